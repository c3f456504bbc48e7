"""Adds updates up in the clear: sparse, or dense where clients put updates in place (section 4.2).

Hidden: nothing. The server sees every update, and which client sent it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from keyhole.about import Leak
from keyhole.aggregation.base import (
    AggregationAbout,
    ClientResult,
    Rounding,
    SumPrice,
    SumRequest,
    SumResult,
    never,
)
from keyhole.pricing import ServiceSpeeds, Workload, measured
from keyhole.primitives.keyspace import key_bytes
from keyhole.server.row_sums import BLOCK, RowUpdate, choosers, merge_blocks, sum_updates

_ARRIVES = ("sent", "late", "refused")
_HEAD_BYTES, _KEY_BYTES = 48, 8  # of an update beside its rows, and of a key

_RESTS_ON = "Nothing: the server sees every update."
_SPARSE = AggregationAbout(
    name="plain",
    title="plain sum",
    leaks=MappingProxyType({"server": Leak(updates="each update, its keys and whose they are")}),
    rests_on=_RESTS_ON,
    noise="on_sum",
    min_clients=0,
    failure=never,
    hides_dropouts=True,
    is_in_clear=True,
    adds_in_blocks=True,
    inputs="checked",
)
_WHERE = "each update and whose it is; its keys are where it is not zero"
_DENSE = AggregationAbout(
    name="dense",
    title="dense sum",
    leaks=MappingProxyType({"server": Leak(updates=_WHERE)}),
    rests_on=_RESTS_ON,
    is_served=False,
    noise="on_sum",
    min_clients=0,
    failure=never,
    hides_dropouts=True,
    is_in_clear=True,
    adds_in_blocks=True,
    inputs="checked",
)


@dataclass(frozen=True)
class PlainSum:
    """Adds up what clients send in the clear: keys and updates, or dense models.

    Args:
        is_dense: whether clients put their updates in place. The numbers are the same, and differ
            in bytes alone: what is added to zeros stays what it is.
    """

    is_dense: bool = False

    @property
    def about(self) -> AggregationAbout:
        """Everything is in the clear."""
        return _DENSE if self.is_dense else _SPARSE

    def with_ring(self, ring: Rounding, noise: float = 0.0) -> PlainSum:
        """Returns itself: floats are added up as they are."""
        return self

    def price(self, load: Workload) -> SumPrice:
        """Returns what a round costs."""
        if self.is_dense:  # the server holds the sum and the model
            up, held = load.table_bytes, 2 * load.table_bytes
        else:
            up = _HEAD_BYTES + load.keys_per_client * (_KEY_BYTES + load.slice_bytes)
            # The trainer holds every client's keys, and two sums with the one that is made of
            # them: a sum has no more rows than its clients chose, and no more than there are.
            chosen, distinct = load.cohort * load.keys_per_client, load.distinct_keys
            rows = min(2 * distinct, chosen) + distinct
            held = chosen * _KEY_BYTES + rows * (load.slice_bytes + _KEY_BYTES)
        speeds = measured(ServiceSpeeds)
        merged = merged_rows(load) * (load.slice_bytes + _KEY_BYTES) / speeds.merging
        added = load.cohort * speeds.adding_seconds(up) + (0 if self.is_dense else merged)
        return SumPrice(self.about.name, up, 0, 1, {"trainer": added}, 0.0, held)

    def add(self, request: SumRequest) -> SumResult:
        """Adds up the updates of a round."""
        up = sent_bytes(request, is_dense=self.is_dense)
        return SumResult(_rows(request), up, count_choosers(request), seen_by=self.about.seen_by())


PLAIN = PlainSum()
"""The sum in the clear, of sparse updates."""

DENSE = PlainSum(is_dense=True)
"""The sum in the clear, of dense models."""


def merged_rows(load: Workload) -> int:
    """Returns how many rows are read while sums of blocks are added in pairs, and pairs of pairs:
    no sum has more than its clients chose, nor more than the cohort did."""
    blocks, merged = ceil(load.cohort / BLOCK), 0
    rows = min(BLOCK * load.keys_per_client, load.distinct_keys)
    while blocks > 1:
        merged += blocks * rows
        blocks, rows = ceil(blocks / 2), min(2 * rows, load.distinct_keys)
    return merged


def sent_bytes(request: SumRequest, *, is_dense: bool = False) -> dict[int, int]:
    """Returns client -> what it sent to have its update added in the clear."""
    layout = request.layout
    whole = sum(4 * part.space.num_keys * part.slice_size for part in layout.parts)

    def size(one: ClientResult) -> int:
        counts = {name: len(z) for name, z in one.keys.items()}
        sparse = key_bytes(one.keys.values()) + layout.client_bytes(**counts)
        return whole if is_dense else sparse

    return {one.client: size(one) for one in _arrived(request)}


def _arrived(request: SumRequest) -> list[ClientResult]:
    """Those who sent something, whether it counts or not: their keys are known."""
    spaces = len(request.layout.spaces)
    return [c for c in request.results if c.outcome in _ARRIVES and len(c.keys) == spaces]


def count_choosers(request: SumRequest) -> tuple[NDArray[np.int64], ...] | None:
    """Returns how many clients chose each key, ascending by key, where that is asked for."""
    if not request.with_counts or not request.sent:
        return None
    keys = [one.keys for one in request.sent]
    return tuple(choosers(part, keys) for part in request.layout.parts)


def _rows(request: SumRequest) -> tuple[RowUpdate, ...] | None:
    """The sum, as it is defined; None if nobody is left."""
    sent = request.sent
    if not sent:
        return None
    keys = [one.keys for one in sent]
    if request.blocks is not None:
        return merge_blocks(request.layout, request.blocks, keys, request.over)
    return sum_updates(request.layout, [one.update for one in sent], keys, request.over)
