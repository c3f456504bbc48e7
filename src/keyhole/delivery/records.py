"""Lays slices of a table out as records of fixed length, plain or coded in fewer bits.

A record is what a slice is on a disk and on a wire: its arrays one after the other in path order,
little-endian, without padding. Every slice of a table has the same length, so key k lies at
k * record_bytes. A sub-model is assembled from the records of its slices, whichever way they came.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from keyhole import tree
from keyhole.arrays import Array, KeyArray, Tree
from keyhole.errors import InputError, ShapeError
from keyhole.primitives.coding import QuantizedRows, check_fits, dequantize_rows, quantize_rows
from keyhole.primitives.keyspace import Keys, distinct_keys
from keyhole.primitives.layout import KeysBySpace, Layout, Part

CodingKind: TypeAlias = Literal["plain", "half", "uint8", "uint4"]
"""How numbers are stored: as they are, in float16, or as 8 or 4 bits with a scale per array."""

RecordArray: TypeAlias = NDArray[np.uint8]
"""Records, shape (m, record_bytes)."""

_BITS = {"uint8": 8, "uint4": 4}
_SCALE_BYTES = 8  # float32 scale and offset behind the codes of an array


@dataclass(frozen=True)
class Coding:
    """How the numbers of a table are stored.

    Args:
        seed: of the stochastic rounding to 8 or 4 bits. One seed for a whole run keeps the bytes of
            rows that do not change, so that rounds can be published incrementally.
    """

    kind: CodingKind = "plain"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in get_args(CodingKind):
            raise InputError(
                f"no such coding of slices: got {self.kind}; expected "
                f"{', '.join(get_args(CodingKind))}; choose one of them"
            )


PLAIN = Coding()
"""Numbers as they are."""


@dataclass(frozen=True)
class RecordField:
    """One array of a slice: its path, shape and dtype before coding."""

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def size(self) -> int:
        """How many numbers it holds."""
        return prod(self.shape)


@dataclass(frozen=True)
class Records:
    """What the records of one table hold.

    >>> table = Records("word", 9, (RecordField("w", (3,), np.dtype("f4")),), Coding("uint8"))
    >>> table.record_bytes  # three codes, a scale and an offset
    11
    >>> coded = table.encode({"w": np.array([[0.0, 255.0, 17.0]], np.float32)}, np.array([7]))
    >>> table.decode(coded)["w"]
    array([[  0., 255.,  17.]], dtype=float32)
    """

    name: str
    num_keys: int
    fields: tuple[RecordField, ...]
    coding: Coding = PLAIN

    @staticmethod
    def of_part(part: Part, coding: Coding) -> Records:
        """Returns the records of a part of a layout."""
        fields = tuple(RecordField(f.path, f.slice_shape, f.dtype) for f in part.fields)
        return Records(part.space.name, part.space.num_keys, fields, coding)

    @cached_property
    def record_bytes(self) -> int:
        """The length of one record."""
        return sum(self._field_bytes(field) for field in self.fields)

    @cached_property
    def slice_size(self) -> int:
        """How many numbers a slice holds."""
        return sum(field.size for field in self.fields)

    def encode(self, slices: Mapping[str, Array], keys: KeyArray) -> RecordArray:
        """Returns the records of slices, path -> (m, *shape) of each field; rounding depends on
        whose slices these are: `keys`, (m,)."""
        out = np.empty((len(keys), self.record_bytes), np.uint8)
        at, start = 0, 0
        for field in self.fields:
            values = np.asarray(slices[field.path]).reshape(len(keys), field.size)
            for block in self._blocks(values, field, keys, start):
                width = block.shape[1] * block.itemsize
                coded = np.ascontiguousarray(block).view(np.uint8).reshape(len(keys), width)
                out[:, at : at + width] = coded
                at += width
            start += field.size
        return out

    def encode_rows(self, rows: Array, keys: KeyArray) -> RecordArray:
        """Returns the records of rows, (m, slice_size): the arrays of each slice side by side.

        Plain rows of one dtype are records already, and come back without a copy.
        """
        if self.coding.kind == "plain" and all(
            f.dtype.newbyteorder("<") == rows.dtype for f in self.fields
        ):
            return np.ascontiguousarray(rows).view(np.uint8).reshape(len(rows), self.record_bytes)
        return self.encode(self._split(rows), keys)

    def decode(self, records: RecordArray) -> dict[str, Array]:
        """Returns path -> (m, *shape): the numbers that records stand for."""
        if records.ndim != 2 or records.shape[1] != self.record_bytes:
            raise ShapeError(
                f"bytes are not records of {self.name!r}: got shape {records.shape}; expected (m, "
                f"{self.record_bytes}); check that both sides use the same manifest"
            )
        found, at = {}, 0
        for field in self.fields:
            stop = at + self._field_bytes(field)
            found[field.path] = self._numbers(np.ascontiguousarray(records[:, at:stop]), field)
            at = stop
        return found

    def decode_rows(self, records: RecordArray) -> Array:
        """Returns the numbers as rows, (m, slice_size): the inverse of `encode_rows`."""
        slices = self.decode(records)
        flat = [slices[f.path].reshape(len(records), f.size) for f in self.fields]
        return flat[0] if len(flat) == 1 else np.concatenate(flat, axis=1)

    def _field_bytes(self, field: RecordField) -> int:
        if self.coding.kind == "plain":
            return field.size * field.dtype.itemsize
        if self.coding.kind == "half":
            return field.size * 2
        return -(-field.size * _BITS[self.coding.kind] // 8) + _SCALE_BYTES

    def _blocks(
        self, values: Array, field: RecordField, keys: KeyArray, start: int
    ) -> tuple[Array, ...]:
        """The stored arrays of one field, each (m, n), in order."""
        if self.coding.kind == "plain":
            return (values.astype(field.dtype.newbyteorder("<"), copy=False),)
        if self.coding.kind == "half":
            with np.errstate(over="ignore"):
                halves = values.astype("<f2")
            check_fits(halves)
            return (halves,)
        coded = quantize_rows(values, keys, _BITS[self.coding.kind], self.coding.seed, start)
        scales = np.stack([coded.scale, coded.offset], axis=1).astype("<f4", copy=False)
        return coded.codes, scales

    def _numbers(self, stored: RecordArray, field: RecordField) -> Array:
        """One field from its stored bytes, (m, *shape)."""
        shape = (len(stored), *field.shape)
        if self.coding.kind == "plain":
            little = stored.view(field.dtype.newbyteorder("<"))
            return little.astype(field.dtype, copy=False).reshape(shape)
        if self.coding.kind == "half":
            return stored.view("<f2").astype(field.dtype).reshape(shape)
        codes = stored[:, :-_SCALE_BYTES]
        scales = np.ascontiguousarray(stored[:, -_SCALE_BYTES:]).view("<f4")
        bits = _BITS[self.coding.kind]
        numbers = dequantize_rows(
            QuantizedRows(codes, scales[:, 0], scales[:, 1], field.size, bits)
        ).reshape(shape)
        is_whole = np.issubdtype(field.dtype, np.integer)
        return (np.rint(numbers) if is_whole else numbers).astype(field.dtype)

    def _split(self, rows: Array) -> dict[str, Array]:
        """The arrays of slices that stand side by side in rows."""
        found, at = {}, 0
        for field in self.fields:
            found[field.path] = rows[:, at : at + field.size]
            at += field.size
        return found


def records_of(layout: Layout, coding: Coding) -> list[Records]:
    """Returns the records of every part of a layout; what everyone receives stays plain."""
    return [
        Records.of_part(part, coding if part.product.factors else PLAIN) for part in layout.parts
    ]


Demand: TypeAlias = Mapping[int, KeysBySpace]
"""Each client's keys by the name of their key space."""


