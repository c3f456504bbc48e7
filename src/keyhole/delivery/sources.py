"""Where slices come from: the server's state, or any select function computed in batches.

Excerpts: the rows of some keys, small enough to travel, from which sub-models are selected.

What clients of one block chose has many keys in common, so an excerpt is smaller than their
sub-models together; and anyone who holds it selects them as the server would, byte for byte.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from keyhole.arrays import Array, KeyArray, SelectFn
from keyhole.delivery.records import PLAIN, Coding, RecordArray, RecordField, Records, records_of
from keyhole.errors import KeySpaceError
from keyhole.primitives.coding import HalfPrecision, Quantized
from keyhole.primitives.keyspace import KeySpace
from keyhole.primitives.layout import ClientKeys, Layout, RowSource
from keyhole.server.state import ServerState


class SliceSource(Protocol):
    """The slices of one table, as records."""

    @property
    def records(self) -> Records:
        """What a record holds."""
        ...

    def read(self, keys: KeyArray) -> RecordArray:
        """Returns the records of `keys`, which the caller checks, (m, record_bytes); order and
        repeats are kept."""
        ...


@dataclass(frozen=True)
class StateSource:
    """One part of a server state, by its place in `state.layout.parts`."""

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
    """A select function that takes all keys of a batch at once, `(x, keys) -> {path: (m, *shape)}`;
    `models/transpose.py` makes one of any, and a fast one of most that are written in JAX."""

    records: Records
    server_value: Any
    select_batch: Callable[[Any, KeyArray], dict[str, Array]]

    @staticmethod
    def of(
        select_batch: BatchSelect, server_value: Any, space: KeySpace, coding: Coding = PLAIN
    ) -> FunctionSource:
        """Returns a source whose records hold what `select_batch`, of
        `models.transpose.batch_select`, says of its slices; `coding_of` tells the coding of a
        transformed select function."""
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
    """Returns the sources of every part of a state, in order; what everyone receives stays
    plain."""
    return tuple(
        StateSource(state, place, records.coding)
        for place, records in enumerate(records_of(state.layout, coding))
    )


def coding_of(select_fn: SelectFn) -> Coding:
    """Returns the coding that gives the slices of a quantized or half-precision select function;
    `PLAIN` of any other."""
    if isinstance(select_fn, Quantized):
        return Coding("uint8" if select_fn.bits == 8 else "uint4", select_fn.seed)
    return Coding("half") if isinstance(select_fn, HalfPrecision) else PLAIN


@dataclass(frozen=True)
class Excerpt:
    """Rows of some parts of a model: a `RowSource` for the keys that are there.

    Args:
        parts: place of a part -> its keys, ascending, and the row of each.
    """

    layout: Layout
    parts: Mapping[int, tuple[KeyArray, Array]]

    @staticmethod
    def of_everyone(source: RowSource) -> Excerpt:
        """Returns what every client receives: the part that is not cut."""
        parts = enumerate(source.layout.parts)
        uncut = [place for place, part in parts if not part.product.factors]
        only = np.zeros(1, np.int64)
        return Excerpt(source.layout, {place: (only, source.rows(place, only)) for place in uncut})

    @staticmethod
    def of_keys(source: RowSource, keys: Sequence[ClientKeys]) -> Excerpt:
        """Returns what clients with these keys receive beyond that, each row once."""
        chosen = [source.layout.keys_by_space(z) for z in keys]
        parts = {}
        for place, part in enumerate(source.layout.parts):
            if part.product.factors:
                distinct = np.unique(np.concatenate([part.keys_of(z).array for z in chosen]))
                parts[place] = distinct, source.rows(place, distinct)
        return Excerpt(source.layout, parts)

    def __or__(self, other: Excerpt) -> Excerpt:
        """Joins the parts of two excerpts."""
        return Excerpt(self.layout, {**self.parts, **other.parts})

    def rows(self, part: int, keys: KeyArray) -> Array:
        """Implements `RowSource.rows`."""
        held, rows = self.parts[part]
        at = np.searchsorted(held, keys)
        if not np.array_equal(held.take(at, mode="clip"), keys):
            raise KeySpaceError(
                f"keys are not in the excerpt: got {len(np.setdiff1d(keys, held))} others; "
                f"expected the {len(held)} keys that it was made for; name them where it is made"
            )
        return rows.take(at, axis=0)
