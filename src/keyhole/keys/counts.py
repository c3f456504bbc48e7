"""Key counts: how often the keys of a space occur in one client's data."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from keyhole.primitives.keyspace import KeySpace
from keyhole.types import Array, KeyArray

__all__ = ["KeyCounts"]


@dataclass(frozen=True, eq=False)
class KeyCounts:
    """What a client knows when it chooses keys: the key space, and what occurs in its own data.

    Args:
        space: all keys there are.
        keys: those that occur, int64 (own,), each once, rising.
        counts: how often, int64 (own,), 1 or more.

    >>> counts = KeyCounts.of(KeySpace("word", 100), np.array([7, 3, 7]))
    >>> counts.keys.tolist(), counts.counts.tolist()
    ([3, 7], [1, 2])
    """

    space: KeySpace
    keys: KeyArray
    counts: Array

    @staticmethod
    def of(space: KeySpace, occurrences: Array) -> KeyCounts:
        """Counts keys in the order they occur in; out of range is an error."""
        found, counts = np.unique(space.keys(occurrences).array, return_counts=True)
        return KeyCounts(space, found, counts.astype(np.int64))

    @staticmethod
    def none(space: KeySpace) -> KeyCounts:
        """Nothing in the data names a key, as with pixels and filters."""
        return KeyCounts(space, np.empty(0, np.int64), np.empty(0, np.int64))