def model_bytes(layout: Layout, tables: Sequence[Records], counts: Mapping[str, int]) -> int:
    """Returns the bytes of a sub-model with this many keys of each key space; `tables` are of each
    part."""
    return sum(
        records.record_bytes * prod(counts[factor.name] for factor in part.product.factors)
        for part, records in zip(layout.parts, tables, strict=True)
    )


def count_asked(layout: Layout, demand: Demand) -> int:
    """Returns how many slices of the cut parts the cohort asked for."""
    return sum(
        prod(len(z[factor.name]) for factor in part.product.factors)
        for part in cut_parts(layout)
        for z in demand.values()
    )


def count_distinct(layout: Layout, demand: Demand) -> int:
    """Returns how many different slices those are."""
    total = 0
    for part in cut_parts(layout):
        asked = [part.keys_of(z).array for z in demand.values()]
        total += len(distinct_keys(asked)) if asked else 0
    return total


def cut_parts(layout: Layout) -> list[Part]:
    """Returns the parts that some key space cuts; what is left is sent to everyone."""
    return [part for part in layout.parts if part.product.factors]


def assemble(
    layout: Layout,
    tables: Sequence[Records],
    found: Sequence[RecordArray],
    keys: Mapping[str, Keys],
) -> Tree:
    """Returns the sub-model that `found`, records of each part in the order of
    `part.keys_of(keys)`, stand for."""
    leaves: dict[str, Array] = {}
    for part, table, records in zip(layout.parts, tables, found, strict=True):
        counts = [len(keys[factor.name]) for factor in part.product.factors]
        leaves |= part.from_rows(table.decode_rows(records), counts)
    return tree.unflatten(layout.structure, leaves)


def keep_found(
    layout: Layout,
    found: Sequence[RecordArray],
    is_found: Sequence[NDArray[np.bool_]],
    keys: Mapping[str, Keys],
) -> tuple[list[RecordArray], dict[str, Keys]]:
    """Drops the keys whose slices are missing, so that what is left is a sub-model.

    A slice of a part that two key spaces cut is missing for a pair of keys: the first of them is
    dropped, from every part.

    Returns:
        The records of each part and the keys that are left, order and repeats kept.
    """
    kept = {name: np.ones(len(z), bool) for name, z in keys.items()}
    for part, there in zip(layout.parts, is_found, strict=True):
        if part.product.factors:
            first, *others = (factor.name for factor in part.product.factors)
            pairs = len(kept[first]), prod(len(keys[name]) for name in others)
            kept[first] &= there.reshape(pairs).all(axis=1)
    left = {name: Keys(z.space, z.array[kept[name]]) for name, z in keys.items()}
    records = []
    for part, rows in zip(layout.parts, found, strict=True):
        masks = [kept[factor.name] for factor in part.product.factors]
        grid = rows.reshape(*map(len, masks), rows.shape[1])
        chosen = grid[np.ix_(*masks)] if masks else rows
        records.append(chosen.reshape(prod(int(m.sum()) for m in masks), rows.shape[1]))
    return records, left
