"""Compiles the optimizers: one pass over the touched rows, catch-up and step fused.

A row that is not touched has gradient zero, so after i missed steps its first moment is b1^i m and,
under Adam, its second b2^i v. Tables hold these powers by number of steps. They start from the
float32 setting, as in a dense float32 loop, and are kept in float64. `1 - b^t` is rounded to
float32 as optax rounds it: at t = 1 and b2 = 0.999 that changes v^ by 1e-5, which is more than all
other roundings of a step.

Each works on touched rows start..stop. Rows are distinct, so threads may share the rows between
them and the bytes do not depend on how. Arithmetic is float32 in a fixed order, without
reassociation or fused multiply-adds, so that the bytes do not depend on the machine's vector width.

`last[slot]` is the step a row is current at; step `now` first makes up for steps
last + 1 .. now - 1, reading after step `now` for last + 1 .. now.
"""

from __future__ import annotations

from functools import lru_cache, partial
from math import ceil, log
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from keyhole.arrays import Array
from keyhole.server.row_loops import AHEAD, fetch_row

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


# Kernels are typed by numba when they are first called.
# mypy: disable-error-code="no-untyped-def"


# Division as in NumPy, without a test for zero that would keep loops from being vectorized.
_kernel = partial(njit, cache=True, nogil=True, error_model="numpy")
_ZERO = np.float32(0)
_ONE = np.float32(1)


@_kernel()
def sgd(values, last, slots, rows, now, lr, start, stop):
    """x - eta u."""
    for i in range(start, stop):
        due = slots[min(i + AHEAD, stop - 1)]
        fetch_row(values, due)
        fetch_row(last, due)
        slot = slots[i]
        last[slot] = now
        for j in range(values.shape[1]):
            values[slot, j] -= lr * rows[i, j]


@_kernel()
def adagrad(values, squares, last, slots, rows, now, lr, eps, start, stop):
    """a + u^2, x - eta u / sqrt(a + eps); nothing moves where a is still zero."""
    for i in range(start, stop):
        due = slots[min(i + AHEAD, stop - 1)]
        fetch_row(values, due)
        fetch_row(squares, due)
        fetch_row(last, due)
        slot = slots[i]
        last[slot] = now
        for j in range(values.shape[1]):
            u = rows[i, j]
            a = squares[slot, j] + u * u
            squares[slot, j] = a
            scale = _ONE / np.sqrt(a + eps) if a > _ZERO else _ZERO
            values[slot, j] -= lr * (scale * u)


@_kernel()
def momentum(
    values, trace, last, slots, rows, now, lr, beta, nesterov, sums, powers, base, start, stop
):
    """m = u + beta m, after the steps that the row missed."""
    for i in range(start, stop):
        due = slots[min(i + AHEAD, stop - 1)]
        fetch_row(values, due)
        fetch_row(trace, due)
        fetch_row(last, due)
        slot = slots[i]
        missed = now - 1 - last[slot]
        shift = sums[min(missed, len(sums) - 1)]
        left = np.float32(_power(powers, base, missed))
        last[slot] = now
        for j in range(values.shape[1]):
            u, m = rows[i, j], trace[slot, j]
            x = values[slot, j] - shift * m
            m = u + beta * (left * m)
            trace[slot, j] = m
            values[slot, j] = x - lr * (u + beta * m if nesterov else m)


@_kernel()
def read_momentum(values, trace, last, slots, out, now, sums, start, stop):
    """Values after step `now`."""
    for i in range(start, stop):
        due = slots[min(i + AHEAD, stop - 1)]
        fetch_row(values, due)
        fetch_row(trace, due)
        fetch_row(last, due)
        slot = slots[i]
        if slot >= 0:
            shift = sums[min(now - last[slot], len(sums) - 1)]
            for j in range(values.shape[1]):
                out[i, j] = values[slot, j] - shift * trace[slot, j]


@_kernel()
def copy(values, slots, out, start, stop):
    """Values of an optimizer that leaves untouched rows alone."""
    for i in range(start, stop):
        due = slots[min(i + AHEAD, stop - 1)]
        fetch_row(values, due)
        slot = slots[i]
        if slot >= 0:
            for j in range(values.shape[1]):
                out[i, j] = values[slot, j]


