"""Errors of learning with errors: a discrete Gaussian, by a table of its distribution."""

from __future__ import annotations

from decimal import Decimal, localcontext
from functools import lru_cache

import numpy as np
from numba import njit
from numpy.typing import NDArray

from keyhole.private.pir.lwe_shape import SIGMA
from keyhole.private.prg import Prg

__all__ = ["draw_errors", "thresholds"]

_REACH = 64  # 10 sigma: what lies beyond has less than 2^-74 and falls to the rounding
_DIGITS = 60
_CHUNK = 256  # words: what stays in the first-level cache with its sums


def draw_errors(prg: Prg, shape: tuple[int, ...]) -> NDArray[np.int32]:
    """Returns errors of the discrete Gaussian with mean 0 and standard deviation 6.4.

    Every error takes one word of 64 bits and as many steps as any other. Each of its values comes
    up with its probability to within 2^-64, the whole distribution to within 2^-57.

    Args:
        prg: where they come from.
        shape: of the result.
    """
    words = np.empty(shape, "<i8")
    prg.fill(words.view(np.uint8))
    out = np.empty(shape, np.int32)
    lowest, steps = thresholds()
    _count(words.reshape(-1), steps, lowest, out.reshape(-1))
    return out


@lru_cache(maxsize=1)  # a pure function of constants
def thresholds() -> tuple[int, NDArray[np.int64]]:
    """The lowest value and the steps of the distribution: the value of a word is the lowest one
    plus the number of steps that are not above the word, all as signed numbers of 64 bits."""
    with localcontext() as context:
        context.prec = _DIGITS
        spread = 2 * Decimal(str(SIGMA)) ** 2
        values = range(-_REACH, _REACH + 1)
        weights = [(-Decimal(x * x) / spread).exp() for x in values]
        total, below, steps = sum(weights), Decimal(0), []
        for weight in weights:
            below += weight
            steps.append(int((below / total * 2**64).to_integral_value()))
    lowest = -_REACH + sum(step == 0 for step in steps)
    kept = [step - 2**63 for step in steps if 0 < step < 2**64]
    table = np.array(kept, np.int64)
    table.setflags(write=False)
    return lowest, table


@njit(cache=True, nogil=True)
def _count(words, steps, lowest, out):  # type: ignore[no-untyped-def]
    """Compares every word with every step, so that the work does not depend on the words."""
    fours = len(steps) // 4 * 4
    passed = np.empty(_CHUNK, np.int64)
    for start in range(0, len(words), _CHUNK):
        some, sums = words[start : start + _CHUNK], out[start : start + _CHUNK]
        passed[:] = lowest
        for k in range(0, fours, 4):
            _pass_four(some, steps[k], steps[k + 1], steps[k + 2], steps[k + 3], passed)
        for k in range(fours, len(steps)):
            for n in range(len(some)):
                passed[n] += np.int64(some[n] >= steps[k])
        for n in range(len(some)):
            sums[n] = passed[n]


@njit(cache=True, nogil=True)
def _pass_four(words, a, b, c, d, out):  # type: ignore[no-untyped-def]
    for n in range(len(words)):
        word = words[n]
        out[n] += np.int64(word >= a) + np.int64(word >= b)
        out[n] += np.int64(word >= c) + np.int64(word >= d)
