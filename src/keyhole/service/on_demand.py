"""Computes slices on demand: each key of a round once, however many devices ask for it.

Option 2 of section 3.2. A round starts for all devices at the same moment, and they ask for much
the same keys: without care an expensive select function runs once for each of them. Here a key is
computed for the first request that misses it, later ones wait for the same result (single flight),
and the misses of requests that meet are computed together.

The newest round is served; none has files.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from keyhole.arrays import KeyArray
from keyhole.delivery.records import RecordArray
from keyhole.delivery.sources import SliceSource
from keyhole.errors import InputError, KeyholeError, NotFoundError, ShapeError, TooLateError
from keyhole.primitives.layout import Layout
from keyhole.server.checksums import sum_records
from keyhole.service.slabs import (
    ABSENT,
    COMING,
    NOWHERE,
    READY,
    BatchQueue,
    MissBatch,
    SliceSlab,
    whole_bytes,
)
from keyhole.wire.assignment import NO_ROUND, Current, Fetched, OpenRound
from keyhole.wire.manifest import TableInfo, describe_round, encode_manifest, name_round, table_info
from keyhole.wire.messages import Sums

BATCH_KEYS = 4096
"""Keys from which a batch takes no further request: 8 MB of slices of 2 KB."""


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
        batch_keys: from which a batch takes no further request, and the most that the source is
            given at once.
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
        self._source, self._info, self._batch_keys = source, info, batch_keys
        self._slab = SliceSlab(info.num_keys, info.record_bytes, max_bytes)
        self._queue = BatchQueue(executor, batch_keys, self._compute, self._settle)

    @property
    def info(self) -> TableInfo:
        """As the manifest has it."""
        return self._info

    async def fetch(self, keys: KeyArray) -> Fetched:
        """Returns the records of keys that have been checked; order and repeats are kept."""
        slots = self._slab.claim(keys)
        states = self._slab.states[slots]
        if (states == READY).all():
            self.counts.add_hits(len(keys))
            return self._slab.gather(slots)
        batches, loose = self._ask(keys, slots, states)
        for batch in batches:
            await batch.wait()
        fetched = self._slab.gather(slots)
        if loose is not None:
            is_loose = states == NOWHERE
            places = np.searchsorted(loose.loose_keys, keys[is_loose])
            fetched.records[is_loose] = loose.loose_records[places]
            fetched.sums[is_loose] = loose.loose_sums[places]
        return fetched

    def segment(self, place: int) -> memoryview:
        """There is none: NotFoundError."""
        raise _no_segment(place)

    def segment_sums(self, place: int) -> memoryview:
        """There are none: NotFoundError."""
        raise _no_segment(place)

    def _ask(
        self, keys: KeyArray, slots: KeyArray, states: NDArray[np.uint8]
    ) -> tuple[list[MissBatch], MissBatch | None]:
        """Sees to it that all keys are coming.

        Returns:
            The batches to wait for, and the one of them that has the keys without a slot.
        """
        slab, missing, loose = self._slab, 0, None
        is_absent, is_loose = states == ABSENT, states == NOWHERE
        if is_absent.any():
            absent, first = np.unique(slots[is_absent], return_index=True)
            batch = self._queue.open()
            batch.keep(keys[is_absent][first], absent)
            slab.states[absent], slab.tickets[absent] = COMING, batch.number
            missing += len(absent)
        coming = slots[slab.states[slots] == COMING]
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
        for part, records, sums in self._read(keys):
            self._slab.put(slots[part], records, sums)
        batch.loose_keys = loose = batch.loose()
        batch.loose_records = np.empty((len(loose), self._info.record_bytes), np.uint8)
        batch.loose_sums = np.empty(len(loose), np.uint64)
        for part, records, sums in self._read(loose):
            batch.loose_records[part], batch.loose_sums[part] = records, sums

    def _read(self, keys: KeyArray) -> Iterator[tuple[slice, RecordArray, Sums]]:
        """The records of `keys` and their sums, as much at once as one batch may hold."""
        for start in range(0, len(keys), self._batch_keys):
            part = slice(start, start + self._batch_keys)
            records = self._source.read(keys[part])
            expected = (len(keys[part]), self._info.record_bytes)
            if records.shape != expected:
                raise ShapeError(
                    "a select function gives other slices than its table holds: got shape "
                    f"{records.shape}; expected {expected}; give it one record for each key"
                )
            yield part, records, sum_records(records)

    def _settle(self, batch: MissBatch, error: KeyholeError | None) -> None:
        """On the event loop: what has been computed may be read, what failed is absent again."""
        _, slots = batch.kept()
        self._slab.states[slots] = READY if error is None else ABSENT
        self.counts.batches += 1
        if error is not None:
            self.counts.failures += 1
            return
        self.counts.uncached += len(batch.loose_sums)
        self.counts.add_evaluations(len(slots) + len(batch.loose_sums))


def _no_segment(place: int) -> NotFoundError:
    return NotFoundError(
        f"slices on demand lie in no segments: got segment {place}; expected queries for slices; "
        "ask for the slices by their keys"
    )


_REMEMBERED = 1024  # rounds whose devices are told that they are late


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
        """The newest round; None before the first."""
        return self._current

    @contextmanager
    def hold(self, round_id: str) -> Iterator[OpenRound]:
        """Keeps a round while it is used."""
        if self._round is None or self._round.id != round_id:
            raise self._missing(round_id)
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

    def _missing(self, round_id: str) -> NotFoundError | TooLateError:
        if round_id in self._past:
            return TooLateError(
                "the round is over: got a round before; expected the current round; take part in "
                "that one"
            )
        return NotFoundError(
            f"{NO_ROUND}: got another; expected the current round; ask which it is"
        )


def _share(max_bytes: int, infos: Sequence[TableInfo]) -> list[int]:
    """Bytes for each table: all it can use, or else an equal part of what smaller ones leave."""
    needs = [whole_bytes(info.num_keys, info.record_bytes) for info in infos]
    shares = [0] * len(infos)
    for rank, place in enumerate(sorted(range(len(infos)), key=needs.__getitem__)):
        shares[place] = min(needs[place], (max_bytes - sum(shares)) // (len(infos) - rank))
    return shares
