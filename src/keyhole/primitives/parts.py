"""Parts: the parameters that one key selects together, and the slice they make.

Parameters that share their cuts form a part: the filters of a convolution, their biases and the
dense weights they feed are one part, because one key selects all three. A part cut by two key
spaces is keyed by their product, and what no cut touches is the part with the empty product: one
key for everyone, which is a broadcast (section 3.3).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from keyhole import tree
from keyhole.errors import ShapeError
from keyhole.primitives.keymaps import Product
from keyhole.primitives.keyspace import Keys, KeySpace
from keyhole.types import Array, Tree

__all__ = ["Field", "Part"]


@dataclass(frozen=True)
class Field:
    """One parameter within a part: where it is, and the axes that the part's key spaces cut."""

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    axes: tuple[int, ...]

    @cached_property
    def slice_shape(self) -> tuple[int, ...]:
        """The shape of one slice: the parameter's without the cut axes."""
        return tuple(n for axis, n in enumerate(self.shape) if axis not in self.axes)

    @cached_property
    def _leads(self) -> bool:
        """Whether the cut axes come first, in order: then slices lie as they are."""
        return self.axes == tuple(range(len(self.axes)))

    def client_shape(self, counts: Sequence[int]) -> tuple[int, ...]:
        """The shape on a client that selected `counts[i]` keys of the i-th key space."""
        shape = list(self.shape)
        for axis, count in zip(self.axes, counts, strict=True):
            shape[axis] = count
        return tuple(shape)

    def index(self, keys: Sequence[Any]) -> tuple[Any, ...]:
        """The index of one slice, for NumPy and JAX arrays alike."""
        chosen = dict(zip(self.axes, keys, strict=True))
        return tuple(chosen.get(axis, slice(None)) for axis in range(len(self.shape)))

    def stack(self, slices: Sequence[Array] | Array, counts: Sequence[int]) -> Array:
        """The client's parameter from its slices, which come in the order of `Product.grid`."""
        stacked = np.asarray(slices, self.dtype).reshape(*counts, *self.slice_shape)
        if self._leads:
            return stacked
        return np.moveaxis(stacked, range(len(counts)), self.axes)

    def unstack(self, value: Array) -> Array:
        """The slices of a client's parameter, shape (number of slices, *slice_shape)."""
        moved = value if self._leads else np.moveaxis(value, self.axes, range(len(self.axes)))
        return moved.reshape(prod(moved.shape[: len(self.axes)]), *self.slice_shape)


@dataclass(frozen=True)
class Part:
    """The parameters that the same key spaces cut: what one key selects."""

    product: Product
    fields: tuple[Field, ...]

    @property
    def space(self) -> KeySpace:
        """The key space of this part; one key where nothing is cut."""
        return self.product.space

    @cached_property
    def record(self) -> np.dtype[Any]:
        """The bytes of one slice: little-endian fields in path order, without padding."""
        spec = [(f.path, f.dtype.newbyteorder("<"), f.slice_shape) for f in self.fields]
        return np.dtype(spec)

    @cached_property
    def slice_size(self) -> int:
        """How many numbers a slice holds."""
        return sum(prod(field.slice_shape) for field in self.fields)

    def select_fn(self, server_value: Tree, key: int) -> dict[str, Any]:
        """psi: the slice of every field at `key`."""
        keys = [k for (k,) in self.product.split(self.space.keys([key]))]
        return {f.path: tree.get(server_value, f.path)[f.index(keys)] for f in self.fields}

    def keys_of(self, keys: Mapping[str, Keys]) -> Keys:
        """The keys of this part for a client that selected `keys`: every combination."""
        return self.product.grid(*(keys[factor.name] for factor in self.product.factors))

    def to_rows(self, leaves: Mapping[str, Array], out: Array | None = None) -> Array:
        """The slices of a model or sub-model as rows, (number of slices, slice_size).

        The fields of a slice stand side by side, in the order of `record`.

        Args:
            leaves: the model's, by path.
            out: where to write them; without it, rows of one field may be a view of its leaf.
        """
        blocks = [field.unstack(np.asarray(leaves[field.path])) for field in self.fields]
        flat = [
            b.reshape(len(b), prod(f.slice_shape)) for b, f in zip(blocks, self.fields, strict=True)
        ]
        if out is None and len(flat) == 1:
            return flat[0]
        return np.concatenate(flat, axis=1, out=out)

    def from_rows(self, rows: Array, counts: Sequence[int]) -> dict[str, Array]:
        """The parameters of a client with `counts` keys: the inverse of `to_rows`."""
        leaves, start = {}, 0
        for field in self.fields:
            stop = start + prod(field.slice_shape)
            leaves[field.path] = field.stack(rows[:, start:stop], counts)
            start = stop
        return leaves

    def pack(self, piece: Mapping[str, Array]) -> bytes:
        """The bytes of one slice, laid out as `record`."""
        row = np.zeros((), self.record)
        for field in self.fields:
            row[field.path] = piece[field.path]
        return row.tobytes()

    def unpack(self, data: bytes) -> dict[str, Array]:
        """The slice whose bytes are `data`."""
        if len(data) != self.record.itemsize:
            raise ShapeError(
                f"bytes are not one slice of {self.space.name!r}",
                got=f"{len(data)} bytes",
                allowed=f"{self.record.itemsize}",
                fix="check that both sides use the same cuts",
            )
        row = np.frombuffer(data, self.record)[0]
        return {field.path: np.asarray(row[field.path], field.dtype) for field in self.fields}
