"""Rows in 8 or 4 bits: uniform levels, stochastic rounding, one scale per row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from keyhole.errors import InputError, NotFiniteError
from keyhole.primitives import noise
from keyhole.types import Array, KeyArray

__all__ = ["QuantizedRows", "check_bits", "check_fits", "dequantize_rows", "quantize_rows"]


@dataclass(frozen=True)
class QuantizedRows:
    """Rows as unsigned codes with a scale and an offset per row: row = offset + scale * code.

    Attributes:
        codes: uint8, (m, d) for 8 bits and (m, ceil(d / 2)) for 4, two codes a byte, low half
            first.
        scale: float32, (m,).
        offset: float32, (m,).
        width: d, numbers in a row.
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

    Returns:
        The codes, scales and offsets.

    Raises:
        InputError: `bits` is neither 8 nor 4.
        NotFiniteError: a row holds NaN or infinity, or numbers too far apart for float32.

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
    dither = noise.uniform(seed, keys, values.shape[1], start)
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
            "slices cannot be quantized to that width",
            got=f"{bits} bits",
            allowed="8 or 4",
            fix="use HalfPrecision for 16",
        )


def check_fits(*arrays: Array) -> None:
    """Raises NotFiniteError unless all numbers of a coded slice are finite."""
    if not all(np.all(np.isfinite(array)) for array in arrays):
        raise NotFiniteError(
            "a slice cannot be stored in fewer bits",
            got="NaN, infinity or numbers beyond the format",
            allowed="finite numbers within its range",
            fix="check the server value; send such slices in float32",
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
