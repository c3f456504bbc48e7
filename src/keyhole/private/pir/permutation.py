"""Public permutations of all keys: key k goes to rank pi(k) in a few steps, without a table.

A Feistel network on pairs (low, high) whose halves are added modulo their sizes, which are about
the square root of K each (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). What
falls outside [0, K) is sent through again until it does not, which befalls fewer than one key in
sqrt(K). The way back takes the same turns in the other order and subtracts. It looks random to
statistics, keys in a row included, and is no secret.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from numba import njit
from numpy.typing import NDArray

from keyhole.primitives.noise import mix
from keyhole.types import KeyArray

__all__ = ["Permutations", "plain_keys", "plain_ranks"]

_TURNS = 8  # of the network: twice what it takes to make neighbours strangers
# The multipliers of SplitMix64's finalizer (Steele, Lea and Flood, 2014).
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True)
class Permutations:
    """Some permutations of [0, num_keys), the same for everyone who gives the same numbers.

    Args:
        num_keys: K.
        count: w, how many permutations.
        label: a number that makes them differ from others.
    """

    num_keys: int
    count: int
    label: int

    @property
    def sides(self) -> tuple[int, int]:
        """The sizes of low and high: their product is K or a little more."""
        low = math.isqrt(self.num_keys - 1) + 1
        return low, -(-self.num_keys // low)

    def seeds(self) -> NDArray[np.uint64]:
        """One word for each turn of each permutation, (w, turns)."""
        facts = struct.pack("<QQQ", self.num_keys, self.count, self.label)
        start = blake2b(facts, digest_size=8, person=b"keyhole-cuckoo").digest()
        steps = np.arange(self.count * _TURNS, dtype=np.uint64)
        words = mix(mix(steps) ^ np.frombuffer(start, "<u8"))
        return words.reshape(self.count, _TURNS)

    def ranks(self, keys: KeyArray) -> NDArray[np.int64]:
        """pi_i(k) for keys (m,) and every permutation, (m, w)."""
        out = np.empty((len(keys), self.count), np.int64)
        _permute(
            np.ascontiguousarray(keys, np.int64), self.num_keys, *self.sides, self.seeds(), out
        )
        return out

    def keys(self, ranks: NDArray[np.int64], which: NDArray[np.int64]) -> KeyArray:
        """The keys with pi_i(k) = rank, for ranks (n,) and the number i of each, (n,)."""
        out = np.empty(len(ranks), np.int64)
        _go_back(
            np.ascontiguousarray(ranks, np.int64),
            np.ascontiguousarray(which, np.int64),
            self.num_keys,
            *self.sides,
            self.seeds(),
            out,
        )
        return out


def plain_ranks(permutations: Permutations, keys: KeyArray) -> NDArray[np.int64]:
    """What `Permutations.ranks` computes, as one reads it."""
    sides = np.array(permutations.sides, np.uint64)
    columns = [_walk(keys, permutations.num_keys, sides, row) for row in permutations.seeds()]
    return np.stack(columns, axis=1)


def plain_keys(
    permutations: Permutations, ranks: NDArray[np.int64], which: NDArray[np.int64]
) -> KeyArray:
    """What `Permutations.keys` computes, as one reads it."""
    sides = np.array(permutations.sides, np.uint64)
    keys = np.empty(len(ranks), np.int64)
    for number, row in enumerate(permutations.seeds()):
        mine = which == number
        keys[mine] = _walk(ranks[mine], permutations.num_keys, sides, row, is_back=True)
    return keys


def _walk(
    keys: NDArray[np.int64],
    num_keys: int,
    sides: NDArray[np.uint64],
    seeds: NDArray[np.uint64],
    is_back: bool = False,
) -> NDArray[np.int64]:
    """One permutation, or its inverse: through the network until all are in range."""
    ranks, outside = keys.astype(np.uint64), np.ones(len(keys), bool)
    turns = list(enumerate(seeds))[:: -1 if is_back else 1]
    while outside.any():
        halves = [ranks[outside] % sides[0], ranks[outside] // sides[0]]
        for turn, seed in turns:
            this, other = turn % 2, 1 - turn % 2
            # The upper 32 bits of a mixed word, scaled to the side: cheaper than a division.
            step = ((mix(halves[other] ^ seed) >> np.uint64(32)) * sides[this]) >> np.uint64(32)
            halves[this] = (halves[this] + (sides[this] - step if is_back else step)) % sides[this]
        ranks[outside] = halves[1] * sides[0] + halves[0]
        outside = ranks >= num_keys
    return ranks.astype(np.int64)


@njit(cache=True, nogil=True)
def _step(other, seed, side):  # type: ignore[no-untyped-def]
    """What the other half adds to a half, below the side."""
    x = other ^ seed
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    x = (x ^ (x >> np.uint64(31))) >> np.uint64(32)
    return (x * side) >> np.uint64(32)


@njit(cache=True, nogil=True)
def _turn(half, other, seed, side):  # type: ignore[no-untyped-def]
    """Adds a function of the other half, modulo the side."""
    half += _step(other, seed, side)
    return half - side if half >= side else half


@njit(cache=True, nogil=True)
def _turn_back(half, other, seed, side):  # type: ignore[no-untyped-def]
    """Subtracts the same."""
    step = _step(other, seed, side)
    return half - step if half >= step else half + side - step


@njit(cache=True, nogil=True)
def _permute(keys, num_keys, wide, tall, seeds, out):  # type: ignore[no-untyped-def]
    """The ranks of keys under each row of seeds."""
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
def _go_back(ranks, which, num_keys, wide, tall, seeds, out):  # type: ignore[no-untyped-def]
    """The keys of ranks, each under its row of seeds."""
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
