"""Makes the tables by which optimizers catch up on missed steps.

A row that is not touched has gradient zero, so after i missed steps its first moment is b1^i m and,
under Adam, its second b2^i v. Tables hold these powers by number of steps. They start from the
float32 setting, as in a dense float32 loop, and are kept in float64. `1 - b^t` is rounded to
float32 as optax rounds it: at t = 1 and b2 = 0.999 that changes v^ by 1e-5, which is more than all
other roundings of a step. The compiled loops of `step_loops.py` read them.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil, log
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from keyhole.arrays import Array

LANES = 8  # numbers that a kernel adds side by side; tables by i are padded to whole lanes

_NEGLIGIBLE = 2.0**-26  # of a movement: less than half a unit in the last place of float32
_UNDERFLOW = 2.0**-150  # times a float32 of ordinary size this is zero
_MAX_TABLE = 1 << 16  # entries of a table of powers; beyond, kernels call pow


class Decay(NamedTuple):
    """Tables of Adam or Yogi; i counts missed steps, t counts steps from the start.

    Of a row that was current at step s, missed step i moves each number by
    `pull[i] bias1[s + i] m / (sqrt(v) root[i] bias2[s + i] + eps)`.
    """

    horizon: int
    pull: NDArray[np.float64]
    root: NDArray[np.float64]
    bias1: NDArray[np.float64]
    bias2: NDArray[np.float64]
    powers1: NDArray[np.float64]
    powers2: NDArray[np.float64]
    base1: float
    base2: float


def momentum_horizon(beta: float) -> int:
    """Returns the number of missed steps after which less than 2^-26 of the movement is to come.

    >>> momentum_horizon(0.0), momentum_horizon(0.5)
    (0, 27)
    """
    return _steps_until(_NEGLIGIBLE * (1 - beta), beta)


def moments_horizon(b1: float, b2: float, decays: bool) -> int:
    """Returns the horizon of Adam (`decays`: v shrinks too) or Yogi.

    Movements of missed steps have one sign and shrink at least as b1 / sqrt(b2), or b1 where v
    stays, but for the bias correction of v, which can undo a factor sqrt(1 - b2) once. Where b1 is
    above sqrt(b2) they may grow until v is gone, so m is followed until it underflows.
    """
    rate = b1 / b2**0.5 if decays else b1
    if rate >= 1:
        return _steps_until(_UNDERFLOW, b1)
    return _steps_until(_NEGLIGIBLE * (1 - rate) * (1 - b2) ** 0.5, rate)


@lru_cache(maxsize=8)
def momentum_sums(
    lr: float, beta: float, nesterov: bool
) -> tuple[Array, NDArray[np.float64], float]:
    """Returns eta (beta + ... + beta^n) for n = 0..horizon in float32, the powers, and beta."""
    base = float(np.float32(beta))
    powers = base ** np.arange(momentum_horizon(beta) + 1)
    sums = np.float32(lr) * (np.cumsum(powers) - 1) * (base if nesterov else 1)
    return sums.astype(np.float32), _powers(base), base


@lru_cache(maxsize=8)
def decay_of(lr: float, b1: float, b2: float, decays: bool, steps: int) -> Decay:
    """Returns the tables of Adam or Yogi for runs of up to `steps` steps."""
    horizon = moments_horizon(b1, b2, decays)
    base1, base2 = float(np.float32(b1)), float(np.float32(b2))
    i = np.arange(horizon + LANES + 1)
    t = np.arange(steps + horizon + LANES + 1)
    pull = np.where(i <= horizon, float(np.float32(lr)) * base1**i, 0.0)
    root = base2 ** (i / 2) if decays else np.ones(len(i))
    bias1, bias2 = _bias(base1, t), np.sqrt(_bias(base2, t))
    kept2 = base2 if decays else 1.0
    return Decay(horizon, pull, root, bias1, bias2, _powers(base1), _powers(kept2), base1, kept2)


def _bias(base: float, t: NDArray[np.int64]) -> NDArray[np.float64]:
    """1 / (1 - base^t) with the difference in float32; the entry for t = 0 is never used."""
    left = np.float32(1) - (base**t).astype(np.float32)
    left[0] = 1
    return 1 / left.astype(np.float64)


def _powers(base: float) -> NDArray[np.float64]:
    """base^0, base^1, ... until it underflows, or as many as a table may hold."""
    count = min(_steps_until(_UNDERFLOW, base) + 2, _MAX_TABLE)
    return np.power(base, np.arange(count, dtype=np.float64))


def _steps_until(bound: float, rate: float) -> int:
    """The least n with rate^n <= bound."""
    if rate <= 0 or rate >= 1:
        return 0 if rate <= 0 else _MAX_TABLE
    return ceil(log(bound) / log(rate))
