"""Lengths: what one client receives and sends in a round, by way, in exact bytes.

Counted are slices, keys and the messages of a protocol, as the modules of `private/` make them.
HTTP and TLS around them, the terms that a client fetches first, and the four bytes an answer by
which a relay packs many into one body, are not.

Work: how long servers and clients compute for each way, and what a server holds.

Estimates of one core: speeds of a `Speeds` times what is copied, hashed, scanned and enciphered.
Sending bytes is not in them, since it follows the bytes.

Prices: what each way of delivery costs in a round, from public numbers alone.

Bytes are exact, seconds are estimates; see `lengths` and `work`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from keyhole.crypto.hpke import PUBLIC_BYTES
from keyhole.delivery.base import DELIVERIES, PARTIES, Basis, DeliveryName, Learned
from keyhole.delivery.enclave import sealed
from keyhole.delivery.enclave.evidence import NONCE_BYTES, EnclaveTerms, Evidence
from keyhole.delivery.pir import one_server, two_server
from keyhole.delivery.pir.database import TAG_BYTES, Scheme, Terms, rows_bytes
from keyhole.delivery.pir.lwe import DIMENSION, WORD_BYTES, LweShape
from keyhole.delivery.pir.two_server import Batch
from keyhole.delivery.relay.client import BlindClient, TableShape
from keyhole.delivery.relay.ohttp import KeyConfig
from keyhole.errors import InputError
from keyhole.pricing import Speeds, Workload
from keyhole.primitives.keyspace import bytes_of_keys

# Of a round with a number of four digits: each digit more is a byte more of every request.
_ROUND_ID = "1000-" + 16 * "0"

# Of a genuine TDX quote and the certificates that go with it; those of other makes differ little.
_QUOTE_BYTES = 5_006
_COLLATERAL_BYTES = 16_072


@dataclass(frozen=True)
class Traffic:
    """Bytes of one client.

    Args:
        down: received, from all servers together.
        up: sent, to all servers together.
    """

    down: int
    up: int

    @property
    def total(self) -> int:
        """Both directions."""
        return self.down + self.up


def traffic_of(way: DeliveryName, need: Workload) -> Traffic:
    """Returns what a client receives and sends, with what everyone receives.

    Raises:
        InputError: the need is beyond what messages of this way can hold.
    """
    traffic = _TRAFFIC[way](need)
    return Traffic(traffic.down + need.broadcast_bytes, traffic.up)


def terms_for(scheme: Scheme, need: Workload) -> Terms:
    """Terms with the public numbers of a need; names and digests do not change a length."""
    return Terms(
        scheme, bytes(16), need.num_keys, need.slice_bytes, need.keys_per_client, bytes(32)
    )


def _broadcast_traffic(need: Workload) -> Traffic:
    return Traffic(need.table_bytes, 0)


def _clear(need: Workload) -> Traffic:
    return Traffic(need.asked_bytes, bytes_of_keys(need.keys_per_client, need.num_keys))


def _relay_traffic(need: Workload) -> Traffic:
    shape = TableShape(0, need.num_keys, need.slice_bytes, need.keys_per_client)
    client = BlindClient(KeyConfig(0, bytes(PUBLIC_BYTES)), _ROUND_ID, [shape])
    requests = client.num_requests
    return Traffic(requests * client.reply_bytes(0), requests * client.request_bytes)


def _two_server_traffic(need: Workload) -> Traffic:
    terms = terms_for("two-server", need)
    return Traffic(2 * two_server.reply_bytes(terms), 2 * two_server.query_bytes(terms))


def _one_server_traffic(need: Workload) -> Traffic:
    terms = terms_for("one-server", need)
    down = one_server.hint_bytes(terms) + one_server.reply_bytes(terms)
    return Traffic(down, one_server.query_bytes(terms))


def _enclave_traffic(need: Workload) -> Traffic:
    terms = EnclaveTerms(
        bytes(16), need.num_keys, need.slice_bytes, need.keys_per_client, bytes(32)
    )
    evidence = Evidence("tdx", bytes(_QUOTE_BYTES), bytes(_COLLATERAL_BYTES), bytes(32), bytes(32))
    down = len(evidence.encode()) + sealed.reply_bytes(terms)
    return Traffic(down, NONCE_BYTES + sealed.request_bytes(terms))


_TRAFFIC: Mapping[DeliveryName, Callable[[Workload], Traffic]] = MappingProxyType(
    {
        "broadcast": _broadcast_traffic,
        "on-demand": _clear,
        "pregenerated": _clear,
        "relay": _relay_traffic,
        "pir": _two_server_traffic,
        "pir-one-server": _one_server_traffic,
        "enclave": _enclave_traffic,
    }
)


@dataclass(frozen=True)
class Work:
    """What a way asks of machines in a round.

    Args:
        seconds_by: party -> CPU seconds of one core for answering the whole cohort.
        building_by: party -> CPU seconds of one core for what it makes before anybody asks, once a
            round; parties that make nothing are not in it.
        client_seconds: of one client.
        server_memory: bytes that one server holds.
        slices_generated: at the server side.
        is_cacheable: whether the same bytes serve many clients, so that caches can give them out.
    """

    seconds_by: Mapping[str, float] = field(hash=False)
    building_by: Mapping[str, float] = field(hash=False)
    client_seconds: float
    server_memory: int
    slices_generated: int
    is_cacheable: bool = False


def work_of(way: DeliveryName, need: Workload, machine: Speeds) -> Work:
    """Returns the work of a way."""
    return _WORK[way](need, machine)


def _broadcast_work(need: Workload, machine: Speeds) -> Work:
    return Work({"server": 0.0}, {}, 0.0, need.table_bytes, 0, is_cacheable=True)


def _on_demand(need: Workload, machine: Speeds) -> Work:
    made = need.distinct_keys * need.slice_bytes
    copied = made + need.cohort * need.asked_bytes
    return Work(
        {"server": copied / machine.gather}, {}, 0.0, need.table_bytes + made, need.distinct_keys
    )


def _pregenerated(need: Workload, machine: Speeds) -> Work:
    return Work(
        {"slice server": need.cohort * need.asked_bytes / machine.gather},
        {"slice server": _making(need, machine)},
        0.0,
        need.table_bytes,
        need.num_keys,
        is_cacheable=True,
    )


def _relay_work(need: Workload, machine: Speeds) -> Work:
    requests = need.cohort * need.keys_per_client
    return Work(
        {
            "relay": requests * machine.forward_seconds,
            "gateway": requests * machine.open_seconds,
        },
        {"gateway": _making(need, machine)},
        need.keys_per_client * machine.seal_seconds,
        need.table_bytes,
        need.num_keys,
    )


def _two_server_work(need: Workload, machine: Speeds) -> Work:
    batch = Batch.of(terms_for("two-server", need))
    table, building = rows_bytes(need.num_keys, need.slice_bytes), _tagging(need, machine)
    hashes = members = 0
    if batch.placement is not None:
        hashes, members = batch.placement.num_hashes, batch.placement.members_bytes
        building += need.num_keys * machine.place_seconds
    seconds = machine.scan_seconds(table, need.cohort * batch.shape.stash)
    seconds += machine.bucket_seconds(hashes * table, need.cohort)
    seconds += need.cohort * (hashes + batch.shape.stash) * need.num_keys / machine.expand
    seconds += need.cohort * machine.read_seconds + _replying(need, machine, batch.num_queries)
    client = machine.ask_seconds + batch.num_queries * machine.share_seconds
    client += _opening(need, machine, batch.num_queries)
    return Work(_both(seconds), _both(building), client, table + members, need.num_keys)


def _one_server_work(need: Workload, machine: Speeds) -> Work:
    shape = LweShape.of(terms_for("one-server", need))
    m, table = need.keys_per_client, rows_bytes(need.num_keys, need.slice_bytes)
    building = _tagging(need, machine) + table / machine.lwe_hint
    seconds = machine.lwe_seconds(table, need.cohort * m)
    seconds += _replying(need, machine, m * shape.slices_per_column * WORD_BYTES)
    # Masks of queries, and of the rows that are opened.
    client = m * DIMENSION * (shape.columns + shape.row_bytes) / machine.lwe_products
    return Work(
        {"server": seconds}, {"server": building}, client, table + shape.hint_bytes, need.num_keys
    )


def _enclave_work(need: Workload, machine: Speeds) -> Work:
    scanned = need.cohort * need.keys_per_client * need.table_bytes
    return Work(
        {"enclave host": scanned / machine.enclave_scan},
        {"enclave host": _making(need, machine)},
        machine.quote_seconds + machine.seal_seconds + need.asked_bytes / machine.aes,
        need.table_bytes,
        need.num_keys,
    )


def _both(seconds: float) -> Mapping[str, float]:
    """Two servers do the same."""
    return {"first server": seconds, "second server": seconds}


def _making(need: Workload, machine: Speeds) -> float:
    """All slices."""
    return need.table_bytes / machine.gather


def _tagging(need: Workload, machine: Speeds) -> float:
    """All slices, and a table of them with a tag for each."""
    tags = need.num_keys * machine.tag_seconds + need.table_bytes / machine.tagging
    return _making(need, machine) + tags


def _replying(need: Workload, machine: Speeds, rows: int) -> float:
    """Putting so many rows into the reply of each client, and the check of its frame."""
    return need.cohort * rows * (need.slice_bytes + TAG_BYTES) / machine.reply


def _opening(need: Workload, machine: Speeds, rows: int) -> float:
    """Adding up replies of two servers, and checking tags."""
    return 2 * rows * (need.slice_bytes + TAG_BYTES) / machine.opening


_WORK: Mapping[DeliveryName, Callable[[Workload, Speeds], Work]] = MappingProxyType(
    {
        "broadcast": _broadcast_work,
        "on-demand": _on_demand,
        "pregenerated": _pregenerated,
        "relay": _relay_work,
        "pir": _two_server_work,
        "pir-one-server": _one_server_work,
        "enclave": _enclave_work,
    }
)


@dataclass(frozen=True)
class Price:
    """What one way costs in a round.

    Args:
        way: its name.
        bytes_down: that a client receives, from all servers together.
        bytes_up: that a client sends, to all servers together.
        seconds_by: party -> CPU seconds of one core for answering the whole cohort.
        building_by: party -> CPU seconds of one core for what it makes before anybody asks, once a
            round; parties that make nothing are not in it.
        client_seconds: CPU seconds of one client.
        server_memory: bytes that one server holds.
        slices_generated: at the server side.
        is_cacheable: whether the same bytes serve many clients, so that caches can give them out.
        seen_by: party -> what it learns.
        basis: what that rests on.
        assumption: the same, in a sentence.
    """

    way: DeliveryName
    bytes_down: int
    bytes_up: int
    seconds_by: Mapping[str, float] = field(hash=False)
    building_by: Mapping[str, float] = field(hash=False)
    client_seconds: float
    server_memory: int
    slices_generated: int
    is_cacheable: bool
    seen_by: Mapping[str, Learned] = field(hash=False)
    basis: Basis
    assumption: str

    @property
    def bytes_total(self) -> int:
        """Both directions, of one client."""
        return self.bytes_down + self.bytes_up

    @property
    def server_seconds(self) -> float:
        """CPU seconds of all parties but the clients, together: building and answering."""
        return sum(self.seconds_by.values()) + sum(self.building_by.values())


def price_all(need: Workload, machine: Speeds | None = None) -> tuple[Price, ...]:
    """Returns the price of every way, in the order of `DELIVERIES`; broadcast is the first.

    A way that cannot serve the need, because its messages would grow beyond their limits, is left
    out.

    Args:
        need: the public numbers.
        machine: speeds; None takes those of a machine of ours.

    >>> need = Workload(num_keys=10_000, keys_per_client=1_000, slice_bytes=2_000, cohort=50)
    >>> prices = {price.way: price for price in price_all(need)}
    >>> prices["broadcast"].bytes_total
    20000000
    >>> prices["pir"].bytes_total < prices["broadcast"].bytes_total / 3
    True
    """
    prices = (_price_within_limits(way, need, machine) for way in DELIVERIES)
    return tuple(price for price in prices if price is not None)


def price_of(way: DeliveryName, need: Workload, machine: Speeds | None = None) -> Price:
    """Returns the price of one way.

    Raises:
        InputError: the need is beyond what messages of this way can hold.
    """
    traffic, parties = traffic_of(way, need), PARTIES[way]
    work = work_of(way, need, machine or Speeds())
    return Price(
        way=way,
        bytes_down=traffic.down,
        bytes_up=traffic.up,
        seconds_by=work.seconds_by,
        building_by=work.building_by,
        client_seconds=work.client_seconds,
        server_memory=work.server_memory,
        slices_generated=work.slices_generated,
        is_cacheable=work.is_cacheable,
        seen_by=parties.seen_by,
        basis=parties.basis,
        assumption=parties.assumption,
    )


def _price_within_limits(way: DeliveryName, need: Workload, machine: Speeds | None) -> Price | None:
    try:
        return price_of(way, need, machine)
    except InputError:  # a need is checked when it is made, so this is a limit of the way
        return None
