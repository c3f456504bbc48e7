"""Says where pieces of rows lie: in three buckets each, at the same position in all of them.

Items are pieces of rows, those of row k from s k on. Of each of w hashes, B buckets hold B items in
a row at every position: item i lies at position i div B, in bucket pi(i mod B) + shift modulo B,
with a public permutation for each hash, and a shift for each hash and position. Items of one
position never meet in a bucket. Rows that change together, such as those of frequent words, share
positions: what changes of a table that is encoded by position is little.

Where a piece has one bucket, this is said of keys in place of items, with buckets of their own for
each of the s pieces: all pieces of two keys meet, or none do."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from keyhole.arrays import KeyArray
from keyhole.crypto.cuckoo import Permutations, place
from keyhole.delivery.pir.shape import RingShape
from keyhole.primitives.coding import mix

_LABEL = 21  # that makes these permutations differ from those of other layouts


@lru_cache(maxsize=8)  # a pure function of a shape
def slots_of(shape: RingShape) -> Slots:
    """Returns the slots of a shape."""
    return Slots(shape)


@dataclass(frozen=True)
class Slots:
    """Where pieces lie: public, the same for everyone."""

    shape: RingShape

    @cached_property
    def _ranks(self) -> NDArray[np.int64]:
        """pi of each hash, (B, w)."""
        size, hashes = self.shape.kind_buckets, self.shape.hashes
        return Permutations(size, hashes, _LABEL).ranks(np.arange(size))

    @cached_property
    def _shifts(self) -> NDArray[np.int64]:
        """(positions, w)."""
        shape = self.shape
        drawn = mix(mix(np.arange(shape.positions * shape.hashes, dtype=np.uint64)))
        return (drawn % np.uint64(shape.kind_buckets)).astype(np.int64).reshape(-1, shape.hashes)

    def places_of(self, items: KeyArray) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the buckets of items, (n, w), and the position of each, (n,)."""
        size = self.shape.kind_buckets
        if self.shape.single:
            keys, piece = np.divmod(items, self.shape.pieces)
            position, rest = np.divmod(keys, size)
            within = (self._ranks[rest, 0] + self._shifts[position, 0]) % size
            return (within + size * piece)[:, None], position
        position, rest = np.divmod(items, size)
        if self.shape.hashes == 1:
            return rest[:, None], position
        within = (self._ranks[rest] + self._shifts[position]) % size
        return within + size * np.arange(self.shape.hashes), position

    def members(self, first: int, count: int) -> NDArray[np.int64]:
        """Returns the items of `count` positions from `first` on, (count, buckets): -1 where there
        is none."""
        shape, size = self.shape, self.shape.at_position
        found = np.full((count, shape.buckets), -1, np.int64)
        items = np.arange(first * size, min((first + count) * size, shape.items))
        buckets, positions = self.places_of(items)
        found[positions[:, None] - first, buckets] = items[:, None]
        return found

    def assign(self, keys: KeyArray) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the bucket of each piece of keys, (n, s), and its position; -1 for all pieces of
        a key of which one found no bucket.

        Args:
            keys: (n,) int64, all different.
        """
        pieces = self.shape.pieces
        items = (keys[:, None] * pieces + np.arange(pieces)).reshape(-1)
        buckets, positions = self.places_of(items)
        found = place(buckets, self.shape.buckets).reshape(-1, pieces)
        found[(found < 0).any(axis=1)] = -1
        return found, positions.reshape(-1, pieces)


def mask_of(rows: NDArray[np.int64], words: int) -> NDArray[np.uint64]:
    """Returns the public random words of rows, (n, words)."""
    return mix((rows[:, None] * words + np.arange(words)).view(np.uint64))
