"""Computes slices on demand: each key of a round once, however many devices ask for it.

Option 2 of section 3.2. A round starts for all devices at the same moment, and they ask for much
the same keys: without care an expensive select function runs once for each of them. Here a key is
computed for the first request that misses it, later ones wait for the same result (single flight),
and the misses of requests that meet are computed together.

Computed slices lie in bounded memory. Where the whole table fits, a key is its own slot. Else slots
are given out through a hash index until the slab is full, so that memory depends on what is asked
for and never on K. The newest round is served; none has files, and no root binds its slices: a
service that computes them can give each device others.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from keyhole.arrays import KeyArray
from keyhole.crypto.merkle import HASH_BYTES, HashArray, hash_leaves
from keyhole.delivery.records import RecordArray
from keyhole.delivery.sources import SliceSource
from keyhole.errors import InputError, KeyholeError, NotFoundError, ShapeError, TooLateError
from keyhole.primitives.layout import Layout
from keyhole.server.tables import KeyIndex
from keyhole.wire.assignment import NO_ROUND, Current, Fetched, OpenRound
from keyhole.wire.manifest import TableInfo, describe_round, encode_manifest, name_round, table_info

BATCH_KEYS = 4096
"""Keys from which a batch takes no further request: 8 MB of slices of 2 KB."""

_ABSENT, _COMING, _READY = 0, 1, 2  # states of a slot: nothing there, being computed, computed
_NOWHERE = 3  # the state of a key that found no slot
_GATHERING = 0.001  # seconds that the first miss of an idle table waits for company
_REMEMBERED = 1024  # rounds whose devices are told that they are late
_SLOT_BYTES = 41  # leaf, state and ticket
_INDEX_BYTES = 120  # of the hash index for each slot, at most: while it grows there are two


def whole_bytes(num_keys: int, record_bytes: int) -> int:
    """Returns what a slab takes that holds every key of a table."""
    return num_keys * (record_bytes + _SLOT_BYTES)


class SliceSlab:
    """Slots for records, each with its leaf, its state and a ticket that its user may write on.

    Memory is reserved at once and becomes real as slots are written: `max_bytes` at most, of
    records, leaves, states and index together.

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
        self.leaves: HashArray = np.zeros((self.capacity, HASH_BYTES), np.uint8)
        self.tickets: NDArray[np.int64] = np.zeros(self.capacity, np.int64)
        # One state more than slots: slot -1, of a key that found no room, reads the last one.
        self.states: NDArray[np.uint8] = np.zeros(self.capacity + 1, np.uint8)
        self.states[-1] = _NOWHERE

    def claim(self, keys: KeyArray) -> KeyArray:
        """Returns the slot of each key, -1 where the slab is full; a key keeps its slot for
        good."""
        if self._index is None:
            return keys
        slots = self._index.find(keys)
        room = self.capacity - len(self._index)
        is_new = slots < 0
        if room and is_new.any():
            self._index.claim(np.unique(keys[is_new])[:room])
            slots = self._index.find(keys)
        return slots

    def gather(self, slots: KeyArray) -> Fetched:
        """Returns a copy of what lies in the slots; slot -1 gives any."""
        # "clip" checks nothing: slots are ours.
        records = np.take(self.records, slots, axis=0, mode="clip")
        return Fetched(records, np.take(self.leaves, slots, axis=0, mode="clip"))


