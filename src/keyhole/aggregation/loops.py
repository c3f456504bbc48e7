"""Runs the inner loops of sketches and of noise, compiled.

Those of sketches are defined under their names in `masked/sketch.py`. Noise has no other form than
this: NumPy's logarithm and cosine may differ from these in the last bit, and no device draws any.
"""

from __future__ import annotations

from math import cos, log, log1p, pi, sin, sqrt

import numpy as np
from numba import njit

# Kernels are typed by numba when they are first called.
# mypy: disable-error-code="no-untyped-def"


@njit(cache=True, nogil=True)
def add_rows(table, cells, rows):
    """Runs `add_rows` of `masked/sketch.py`."""
    for i in range(cells.shape[0]):
        for cell in cells[i]:
            for k in range(rows.shape[1]):
                table[cell, k] += rows[i, k]


@njit(cache=True, nogil=True)
def take_rows(table, cells, rows):
    """Runs `take_rows` of `masked/sketch.py`."""
    for i in range(cells.shape[0]):
        for cell in cells[i]:
            for k in range(rows.shape[1]):
                table[cell, k] -= rows[i, k]


@njit(cache=True, nogil=True)
def read_keys(heads, cells, key_words, word_bits, num_keys, max_clients):
    """Runs `read_keys` of `masked/sketch.py`."""
    keys = np.full(cells.shape[0], -1, np.int64)
    for i in range(cells.shape[0]):
        count = np.int64(heads[cells[i], 0])
        if count < 1 or count > max_clients:
            continue
        key = np.int64(0)
        for word in range(key_words):
            total = np.int64(heads[cells[i], 1 + word])
            digit = total // count
            if digit * count != total or digit >> word_bits:
                key = np.int64(-1)
                break
            key |= digit << np.int64(word * word_bits)
        if 0 <= key < num_keys:
            keys[i] = key
    return keys


@njit(cache=True, nogil=True)
def box_muller(words, out):
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
def add_rounded(numbers, sd, out):
    """Adds numbers, times sd and rounded to the nearest, to elements of a ring."""
    for n in range(len(out)):
        # By way of int64: what a negative float is as an unsigned number depends on the machine.
        out[n] += np.int64(np.rint(sd * numbers[n]))
