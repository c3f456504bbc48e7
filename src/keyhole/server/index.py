"""An index from keys to slots: open addressing, linear probing, at most half full.

Slots are numbered in the order in which keys were claimed, so what is stored under them does not
depend on the hash. The hash is salted: keys come from clients, and whoever knew the hash could
choose keys that all meet in one place.
"""

from __future__ import annotations

import secrets

import numpy as np
from numba import njit

from keyhole.server.mixing import mix
from keyhole.types import KeyArray

__all__ = ["KeyIndex"]

_FEWEST = 1024  # places of a new index: 16 kB


class KeyIndex:
    """Which slot each claimed key has.

    >>> index = KeyIndex()
    >>> index.claim(np.array([2**62, 7])), index.claim(np.array([7, 9]))
    (array([0, 1]), array([1, 2]))
    >>> index.find(np.array([9, 8]))
    array([ 2, -1])
    """

    def __init__(self) -> None:
        self._salt = np.uint64(secrets.randbits(64))
        self._places = _empty(_FEWEST)
        self._keys = np.empty(_FEWEST // 2, np.int64)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def keys(self) -> KeyArray:
        """The claimed keys by slot."""
        return self._keys[: self._count]

    @property
    def nbytes(self) -> int:
        """The memory of the index."""
        return self._places.nbytes + self._keys.nbytes

    def find(self, keys: KeyArray) -> KeyArray:
        """The slot of each key, -1 for one that was never claimed."""
        slots = np.empty(len(keys), np.int64)
        _find(self._places, self._salt, keys, slots)
        return slots

    def claim(self, keys: KeyArray) -> KeyArray:
        """The slot of each key; a new key takes the next free one."""
        slots = np.empty(len(keys), np.int64)
        self._reserve(self._count + len(keys))
        self._count = _claim(self._places, self._salt, keys, self._keys, self._count, slots)
        return slots

    def _reserve(self, count: int) -> None:
        """Doubles until `count` keys fill at most half of the places."""
        size = len(self._places)
        if 2 * count <= size:
            return
        while size < 2 * count:
            size *= 2
        places, keys = _empty(size), np.empty(size // 2, np.int64)
        _claim(places, self._salt, self.keys, keys, 0, np.empty(self._count, np.int64))
        self._places, self._keys = places, keys


def _empty(size: int) -> KeyArray:
    """Places (key, slot), none taken."""
    return np.full((size, 2), -1, np.int64)


@njit(cache=True, nogil=True)
def _home(key, salt, mask):  # type: ignore[no-untyped-def]
    """Where the search for a key begins."""
    return np.int64(mix(np.uint64(key) ^ salt) & np.uint64(mask))


@njit(cache=True, nogil=True)
def _find(places, salt, keys, slots):  # type: ignore[no-untyped-def]
    mask = len(places) - 1
    for i in range(len(keys)):
        at = _home(keys[i], salt, mask)
        while places[at, 0] != keys[i] and places[at, 0] >= 0:
            at = (at + 1) & mask
        slots[i] = places[at, 1]


@njit(cache=True, nogil=True)
def _claim(places, salt, keys, owners, count, slots):  # type: ignore[no-untyped-def]
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