class MissBatch:
    """Misses that are computed together.

    Kept keys have a slot and are distinct over all requests; loose ones have none, may repeat, and
    leave their result with the batch until the last request that waits for it has taken it.
    """

    def __init__(self, number: int, done: asyncio.Future[None]) -> None:
        self.number, self.size = number, 0
        self.loose_keys: KeyArray  # distinct, ascending; these three are there when it has ended
        self.loose_records: RecordArray
        self.loose_leaves: HashArray
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
        """Returns the kept keys and their slots."""
        none = np.empty(0, np.int64)
        return (
            np.concatenate([none, *(keys for keys, _ in self._kept)]),
            np.concatenate([none, *(slots for _, slots in self._kept)]),
        )

    def loose(self) -> KeyArray:
        """Returns the distinct loose keys, ascending: the order of their records."""
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
    """Runs batches one at a time on an executor: each starts when the one before it is done, or a
    millisecond after its first key. `settle` is called on the event loop with each batch that has
    ended, before those who wait."""

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
        """Returns the batch that takes misses now; it will be computed without further doing."""
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
            work.add_done_callback(
                lambda work: self._end(
                    batch, asyncio.CancelledError() if work.cancelled() else work.exception(), loop
                )
            )

    def _end(
        self, batch: MissBatch, failure: BaseException | None, loop: asyncio.AbstractEventLoop
    ) -> None:
        error = None if failure is None else _without_keys(failure)
        del self._under_way[batch.number]
        self._settle(batch, error)
        batch.finish(error)
        self._start(loop)


def _without_keys(failure: BaseException) -> KeyholeError:
    """Our own errors hold no keys; the text of any other may, so only its kind is told."""
    if isinstance(failure, KeyholeError):
        return failure
    return KeyholeError(
        f"slices cannot be computed: got {type(failure).__name__}; expected a select function that "
        "takes every key of its table; call it in process with keys of one's own to see the error"
    )


@dataclass
class Counts:
    """What slices on demand have cost."""

    evaluations: int = 0  # slices computed: one for each distinct key, but for uncached ones
    hits: int = 0  # keys asked for that were there, or on their way for another request
    batches: int = 0
    uncached: int = 0  # evaluations whose result found no room
    failures: int = 0  # batches whose select function raised; their evaluations are not counted
    # where evaluations and hits are reported to, `Metrics.add` for one
    tell: Callable[[Literal["evaluations", "cached"], float], None] = lambda name, amount: None

    def add_hits(self, keys: int) -> None:
        """Keys that were there, or on their way."""
        self.hits += keys
        self.tell("cached", keys)

    def add_evaluations(self, slices: int) -> None:
        """Slices that were computed."""
        self.evaluations += slices
        self.tell("evaluations", slices)


