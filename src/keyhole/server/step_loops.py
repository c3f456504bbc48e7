"""Runs the optimizers, compiled: one pass over the touched rows, catch-up and step fused.

Each works on touched rows start..stop. Rows are distinct, so threads may share the rows between
them and the bytes do not depend on how. Arithmetic is float32 in a fixed order, without
reassociation or fused multiply-adds, so that the bytes do not depend on the machine's vector width.

`last[slot]` is the step a row is current at; step `now` first makes up for steps
last + 1 .. now - 1, reading after step `now` for last + 1 .. now.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from numba import njit

from keyhole.server.row_loops import AHEAD, fetch_row
from keyhole.server.steps import LANES

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
