"""Draws Gaussian noise from the cryptographic generator, for floats and for integers of a ring.

**What it is.** Two words of 64 bits give two numbers by the formula of Box and Muller,

    r = sqrt(-2 ln u),  u = (2 floor(w / 2) + 1) / 2^64,    r cos(2 pi v),  r sin(2 pi v),
    v = floor(w' / 2^11) / 2^53,

in doubles, each within 2^-46 of the exact value of the formula. Integers are sd times that, rounded
to the nearest. An integer plus such noise is the rounded sum of the integer and a real Gaussian, so
that the ring, like everything else that is computed from the sum, loses no privacy: the accounting
of the continuous Gaussian holds for it.

**Where it differs from a Gaussian.** (1) No number lies beyond 9.42 standard deviations. Of real
ones, a pair reaches that radius with probability 2^-64, so that the missing tail of n numbers has
less than n 2^-65: 2^-39 for 5 x 10^7 of them. Add that to delta. (2) Words and doubles are no
reals: they move a number by less than 2^-46 sd, and the steps of u by another 2^-60 sd on average.
The integer it is rounded to becomes another one where it lies that near to the middle between two:
a share of 2^-45 sd of the numbers, 2^-20 at sd = 2^25. No proof here turns that into a delta.
(3) Noise on floats is exact in none of its bits: a person who sees the sum in full precision can
learn from which float values it may have come (Mironov, 2012). Where the sum is released to people
who would try, add integers in the ring.

**Who may know the noise.** A party that knows the seed can take the noise away. With two servers,
each adds noise of the full standard deviation from a seed of its own, so that the sum is protected
against either of them; others see sqrt(2) times the noise, which the accountant does not count.
"""

from __future__ import annotations

from math import ceil, cos, inf, log, log1p, pi, sin, sqrt

import numpy as np
from numba import njit
from numpy.typing import NDArray

from keyhole.arrays import Array
from keyhole.crypto.prg import Prg
from keyhole.errors import InputError, ShapeError

LARGEST = sqrt(128 * log(2))
"""The most standard deviations that a number can be away from zero: 9.42."""

_CHUNK = 1 << 14  # numbers at a time: their words and results stay in the second-level cache
_RING = {2: np.dtype(np.uint16), 4: np.dtype(np.uint32)}
_MAX_RING_SD = {2: 2.0**11, 4: 2.0**27}  # 9.42 of them stay below half of the ring


def normal(prg: Prg, shape: int | tuple[int, ...]) -> NDArray[np.float64]:
    """Returns numbers of the normal distribution with mean 0 and standard deviation 1.

    Args:
        prg: where they come from: 16 bytes for every two of them. The same seed gives the same
            numbers on the same machine; another library of mathematics may differ in the last bit.
        shape: of the result.

    >>> normal(Prg(bytes(16)), 3).round(3)
    array([ 0.725,  1.55 , -0.837])
    """
    out = np.empty(shape, np.float64)
    flat = out.reshape(-1)
    for start in range(0, len(flat), _CHUNK):
        part = flat[start : start + _CHUNK]
        _box_muller(prg.words(len(part) + len(part) % 2), part)
    return out


def add_noise(values: Array, sd: float, prg: Prg, out: Array | None = None) -> Array:
    """Adds Gaussian noise to every number of a plain sum.

    Args:
        values: floats, any shape: all rows, also those that nobody asked for, since their being
            zero would say so.
        sd: standard deviation: the noise multiplier times the clipping norm; 0 adds nothing.
        prg: where it comes from.
        out: where to write, like `values`; a new array without it. It may be `values` itself.

    Raises:
        InputError: a standard deviation below zero, infinite or NaN.
        ShapeError: values that are no floats, or an `out` that is not like them.
    """
    _check_sd(sd, inf)
    if values.dtype.kind != "f":
        raise _wrong_kind(values, "floating point")
    target = _target(values, out)
    if sd > 0:
        flat = target.reshape(-1)
        for start in range(0, len(flat), _CHUNK):
            part = flat[start : start + _CHUNK]
            part[...] = part + sd * normal(prg, len(part))
    return target