class SlabTable:
    """A table whose slices are computed when they are first asked for.

    A batch of misses runs on the executor while the event loop goes on. If the select function
    fails, all requests that wait for the batch fail with one error, and the next request for one of
    its keys tries again. A request that is cancelled leaves the batch to the others.

    Every distinct key is evaluated exactly once by each process that serves the round, as long as
    there is room. Keys that find none are evaluated again for later requests; `counts` has their
    number. The bound is on the slices that are kept: a batch under way, and the answers of the
    requests that wait, come on top.

    Used from one event loop.

    Args:
        source: the select function; called on the executor, and the same for the whole round.
        max_bytes: that kept slices may take.
        batch_keys: max keys that the source is given at once.
    """

    def __init__(
        self,
        source: SliceSource,
        info: TableInfo,
        *,
        max_bytes: int,
        executor: Executor,
        batch_keys: int = BATCH_KEYS,
        counts: Counts | None = None,
    ) -> None:
        if batch_keys < 1:
            raise InputError(
                f"a batch takes no keys: got {batch_keys}; expected 1 or more; raise batch_keys"
            )
        self.counts = Counts() if counts is None else counts
        self.info = info  # as the manifest has it
        self._source, self._batch_keys = source, batch_keys
        self._slab = SliceSlab(info.num_keys, info.record_bytes, max_bytes)
        self._queue = BatchQueue(executor, batch_keys, self._compute, self._settle)

    @property
    def tree(self) -> None:
        """Implements `SliceTable.tree`: what is not known yet is bound to nothing."""
        return None

    async def fetch(self, keys: KeyArray, out: RecordArray | None = None) -> Fetched:
        """Implements `SliceTable.fetch`."""
        found = await self._fetch(keys)
        if out is None:
            return found
        out[:] = found.records
        return Fetched(out, found.leaves)

    async def _fetch(self, keys: KeyArray) -> Fetched:
        slots = self._slab.claim(keys)
        states = self._slab.states[slots]
        if (states == _READY).all():
            self.counts.add_hits(len(keys))
            return self._slab.gather(slots)
        batches, loose = self._ask(keys, slots, states)
        for batch in batches:
            await batch.wait()
        fetched = self._slab.gather(slots)
        if loose is not None:
            is_loose = states == _NOWHERE
            places = np.searchsorted(loose.loose_keys, keys[is_loose])
            fetched.records[is_loose] = loose.loose_records[places]
            fetched.leaves[is_loose] = loose.loose_leaves[places]
        return fetched

    def segment(self, place: int) -> memoryview:
        """There is none: NotFoundError."""
        raise NotFoundError(
            f"slices on demand lie in no segments: got segment {place}; expected queries for "
            "slices; ask for the slices by their keys"
        )

    def _ask(
        self, keys: KeyArray, slots: KeyArray, states: NDArray[np.uint8]
    ) -> tuple[list[MissBatch], MissBatch | None]:
        """Sees to it that all keys are coming; returns the batches to wait for, and the one of them
        that has the keys without a slot."""
        slab, missing, loose = self._slab, 0, None
        is_absent, is_loose = states == _ABSENT, states == _NOWHERE
        if is_absent.any():
            absent, first = np.unique(slots[is_absent], return_index=True)
            batch = self._queue.open()
            batch.keep(keys[is_absent][first], absent)
            slab.states[absent], slab.tickets[absent] = _COMING, batch.number
            missing += len(absent)
        coming = slots[slab.states[slots] == _COMING]
        batches = [self._queue[number] for number in np.unique(slab.tickets[coming]).tolist()]
        if is_loose.any():
            loose = self._queue.open()
            loose.add_loose(keys[is_loose])
            missing += int(np.count_nonzero(is_loose))
            batches.append(loose)
        self.counts.add_hits(len(keys) - missing)
        return batches, loose

    def _compute(self, batch: MissBatch) -> None:
        """On the executor: coming slots have no reader, so nothing needs a lock."""
        keys, slots = batch.kept()
        for part, records, leaves in self._read(keys):
            self._slab.records[slots[part]], self._slab.leaves[slots[part]] = records, leaves
        batch.loose_keys = loose = batch.loose()
        batch.loose_records = np.empty((len(loose), self.info.record_bytes), np.uint8)
        batch.loose_leaves = np.empty((len(loose), HASH_BYTES), np.uint8)
        for part, records, leaves in self._read(loose):
            batch.loose_records[part], batch.loose_leaves[part] = records, leaves

    def _read(self, keys: KeyArray) -> Iterator[tuple[slice, RecordArray, HashArray]]:
        """The records of `keys` and their leaves, as much at once as one batch may hold."""
        for start in range(0, len(keys), self._batch_keys):
            part = slice(start, start + self._batch_keys)
            records = self._source.read(keys[part])
            expected = (len(keys[part]), self.info.record_bytes)
            if records.shape != expected:
                raise ShapeError(
                    "a select function gives other slices than its table holds: got shape "
                    f"{records.shape}; expected {expected}; give it one record for each key"
                )
            yield part, records, hash_leaves(records)

    def _settle(self, batch: MissBatch, error: KeyholeError | None) -> None:
        """On the event loop: what has been computed may be read, what failed is absent again."""
        _, slots = batch.kept()
        self._slab.states[slots] = _READY if error is None else _ABSENT
        self.counts.batches += 1
        if error is not None:
            self.counts.failures += 1
            return
        self.counts.uncached += len(batch.loose_leaves)
        self.counts.add_evaluations(len(slots) + len(batch.loose_leaves))


