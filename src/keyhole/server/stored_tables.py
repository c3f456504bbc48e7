"""What a snapshot stores of a table: arrays that come, and go back, a piece at a time.

A piece is some consecutive rows of an array. Of a table whose rows lie elsewhere no more than a
piece is ever in this process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np

from keyhole.server.initial import RowInitial
from keyhole.server.optimizers import Optimizer
from keyhole.server.tables import DenseTable, LazyTable, Table
from keyhole.types import Array

__all__ = [
    "PIECE",
    "Fill",
    "RemoteTable",
    "StoredArray",
    "dump_table",
    "initial_of",
    "load_table",
    "rows_of_piece",
]

PIECE = 64 << 20
"""Bytes of a piece: large enough for disks and networks, small enough to forget about."""


@dataclass(frozen=True)
class StoredArray:
    """An array as a snapshot takes it.

    Args:
        dtype: of its numbers.
        shape: of all of it.
        pieces: `() -> pieces`, along the first axis, from the first row to the last; may be called
            more than once.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    pieces: Callable[[], Iterator[Array]]

    @staticmethod
    def of(array: Array, most_bytes: int = PIECE) -> StoredArray:
        """An array that is in this process; its pieces are views of it."""
        return StoredArray(array.dtype, array.shape, partial(_views, array, most_bytes))


Fill: TypeAlias = Callable[[str, int, Array], None]
"""`fill(name, first row, piece)`: arrays in the order in which a table dumps them, each from its
first row to its last."""


@runtime_checkable
class RemoteTable(Protocol):
    """A table whose rows lie elsewhere: they come, and go back, in pieces."""

    def dump(self) -> tuple[dict[str, Any], dict[str, StoredArray]]:
        """What `dump_table` returns, with the bytes of a table in this process."""
        ...

    def refill(self, described: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> Fill:
        """Begins anew with what was dumped, of which the pieces are to follow.

        Raises:
            ValueError: what was dumped does not fit this table.
        """
        ...


def dump_table(table: Table) -> tuple[dict[str, Any], dict[str, StoredArray]]:
    """What a table stores: its kind, and every row or those that exist and their keys."""
    if isinstance(table, RemoteTable):
        return table.dump()
    if isinstance(table, LazyTable):
        described = {"seed": table.initial.seed, "columns": table.initial.columns}
        rows = {name: array[: len(table)] for name, array in table.slab.named().items()}
        return {"kind": "lazy", **described}, _stored({"keys": table.index.keys, **rows})
    assert isinstance(table, DenseTable)
    return {"kind": "dense"}, _stored(table.slab.named())


def load_table(
    num_keys: int, described: Mapping[str, Any], arrays: Mapping[str, Array], optimizer: Optimizer
) -> DenseTable | LazyTable:
    """A table with what `dump_table` returned in place of its own; it takes `values` over."""
    if described["kind"] == "dense":
        dense = DenseTable(arrays["values"], optimizer)
        _fill(dense.slab.named(), arrays)
        return dense
    lazy = LazyTable(num_keys, initial_of(described), optimizer)
    lazy.reserve(arrays["keys"])
    _fill(lazy.slab.named(), arrays)
    return lazy


def initial_of(described: Mapping[str, Any]) -> RowInitial:
    """How the rows of a lazy table start, as `dump_table` has described it."""
    columns = tuple((int(n), int(kind), float(scale)) for n, kind, scale in described["columns"])
    return RowInitial(described["seed"], columns)


def rows_of_piece(dtype: np.dtype[Any], shape: tuple[int, ...], most_bytes: int) -> int:
    """How many rows of an array make a piece."""
    return max(1, most_bytes // max(1, prod(shape[1:]) * dtype.itemsize))


def _views(array: Array, most_bytes: int) -> Iterator[Array]:
    rows = rows_of_piece(array.dtype, array.shape, most_bytes)
    return (array[at : at + rows] for at in range(0, len(array), rows))


def _stored(arrays: Mapping[str, Array]) -> dict[str, StoredArray]:
    return {name: StoredArray.of(array) for name, array in arrays.items()}


def _fill(own: Mapping[str, Array], stored: Mapping[str, Array]) -> None:
    for name, array in own.items():
        array[: len(stored[name])] = stored[name]
