"""Answers private queries of one table together, in passes over it.

Reading the table is what a query costs; reading it once for many costs little more. The first query
waits `GATHERED_SECONDS` for others, and no longer; while a pass runs beside the event loop, queries
that come wait for the next one.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TypeAlias

from keyhole.delivery.base import SelectServer
from keyhole.errors import KeyholeError, ProtocolError
from keyhole.service.limits import Gate

GATHERED_SECONDS = 0.005
"""How long a query waits for others where no pass is under way: a pass takes several times as long
from 10^4 keys on."""

_Outcome: TypeAlias = bytes | Exception
_Charge: TypeAlias = Callable[[float], None]
_Turn: TypeAlias = tuple[bytes, asyncio.Future[bytes], _Charge]


def answer_apart(server: SelectServer, queries: Sequence[bytes]) -> tuple[list[_Outcome], int]:
    """Answers queries in as few passes as possible; one that is refused spoils no other.

    A server refuses all queries of a pass if one of them cannot be used, before it reads a slice.
    Halving finds the one: with none that is bad there is one pass. Returns a reply or the refusal
    of each, in order, and the number of passes over the table.
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
        gate: to go through for each pass; tables may share it.
        together: queries of one pass. As many do not wait for more.
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
        self._is_full = asyncio.Event()
        self._running: asyncio.Task[None] | None = None

    async def answer(self, query: bytes, charge: _Charge = lambda seconds: None) -> bytes:
        """Returns the reply of the next pass, or raises what is wrong with the query. Anyone who
        leaves disturbs nobody, and if a pass breaks off nobody waits for ever.

        Args:
            charge: is told the query's share of the CPU seconds of its pass, refused or not, even
                if nobody waits for the reply any more.
        """
        turn: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting.append((query, turn, charge))
        if len(self._waiting) >= self._together:
            self._is_full.set()
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._run())
        return await turn

    async def _run(self) -> None:
        """Makes passes until nobody waits."""
        try:
            self._is_full = asyncio.Event()
            if len(self._waiting) < self._together:
                with suppress(TimeoutError):
                    async with asyncio.timeout(GATHERED_SECONDS):
                        await self._is_full.wait()
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
        batch = [each for each in batch if not each[1].done()]
        if not batch:
            return
        try:
            outcomes, passes, seconds = await asyncio.to_thread(
                _timed, self._server, [query for query, *_ in batch]
            )
            for *_, charge in batch:
                charge(seconds / len(batch))
            answered = sum(isinstance(outcome, bytes) for outcome in outcomes)
            self._on_pass(passes, answered)
        except BaseException as error:
            # Not only an Exception: a library that panics raises something else.
            _settle(batch, [_told(error)] * len(batch))
            if not isinstance(error, Exception):
                raise
        else:
            _settle(batch, outcomes)


def _timed(server: SelectServer, queries: Sequence[bytes]) -> tuple[list[_Outcome], int, float]:
    """What `answer_apart` gives, and the CPU seconds that it took this thread."""
    start = time.thread_time()
    return *answer_apart(server, queries), time.thread_time() - start


def _settle(batch: Iterable[_Turn], outcomes: Sequence[_Outcome]) -> None:
    """Gives everyone who still waits what came of their query."""
    for (_, turn, _), outcome in zip(batch, outcomes, strict=True):
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
        f"a pass over the table broke off: got {type(error).__name__}; expected passes that end; "
        "ask again; the operator finds more in the log"
    )
    told.__cause__ = error
    return told
