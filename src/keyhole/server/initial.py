"""Computes the rows that do not exist yet: a pure function of seed, key and position.

A table of a billion rows starts without memory: a row is made when a client first trains it, and
until then every reader computes the same numbers. Uniform numbers are those of
`keyhole.primitives.coding.uniform`, made without its temporary arrays.

`mix` is the hash behind these values and behind the key index, compiled for single numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from keyhole.arrays import Array, KeyArray
from keyhole.errors import InputError
from keyhole.primitives import coding
from keyhole.primitives.coding import GOLDEN
from keyhole.primitives.layout import Part

mix: Any = njit(cache=True, nogil=True)(coding.mix)


_ZEROS, _UNIFORM, _NORMAL = np.uint8(0), np.uint8(1), np.uint8(2)


@dataclass(frozen=True)
class Zeros:
    """Rows start at zero."""

    @property
    def code(self) -> tuple[int, float]:
        """Kind and scale."""
        return int(_ZEROS), 0.0


@dataclass(frozen=True)
class Uniform:
    """Rows start uniform in [-scale, scale).

    Args:
        scale: above 0.
    """

    scale: float

    def __post_init__(self) -> None:
        _check_scale(self.scale)

    @property
    def code(self) -> tuple[int, float]:
        """Kind and scale."""
        return int(_UNIFORM), self.scale


@dataclass(frozen=True)
class Normal:
    """Rows start normal with mean 0.

    Args:
        scale: the standard deviation, above 0.
    """

    scale: float

    def __post_init__(self) -> None:
        _check_scale(self.scale)

    @property
    def code(self) -> tuple[int, float]:
        """Kind and scale."""
        return int(_NORMAL), self.scale


Initial = Zeros | Uniform | Normal


@dataclass(frozen=True)
class RowInitial:
    """How the rows of one table start.

    Args:
        seed: from 0 to 2^64 - 1.
        columns: for consecutive numbers of a row, (how many, kind, scale).

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
        """The start of a part's rows from that of its parameters; those not named are zeros."""
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
        """The initial rows of `keys`, shape (m, width)."""
        out = np.empty((len(keys), self.width), np.float32)
        self.fill(keys, np.arange(len(keys), dtype=np.int64), out)
        return out

    def fill(self, keys: KeyArray, places: KeyArray, out: Array) -> None:
        """Writes the initial row of keys[i] to out[places[i]]."""
        counts = [count for count, _, _ in self.columns]
        kinds = np.repeat(np.array([kind for _, kind, _ in self.columns], np.uint8), counts)
        scales = np.repeat(np.array([scale for _, _, scale in self.columns], np.float32), counts)
        _fill(np.uint64(self.seed), keys, places, kinds, scales, out)


def _check_scale(scale: float) -> None:
    if not 0 < scale < np.inf:
        raise InputError(
            f"scale is out of range: got {scale}; expected above 0; use Zeros for no spread"
        )


@njit(cache=True, nogil=True)
def _fill(seed, keys, places, kinds, scales, out):  # type: ignore[no-untyped-def]
    """Number j of a row comes from number j of its key's stream, a normal one also from number
    width + j."""
    width = len(kinds)
    grain = np.float32(2.0**-24)
    for i in range(len(keys)):
        stream = mix(mix(seed) ^ mix(np.uint64(keys[i]) + GOLDEN))
        place = places[i]
        for j in range(width):
            if kinds[j] == _ZEROS:
                out[place, j] = 0
                continue
            bits = mix(stream + np.uint64(j + 1) * GOLDEN) >> np.uint64(40)
            if kinds[j] == _UNIFORM:
                number = np.float32(bits) * grain
                out[place, j] = scales[j] * (np.float32(2) * number - np.float32(1))
            else:
                more = mix(stream + np.uint64(width + j + 1) * GOLDEN) >> np.uint64(40)
                out[place, j] = np.float32(scales[j] * _box_muller(bits, more))


@njit(cache=True, nogil=True)
def _box_muller(bits, more):  # type: ignore[no-untyped-def]
    """One normal number from two of 24 bits; the half keeps the logarithm finite."""
    radius = np.sqrt(-2.0 * np.log((np.float64(bits) + 0.5) * 2.0**-24))
    return radius * np.cos(2.0 * np.pi * np.float64(more) * 2.0**-24)