@_kernel()
def moments(
    values, first, second, last, slots, rows, now, settings, is_yogi, moves_all, decay, start, stop
):
    """Adam or Yogi, after the steps that the row missed."""
    width = values.shape[1]
    lr, b1, c1, b2, c2, eps = settings
    horizon, pull, root, all_bias1, all_bias2, powers1, powers2, base1, base2 = decay
    bias1 = np.float32(all_bias1[now])
    bias2 = np.float32(all_bias2[now] * all_bias2[now])
    pulls, roots, lanes, row_roots, drift = _scratch(horizon, width)
    for i in range(start, stop):
        due = slots[min(i + AHEAD, stop - 1)]
        fetch_row(values, due)
        fetch_row(first, due)
        fetch_row(second, due)
        fetch_row(last, due)
        slot = slots[i]
        missed = now - 1 - last[slot]
        # Without an initial moment, a row that was never touched has nothing to catch up.
        if missed > 0 and (moves_all or last[slot] > 0):
            count = min(missed, horizon)
            _coefficients(pull, root, all_bias1, all_bias2, last[slot], count, pulls, roots)
            _drift(first, second, slot, count, eps, pulls, roots, lanes, row_roots, drift)
            left1 = np.float32(_power(powers1, base1, missed))
            left2 = np.float32(_power(powers2, base2, missed))
            _catch_up(values, first, second, slot, drift, left1, left2)
        last[slot] = now
        for j in range(width):
            u = rows[i, j]
            m = c1 * u + b1 * first[slot, j]
            v = second[slot, j]
            square = u * u
            v = v - c2 * np.sign(v - square) * square if is_yogi else c2 * square + b2 * v
            first[slot, j] = m
            second[slot, j] = v
            values[slot, j] -= lr * (m * bias1 / (np.sqrt(v * bias2) + eps))


@_kernel()
def read_moments(values, first, second, last, slots, out, now, eps, moves_all, decay, start, stop):
    """Values after step `now`."""
    width = values.shape[1]
    horizon, pull, root, bias1, bias2, _, _, _, _ = decay
    pulls, roots, lanes, row_roots, drift = _scratch(horizon, width)
    for i in range(start, stop):
        due = slots[min(i + AHEAD, stop - 1)]
        fetch_row(values, due)
        fetch_row(first, due)
        fetch_row(second, due)
        fetch_row(last, due)
        slot = slots[i]
        if slot < 0:
            continue
        missed = now - last[slot]
        if missed > 0 and (moves_all or last[slot] > 0):
            count = min(missed, horizon)
            _coefficients(pull, root, bias1, bias2, last[slot], count, pulls, roots)
            _drift(first, second, slot, count, eps, pulls, roots, lanes, row_roots, drift)
            for j in range(width):
                out[i, j] = values[slot, j] - drift[j]
        else:
            for j in range(width):
                out[i, j] = values[slot, j]


@_kernel()
def _scratch(horizon, width):
    """Coefficients of missed steps, padded to whole lanes; LANES sums; sqrt(v) and the movement of
    one row."""
    steps = np.empty((2, horizon + LANES), np.float32)
    row = np.empty((2, width), np.float32)
    return steps[0], steps[1], np.empty(LANES, np.float32), row[0], row[1]


@_kernel(inline="always")
def _catch_up(values, first, second, slot, drift, left1, left2):
    """Moves a row by what it missed; of its moments left1 and left2 are left."""
    for j in range(values.shape[1]):
        values[slot, j] -= drift[j]
        first[slot, j] *= left1
        second[slot, j] *= left2


@_kernel(inline="always")
def _power(powers, base, n):
    """base^n, from the table where it reaches."""
    return powers[n] if n < len(powers) else base ** np.float64(n)


@_kernel(inline="always")
def _coefficients(pull, root, bias1, bias2, since, count, pulls, roots):
    """What multiplies m and sqrt(v) in each missed step; zeros up to whole lanes."""
    for i in range(count):
        pulls[i] = pull[i + 1] * bias1[since + i + 1]
        roots[i] = root[i + 1] * bias2[since + i + 1]
    for i in range(count, count + LANES - 1):  # a lane without a step adds 0 / (0 + eps)
        pulls[i] = _ZERO
        roots[i] = _ZERO


@_kernel(inline="always")
def _drift(first, second, slot, count, eps, pulls, roots, lanes, row_roots, drift):
    """Adds up how far each number of a row moves in `count` missed steps.

    Wide rows are added number by number side by side, narrow ones step by step side by side:
    either way a vector is full.
    """
    width = first.shape[1]
    for j in range(width):
        row_roots[j] = np.sqrt(second[slot, j])
        drift[j] = _ZERO
    if width < LANES:
        for j in range(width):
            drift[j] = _sum_lanes(row_roots[j], count, eps, pulls, roots, lanes)
    else:
        for i in range(0, count, 2):  # two at a time halve the loads and stores of the sum
            pull1, root1, pull2, root2 = pulls[i], roots[i], pulls[i + 1], roots[i + 1]
            for j in range(width):
                step1 = pull1 / (row_roots[j] * root1 + eps)
                drift[j] += step1 + pull2 / (row_roots[j] * root2 + eps)
    for j in range(width):
        drift[j] *= first[slot, j]


@_kernel(inline="always")
def _sum_lanes(root_of_v, count, eps, pulls, roots, lanes):
    """The sum over missed steps for one number, as LANES sums that are then added in order."""
    for lane in range(LANES):
        lanes[lane] = _ZERO
    for i in range(0, count, LANES):
        for lane in range(LANES):
            lanes[lane] += pulls[i + lane] / (root_of_v * roots[i + lane] + eps)
    total = _ZERO
    for lane in range(LANES):
        total += lanes[lane]
    return total
