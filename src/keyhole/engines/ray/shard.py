"""A shard: what an actor holds of the server's tables, a range of keys of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keyhole.server.optimizers import Optimizer
from keyhole.server.stored_tables import initial_of
from keyhole.server.tables import DenseTable, LazyTable
from keyhole.types import Array, KeyArray

__all__ = ["Shard"]

_NONE = np.empty(0, np.int64)
_NO_NUMBER = 2**63 - 1  # of a row that does not exist; above all others


@dataclass
class _Held:
    """One table's rows here.

    Args:
        table: dense with rows counted from 0, or lazy with its keys.
        first, last: its keys are from `first` up to but without `last`.
        slots: where the step that is being made will go.
    """

    table: DenseTable | LazyTable
    first: int
    last: int
    _numbers: Array = field(default_factory=lambda: np.empty(0, np.int64))
    slots: KeyArray = field(default_factory=lambda: np.empty(0, np.int64))

    @property
    def numbers(self) -> Array:
        """Of a lazy table, for each row one that grows with when it was made, over all shards."""
        return self._numbers[: len(self.table)] if isinstance(self.table, LazyTable) else _NONE

    @property
    def offset(self) -> int:
        """What a key has above its row's place in the table's own counting."""
        return self.first if isinstance(self.table, DenseTable) else 0

    def arrays(self) -> dict[str, Array]:
        """What is stored of it, by name."""
        if isinstance(self.table, DenseTable):
            return dict(self.table.slab.named())
        rows = {name: array[: len(self.table)] for name, array in self.table.slab.named().items()}
        return {"keys": self.table.index.keys, **rows}

    def claim(self, keys: KeyArray, numbers: Array) -> KeyArray:
        """Slots of keys; rows that are made for it get the number of the first that asks."""
        if isinstance(self.table, DenseTable):
            return self.table.reserve(keys - self.offset)
        before = len(self.table)
        slots = self.table.reserve(keys)
        made = slots >= before
        _, first = np.unique(slots[made], return_index=True)
        if len(self.table) > len(self._numbers):  # doubled, so that a number is copied about once
            self._numbers = np.resize(self._numbers, 2 * len(self.table))
        self._numbers[before : len(self.table)] = numbers[made][first]
        return slots


class Shard:
    """In an actor; methods take the place of the table they are about."""

    def __init__(self) -> None:
        self._tables: dict[int, _Held] = {}

    def begin(
        self,
        place: int,
        first: int,
        last: int,
        described: Mapping[str, Any],
        num_keys: int,
        width: int,
        optimizer: Optimizer,
    ) -> None:
        """Makes room for the rows of keys `first` to `last`, which `fill` brings."""
        if described["kind"] == "dense":
            values = np.empty((last - first, width), np.float32)
            table: DenseTable | LazyTable = DenseTable(values, optimizer)
        else:
            table = LazyTable(num_keys, initial_of(described), optimizer)
        self._tables[place] = _Held(table, first, last)

    def fill(self, place: int, name: str, start: int, piece: Array) -> None:
        """Takes its own rows out of a piece that begins at row `start` of all."""
        held = self._tables[place]
        stop = start + len(piece)
        if isinstance(held.table, DenseTable):
            low, high = max(start, held.first), min(stop, held.last)
            held.arrays()[name][low - held.first : high - held.first] = piece[
                low - start : high - start
            ]
        elif name == "keys":
            mine = np.flatnonzero((piece >= held.first) & (piece < held.last))
            held.claim(piece[mine], start + mine)
        else:
            low, high = np.searchsorted(held.numbers, [start, stop])
            held.arrays()[name][low:high] = piece[held.numbers[low:high] - start]

    def rows(self, place: int, keys: KeyArray, now: int, threads: int) -> NDArray[np.float32]:
        """See `Table.rows`."""
        held = self._tables[place]
        return held.table.rows(keys - held.offset, now, threads)

    def reserve(self, place: int, keys: KeyArray, numbers: Array) -> None:
        """See `Table.reserve`; slots stay here, for the step that follows."""
        held = self._tables[place]
        held.slots = held.claim(np.array(keys), numbers)

    def step(self, place: int, rows: Array, now: int, threads: int) -> None:
        """See `Table.step`; what Ray hands over cannot be written to, which kernels insist on."""
        held = self._tables[place]
        held.table.step(held.slots, np.array(rows), now, threads)

    def touched_after(self, place: int, step: int) -> KeyArray:
        """See `Table.touched_after`."""
        held = self._tables[place]
        return held.table.touched_after(step) + held.offset

    def nbytes(self, place: int) -> int:
        """See `Table.nbytes`."""
        held = self._tables[place]
        return held.table.nbytes + held.numbers.nbytes

    def shapes(self, place: int) -> dict[str, tuple[np.dtype[Any], tuple[int, ...]]]:
        """Type and shape of what is stored, by name, in order."""
        return {name: (a.dtype, a.shape) for name, a in self._tables[place].arrays().items()}

    def dump(self, place: int, name: str, first: int, last: int) -> Array:
        """Some rows."""
        return self._tables[place].arrays()[name][first:last]

    def number_of(self, place: int, row: int) -> int:
        """The number of a row, above all others where there is no such row."""
        numbers = self._tables[place].numbers
        return int(numbers[row]) if row < len(numbers) else _NO_NUMBER

    def dump_below(self, place: int, name: str, first: int, below: int) -> tuple[Array, Array]:
        """Rows from `first` on whose numbers are below `below`, and their numbers."""
        held = self._tables[place]
        last = np.searchsorted(held.numbers, below)
        return held.numbers[first:last], held.arrays()[name][first:last]
