"""Numbers that look random and are a pure function of (seed, key, position).

Counter-based: any number can be made without those before it, so a slice rounded on demand has the
bytes of the slice that was rounded beforehand. Not for secrets.

Rows in 8 or 4 bits: uniform levels, stochastic rounding, one scale per row.

Select functions that transform what they pick: slices of 8 or 4 bits, or of half precision.

A transformed select function remembers the plain one. The client decodes its slices and trains on
numbers; its update belongs to the plain slices, so deselect is the plain one's: rounding has no
transpose, and needs none.

Padding: sub-models of unequal size brought to one size, and back.

Compiled client code wants few shapes. A sub-model is padded with zeros behind its selected slices,
never with slices of a key that could be real; a mask says which slots hold a slice. Coming back,
whatever stands in the padding is cut off, so padding a client changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keyhole import tree
from keyhole.arrays import Array, KeyArray, SelectFn, Tree
from keyhole.errors import InputError, NotFiniteError
from keyhole.primitives.layout import Layout

# The increment and the two multipliers of SplitMix64 (Steele, Lea and Flood, 2014).
GOLDEN, _MIX_1, _MIX_2 = (
    np.uint64(0x9E3779B97F4A7C15),
    np.uint64(0xBF58476D1CE4E5B9),
    np.uint64(0x94D049BB133111EB),
)


def uniform(seed: int, keys: KeyArray, count: int, start: int = 0) -> NDArray[np.float32]:
    """Returns `count` uniform numbers in [0, 1) for each key.

    Args:
        seed: any whole number from 0 to 2^64 - 1.
        start: how many numbers of each key's stream to pass over.

    >>> uniform(1, np.array([5, 9]), 3)[1] == uniform(1, np.array([9]), 3)[0]
    array([ True,  True,  True])
    """
    stream = mix(mix(np.array([seed], np.uint64)) ^ mix(keys.astype(np.uint64) + GOLDEN))
    steps = np.arange(start + 1, start + count + 1, dtype=np.uint64) * GOLDEN
    bits = mix(stream[:, None] + steps) >> np.uint64(40)
    return bits.astype(np.float32) * np.float32(2**-24)


def mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finalizer: every input bit changes every output bit half of the time."""
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


@dataclass(frozen=True)
class QuantizedRows:
    """Rows as unsigned codes with a scale and an offset per row: row = offset + scale * code.

    Attributes:
        codes: uint8, (m, d) for 8 bits and (m, ceil(d / 2)) for 4, two codes a byte, low half
            first.
        scale: float32, (m,).
        offset: float32, (m,).
        bits: 8 or 4.
    """

    codes: NDArray[np.uint8]
    scale: NDArray[np.float32]
    offset: NDArray[np.float32]
    width: int
    bits: int

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return self.codes.nbytes + self.scale.nbytes + self.offset.nbytes


def quantize_rows(
    rows: Array, keys: KeyArray, bits: int, seed: int, start: int = 0
) -> QuantizedRows:
    r"""Rounds each row to $2^b$ evenly spaced levels between its least and greatest number.

    Stochastic: $c = \lfloor (v - \text{offset}) / \text{scale} + r \rfloor$ with r uniform in [0,
    1) from (seed, key, position), so the decoded number is right on average and off by less than
    one scale.

    Args:
        rows: (m, d), floating point.
        keys: (m,), the key of each row.
        bits: 8 or 4.
        seed: of the rounding; one per round gives independent errors over rounds.
        start: position of the first column, where the rows are a part of longer ones.

    >>> q = quantize_rows(np.array([[0.0, 255.0, 17.0]]), np.array([0]), bits=8, seed=0)
    >>> q.codes
    array([[  0, 255,  17]], dtype=uint8)
    """
    check_bits(bits)
    levels = np.float32(2**bits - 1)
    values = np.asarray(rows, np.float32)
    if values.shape[1] == 0:
        empty = np.zeros(len(values), np.float32)
        return QuantizedRows(np.zeros(values.shape, np.uint8), empty, empty, 0, bits)
    offset, top = values.min(axis=1), values.max(axis=1)
    with np.errstate(over="ignore", invalid="ignore"):
        scale = (top - offset) / levels
    check_fits(scale, offset)
    step = np.where(scale > 0, scale, np.float32(1))
    exact = (values - offset[:, None]) / step[:, None]
    dither = uniform(seed, keys, values.shape[1], start)
    codes = np.clip(np.floor(exact + dither), 0, levels).astype(np.uint8)
    return QuantizedRows(_pack(codes, bits), scale, offset, values.shape[1], bits)


