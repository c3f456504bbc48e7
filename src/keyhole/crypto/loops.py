"""Runs the inner loops of point functions, placement and rounding, compiled.

Each is defined under its name, in NumPy, where it is used: see `compiled.py`.
"""

from __future__ import annotations

import numpy as np
from numba import njit

# Kernels are typed by numba when they are first called.
# mypy: disable-error-code="no-untyped-def"

_ONE = np.uint64(1)


@njit(cache=True, nogil=True)
def mix_blocks(halves, out):
    """Runs `mix_blocks` of `prg.py`."""
    for row in range(halves.shape[0]):
        high = halves[row, 1]
        both = high ^ halves[row, 0]
        for block in range(out.shape[1] // 2):
            out[row, 2 * block] = high
            out[row, 2 * block + 1] = both ^ np.uint64(block)


@njit(cache=True, nogil=True)
def grow(children, bits, control, seed_words, bit_words):
    """Runs `grow` of `dpf.py`."""
    for i in range(children.shape[0]):
        for j in range(children.shape[1]):
            mask = np.uint64(0) - np.uint64(control[i, j])
            for side in range(2):
                low = children[i, j, side, 0]
                bits[i, j, side] = (low & _ONE != 0) ^ (control[i, j] & bit_words[i, side])
                children[i, j, side, 0] = (low & ~_ONE) ^ (seed_words[i, 0] & mask)
                children[i, j, side, 1] ^= seed_words[i, 1] & mask


@njit(cache=True, nogil=True)
def write_leaves(leaves, control, corrections, out):
    """Runs `write_leaves` of `dpf.py`."""
    width = corrections.shape[1]
    for i in range(leaves.shape[0]):
        for j in range(leaves.shape[1]):
            mask = np.uint8(0) - np.uint8(control[i, j])
            for k in range(min(width, out.shape[1] - j * width)):
                out[i, j * width + k] = leaves[i, j, k] ^ (corrections[i, k] & mask)


_TURNS = 8  # of the network of `cuckoo.py`
# The multipliers of SplitMix64's finalizer (Steele, Lea and Flood, 2014).
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


@njit(cache=True, nogil=True)
def _step(other, seed, side):
    """What the other half adds to a half, below the side."""
    x = other ^ seed
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    x = (x ^ (x >> np.uint64(31))) >> np.uint64(32)
    return (x * side) >> np.uint64(32)


@njit(cache=True, nogil=True)
def _turn(half, other, seed, side):
    """Adds a function of the other half, modulo the side."""
    half += _step(other, seed, side)
    return half - side if half >= side else half


@njit(cache=True, nogil=True)
def _turn_back(half, other, seed, side):
    """Subtracts the same."""
    step = _step(other, seed, side)
    return half - step if half >= step else half + side - step


@njit(cache=True, nogil=True)
def permute(keys, num_keys, wide, tall, seeds, out):
    """Runs `permute` of `cuckoo.py`."""
    count, a, b = np.uint64(num_keys), np.uint64(wide), np.uint64(tall)
    for i in range(len(keys)):
        for j in range(len(seeds)):
            rank = np.uint64(keys[i])
            while True:
                low, high = rank % a, rank // a
                for turn in range(0, _TURNS, 2):
                    low = _turn(low, high, seeds[j, turn], a)
                    high = _turn(high, low, seeds[j, turn + 1], b)
                rank = high * a + low
                if rank < count:
                    break
            out[i, j] = np.int64(rank)


@njit(cache=True, nogil=True)
def go_back(ranks, which, num_keys, wide, tall, seeds, out):
    """Runs `go_back` of `cuckoo.py`."""
    count, a, b = np.uint64(num_keys), np.uint64(wide), np.uint64(tall)
    for i in range(len(ranks)):
        key, words = np.uint64(ranks[i]), seeds[which[i]]
        while True:
            low, high = key % a, key // a
            for turn in range(_TURNS - 2, -1, -2):
                high = _turn_back(high, low, words[turn + 1], b)
                low = _turn_back(low, high, words[turn], a)
            key = high * a + low
            if key < count:
                break
        out[i] = np.int64(key)


@njit(cache=True, nogil=True)
def match(choices, num_buckets, bucket_of):
    """Runs `match` of `cuckoo.py`."""
    key_in = np.full(num_buckets, -1, np.int64)
    came_from = np.empty(num_buckets, np.int64)
    seen_by = np.full(num_buckets, -1, np.int64)
    queue = np.empty(len(choices), np.int64)
    for first in range(len(choices)):
        queue[0], head, tail, free = first, 0, 1, np.int64(-1)
        while head < tail and free < 0:
            key = queue[head]
            head += 1
            for bucket in choices[key]:
                if seen_by[bucket] == first:
                    continue
                seen_by[bucket], came_from[bucket] = first, key
                if key_in[bucket] < 0:
                    free = bucket
                    break
                queue[tail] = key_in[bucket]
                tail += 1
        while free >= 0:
            key = came_from[free]
            left = bucket_of[key]
            bucket_of[key], key_in[free] = free, key
            free = left


@njit(cache=True, nogil=True)
def round_numbers(values, words, clip, scale, out):
    """Runs `round_numbers` of `ring.py`."""
    lost = 0
    for i in range(values.size):
        value = float(values[i])
        lost += 0 if abs(value) < np.inf else 1
        value = value if value < clip else clip
        value = value if value > -clip else -clip
        scaled = value * scale
        floor = np.floor(scaled)
        is_up = np.float64(words[i]) + 0.5 < (scaled - floor) * 4294967296.0
        out[i] = np.int32(floor) + np.int32(is_up)
    return lost
