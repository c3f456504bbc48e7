"""Runs the inner loops of learning with errors, compiled; `lwe.py` defines them."""

from __future__ import annotations

import numpy as np
from numba import njit

# Kernels are typed by numba when they are first called.
# mypy: disable-error-code="no-untyped-def"

# Wide panels, so that a call is worth its cost; few columns, so that they stay in the cache while
# all rows of weights meet them.
_PANEL = 4096
_DEPTH = 16
_STEP = 8


@njit(cache=True, nogil=True)
def multiply_into(out, weights, table):
    """Runs `multiply_into` of `lwe.py`."""
    depth, width = table.shape
    for top in range(0, depth, _DEPTH):
        bottom = min(top + _DEPTH, depth)
        eights = top + (bottom - top) // _STEP * _STEP
        for left in range(0, width, _PANEL):
            panel = slice(left, min(left + _PANEL, width))
            for row in range(len(weights)):
                sums, factors = out[row][panel], weights[row]
                for k in range(top, eights, _STEP):
                    _add_eight(
                        sums,
                        factors[k : k + _STEP],
                        table[k][panel],
                        table[k + 1][panel],
                        table[k + 2][panel],
                        table[k + 3][panel],
                        table[k + 4][panel],
                        table[k + 5][panel],
                        table[k + 6][panel],
                        table[k + 7][panel],
                    )
                for k in range(eights, bottom):
                    _add_one(sums, factors[k], table[k][panel])


@njit(cache=True, nogil=True)
def _add_eight(out, f, a, b, c, d, e, g, h, i):
    """Eight at a time: a sum is loaded and stored once for eight products."""
    word = np.uint32  # products of 32 bits, eight in a vector; without it they have 64
    f0, f1, f2, f3, f4, f5, f6, f7 = f[0], f[1], f[2], f[3], f[4], f[5], f[6], f[7]
    for n in range(len(out)):
        first = word(f0 * a[n]) + word(f1 * b[n]) + word(f2 * c[n]) + word(f3 * d[n])
        second = word(f4 * e[n]) + word(f5 * g[n]) + word(f6 * h[n]) + word(f7 * i[n])
        out[n] += word(first) + word(second)


@njit(cache=True, nogil=True)
def _add_one(out, factor, row):
    for n in range(len(out)):
        out[n] += np.uint32(factor * row[n])


_CHUNK = 256  # words: what stays in the first-level cache with its sums


@njit(cache=True, nogil=True)
def count_steps(words, steps, lowest, out):
    """Runs `count_steps` of `lwe.py`."""
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
def _pass_four(words, a, b, c, d, out):
    for n in range(len(words)):
        word = words[n]
        out[n] += np.int64(word >= a) + np.int64(word >= b)
        out[n] += np.int64(word >= c) + np.int64(word >= d)
