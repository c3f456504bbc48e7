"""Holds the computed slices of one round in bounded memory, and computes misses in batches.

Where the whole table fits, a key is its own slot. Else slots are given out through a hash index
until the slab is full, so that memory depends on what is asked for and never on K.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor

import numpy as np
from numpy.typing import NDArray

from keyhole.arrays import KeyArray
from keyhole.delivery.records import RecordArray
from keyhole.errors import InputError, KeyholeError
from keyhole.server.tables import KeyIndex
from keyhole.wire.assignment import Fetched
from keyhole.wire.messages import Sums

ABSENT, COMING, READY, NOWHERE = 0, 1, 2, 3
"""States of a slot: nothing there, being computed, computed; and of a key that found no slot."""

_SLOT_BYTES = 17  # sum, state and ticket
_INDEX_BYTES = 120  # of the hash index for each slot, at most: while it grows there are two


def whole_bytes(num_keys: int, record_bytes: int) -> int:
    """What a slab takes that holds every key of a table."""
    return num_keys * (record_bytes + _SLOT_BYTES)


class SliceSlab:
    """Slots for records, each with its sum, its state and a ticket that its user may write on.

    Memory is reserved at once and becomes real as slots are written, `max_bytes` at most.

    Args:
        max_bytes: of records, sums, states and index together.

    >>> slab = SliceSlab(2**62, 4, max_bytes=10**6)
    >>> slab.claim(np.array([7, 2**61, 7]))
    array([0, 1, 0])
    """

    def __init__(self, num_keys: int, record_bytes: int, max_bytes: int) -> None:
        is_whole = whole_bytes(num_keys, record_bytes) <= max_bytes
        each = record_bytes + _SLOT_BYTES + _INDEX_BYTES
        self.capacity = num_keys if is_whole else max_bytes // each
        if self.capacity < 1:
            raise InputError(
                f"no slice fits into the memory for slices on demand: got {max_bytes} bytes; "
                f"expected {each} or more; raise max_bytes"
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


_GATHERING = 0.001  # seconds that the first miss of an idle table waits for company


class MissBatch:
    """Misses that are computed together.

    Kept keys have a slot and are distinct over all requests; loose ones have none, may repeat, and
    leave their result with the batch until the last request that waits for it has taken it.
    """

    def __init__(self, number: int, done: asyncio.Future[None]) -> None:
        self.number = number
        self.size = 0
        self.loose_keys: KeyArray  # distinct, ascending; these three are there when it has ended
        self.loose_records: RecordArray
        self.loose_sums: Sums
        self._kept: list[tuple[KeyArray, KeyArray]] = []
        self._loose: list[KeyArray] = []
        self._done = done  # never holds an error: nobody may be left to take it
        self._error: KeyholeError | None = None

    def keep(self, keys: KeyArray, slots: KeyArray) -> None:
        """Adds keys whose records go to these slots."""
        self._kept.append((keys, slots))
        self.size += len(keys)

    def add_loose(self, keys: KeyArray) -> None:
        """Adds keys whose records are not kept."""
        self._loose.append(keys)
        self.size += len(keys)

    def kept(self) -> tuple[KeyArray, KeyArray]:
        """The kept keys and their slots."""
        none = np.empty(0, np.int64)
        return (
            np.concatenate([none, *(keys for keys, _ in self._kept)]),
            np.concatenate([none, *(slots for _, slots in self._kept)]),
        )

    def loose(self) -> KeyArray:
        """The distinct loose keys, ascending: the order of their records."""
        return np.unique(np.concatenate([np.empty(0, np.int64), *self._loose]))

    async def wait(self) -> None:
        """Returns when the batch is computed; anyone who waits may go without disturbing it."""
        await asyncio.shield(self._done)
        if self._error is not None:
            # Else the traceback of one error would grow with everyone who raises it.
            raise self._error.with_traceback(None)

    def finish(self, error: KeyholeError | None) -> None:
        """Wakes everyone who waits."""
        self._error = error
        self._done.set_result(None)


class BatchQueue:
    """Runs batches one at a time on an executor; a full one, or one that is due, starts.

    A batch starts when the one before it is done, or a millisecond after its first key.

    Args:
        batch_keys: from which a batch takes no further request.
        settle: called on the event loop with each batch that has ended, before those who wait.
    """

    def __init__(
        self,
        executor: Executor,
        batch_keys: int,
        compute: Callable[[MissBatch], None],
        settle: Callable[[MissBatch, KeyholeError | None], None],
    ) -> None:
        self._executor, self._batch_keys = executor, batch_keys
        self._compute, self._settle = compute, settle
        self._waiting: deque[MissBatch] = deque()
        self._under_way: dict[int, MissBatch] = {}  # by number: the waiting ones and one that runs
        self._next_number = 0
        self._is_idle = True

    def __getitem__(self, number: int) -> MissBatch:
        """A batch that has not ended."""
        return self._under_way[number]

    def open(self) -> MissBatch:
        """The batch that takes misses now; it will be computed without further doing."""
        if not self._waiting or self._waiting[-1].size >= self._batch_keys:
            loop = asyncio.get_running_loop()
            batch = MissBatch(self._next_number, loop.create_future())
            self._next_number += 1
            self._waiting.append(batch)
            self._under_way[batch.number] = batch
            if self._is_idle:
                self._is_idle = False
                loop.call_later(_GATHERING, self._start, loop)
        return self._waiting[-1]

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Hands the next batch to the executor, if there is one."""
        self._is_idle = not self._waiting
        if self._is_idle:
            return
        batch = self._waiting.popleft()
        try:
            work = loop.run_in_executor(self._executor, self._compute, batch)
        except RuntimeError as error:  # an executor that has been shut down takes no work
            self._end(batch, error, loop)
        else:
            work.add_done_callback(lambda work: self._end(batch, _failure(work), loop))

    def _end(
        self, batch: MissBatch, failure: BaseException | None, loop: asyncio.AbstractEventLoop
    ) -> None:
        error = None if failure is None else _without_keys(failure)
        del self._under_way[batch.number]
        self._settle(batch, error)
        batch.finish(error)
        self._start(loop)


def _failure(work: asyncio.Future[None]) -> BaseException | None:
    return asyncio.CancelledError() if work.cancelled() else work.exception()


def _without_keys(failure: BaseException) -> KeyholeError:
    """Our own errors hold no keys; the text of any other may, so only its kind is told."""
    if isinstance(failure, KeyholeError):
        return failure
    return KeyholeError(
        f"slices cannot be computed: got {type(failure).__name__}; expected a select function that "
        "takes every key of its table; call it in process with keys of one's own to see the error"
    )
