"""Runs the loops of tables, compiled: initial values of rows, and the index of claimed keys."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from keyhole.primitives import coding
from keyhole.primitives.coding import GOLDEN
from keyhole.server.initial import UNIFORM, ZEROS

# Kernels are typed by numba when they are first called.
# mypy: disable-error-code="no-untyped-def"

# The hash behind initial values and the index, for single numbers.
mix: Any = njit(cache=True, nogil=True)(coding.mix)


@njit(cache=True, nogil=True)
def fill(seed, keys, places, kinds, scales, out):
    """Number j of a row comes from number j of its key's stream, a normal one also from number
    width + j."""
    width = len(kinds)
    grain = np.float32(2.0**-24)
    for i in range(len(keys)):
        stream = mix(mix(seed) ^ mix(np.uint64(keys[i]) + GOLDEN))
        place = places[i]
        for j in range(width):
            if kinds[j] == ZEROS:
                out[place, j] = 0
                continue
            bits = mix(stream + np.uint64(j + 1) * GOLDEN) >> np.uint64(40)
            if kinds[j] == UNIFORM:
                number = np.float32(bits) * grain
                out[place, j] = scales[j] * (np.float32(2) * number - np.float32(1))
            else:
                more = mix(stream + np.uint64(width + j + 1) * GOLDEN) >> np.uint64(40)
                out[place, j] = np.float32(scales[j] * _box_muller(bits, more))


@njit(cache=True, nogil=True)
def _box_muller(bits, more):
    """One normal number from two of 24 bits; the half keeps the logarithm finite."""
    radius = np.sqrt(-2.0 * np.log((np.float64(bits) + 0.5) * 2.0**-24))
    return radius * np.cos(2.0 * np.pi * np.float64(more) * 2.0**-24)


@njit(cache=True, nogil=True)
def _home(key, salt, mask):
    """Where the search for a key begins."""
    return np.int64(mix(np.uint64(key) ^ salt) & np.uint64(mask))


@njit(cache=True, nogil=True)
def find(places, salt, keys, slots):
    """Writes the slot of each key, -1 for one without."""
    mask = len(places) - 1
    for i in range(len(keys)):
        at = _home(keys[i], salt, mask)
        while places[at, 0] != keys[i] and places[at, 0] >= 0:
            at = (at + 1) & mask
        slots[i] = places[at, 1]


@njit(cache=True, nogil=True)
def claim(places, salt, keys, owners, count, slots):
    """Writes the slot of each key, a new one for a new key; returns how many there are then."""
    mask = len(places) - 1
    for i in range(len(keys)):
        at = _home(keys[i], salt, mask)
        while places[at, 0] != keys[i] and places[at, 0] >= 0:
            at = (at + 1) & mask
        if places[at, 0] < 0:
            places[at, 0] = keys[i]
            places[at, 1] = count
            owners[count] = keys[i]
            count += 1
        slots[i] = places[at, 1]
    return count
