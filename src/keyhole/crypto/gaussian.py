"""Draws small numbers from the discrete Gaussian, as secrets and errors of lattices are.

Every number takes one word of 64 bits of the generator and is compared with every step of the
distribution's table, so that neither the work nor what is read depends on what is drawn. Compiled
code keeps that as far as the compiler leaves it: it makes a sum of comparisons, without a branch.
"""

from __future__ import annotations

from decimal import Decimal, localcontext
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from keyhole.compiled import loop
from keyhole.crypto.prg import Prg

_REACH = 10  # standard deviations: what lies beyond has less than 2^-72 and falls to the rounding
_DIGITS = 60


def draw_gaussian(prg: Prg, sigma: float, shape: tuple[int, ...]) -> NDArray[np.int32]:
    """Returns numbers of the discrete Gaussian with mean 0 and a standard deviation.

    Each of its values comes up with its probability to within 2^-64, the whole distribution to
    within 2^-57.

    Args:
        sigma: 0.5 to 64.
    """
    words, out = np.empty(shape, "<i8"), np.empty(shape, np.int32)
    prg.fill(words.view(np.uint8))
    lowest, steps = thresholds(sigma)
    count_steps(words.reshape(-1), steps, lowest, out.reshape(-1))
    return out


@lru_cache(maxsize=4)  # a pure function of a number
def thresholds(sigma: float) -> tuple[int, NDArray[np.int64]]:
    """Returns the lowest value and the steps of the distribution: the value of a word is the lowest
    one plus the number of steps that are not above the word, all as signed numbers of 64 bits."""
    reach = int(_REACH * sigma)
    with localcontext() as context:
        context.prec = _DIGITS
        spread = 2 * Decimal(str(sigma)) ** 2
        values = range(-reach, reach + 1)
        weights = [(-Decimal(x * x) / spread).exp() for x in values]
        total, below, steps = sum(weights), Decimal(0), []
        for weight in weights:
            below += weight
            steps.append(int((below / total * 2**64).to_integral_value()))
    lowest = -reach + sum(step == 0 for step in steps)
    kept = [step - 2**63 for step in steps if 0 < step < 2**64]
    table = np.array(kept, np.int64)
    table.setflags(write=False)
    return lowest, table


@loop("keyhole.crypto.ntt_loops")
def count_steps(
    words: NDArray[np.int64], steps: NDArray[np.int64], lowest: int, out: NDArray[np.int32]
) -> None:
    """Writes `lowest` plus the number of steps that are not above each word. Every word is compared
    with every step, so that the work does not depend on the words."""
    out[:] = lowest
    for step in steps:
        out += words >= step
