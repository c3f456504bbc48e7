"""Answers private queries that meet together, by one scan of a table held in memory.

Reading the table is what a query costs; reading it once for many costs little more. While a pass
runs beside the event loop, queries that come wait for the next one.

A published round has its slices in files, but a scan reads all of them for every pass, with a tag
beside each. So a table is copied when it is first asked for. Tables of the two newest rounds are
kept, as far as the memory that was set aside holds them; those of the older round go first.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from keyhole.delivery.exchange import SelectServer
from keyhole.delivery.pir.database import Database
from keyhole.delivery.pir.messages import PirServer
from keyhole.delivery.pir.way import Lengths
from keyhole.delivery.records import RecordArray
from keyhole.errors import (
    BusyError,
    KeyholeError,
    NotFoundError,
    ProtocolError,
    StorageError,
    TooLateError,
)
from keyhole.server.checksums import sum_records
from keyhole.service.limits import Gate
from keyhole.service.metrics import Metrics
from keyhole.wire.assignment import OpenRound, RoundSource, SliceTable
from keyhole.wire.manifest import TableInfo
from keyhole.wire.private import PirSettings, held_bytes, max_keys_of_table, name_table

_Outcome: TypeAlias = bytes | Exception
_Turn: TypeAlias = tuple[bytes, asyncio.Future[bytes]]


def answer_apart(server: SelectServer, queries: Sequence[bytes]) -> tuple[list[_Outcome], int]:
    """Answers queries in as few passes as possible; one that is refused spoils no other.

    A server refuses all queries of a pass if one of them cannot be used, before it reads a slice.
    Halving finds the one: with none that is bad there is one pass.

    Args:
        server: of the table.
        queries: one or more.

    Returns:
        A reply or the refusal of each, in order, and the number of passes over the table.
    """
    try:
        return [*server.answer(queries)], 1
    except ProtocolError as error:
        if len(queries) == 1:
            return [error], 0
    half = len(queries) // 2
    left, passes = answer_apart(server, queries[:half])
    right, more = answer_apart(server, queries[half:])
    return left + right, passes + more


class Passes:
    """The queries of one table. Used from one event loop.

    Args:
        server: of the table; one pass at a time.
        gate: to go through for each pass; tables may share it.
        together: queries of one pass at most.
        on_pass: is told how many passes were made, and how many queries they answered.
    """

    def __init__(
        self,
        server: SelectServer,
        gate: Gate,
        together: int,
        on_pass: Callable[[int, int], None] = lambda passes, queries: None,
    ) -> None:
        self._server, self._gate, self._together = server, gate, together
        self._on_pass = on_pass
        self._waiting: deque[_Turn] = deque()
        self._running: asyncio.Task[None] | None = None

    async def answer(self, query: bytes) -> bytes:
        """Returns the reply of the next pass; anyone who leaves disturbs nobody.

        Raises:
            ProtocolError: the query cannot be used.
            KeyholeError: the pass broke off; whatever is left of it, nobody waits for ever.
        """
        turn: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting.append((query, turn))
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._run())
        return await turn

    async def _run(self) -> None:
        """Makes passes until nobody waits."""
        try:
            while self._waiting:
                await self._gate.enter()
                try:
                    await self._next_pass()
                finally:
                    self._gate.leave()
        except BaseException as error:
            # Nobody else would come for those who wait: not even for a pass that can go on.
            _settle(self._waiting, [_told(error)] * len(self._waiting))
            self._waiting.clear()
            raise

    async def _next_pass(self) -> None:
        # Chosen only now: anyone who came while others scanned goes along.
        count = min(self._together, len(self._waiting))
        batch = [self._waiting.popleft() for _ in range(count)]
        batch = [(query, turn) for query, turn in batch if not turn.done()]
        if not batch:
            return
        try:
            outcomes, passes = await asyncio.to_thread(
                answer_apart, self._server, [query for query, _ in batch]
            )
            answered = sum(isinstance(outcome, bytes) for outcome in outcomes)
            self._on_pass(passes, answered)
        except BaseException as error:
            # Not only an Exception: a library that panics raises something else.
            _settle(batch, [_told(error)] * len(batch))
            if not isinstance(error, Exception):
                raise
        else:
            _settle(batch, outcomes)


def _settle(batch: Iterable[_Turn], outcomes: Sequence[_Outcome]) -> None:
    """Gives everyone who still waits what came of their query."""
    for (_, turn), outcome in zip(batch, outcomes, strict=True):
        if turn.done():
            continue
        if isinstance(outcome, bytes):
            turn.set_result(outcome)
        else:
            turn.set_exception(outcome)


def _told(error: BaseException) -> Exception:
    """What those who wait are told: what ends a pass need not end all that wait for it."""
    if isinstance(error, Exception):
        return error
    told = KeyholeError(
        "a pass over the table broke off",
        got=type(error).__name__,
        allowed="passes that end",
        fix="ask anew; the operator finds more in the log",
    )
    told.__cause__ = error
    return told


_ROUNDS = 2  # that are kept: the current one, and the one that late devices still ask for
_FETCH_AT_ONCE = 65_536  # keys, where slices are computed on demand


@dataclass(frozen=True)
class ServedTable:
    """A table that answers.

    Args:
        opened: its server.
        lengths: of its messages.
        passes: where queries go.
    """

    opened: PirServer
    lengths: Lengths
    passes: Passes


@dataclass(frozen=True)
class _Entry:
    number: int
    size: int
    task: asyncio.Task[ServedTable]


class Databases:
    """The tables that a service answers from. Used from one event loop.

    Args:
        rounds: of the service.
        settings: of private retrieval.
        gate: that every pass goes through.
        metrics: what is counted.
    """

    def __init__(
        self, rounds: RoundSource, settings: PirSettings, gate: Gate, metrics: Metrics
    ) -> None:
        self._rounds, self._settings = rounds, settings
        self._gate, self._metrics = gate, metrics
        self._entries: dict[tuple[str, int], _Entry] = {}

    @property
    def held_bytes(self) -> int:
        """What the tables that are kept take."""
        return sum(entry.size for entry in self._entries.values())

    async def table(self, held: OpenRound, place: int) -> ServedTable:
        """A table of a round; the first who asks has it made, and all wait for the same one.

        Args:
            held: the round, which the caller holds.
            place: of the table in its manifest.

        Raises:
            NotFoundError: a table that is not retrieved from in private, or too large for it.
            TooLateError: two newer rounds have taken its place.
            BusyError: the memory is taken by tables that are being made.
            StorageError: its files are damaged.
        """
        entry = self._entries.get((held.id, place))
        if entry is None:
            entry = self._start(held, place)
        return await asyncio.shield(entry.task)  # anyone who leaves must not stop it for the others

    def _start(self, held: OpenRound, place: int) -> _Entry:
        max_keys, size = self._measured(held, place)
        self._make_room(held.manifest.number, size)
        task = asyncio.create_task(self._make(held.id, place, max_keys))
        name, entry = (held.id, place), _Entry(held.manifest.number, size, task)
        self._entries[name] = entry

        def forget(done: asyncio.Task[ServedTable]) -> None:
            # The next one who asks tries again; nobody may be left to take the error.
            has_failed = done.cancelled() or done.exception() is not None
            if has_failed and self._entries.get(name) is entry:
                del self._entries[name]

        task.add_done_callback(forget)
        return entry

    def _measured(self, held: OpenRound, place: int) -> tuple[int, int]:
        """Keys of a query, and bytes of the table, if the whole round has room: no two of its
        tables take turns.
        """
        settings, sizes = self._settings, {}
        max_keys = max_keys_of_table(settings, held.manifest, _checked(held.tables[place].info))
        for at, table in enumerate(held.tables):
            with suppress(NotFoundError):  # of a table that is not offered
                info = _checked(table.info)
                limit = max_keys_of_table(settings, held.manifest, info)
                numbers = info.num_keys, info.record_bytes, limit
                sizes[at] = held_bytes(settings.role.delivery, *numbers)
        if sum(sizes.values()) > settings.max_bytes:
            raise NotFoundError(
                "the round is too large to be retrieved from in private",
                got=f"{sum(sizes.values())} bytes",
                allowed=f"{settings.max_bytes} bytes",
                fix="serve with a larger --pir-memory-mb",
            )
        return max_keys, sizes[place]

    def _make_room(self, number: int, size: int) -> None:
        """Lets go of older rounds, and of whatever else must go for `size` bytes to fit."""
        numbers = sorted({number, *(e.number for e in self._entries.values())})[-_ROUNDS:]
        if number not in numbers:
            raise _too_old(number)
        for name, entry in sorted(self._entries.items(), key=lambda item: item[1].number):
            is_full = self.held_bytes + size > self._settings.max_bytes
            is_old = entry.number not in numbers
            if is_old or (is_full and entry.number < number and entry.task.done()):
                del self._entries[name]
        if self.held_bytes + size > self._settings.max_bytes:
            if any(entry.number > number for entry in self._entries.values()):
                raise _too_old(number)  # a newer one has taken its place
            raise _no_room(self.held_bytes + size, self._settings.max_bytes)

    async def _make(self, round_id: str, place: int, max_keys: int) -> ServedTable:
        settings = self._settings
        with self._rounds.hold(round_id) as held:  # of its own: those who wait may leave
            table, name = held.tables[place], name_table(round_id, place)
            if table.info.segments:
                opened = await asyncio.to_thread(_open_segments, table, name, settings, max_keys)
            else:
                records = await _fetch_all(table)
                opened = await asyncio.to_thread(_open, records, name, settings, max_keys)
        passes = Passes(opened, self._gate, settings.together, self._count)
        lengths = settings.role.delivery.lengths(opened.params)
        return ServedTable(opened, lengths, passes)

    def _count(self, passes: int, queries: int) -> None:
        self._metrics.add("scans", passes)
        self._metrics.add("private", queries)


def _open(records: RecordArray, name: bytes, settings: PirSettings, max_keys: int) -> PirServer:
    role, database = settings.role, Database.of(name, records)
    return role.delivery.open(database, max_keys, settings.max_queries)[role.server]


def _open_segments(
    table: SliceTable, name: bytes, settings: PirSettings, max_keys: int
) -> PirServer:
    """Copies the files of a table, each record compared with its sum: a device can not do that."""
    info = table.info
    pieces = []
    for place, segment in enumerate(info.segments):
        piece = np.frombuffer(table.segment(place), np.uint8)
        piece = piece.reshape(segment.count, info.record_bytes)
        sums = np.frombuffer(table.segment_sums(place), "<u8")
        if not np.array_equal(sum_records(piece), sums):
            raise StorageError(
                f"records of table {info.name!r} are damaged",
                got="records that do not fit their sums",
                allowed="the files as they were published",
                fix="publish the round again",
            )
        pieces.append(piece)
    records = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
    return _open(records, name, settings, max_keys)


async def _fetch_all(table: SliceTable) -> RecordArray:
    """All records of a table that is computed on demand."""
    info = table.info
    records = np.empty((info.num_keys, info.record_bytes), np.uint8)
    for start in range(0, info.num_keys, _FETCH_AT_ONCE):
        keys = np.arange(start, min(start + _FETCH_AT_ONCE, info.num_keys))
        records[keys] = (await table.fetch(keys)).records
    return records


def _checked(info: TableInfo) -> TableInfo:
    if info.factors == () or not info.record_bytes:
        raise NotFoundError(
            f"table {info.name!r} is not retrieved from in private",
            got="a table that all devices receive, or without content",
            allowed="a table of slices",
            fix="fetch it as /v1/rounds/{round}/broadcast",
        )
    return info


def _too_old(number: int) -> TooLateError:
    return TooLateError(
        f"round {number} is not retrieved from in private any more",
        got=f"round {number}",
        allowed=f"the {_ROUNDS} newest rounds",
        fix="take part in the current one",
    )


def _no_room(needed: int, limit: int) -> BusyError:
    return BusyError(
        "there is no room for another table",
        got=f"{needed} bytes",
        allowed=f"{limit} bytes",
        fix="come back later; the operator may raise --pir-memory-mb",
    )
