"""Runs the inner loops of polynomial rings, compiled: transforms, errors, packing.

Each is defined under its name, in NumPy, where it is used: see `compiled.py`.
"""

from __future__ import annotations

import numpy as np
from numba import njit

# Kernels are typed by numba when they are first called.
# mypy: disable-error-code="no-untyped-def"

_CHUNK = 256  # words: what stays in the first-level cache with its sums


@njit(cache=True, nogil=True)
def to_values(columns, powers, scaled, p):
    """Runs `to_values` of `ntt.py`."""
    count, degree, lanes = columns.shape
    twice = np.uint32(p + p)
    one = np.uint32((np.uint64(1) << np.uint64(32)) // np.uint64(p))
    for block in range(count):
        a, half, groups = columns[block], degree, 1
        while groups < degree:
            half >>= 1
            for i in range(groups):
                w, s = np.uint64(powers[groups + i]), np.uint64(scaled[groups + i])
                for j in range(2 * i * half, 2 * i * half + half):
                    low, high = a[j], a[j + half]
                    for r in range(lanes):
                        x = np.uint64(high[r])
                        q = (x * s) >> np.uint64(32)
                        v = np.uint32(x * w - q * np.uint64(p))
                        u = low[r]
                        low[r] = np.uint32(u + v)
                        high[r] = np.uint32(u + twice - v)
            groups <<= 1
        for j in range(degree):
            row = a[j]
            for r in range(lanes):
                q = (np.uint64(row[r]) * np.uint64(one)) >> np.uint64(32)
                left = np.uint32(row[r] - np.uint32(q) * p)
                row[r] = min(left, np.uint32(left - p))


@njit(cache=True, nogil=True)
def to_polynomials(columns, powers, scaled, last, last_scaled, p):
    """Runs `to_polynomials` of `ntt.py`."""
    count, degree, lanes = columns.shape
    twice = np.uint32(p + p)
    for block in range(count):
        a, half, groups = columns[block], 1, degree
        while groups > 1:
            groups >>= 1
            for i in range(groups):
                w, s = np.uint64(powers[groups + i]), np.uint64(scaled[groups + i])
                for j in range(2 * i * half, 2 * i * half + half):
                    low, high = a[j], a[j + half]
                    for r in range(lanes):
                        u, v = low[r], high[r]
                        y = np.uint32(u + v)
                        low[r] = min(y, np.uint32(y - twice))
                        x = np.uint64(np.uint32(u + twice - v))
                        q = (x * s) >> np.uint64(32)
                        high[r] = np.uint32(x * w - q * np.uint64(p))
            half <<= 1
        for j in range(degree):
            row = a[j]
            for r in range(lanes):
                x = np.uint64(row[r])
                q = (x * np.uint64(last_scaled)) >> np.uint64(32)
                y = np.uint32(x * np.uint64(last) - q * np.uint64(p))
                row[r] = min(y, np.uint32(y - p))


@njit(cache=True, nogil=True)
def count_steps(words, steps, lowest, out):
    """Runs `count_steps` of `gaussian.py`."""
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


@njit(cache=True, nogil=True)
def pack_into(numbers, bits, out):
    """Runs `pack_into` of `bits.py`."""
    held, have, at = np.uint64(0), 0, 0
    for i in range(len(numbers)):
        held |= np.uint64(numbers[i]) << np.uint64(have)
        have += bits
        while have >= 8:
            out[at] = np.uint8(held & np.uint64(255))
            held >>= np.uint64(8)
            have -= 8
            at += 1
    if have:
        out[at] = np.uint8(held)


@njit(cache=True, nogil=True)
def unpack_into(data, bits, out):
    """Runs `unpack_into` of `bits.py`."""
    held, have, at = np.uint64(0), 0, 0
    mask = (np.uint64(1) << np.uint64(bits)) - np.uint64(1)
    for i in range(len(out)):
        while have < bits:
            held |= np.uint64(data[at]) << np.uint64(have)
            have += 8
            at += 1
        out[i] = held & mask
        held >>= np.uint64(bits)
        have -= bits
