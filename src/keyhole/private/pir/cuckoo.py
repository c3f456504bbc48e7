"""Cuckoo placement: m keys into buckets, so that one small query a bucket fetches them all.

There are w sub-tables. Sub-table i holds every key once: a public permutation pi_i of all keys,
dealt out to B_i buckets, so that key k lies in bucket pi_i(k) mod B_i at position pi_i(k) div B_i.
A client finds all places of a key in a few steps and never builds the table. It then assigns each
of its keys to one of the w buckets that hold it, no two to the same, by a maximum matching: a key
is left over only if no assignment has room for it (Hall's condition).

Which keys were left over is the client's secret; the layout is public and hides nothing.
"""

from __future__ import annotations

import struct
from functools import cached_property
from hashlib import blake2b

import numpy as np
from numba import njit
from numpy.typing import NDArray

from keyhole.errors import InputError
from keyhole.types import KeyArray

__all__ = ["BatchShape", "Placement", "batch_shape", "place"]

from dataclasses import dataclass

_ROUNDS = 8
# SplitMix64's multipliers (Steele, Lea and Flood, 2014).
_GOLDEN, _MIX_1, _MIX_2 = (
    np.uint64(0x9E3779B97F4A7C15),
    np.uint64(0xBF58476D1CE4E5B9),
    np.uint64(0x94D049BB133111EB),
)


@dataclass(frozen=True)
class BatchShape:
    """How many queries a batch consists of: public, and the same for every client.

    Args:
        num_buckets: B, with one query each; 0 if there are none.
        stash: queries over the whole table.
    """

    num_buckets: int
    stash: int


def batch_shape(most_keys: int, num_keys: int) -> BatchShape:
    """The queries that fetch up to `most_keys` keys."""
    if most_keys <= 8 or most_keys * num_keys <= 1 << 17:
        return BatchShape(0, most_keys)
    if most_keys < 100:
        return BatchShape(max(6, -(-3 * most_keys // 2)), 1)
    return BatchShape(-(-13 * most_keys // 10), 1)


class Placement:
    """Where keys lie: public, the same for everyone.

    Args:
        num_keys: K.
        num_buckets: B, at least one for each hash.
        num_hashes: w, how many buckets hold each key.

    Raises:
        InputError: fewer buckets than hashes, or no keys.
    """

    def __init__(self, num_keys: int, num_buckets: int, num_hashes: int = 3) -> None:
        if num_keys < 1 or num_hashes < 1 or num_buckets < num_hashes:
            raise InputError(
                "a placement that cannot be",
                got=f"{num_keys} keys, {num_buckets} buckets, {num_hashes} hashes",
                allowed="1 or more keys and hashes, no fewer buckets than hashes",
                fix="ask batch_shape for the number of buckets",
            )
        self.num_keys = num_keys
        self.num_buckets = num_buckets
        self.num_hashes = num_hashes
        # As equal as possible: the first ones have a bucket more.
        parts = np.arange(num_hashes + 1) * num_buckets // num_hashes
        self._starts = parts[:-1].astype(np.int64)
        self._counts = np.diff(parts).astype(np.int64)
        self._width = int(np.ceil(np.sqrt(num_keys)))
        seed = blake2b(struct.pack("<QQ", num_keys, num_buckets), person=b"keyhole-cuckoo")
        self._seed = np.uint64(int.from_bytes(seed.digest()[:8], "little"))

    @property
    def bucket_size(self) -> int:
        """Positions of a bucket; the last one of some is empty."""
        return -(-self.num_keys // int(self._counts.min()))

    def ranks_of(self, keys: KeyArray) -> NDArray[np.int64]:
        """pi_i(k), (m, w)."""
        return _ranks(
            np.ascontiguousarray(keys, np.int64),
            self.num_keys,
            self._width,
            self._seed,
            self.num_hashes,
        )

    def buckets_of(self, keys: KeyArray) -> NDArray[np.int64]:
        """The buckets that hold each key, (m, w)."""
        return self._starts + self.ranks_of(keys) % self._counts

    def positions_of(self, keys: KeyArray) -> NDArray[np.int64]:
        """Where in these buckets each key lies, (m, w)."""
        return self.ranks_of(keys) // self._counts

    def members(self) -> NDArray[np.int32]:
        """The keys of every bucket, (B, bucket_size), with -1 where there is none. For servers."""
        return self._members

    @cached_property
    def _members(self) -> NDArray[np.int32]:
        keys = np.arange(self.num_keys)
        ranks = self.ranks_of(keys)
        members = np.full((self.num_buckets, self.bucket_size), -1, np.int32)
        members[self._starts + ranks % self._counts, ranks // self._counts] = keys[:, None]
        members.setflags(write=False)
        return members


@njit(cache=True)
def _mix(x):  # type: ignore[no-untyped-def]
    """SplitMix64's finalizer."""
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


@njit(cache=True)
def _permute(key, num_keys, width, height, seed):  # type: ignore[no-untyped-def]
    """One keyed permutation of [0, num_keys): a Feistel network on [0, width * height) whose
    halves are added modulo their sizes, walked until it comes back into range."""
    x = np.uint64(key)
    while True:
        low, high = x % width, x // width
        for turn in range(0, _ROUNDS, 2):
            low = (low + _mix(_mix(seed + np.uint64(turn) * _GOLDEN) ^ high) % width) % width
            high = (high + _mix(_mix(seed + np.uint64(turn + 1) * _GOLDEN) ^ low) % height) % height
        x = high * width + low
        if x < num_keys:
            return np.int64(x)


@njit(cache=True)
def _ranks(keys, num_keys, width, seed, num_hashes):  # type: ignore[no-untyped-def]
    out = np.empty((len(keys), num_hashes), np.int64)
    K, a = np.uint64(num_keys), np.uint64(width)
    b = (K + a - np.uint64(1)) // a
    for i in range(len(keys)):
        for j in range(num_hashes):
            out[i, j] = _permute(keys[i], K, a, b, _mix(seed + np.uint64(j + 1) * _GOLDEN))
    return out


@njit(cache=True)
def place(choices, num_buckets):  # type: ignore[no-untyped-def]
    """Assigns each key to one of its buckets, as many keys as can be.

    Args:
        choices: (m, w) int64: the buckets that hold each key.
        num_buckets: B.

    Returns:
        (m,) int64: the bucket of each key, no two the same; -1 for a key without a bucket.
    """
    m, w = choices.shape
    bucket_of = np.full(m, -1, np.int64)
    key_in = np.full(num_buckets, -1, np.int64)
    came_from = np.empty(num_buckets, np.int64)  # the key from which the search met a bucket
    seen = np.full(num_buckets, -1, np.int64)  # the search that met it last
    queue = np.empty(m, np.int64)
    for first in range(m):
        queue[0], head, tail, free = first, 0, 1, np.int64(-1)
        while head < tail and free < 0:
            key = queue[head]
            head += 1
            for j in range(w):
                bucket = choices[key, j]
                if seen[bucket] == first:
                    continue
                seen[bucket], came_from[bucket] = first, key
                if key_in[bucket] < 0:
                    free = bucket
                    break
                queue[tail] = key_in[bucket]
                tail += 1
        # Along the path every key moves to the bucket through which the next one was met.
        while free >= 0:
            key = came_from[free]
            left = bucket_of[key]
            bucket_of[key], key_in[free] = free, key
            free = left
    return bucket_of
