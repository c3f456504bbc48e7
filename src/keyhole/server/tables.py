"""Holds one row of float32 for each key of a part: all rows, or those that were touched.

`DenseTable` holds every row. `LazyTable` holds the rows that were touched and computes the others,
so memory grows with training and not with the key space. With the same initial values both return
the same bytes.

A row that does not exist yet is a pure function of seed, key and position: it is made when a client
first trains it, and until then every reader computes the same numbers, those of
`keyhole.primitives.coding.uniform` without its temporary arrays.

Keys find their slots by open addressing with linear probing, at most half full. Slots are numbered
in the order in which keys were claimed, so what is stored under them does not depend on the hash.
The hash is salted: keys come from clients, and one who knew the hash could choose keys that all
meet in one place.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import prod
from threading import Thread
from types import ModuleType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from keyhole.arrays import Array, KeyArray
from keyhole.compiled import load_compiler
from keyhole.errors import InputError, KeySpaceError
from keyhole.primitives.keyspace import are_same_rising
from keyhole.primitives.layout import Part
from keyhole.server.initial import Initial, Zeros
from keyhole.server.optimizers import Optimizer, Slab
from keyhole.server.rows import checked_keys, gather_rows


@cache
def _loops() -> ModuleType:
    """The compiled loops; a device that describes a task needs no numba."""
    from keyhole.server import table_loops

    return table_loops


@dataclass(frozen=True)
class RowInitial:
    """How the rows of one table start.

    Args:
        seed: from 0 to 2^64 - 1.
        columns: for consecutive numbers of a row, (how many, kind, scale).

    >>> from keyhole.server.initial import Normal
    >>> start = RowInitial(7, ((2, *Normal(0.1).code), (1, *Zeros().code)))
    >>> rows = start.rows(np.array([5, 900_000_000_000]))
    >>> rows.shape, bool(np.all(rows[:, 2] == 0))
    ((2, 3), True)
    """

    seed: int
    columns: tuple[tuple[int, int, float], ...]

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**64:
            raise InputError(
                f"seed is out of range: got {self.seed}; expected 0..2^64 - 1; choose another"
            )

    @staticmethod
    def of(part: Part, initial: Mapping[str, Initial], seed: int) -> RowInitial:
        """Returns the start of a part's rows from that of its parameters; those not named are
        zeros."""
        columns = tuple(
            (prod(field.slice_shape), *initial.get(field.path, Zeros()).code)
            for field in part.fields
        )
        return RowInitial(seed, columns)

    @property
    def width(self) -> int:
        """How many numbers a row holds."""
        return sum(count for count, _, _ in self.columns)

    def rows(self, keys: KeyArray) -> NDArray[np.float32]:
        """Returns the initial rows of `keys`, shape (m, width)."""
        out = np.empty((len(keys), self.width), np.float32)
        self.fill(keys, np.arange(len(keys), dtype=np.int64), out)
        return out

    def fill(self, keys: KeyArray, places: KeyArray, out: Array) -> None:
        """Writes the initial row of keys[i] to out[places[i]]."""
        counts = [count for count, _, _ in self.columns]
        kinds = np.repeat(np.array([kind for _, kind, _ in self.columns], np.uint8), counts)
        scales = np.repeat(np.array([scale for _, _, scale in self.columns], np.float32), counts)
        _loops().fill(np.uint64(self.seed), keys, places, kinds, scales, out)


_MIN_SLOTS = 1024  # places of a new index: 16 kB


class KeyIndex:
    """Which slot each claimed key has.

    >>> index = KeyIndex()
    >>> index.claim(np.array([2**62, 7])), index.claim(np.array([7, 9]))
    (array([0, 1]), array([1, 2]))
    >>> index.find(np.array([9, 8]))
    array([ 2, -1])
    """

    def __init__(self) -> None:
        self._salt = np.uint64(secrets.randbits(64))
        self._places = np.full((_MIN_SLOTS, 2), -1, np.int64)  # (key, slot), none taken
        self._keys = np.empty(_MIN_SLOTS // 2, np.int64)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def keys(self) -> KeyArray:
        """The claimed keys by slot."""
        return self._keys[: self._count]

    @property
    def nbytes(self) -> int:
        """The memory of the index."""
        return self._places.nbytes + self._keys.nbytes

    def find(self, keys: KeyArray) -> KeyArray:
        """Returns the slot of each key, -1 for one that was never claimed."""
        slots = np.empty(len(keys), np.int64)
        _loops().find(self._places, self._salt, keys, slots)
        return slots

    def claim(self, keys: KeyArray) -> KeyArray:
        """Returns the slot of each key; a new key takes the next free one."""
        slots = np.empty(len(keys), np.int64)
        self._reserve(self._count + len(keys))
        self._count = _loops().claim(self._places, self._salt, keys, self._keys, self._count, slots)
        return slots

    def _reserve(self, count: int) -> None:
        """Doubles until `count` keys fill at most half of the places."""
        size = len(self._places)
        if 2 * count <= size:
            return
        while size < 2 * count:
            size *= 2
        places, keys = np.full((size, 2), -1, np.int64), np.empty(size // 2, np.int64)
        _loops().claim(places, self._salt, self.keys, keys, 0, np.empty(self._count, np.int64))
        self._places, self._keys = places, keys


_MIN = 64  # rows of a new lazy slab
_THREAD_FROM = 4 << 20  # bytes of rows; a thread costs about 0.1 ms to start


class Table(Protocol):
    """The rows of one part, with their optimizer state."""

    @property
    def num_keys(self) -> int:
        """K."""
        ...

    @property
    def width(self) -> int:
        """Numbers in a row."""
        ...

    @property
    def nbytes(self) -> int:
        """Memory set aside; pages that were never written are not resident."""
        ...

    def rows(self, keys: KeyArray, now: int, threads: int = 1) -> NDArray[np.float32]:
        """Returns the rows of `keys` after step `now`, in their order, repeats kept."""
        ...

    def current(self, keys: KeyArray) -> tuple[NDArray[np.float32], KeyArray] | None:
        """Returns an array whose rows are current, and where in it those of `keys` are; None where
        rows have steps to catch up on. The next step changes what is seen."""
        ...

    def reserve(self, keys: KeyArray) -> KeyArray:
        """Makes room for a step on `keys`, which then cannot run out of memory; returns slots."""
        ...

    def step(self, slots: KeyArray, rows: NDArray[np.float32], now: int, threads: int = 1) -> None:
        """Applies step `now` to the rows at `slots`, which `reserve` returned."""
        ...

    def touched_after(self, step: int) -> KeyArray:
        """Returns the keys touched in later steps than `step`, ascending."""
        ...


class DenseTable:
    """Every row in memory.

    Args:
        values: (K, width) float32, C-contiguous; the table takes it over.
    """

    def __init__(self, values: NDArray[np.float32], optimizer: Optimizer) -> None:
        load_compiler()
        moments = tuple(_full(values.shape, start) for start in optimizer.initial_moments)
        self.slab = Slab(values, moments, np.zeros(len(values), np.int32))
        self.num_keys, self.width = values.shape
        self.optimizer = optimizer

    @property
    def nbytes(self) -> int:
        """Implements `Table.nbytes`."""
        return self.slab.nbytes

    def rows(self, keys: KeyArray, now: int, threads: int = 1) -> NDArray[np.float32]:
        """Implements `Table.rows`."""
        if not self.optimizer.horizon:  # values are current: a plain gather, faster on wide rows
            return gather_rows(self.slab.values, keys, threads=threads)
        check_keys(keys, self.num_keys)
        out = np.empty((len(keys), self.width), np.float32)
        _share(self.optimizer.read(self.slab, keys, out, now), out, threads)
        return out

    def view(self, keys: KeyArray) -> NDArray[np.float32] | None:
        """Returns all rows without a copy, read-only, if `keys` are all keys in order and no row
        has steps to catch up on; None otherwise. The next step changes what is seen."""
        is_whole = len(keys) == self.num_keys and are_same_rising([keys])
        if self.optimizer.horizon or not is_whole or keys[0] or keys[-1] != self.num_keys - 1:
            return None
        rows = self.slab.values.view()
        rows.setflags(write=False)
        return rows

    def current(self, keys: KeyArray) -> tuple[NDArray[np.float32], KeyArray] | None:
        """Implements `Table.current`."""
        if self.optimizer.horizon:
            return None
        return self.slab.values, checked_keys(keys, self.num_keys)

    def reserve(self, keys: KeyArray) -> KeyArray:
        """Implements `Table.reserve`: all rows are there, each at its key."""
        return keys

    def step(self, slots: KeyArray, rows: NDArray[np.float32], now: int, threads: int = 1) -> None:
        """Implements `Table.step`."""
        _share(self.optimizer.step(self.slab, slots, rows, now), rows, threads)

    def touched_after(self, step: int) -> KeyArray:
        """Implements `Table.touched_after`; one pass over 4 bytes per row."""
        return np.flatnonzero(self.slab.last > step)


class LazyTable:
    """The touched rows in memory, the others computed when they are read.

    A slab twice as large replaces a full one, so a row is copied about once in its life.

    Args:
        num_keys: K, up to 2^63.
    """

    def __init__(self, num_keys: int, initial: RowInitial, optimizer: Optimizer) -> None:
        load_compiler()
        self.num_keys = num_keys
        self.width = initial.width
        self.initial = initial
        self.optimizer = optimizer
        self.index = KeyIndex()
        self.slab = Slab.empty(_MIN, self.width, len(optimizer.initial_moments))

    def __len__(self) -> int:
        """How many rows exist."""
        return len(self.index)

    @property
    def nbytes(self) -> int:
        """Implements `Table.nbytes`."""
        return self.slab.nbytes + self.index.nbytes

    def rows(self, keys: KeyArray, now: int, threads: int = 1) -> NDArray[np.float32]:
        """Implements `Table.rows`; no row is made."""
        check_keys(keys, self.num_keys)
        out = np.empty((len(keys), self.width), np.float32)
        slots = self.index.find(keys)
        _share(self.optimizer.read(self.slab, slots, out, now), out, threads)
        untouched = np.flatnonzero(slots < 0)
        if not len(untouched):
            return out
        self.initial.fill(keys[untouched], untouched, out)
        if self.optimizer.moves_all:  # by as much as one that starts at zero
            start = DenseTable(np.zeros((1, self.width), np.float32), self.optimizer)
            out[untouched] += start.rows(np.zeros(1, np.int64), now)
        return out

    def current(self, keys: KeyArray) -> tuple[NDArray[np.float32], KeyArray] | None:
        """Implements `Table.current`; None where a row does not exist yet, too."""
        check_keys(keys, self.num_keys)
        slots = self.index.find(keys)
        return None if self.optimizer.horizon or (slots < 0).any() else (self.slab.values, slots)

    def reserve(self, keys: KeyArray) -> KeyArray:
        """Implements `Table.reserve`: makes the rows that are missing, as they started."""
        count = len(self.index)
        if count + len(keys) > len(self.slab.values):
            capacity = max(2 * len(self.slab.values), count + len(keys))
            self.slab = self.slab.grown(capacity, count)
        slots = self.index.claim(keys)
        made = slice(count, len(self.index))
        self.initial.fill(self.index.keys[made], np.arange(made.start, made.stop), self.slab.values)
        for moment, start in zip(self.slab.moments, self.optimizer.initial_moments, strict=True):
            moment[made] = start
        self.slab.last[made] = 0
        return slots

    def step(self, slots: KeyArray, rows: NDArray[np.float32], now: int, threads: int = 1) -> None:
        """Implements `Table.step`."""
        _share(self.optimizer.step(self.slab, slots, rows, now), rows, threads)

    def touched_after(self, step: int) -> KeyArray:
        """Implements `Table.touched_after`; one pass over the touched rows."""
        touched = self.index.keys[self.slab.last[: len(self.index)] > step]
        return np.sort(touched)


def check_keys(keys: KeyArray, num_keys: int) -> None:
    """Raises KeySpaceError unless keys are a vector of int64 in [0, num_keys)."""
    if keys.dtype != np.int64:
        raise KeySpaceError(
            f"keys are not int64: got {keys.dtype}; expected int64; make them with KeySpace.keys"
        )
    checked_keys(keys, num_keys)


def _share(work: Callable[[int, int], None], rows: NDArray[np.float32], threads: int) -> None:
    """Splits work on rows between up to `threads` threads, this one included."""
    count = len(rows)
    threads = min(threads, max(1, rows.nbytes // _THREAD_FROM))
    cuts = [count * i // threads for i in range(threads + 1)]
    others = [Thread(target=work, args=span) for span in pairwise(cuts[1:])]
    for other in others:
        other.start()
    work(0, cuts[1])
    for other in others:
        other.join()


def _full(shape: tuple[int, ...], start: Any) -> NDArray[np.float32]:
    """Zeros come as untouched pages; other numbers have to be written."""
    return np.full(shape, start, np.float32) if np.any(start) else np.zeros(shape, np.float32)
