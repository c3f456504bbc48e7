"""Memory for the slices of one round that have been computed: a slab of slots, bounded.

Where the whole table fits, a key is its own slot. Else slots are given out through a hash index
until the slab is full, so that memory depends on what is asked for and never on K.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from keyhole.delivery.records import RecordArray
from keyhole.errors import InputError
from keyhole.server.index import KeyIndex
from keyhole.serving.tables import Fetched
from keyhole.serving.wire import Sums
from keyhole.types import KeyArray

__all__ = ["ABSENT", "COMING", "NOWHERE", "READY", "Slab", "whole_bytes"]

ABSENT, COMING, READY, NOWHERE = 0, 1, 2, 3
"""States of a slot: nothing there, being computed, computed; and of a key that found no slot."""

_SLOT_BYTES = 17  # sum, state and ticket
_INDEX_BYTES = 120  # of the hash index for each slot, at most: while it grows there are two


def whole_bytes(num_keys: int, record_bytes: int) -> int:
    """What a slab takes that holds every key of a table."""
    return num_keys * (record_bytes + _SLOT_BYTES)


class Slab:
    """Slots for records, each with its sum, its state and a ticket that its user may write on.

    Memory is reserved at once and becomes real as slots are written, `most_bytes` at most.

    Args:
        num_keys: K.
        record_bytes: length of a record.
        most_bytes: of records, sums, states and index together.

    Raises:
        InputError: not even one record fits.

    >>> slab = Slab(2**62, 4, most_bytes=10**6)
    >>> slab.claim(np.array([7, 2**61, 7]))
    array([0, 1, 0])
    """

    def __init__(self, num_keys: int, record_bytes: int, most_bytes: int) -> None:
        is_whole = whole_bytes(num_keys, record_bytes) <= most_bytes
        each = record_bytes + _SLOT_BYTES + _INDEX_BYTES
        self.capacity = num_keys if is_whole else most_bytes // each
        if self.capacity < 1:
            raise InputError(
                "no slice fits into the memory for slices on demand",
                got=f"{most_bytes} bytes",
                allowed=f"{each} or more",
                fix="raise most_bytes",
            )
        self._index = None if is_whole else KeyIndex()
        self.records: RecordArray = np.empty((self.capacity, record_bytes), np.uint8)
        self.sums: Sums = np.zeros(self.capacity, np.uint64)
        self.tickets: NDArray[np.int64] = np.zeros(self.capacity, np.int64)
        # One state more than slots: slot -1, of a key that found no room, reads the last one.
        self.states: NDArray[np.uint8] = np.zeros(self.capacity + 1, np.uint8)
        self.states[-1] = NOWHERE

    def claim(self, keys: KeyArray) -> KeyArray:
        """The slot of each key, -1 where the slab is full; a key keeps its slot for good."""
        if self._index is None:
            return keys
        slots = self._index.find(keys)
        room = self.capacity - len(self._index)
        is_new = slots < 0
        if room and is_new.any():
            self._index.claim(np.unique(keys[is_new])[:room])
            slots = self._index.find(keys)
        return slots

    def put(self, slots: KeyArray, records: RecordArray, sums: Sums) -> None:
        """Writes records; whether they may be read is for the states to say."""
        self.records[slots] = records
        self.sums[slots] = sums

    def gather(self, slots: KeyArray) -> Fetched:
        """A copy of what lies in the slots; slot -1 gives any."""
        # "clip" checks nothing: slots are ours.
        records = np.take(self.records, slots, axis=0, mode="clip")
        return Fetched(records, np.take(self.sums, slots, mode="clip"))