def dequantize_rows(quantized: QuantizedRows) -> NDArray[np.float32]:
    """Returns the numbers that the codes stand for, float32 of shape (m, d).

    >>> q = quantize_rows(np.array([[0.0, 255.0, 17.0]]), np.array([0]), bits=8, seed=0)
    >>> dequantize_rows(q)
    array([[  0., 255.,  17.]], dtype=float32)
    """
    codes = _unpack(quantized.codes, quantized.bits, quantized.width)
    return quantized.offset[:, None] + quantized.scale[:, None] * codes.astype(np.float32)


def check_bits(bits: int) -> None:
    """Raises InputError unless `bits` is a width that is supported."""
    if bits not in (4, 8):
        raise InputError(
            f"slices cannot be quantized to that width: got {bits} bits; expected 8 or 4; use "
            "HalfPrecision for 16"
        )


def check_fits(*arrays: Array) -> None:
    """Raises NotFiniteError unless all numbers of a coded slice are finite."""
    if not all(np.all(np.isfinite(array)) for array in arrays):
        raise NotFiniteError(
            "a slice cannot be stored in fewer bits: got NaN, infinity or numbers beyond the "
            "format; expected finite numbers within its range; check the server value; send such "
            "slices in float32"
        )


def _pack(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Two 4-bit codes a byte, the first in the low half."""
    if bits == 8:
        return codes
    even = np.pad(codes, ((0, 0), (0, codes.shape[1] % 2)))
    return even[:, 0::2] | (even[:, 1::2] << np.uint8(4))


def _unpack(packed: NDArray[np.uint8], bits: int, width: int) -> NDArray[np.uint8]:
    if bits == 8:
        return packed
    halves = np.stack([packed & np.uint8(15), packed >> np.uint8(4)], axis=-1)
    return halves.reshape(len(packed), 2 * packed.shape[1])[:, :width]


@dataclass(frozen=True)
class QuantizedArray:
    """One array of a slice, quantized: a single row, and the shape and dtype to give back."""

    row: QuantizedRows
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def decode(self) -> Array:
        """Returns the array it stands for."""
        numbers = dequantize_rows(self.row).reshape(self.shape)
        is_whole = np.issubdtype(self.dtype, np.integer)
        return (np.rint(numbers) if is_whole else numbers).astype(self.dtype)


@dataclass(frozen=True)
class HalfArray:
    """One array of a slice in half precision, and the dtype to give back."""

    values: NDArray[np.float16]
    dtype: np.dtype[Any]

    def decode(self) -> Array:
        """Returns the array it stands for."""
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


def count_slots(layout: Layout, submodel: Tree) -> dict[str, int]:
    """Returns how many slices of each key space a sub-model has room for, read from its shapes.

    >>> from keyhole.primitives.layout import Cut
    >>> from keyhole.primitives.keyspace import KeySpace
    >>> layout = Layout.of({"w": np.zeros((5, 2))}, Cut(KeySpace("row", 5), {"w": 0}))
    >>> count_slots(layout, {"w": np.zeros((3, 2))})
    {'row': 3}
    """
    leaves = tree.flatten(submodel)
    counts: dict[str, int] = {}
    for part in layout.parts:
        for field in part.fields:
            shape = np.shape(leaves[field.path])
            for factor, axis in zip(part.product.factors, field.axes, strict=True):
                counts[factor.name] = shape[axis]
    return counts


def resize_submodel(layout: Layout, submodel: Tree, sizes: Mapping[str, int]) -> Tree:
    """Brings every cut axis to its size: zeros behind, or the end cut off.

    Args:
        submodel: what a client selected, or its update.
        sizes: number of slots for each key space.

    >>> from keyhole.primitives.layout import Cut
    >>> from keyhole.primitives.keyspace import KeySpace
    >>> layout = Layout.of(np.zeros(5), Cut(KeySpace("row", 5), {".": 0}))
    >>> padded = resize_submodel(layout, np.array([7.0, 8.0]), {"row": 4})
    >>> padded
    array([7., 8., 0., 0.])
    >>> resize_submodel(layout, padded, {"row": 2})
    array([7., 8.])
    """
    leaves = tree.flatten(submodel)
    resized = {}
    for part in layout.parts:
        counts = [sizes[factor.name] for factor in part.product.factors]
        for field in part.fields:
            leaf = np.asarray(leaves[field.path])
            resized[field.path] = _fit(leaf, field.client_shape(counts))
    return tree.unflatten(layout.structure, resized)


def slot_masks(counts: Mapping[str, int], sizes: Mapping[str, int]) -> dict[str, Array]:
    """Returns, for each key space, which of its slots hold a slice: bool of shape (size,)."""
    return {name: np.arange(size) < counts[name] for name, size in sizes.items()}


def _fit(array: Array, shape: tuple[int, ...]) -> Array:
    """The array within another shape; itself if that is its shape."""
    if array.shape == shape:
        return array
    fitted = np.zeros(shape, array.dtype)
    common = tuple(slice(min(a, b)) for a, b in zip(array.shape, shape, strict=True))
    fitted[common] = array[common]
    return fitted
