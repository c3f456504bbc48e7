"""Places m keys into buckets, so that one small query for each bucket fetches them all.

There are w sub-tables. Sub-table i holds every key once: a public permutation pi_i of all keys,
dealt out to B_i buckets, so that key k lies in bucket pi_i(k) mod B_i at position pi_i(k) div B_i.
A client finds all places of a key in a few steps and never builds the table. It then assigns each
of its keys to one of the w buckets that hold it, no two to the same, by a maximum matching: a key
is left over only if no assignment has room for it (Hall's condition).

Which keys were left over is the client's secret; the layout is public and hides nothing.

A permutation takes key k to rank pi(k) in a few steps, without a table: a Feistel network on pairs
(low, high) whose halves are added modulo their sizes, about the square root of K each (Black and
Rogaway, "Ciphers with arbitrary finite domains", 2002). What falls outside [0, K) is sent through
again until it does not, which happens to fewer than one key in sqrt(K). The way back subtracts in
the other order. It looks random to statistics, keys in a row included, and is no secret.
"""

from __future__ import annotations

import math
import struct
from collections import deque
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from keyhole.arrays import KeyArray
from keyhole.compiled import loop
from keyhole.errors import InputError
from keyhole.primitives.coding import mix

_TURNS = 8  # of the network: twice what it takes to make neighbours strangers


@dataclass(frozen=True)
class Permutations:
    """Some permutations of [0, num_keys), the same for everyone who gives the same numbers.

    `label` makes them differ from others.
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
        """Returns one word for each turn of each permutation, (w, turns)."""
        facts = struct.pack("<QQQ", self.num_keys, self.count, self.label)
        start = blake2b(facts, digest_size=8, person=b"keyhole-cuckoo").digest()
        steps = np.arange(self.count * _TURNS, dtype=np.uint64)
        words = mix(mix(steps) ^ np.frombuffer(start, "<u8"))
        return words.reshape(self.count, _TURNS)

    def ranks(self, keys: KeyArray) -> NDArray[np.int64]:
        """pi_i(k) for keys (m,) and every permutation, (m, w)."""
        out = np.empty((len(keys), self.count), np.int64)
        keys = np.ascontiguousarray(keys, np.int64)
        permute(keys, self.num_keys, *self.sides, self.seeds(), out)
        return out

    def keys(self, ranks: NDArray[np.int64], which: NDArray[np.int64]) -> KeyArray:
        """Returns the keys with pi_i(k) = rank, for ranks (n,) and the number i of each, (n,)."""
        out = np.empty(len(ranks), np.int64)
        ranks, which = (np.ascontiguousarray(each, np.int64) for each in (ranks, which))
        go_back(ranks, which, self.num_keys, *self.sides, self.seeds(), out)
        return out


@loop("keyhole.crypto.loops")
def permute(
    keys: KeyArray,
    num_keys: int,
    wide: int,
    tall: int,
    seeds: NDArray[np.uint64],
    out: NDArray[np.int64],
) -> None:
    """Writes the ranks of keys under each row of seeds."""
    sides = np.array([wide, tall], np.uint64)
    for number, row in enumerate(seeds):
        out[:, number] = _walk(keys, num_keys, sides, row)


@loop("keyhole.crypto.loops")
def go_back(
    ranks: NDArray[np.int64],
    which: NDArray[np.int64],
    num_keys: int,
    wide: int,
    tall: int,
    seeds: NDArray[np.uint64],
    out: KeyArray,
) -> None:
    """Writes the keys of ranks, each under its row of seeds."""
    sides = np.array([wide, tall], np.uint64)
    for number, row in enumerate(seeds):
        mine = which == number
        out[mine] = _walk(ranks[mine], num_keys, sides, row, is_back=True)


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


_FEW_KEYS = 32  # in one pass, as many whole queries take a server no longer than buckets do
_FEW_READS = 1 << 17  # rows: a server adds up as many in some milliseconds
_MANY_KEYS = 100  # from here on hardly a key is left over
_MEMBER = np.dtype(np.int32)  # a key in a bucket, at a server

MAX_IN_BUCKETS = 2**31 - 1
"""Keys of a table with buckets: members are 32 bits."""


@dataclass(frozen=True)
class BatchShape:
    """How many queries a batch consists of: public, and the same for every client. There is one for
    each of `num_buckets`, which may be 0."""

    num_buckets: int
    stash: int


def batch_shape(max_keys: int, num_keys: int) -> BatchShape:
    """Returns the queries that fetch up to `max_keys` keys.

    Up to 32 keys, or where the server's work is small, each key has a query over the whole table:
    nothing is smaller on the wire, and nothing fails. Else there are 1.09 m + 2.1 sqrt(m) queries,
    all but one of them in buckets: 1.09 m is where large batches start to fit, and what is near
    that line shrinks with the root of m. Below 100 keys there are 1.3 m + 2 buckets and two stash
    queries, since a few keys that crowd each other weigh more there.

    Measured, as a fraction of a million clients or more, with uniform keys:

        m                       33     50     70     99      100
        buckets, stash          45, 2  67, 2  93, 2  131, 2  129, 1
        a key in no bucket      5e-4   2e-4   3e-5   5e-6    2e-5
        more than the stash     7e-6   2e-6   1e-6   5e-7    5e-6

        m                       150    200     300 to 3000
        buckets, stash          189, 1 247, 1
        a key in no bucket      4e-6   5e-6    0 of 5.4e5 clients
        more than the stash     0      2e-6    0

    Bytes of a batch and the work for it are in proportion to the queries.

    >>> batch_shape(1000, 100_000)
    BatchShape(num_buckets=1156, stash=1)
    """
    if not 1 <= max_keys <= num_keys:
        raise InputError(
            f"max_keys does not fit the table: got {max_keys} of {num_keys} keys; expected 1 or "
            "more, and no more than there are; check max_keys and num_keys"
        )
    if max_keys <= _FEW_KEYS or max_keys * num_keys <= _FEW_READS:
        return BatchShape(0, max_keys)
    if max_keys < _MANY_KEYS:
        return BatchShape(-(-13 * max_keys // 10) + 2, 2)
    return BatchShape(-(-(109 * max_keys + math.isqrt(44_100 * max_keys)) // 100) - 1, 1)


class Placement:
    """Where keys lie: public, the same for everyone.

    Args:
        num_buckets: B, at least one for each hash.
        num_hashes: w, how many buckets hold each key.

    >>> placement = Placement(num_keys=1000, num_buckets=13)
    >>> key = np.array([7])
    >>> placement.members()[placement.buckets_of(key), placement.positions_of(key)]
    array([[7, 7, 7]], dtype=int32)
    """

    def __init__(self, num_keys: int, num_buckets: int, num_hashes: int = 3) -> None:
        if not 1 <= num_keys <= MAX_IN_BUCKETS or not 1 <= num_hashes <= num_buckets:
            raise InputError(
                f"keys, buckets and hashes do not fit together: got {num_keys} keys, {num_buckets} "
                f"buckets, {num_hashes} hashes; expected 1..{MAX_IN_BUCKETS} keys, a hash or more, "
                "no fewer buckets than hashes; ask batch_shape for the number of buckets"
            )
        self.num_keys = num_keys
        self.num_buckets = num_buckets
        self.num_hashes = num_hashes
        borders = np.arange(num_hashes + 1, dtype=np.int64) * num_buckets // num_hashes
        self._starts, self._counts = borders[:-1], np.diff(borders)
        self._permutations = Permutations(num_keys, num_hashes, num_buckets)

    def __repr__(self) -> str:
        return f"Placement({self.num_keys}, {self.num_buckets}, {self.num_hashes})"

    @property
    def bucket_size(self) -> int:
        """Positions of a bucket, the same for all; the last ones of some are empty."""
        return -(-self.num_keys // int(self._counts.min()))

    @property
    def members_bytes(self) -> int:
        """The number of bytes of `members`, known before it is made."""
        return self.num_buckets * self.bucket_size * _MEMBER.itemsize

    def places_of(self, keys: KeyArray) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns what `buckets_of` and `positions_of` return, in one go."""
        positions, rest = np.divmod(self._permutations.ranks(keys), self._counts)
        return self._starts + rest, positions

    def buckets_of(self, keys: KeyArray) -> NDArray[np.int64]:
        """Returns the buckets that hold each of keys (m,), one of every sub-table, (m, w)."""
        return self.places_of(keys)[0]

    def positions_of(self, keys: KeyArray) -> NDArray[np.int64]:
        """Returns where in these buckets each of keys (m,) lies, (m, w)."""
        return self.places_of(keys)[1]

    def keys_at(self, buckets: NDArray[np.int64], positions: NDArray[np.int64]) -> KeyArray:
        """Returns the key at each place, given as buckets (n,) and positions (n,): -1 if it is
        empty."""
        which = np.searchsorted(self._starts, buckets, "right") - 1
        ranks = positions * self._counts[which] + buckets - self._starts[which]
        keys = np.full(len(ranks), -1, np.int64)
        is_full = ranks < self.num_keys
        keys[is_full] = self._permutations.keys(ranks[is_full], which[is_full])
        return keys

    def members(self) -> NDArray[np.int32]:
        """Returns the keys of every bucket, (B, bucket_size), with -1 where there is none. For
        servers."""
        return self._members

    @cached_property
    def _members(self) -> NDArray[np.int32]:
        keys = np.arange(self.num_keys, dtype=np.int64)
        members = np.full((self.num_buckets, self.bucket_size), -1, _MEMBER)
        members[self.places_of(keys)] = keys[:, None]
        members.setflags(write=False)
        return members