def add_ring_noise(sums: Array, sd: float, prg: Prg, out: Array | None = None) -> Array:
    """Adds rounded Gaussian noise to every element of a sum in a ring, or of one share of it.

    Args:
        sums: uint32 or uint16, any shape: all rows, also those that nobody asked for.
        sd: standard deviation in units of the ring: multiplier times clipping norm times scale; 0
            adds nothing. `noise_room` says how much of the ring it takes.
        prg: where it comes from.
        out: where to write, like `sums`; a new array without it. It may be `sums` itself.

    Raises:
        InputError: a standard deviation below zero, or too large for the ring.
        ShapeError: elements of another dtype, or an `out` that is not like `sums`.

    >>> add_ring_noise(np.zeros(4, np.uint32), 3.0, Prg(bytes(16))).view(np.int32)
    array([ 2,  5, -3,  3], dtype=int32)
    """
    if sums.dtype != _RING.get(sums.dtype.itemsize):
        raise _wrong_kind(sums, "uint16 or uint32")
    _check_sd(sd, _MAX_RING_SD[sums.dtype.itemsize])
    target = _target(sums, out)
    if sd > 0:
        flat = target.reshape(-1)
        for start in range(0, len(flat), _CHUNK):
            part = flat[start : start + _CHUNK]
            _add_rounded(normal(prg, len(part)), sd, part)
    return target


def noise_room(noise_multiplier: float, parties: int = 1) -> int:
    """How many clients more a ring must have room for, so that noise cannot make a sum overflow:
    the `cohort` of `FixedPoint` is the planned cohort and this.

    Args:
        noise_multiplier: of each party.
        parties: that add noise: 2 where both servers do.

    >>> noise_room(1.0, parties=2)
    20
    """
    return parties * ceil(LARGEST * noise_multiplier) if noise_multiplier else 0


@njit(cache=True, nogil=True)
def _box_muller(words, out):  # type: ignore[no-untyped-def]
    """Turns pairs of words into pairs of numbers; an odd number of results drops the last one."""
    for pair in range(len(words) // 2):
        odd = words[2 * pair] | np.uint64(1)
        if odd < np.uint64(1 << 63):
            logarithm = log(np.float64(odd) * 2.0**-64)
        else:  # near 1 a double keeps u badly, and 1 - u well
            logarithm = log1p(-(np.float64(~odd + np.uint64(1)) * 2.0**-64))
        radius = sqrt(-2 * logarithm)
        angle = 2 * pi * (np.float64(words[2 * pair + 1] >> np.uint64(11)) * 2.0**-53)
        out[2 * pair] = radius * cos(angle)
        if 2 * pair + 1 < len(out):
            out[2 * pair + 1] = radius * sin(angle)


@njit(cache=True, nogil=True)
def _add_rounded(numbers, sd, out):  # type: ignore[no-untyped-def]
    for n in range(len(out)):
        # By way of int64: what a negative float is as an unsigned number depends on the machine.
        out[n] += np.int64(np.rint(sd * numbers[n]))


def _check_sd(sd: float, limit: float) -> None:
    if not 0 <= sd < inf or sd > limit:
        raise InputError(
            "the standard deviation of the noise is out of range",
            got=f"{sd:g}",
            allowed="0 or more, and finite" if limit == inf else f"0 to {limit:g} in this ring",
            fix="multiply noise multiplier, clipping norm and scale anew",
        )


def _target(values: Array, out: Array | None) -> Array:
    """A contiguous array that holds the values, to be written over."""
    if out is None:
        return np.array(values, order="C")
    if out.shape != values.shape or out.dtype != values.dtype or not out.flags.c_contiguous:
        raise ShapeError(
            "an array that noisy values do not fit in",
            got=f"{out.shape} of {out.dtype}, contiguous: {out.flags.c_contiguous}",
            allowed=f"{values.shape} of {values.dtype}, contiguous",
            fix="leave out=None",
        )
    if out is not values:
        out[...] = values
    return out


def _wrong_kind(values: Array, allowed: str) -> ShapeError:
    return ShapeError(
        "numbers of another kind",
        got=values.dtype,
        allowed=allowed,
        fix="use add_noise for floats and add_ring_noise for a ring",
    )
