"""Where slices come from: the server's state, or any select function computed in batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from keyhole.delivery.records import PLAIN, Coding, RecordArray, RecordField, Records, records_of
from keyhole.primitives.keyspace import KeySpace
from keyhole.primitives.transforms import HalfPrecision, Quantized
from keyhole.server.state import ServerState
from keyhole.types import Array, KeyArray, SelectFn

__all__ = [
    "BatchSelect",
    "FunctionSource",
    "SliceSource",
    "StateSource",
    "coding_of",
    "sources_of",
]


class SliceSource(Protocol):
    """The slices of one table, as records."""

    @property
    def records(self) -> Records:
        """What a record holds."""
        ...

    def read(self, keys: KeyArray) -> RecordArray:
        """Returns the records of `keys`, (m, record_bytes); order and repeats are kept.

        Args:
            keys: (m,) int64, checked by the caller.
        """
        ...


@dataclass(frozen=True)
class StateSource:
    """One part of a server state.

    Args:
        state: read at the moment of asking.
        place: of the part in `state.layout.parts`.
        coding: how its numbers are stored.
    """

    state: ServerState
    place: int
    coding: Coding = PLAIN

    @cached_property
    def records(self) -> Records:
        """What a record holds."""
        return Records.of_part(self.state.layout.parts[self.place], self.coding)

    def read(self, keys: KeyArray) -> RecordArray:
        """Returns the records of `keys`."""
        return self.records.encode_rows(self.state.rows(self.place, keys), keys)


class BatchSelect(Protocol):
    """A select function of many keys that knows what its slices are."""

    @property
    def slices(self) -> Mapping[str, Any]:
        """Path -> something with the shape and dtype of that array of a slice, in path order."""
        ...

    def __call__(self, server_value: Any, keys: KeyArray, /) -> dict[str, Array]:
        """Returns path -> (m, *shape)."""
        ...


@dataclass(frozen=True)
class FunctionSource:
    """A select function that takes all keys of a batch at once.

    Args:
        records: what a record holds.
        server_value: x.
        select_batch: `(x, keys) -> {path: (m, *shape)}`; `keyhole.models.batched` makes one of any
            select function, and a fast one of most that are written in JAX.
    """

    records: Records
    server_value: Any
    select_batch: Callable[[Any, KeyArray], dict[str, Array]]

    @staticmethod
    def of(
        select_batch: BatchSelect, server_value: Any, space: KeySpace, coding: Coding = PLAIN
    ) -> FunctionSource:
        """A source whose records hold what `select_batch` says of its slices.

        Args:
            select_batch: made by `keyhole.models.batched.batch_select`.
            server_value: x.
            space: the key space.
            coding: how numbers are stored; `coding_of` tells that of a transformed select function.
        """
        fields = tuple(
            RecordField(path, tuple(like.shape), np.dtype(like.dtype))
            for path, like in select_batch.slices.items()
        )
        records = Records(space.name, space.num_keys, fields, coding)
        return FunctionSource(records, server_value, select_batch)

    def read(self, keys: KeyArray) -> RecordArray:
        """Returns the records of `keys`."""
        return self.records.encode(self.select_batch(self.server_value, keys), keys)


def sources_of(state: ServerState, coding: Coding = PLAIN) -> tuple[StateSource, ...]:
    """The sources of every part of a state, in order; what everyone receives stays plain."""
    return tuple(
        StateSource(state, place, records.coding)
        for place, records in enumerate(records_of(state.layout, coding))
    )


def coding_of(select_fn: SelectFn) -> Coding:
    """The coding that gives the slices of a quantized or half-precision select function; `PLAIN`
    of any other."""
    if isinstance(select_fn, Quantized):
        return Coding("uint8" if select_fn.bits == 8 else "uint4", select_fn.seed)
    return Coding("half") if isinstance(select_fn, HalfPrecision) else PLAIN
