"""Sums: what each way of adding updates up costs in a round, from public numbers alone.

Bytes are those of the messages that the modules of `private/secure_sum` make, and of an update in
the clear. Seconds are estimates of one core: `SumSpeeds` times what is masked, added and decoded.
What HTTP costs beside them is in `capacity`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import ceil
from types import MappingProxyType
from typing import Literal, TypeAlias, get_args

from keyhole.aggregation.masked.messages import FRAME_BYTES, SEALED_BYTES
from keyhole.aggregation.masked.params import SecAggSettings, degree_of
from keyhole.aggregation.masked.sketch import SketchShape
from keyhole.aggregation.two_servers.sparse import SparseTerms, upload_bytes
from keyhole.crypto.ring import FixedPoint
from keyhole.crypto.shamir import SHARE_BYTES
from keyhole.errors import InputError
from keyhole.pricing import ServiceSpeeds, SumSpeeds, Workload

SumName: TypeAlias = Literal["plain", "secure-dense", "secure-sketch", "secure-sparse"]
"""Ways to add updates up that are priced here."""

SUMS: tuple[SumName, ...] = get_args(SumName)

_DROPPED = 0.1  # of the clients, after they have shared their secrets: 6 to 10 of 100 is usual
_KEYS_BYTES = 96  # two public keys and a commitment
_ELEMENT = 4  # bytes of a number, in the clear and in the ring
_PLAIN_HEAD, _KEY = 16, 8  # bytes of an update beside rows and keys, and of a key


@dataclass(frozen=True)
class SumPrice:
    """What adding up costs in a round.

    Args:
        way: its name.
        bytes_up: that a client sends, to all servers together.
        bytes_down: that it receives.
        requests: of a client, at each server.
        seconds_by: party -> CPU seconds of one core for the whole cohort.
        client_seconds: CPU seconds of one client.
        server_memory: bytes that one server holds.
    """

    way: SumName
    bytes_up: int
    bytes_down: int
    requests: int
    seconds_by: Mapping[str, float] = field(hash=False)
    client_seconds: float
    server_memory: int


def price_sums(need: Workload) -> tuple[SumPrice, ...]:
    """Returns the price of every way to add up whose messages and rings can hold the need.

    >>> need = Workload(num_keys=10_000, keys_per_client=1_000, slice_bytes=2_000, cohort=50)
    >>> [price.way for price in price_sums(need)]
    ['plain', 'secure-dense', 'secure-sketch', 'secure-sparse']
    """
    found = []
    for way in SUMS:
        try:
            found.append(sum_price_of(way, need))
        except InputError:  # a need is checked when it is made, so this is a limit of the way
            continue
    return tuple(found)


def sum_price_of(way: SumName, need: Workload) -> SumPrice:
    """Returns the price of one way to add up; one in ten clients drops out on the way.

    Raises:
        InputError: the need is beyond what messages of this way can hold.
    """
    return _PRICES[way](need)


def _plain(need: Workload) -> SumPrice:
    up = _PLAIN_HEAD + need.keys_per_client * (_KEY + need.slice_bytes)
    added = need.cohort * up / ServiceSpeeds().adding
    # The trainer holds every client's keys, and two sums with the one that is made of them: a sum
    # has no more rows than its clients chose, and no more than there are.
    chosen, distinct = need.cohort * need.keys_per_client, need.distinct_keys
    held = chosen * _KEY + (min(2 * distinct, chosen) + distinct) * (need.slice_bytes + _KEY)
    return SumPrice("plain", up, 0, 1, {"trainer": added}, 0.0, held)


def _secure_dense(need: Workload) -> SumPrice:
    return _masked("secure-dense", need, need.num_keys * _width(need), 0.0)


def _secure_sketch(need: Workload) -> SumPrice:
    shape = SketchShape(
        need.num_keys, _width(need), need.distinct_keys, bytes(16), max_clients=need.cohort
    )
    decoded = need.distinct_keys * need.slice_bytes / SumSpeeds().decoding
    return _masked("secure-sketch", need, shape.length, decoded)


def _masked(way: SumName, need: Workload, length: int, decoding: float) -> SumPrice:
    """Vectors of so many numbers under masks that cancel, at one server."""
    speeds, clients = SumSpeeds(), need.cohort
    # Two neighbours: limits are checked, and the lists of neighbours are not made.
    SecAggSettings(bytes(16), clients, length, threshold=2, degree=2 if clients > 2 else None)
    FixedPoint(1.0, clients)
    degree, vector = degree_of(clients), length * _ELEMENT
    up, down = _lengths(degree + 1, vector)
    lost = ceil(_DROPPED * clients)
    kept = clients - lost
    seconds = kept * vector / speeds.summing + clients * speeds.rebuild_seconds + decoding
    seconds += (kept + lost * degree) * vector / speeds.masking
    client = degree * (speeds.agree_seconds + vector / speeds.masking)
    return SumPrice(way, up, down, 4, {"server": seconds}, client, 2 * vector)


def _lengths(members: int, vector: int) -> tuple[int, int]:
    """Bytes that a client sends and receives in all steps, with so many members in its group."""
    bits = -(-members // 8)
    slots = {width: bits + members * width for width in (_KEYS_BYTES, SEALED_BYTES, SHARE_BYTES)}
    up = _KEYS_BYTES + slots[SEALED_BYTES] + vector + slots[SHARE_BYTES] + 4 * FRAME_BYTES
    down = slots[_KEYS_BYTES] + slots[SEALED_BYTES] + 2 * bits + 3 * FRAME_BYTES
    return up, down


def _secure_sparse(need: Workload) -> SumPrice:
    FixedPoint(1.0, need.cohort)
    terms = SparseTerms(
        bytes(16), need.num_keys, _width(need), need.keys_per_client, 32, min_clients=1
    )
    speeds, row = SumSpeeds(), terms.row * _ELEMENT
    positions = terms.num_buckets * terms.bucket_size
    seconds = need.cohort * positions * (speeds.position_seconds + row / speeds.rows)
    each = speeds.key_seconds + row / speeds.sharing
    client = speeds.share_seconds + need.keys_per_client * each
    return SumPrice(
        "secure-sparse",
        upload_bytes(terms),
        0,
        1,
        {"first server": seconds, "second server": seconds},
        client,
        need.num_keys * row + terms.placement.members_bytes,
    )


def _width(need: Workload) -> int:
    """Numbers of a row."""
    return -(-need.slice_bytes // _ELEMENT)


_PRICES: Mapping[SumName, Callable[[Workload], SumPrice]] = MappingProxyType(
    {
        "plain": _plain,
        "secure-dense": _secure_dense,
        "secure-sketch": _secure_sketch,
        "secure-sparse": _secure_sparse,
    }
)