def place(choices: NDArray[np.int64], num_buckets: int) -> NDArray[np.int64]:
    """Assigns each key to one of its buckets, no two to the same, and as many keys as can be;
    `choices` (m, w) are the buckets that hold each.

    >>> place(np.array([[0, 1], [0, 1], [0, 1]]), 2)
    array([ 0,  1, -1])
    """
    bucket_of = np.full(len(choices), -1, np.int64)
    match(np.ascontiguousarray(choices, np.int64), num_buckets, bucket_of)
    return bucket_of


@loop("keyhole.crypto.loops")
def match(choices: NDArray[np.int64], num_buckets: int, bucket_of: NDArray[np.int64]) -> None:
    """Writes a maximum matching, found by augmenting paths, the shortest first (Berge, 1957).

    A key that once has a bucket keeps one, and a key from which no path leads to a free bucket has
    none later either, so that one search for each key is enough.
    """
    key_in: dict[int, int] = {}
    placed = [-1] * len(choices)
    buckets_of = choices.tolist()
    for first in range(len(choices)):
        came_from: dict[int, int] = {}  # the key from which the search met a bucket
        queue, free = deque([first]), -1
        while queue and free < 0:
            key = queue.popleft()
            for bucket in buckets_of[key]:
                if bucket in came_from:
                    continue
                came_from[bucket] = key
                if bucket not in key_in:
                    free = bucket
                    break
                queue.append(key_in[bucket])
        # Back along the path: each key leaves its bucket to the one before it.
        while free >= 0:
            key = came_from[free]
            left, placed[key], key_in[free] = placed[key], free, key
            free = left
    bucket_of[:] = placed
