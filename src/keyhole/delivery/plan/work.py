"""Work: how long servers and clients compute for each way, and what a server holds.

Estimates of one core: speeds of a `Machine` times what is copied, hashed, scanned and enciphered.
Sending bytes is not in them, since it follows the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from keyhole.delivery.names import DeliveryName
from keyhole.delivery.plan.lengths import terms_for
from keyhole.delivery.plan.machine import Machine
from keyhole.delivery.plan.need import Need
from keyhole.private.pir.batch import Batch
from keyhole.private.pir.database import rows_bytes
from keyhole.private.pir.lwe_shape import DIMENSION, WORD_BYTES, LweShape
from keyhole.private.pir.terms import TAG_BYTES

__all__ = ["Work", "work_of"]


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


def work_of(way: DeliveryName, need: Need, machine: Machine) -> Work:
    """Returns the work of a way."""
    return _WORK[way](need, machine)


def _broadcast(need: Need, machine: Machine) -> Work:
    return Work({"server": 0.0}, {}, 0.0, need.table_bytes, 0, is_cacheable=True)


def _on_demand(need: Need, machine: Machine) -> Work:
    made = need.distinct_keys * need.slice_bytes
    copied = made + need.cohort * need.asked_bytes
    return Work(
        {"server": copied / machine.gather}, {}, 0.0, need.table_bytes + made, need.distinct_keys
    )


def _pregenerated(need: Need, machine: Machine) -> Work:
    return Work(
        {"slice server": need.cohort * need.asked_bytes / machine.gather},
        {"slice server": _making(need, machine)},
        0.0,
        need.table_bytes,
        need.num_keys,
        is_cacheable=True,
    )


def _relay(need: Need, machine: Machine) -> Work:
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


def _two_server(need: Need, machine: Machine) -> Work:
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


def _chor(need: Need, machine: Machine) -> Work:
    m, table = need.keys_per_client, rows_bytes(need.num_keys, need.slice_bytes)
    seconds = machine.scan_seconds(table, need.cohort * m) + _replying(need, machine, m)
    client = m * need.num_keys / 8 / machine.aes + _opening(need, machine, m)
    building = _tagging(need, machine)
    return Work(_both(seconds), _both(building), client, table, need.num_keys)


def _one_server(need: Need, machine: Machine) -> Work:
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


def _enclave(need: Need, machine: Machine) -> Work:
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


def _making(need: Need, machine: Machine) -> float:
    """All slices."""
    return need.table_bytes / machine.gather


def _tagging(need: Need, machine: Machine) -> float:
    """All slices, and a table of them with a tag for each."""
    tags = need.num_keys * machine.tag_seconds + need.table_bytes / machine.tagging
    return _making(need, machine) + tags


def _replying(need: Need, machine: Machine, rows: int) -> float:
    """Putting so many rows into the reply of each client, and the check of its frame."""
    return need.cohort * rows * (need.slice_bytes + TAG_BYTES) / machine.reply


def _opening(need: Need, machine: Machine, rows: int) -> float:
    """Adding up replies of two servers, and checking tags."""
    return 2 * rows * (need.slice_bytes + TAG_BYTES) / machine.opening


_WORK: Mapping[DeliveryName, Callable[[Need, Machine], Work]] = MappingProxyType(
    {
        "broadcast": _broadcast,
        "on-demand": _on_demand,
        "pregenerated": _pregenerated,
        "relay": _relay,
        "pir": _two_server,
        "pir-chor": _chor,
        "pir-one-server": _one_server,
        "enclave": _enclave,
    }
)
