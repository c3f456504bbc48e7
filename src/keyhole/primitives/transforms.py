"""Select functions that transform what they pick: slices of 8 or 4 bits, or of half precision.

A transformed select function remembers the plain one. The client decodes its slices and trains on
numbers; its update belongs to the plain slices, so deselect is the plain one's: rounding has no
transpose, and needs none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keyhole import tree
from keyhole.primitives.quantize import (
    QuantizedRows,
    check_bits,
    check_fits,
    dequantize_rows,
    quantize_rows,
)
from keyhole.types import Array, SelectFn, Tree

__all__ = [
    "HalfArray",
    "HalfPrecision",
    "Quantized",
    "QuantizedArray",
    "decode",
    "plain_select_fn",
]


@dataclass(frozen=True)
class QuantizedArray:
    """One array of a slice, quantized: a single row, and the shape and dtype to give back."""

    row: QuantizedRows
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def decode(self) -> Array:
        """The array it stands for."""
        numbers = dequantize_rows(self.row).reshape(self.shape)
        is_whole = np.issubdtype(self.dtype, np.integer)
        return (np.rint(numbers) if is_whole else numbers).astype(self.dtype)


@dataclass(frozen=True)
class HalfArray:
    """One array of a slice in half precision, and the dtype to give back."""

    values: NDArray[np.float16]
    dtype: np.dtype[Any]

    def decode(self) -> Array:
        """The array it stands for."""
        return self.values.astype(self.dtype)


@dataclass(frozen=True)
class Quantized:
    """A select function whose slices are quantized, one scale per array of a slice.

    Args:
        plain: psi.
        bits: 8 or 4.
        seed: of the stochastic rounding; slices are a pure function of (x, key, seed).

    >>> psi = Quantized(lambda x, k: x[k], bits=4, seed=7)
    >>> decode(psi(np.array([[0.0, 15.0], [3.0, 3.0]]), 1))
    array([3., 3.])
    """

    plain: SelectFn
    bits: int
    seed: int

    def __post_init__(self) -> None:
        check_bits(self.bits)

    def __call__(self, server_value: Any, key: int) -> Tree:
        """psi': the slice at `key`, quantized."""
        piece = self.plain(server_value, key)
        coded, start = {}, 0
        for path, leaf in tree.flatten(piece).items():
            array = np.asarray(leaf)
            row = quantize_rows(array.reshape(1, -1), np.array([key]), self.bits, self.seed, start)
            coded[path] = QuantizedArray(row, array.shape, array.dtype)
            start += array.size
        return tree.unflatten(piece, coded)


@dataclass(frozen=True)
class HalfPrecision:
    """A select function whose slices are float16.

    Args:
        plain: psi.

    >>> decode(HalfPrecision(lambda x, k: x[k])(np.array([0.1, 2.0]), 1))
    array(2.)
    """

    plain: SelectFn

    def __call__(self, server_value: Any, key: int) -> Tree:
        """psi': the slice at `key`, in half precision; NotFiniteError beyond +-65504."""
        return tree.map_leaves(self._encode, self.plain(server_value, key))

    @staticmethod
    def _encode(leaf: Any) -> HalfArray:
        with np.errstate(over="ignore"):
            values = np.asarray(leaf).astype(np.float16)
        check_fits(values)
        return HalfArray(values, np.asarray(leaf).dtype)


def decode(piece: Tree) -> Tree:
    """Returns the numbers of a transformed slice; a plain slice comes back as it is."""
    return tree.map_leaves(lambda leaf: leaf.decode() if hasattr(leaf, "decode") else leaf, piece)


def plain_select_fn(select_fn: SelectFn) -> SelectFn:
    """Returns the select function under a transform: the one whose deselect is used."""
    return select_fn.plain if isinstance(select_fn, (Quantized, HalfPrecision)) else select_fn