class OnDemandRounds:
    """One round at a time, computed as devices ask for it.

    A round that is replaced takes no new requests; those that hold it finish, then its memory goes.
    Slices of a round come from one value: anyone who trains further meanwhile passes sources of a
    copy, or closes the round first.

    Used from one event loop.

    Args:
        max_bytes: that the kept slices of a round may take, over all tables. Small
            tables get what they need, large ones share what is left.
    """

    def __init__(
        self,
        *,
        max_bytes: int,
        executor: Executor,
        batch_keys: int = BATCH_KEYS,
        counts: Counts | None = None,
    ) -> None:
        self.counts = Counts() if counts is None else counts
        self._max_bytes, self._executor, self._batch_keys = max_bytes, executor, batch_keys
        self._round: OpenRound | None = None
        self._current: Current | None = None
        self._past: deque[str] = deque(maxlen=_REMEMBERED)

    def publish(
        self,
        sources: Sequence[SliceSource],
        layout: Layout | None,
        *,
        number: int,
        step: int = 0,
        settings: Mapping[str, Any] | None = None,
        cohort: Mapping[str, int] | None = None,
    ) -> str:
        """Makes a round the current one, in place of the one before.

        Args:
            settings: what devices are told about the run. The name of a round on demand follows
                from these and the number, not from its slices: whatever tells two runs apart, a
                seed, belongs here if a cache stands between service and devices.
            cohort: device -> its place; None lets every device take part.
        """
        if self._current is not None and number <= self._current.number:
            raise InputError(
                f"a round does not follow the one before: got number {number}; expected "
                f"{self._current.number + 1} or more; count rounds upwards"
            )
        opened = self._open(sources, layout, number, step, settings or {})
        if self._round is not None:
            self._past.append(self._round.id)
        self._round, self._current = opened, Current(opened.id, number, "open", cohort)
        return opened.id

    def close(self) -> None:
        """The current round takes no further updates; its slices can still be had."""
        if self._current is not None:
            self._current = replace(self._current, phase="closed")

    def current(self, newest: bool = False) -> Current | None:
        """Returns the newest round; None before the first."""
        return self._current

    @contextmanager
    def hold(self, round_id: str) -> Iterator[OpenRound]:
        """Keeps a round while it is used."""
        if self._round is None or self._round.id != round_id:
            if round_id in self._past:
                raise TooLateError(
                    "the round is over: got a round before; expected the current round; take part "
                    "in that one"
                )
            raise NotFoundError(
                f"{NO_ROUND}: got another; expected the current round; ask which it is"
            )
        yield self._round

    def _open(
        self,
        sources: Sequence[SliceSource],
        layout: Layout | None,
        number: int,
        step: int,
        settings: Mapping[str, Any],
    ) -> OpenRound:
        infos = [table_info(source.records, layout, place) for place, source in enumerate(sources)]
        manifest = describe_round(layout, infos, number, step, settings)
        encoded = encode_manifest(manifest)
        shares = _share(self._max_bytes, infos)
        tables = tuple(
            SlabTable(
                source,
                info,
                max_bytes=share,
                executor=self._executor,
                batch_keys=self._batch_keys,
                counts=self.counts,
            )
            for source, info, share in zip(sources, infos, shares, strict=True)
        )
        return OpenRound(name_round(encoded, number), manifest, encoded, tables)


def _share(max_bytes: int, infos: Sequence[TableInfo]) -> list[int]:
    """Bytes for each table: all it can use, or else an equal part of what smaller ones leave."""
    needs = [whole_bytes(info.num_keys, info.record_bytes) for info in infos]
    shares = [0] * len(infos)
    for rank, place in enumerate(sorted(range(len(infos)), key=needs.__getitem__)):
        shares[place] = min(needs[place], (max_bytes - sum(shares)) // (len(infos) - rank))
    return shares
