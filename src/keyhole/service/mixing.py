"""Holds requests of several clients back until others have come, and sends them in random order.

What the receiver can tell from order and time shrinks with the number of clients that are mixed. It
is not nothing: a client that comes alone goes alone, and one who watches both sides can match
bursts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from keyhole.crypto.prg import Prg
from keyhole.delivery.exchange import mix
from keyhole.errors import InputError, ServiceError

Forward: TypeAlias = Callable[[list[bytes]], Awaitable[list[bytes]]]
"""Takes requests of one length to the gateway; an answer to each in their order."""


@dataclass(frozen=True)
class Mix:
    """How long requests wait for others.

    Args:
        seconds: at most, after which they go with anyone who is there.
        clients: bodies that go as soon as this many have come.
        requests: of one forwarded batch; more go in several. Their answers together must be within
            what the gateway gives out at once, 512 MB unless told otherwise.
    """

    seconds: float = 0.2
    clients: int = 64
    requests: int = 4096

    def __post_init__(self) -> None:
        if not 0 <= self.seconds <= 60 or self.clients < 1 or self.requests < 1:
            raise InputError(
                f"a mix that cannot be: got {self.seconds:g} s, {self.clients} clients, "
                f"{self.requests} requests; expected 0..60 s, 1 or more clients and requests; "
                "choose other numbers"
            )


@dataclass
class _Pool:
    """What waits: requests by client, and who waits for their answers."""

    timer: asyncio.TimerHandle
    waiting: list[tuple[Sequence[bytes], asyncio.Future[list[bytes]]]] = field(default_factory=list)


class Mixer:
    """Collects, shuffles, forwards, and gives everybody their own answers.

    Only requests of one length are mixed with one another: those of one round have one.

    Args:
        prg: of the order; a fresh one if None. Given by tests only.
    """

    def __init__(self, forward: Forward, mix: Mix, prg: Prg | None = None) -> None:
        self._forward, self._mix, self._prg = forward, mix, prg or Prg.fresh()
        self._pools: dict[int, _Pool] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def ask(self, requests: Sequence[bytes]) -> list[bytes]:
        """Returns the answers to one client's requests, one or more of one length."""
        loop, length = asyncio.get_running_loop(), len(requests[0])
        pool = self._pools.get(length)
        if pool is None:
            timer = loop.call_later(self._mix.seconds, self._go, length)
            pool = self._pools[length] = _Pool(timer)
        turn: asyncio.Future[list[bytes]] = loop.create_future()
        pool.waiting.append((requests, turn))
        if len(pool.waiting) >= self._mix.clients:
            self._go(length)
        return await turn

    def _go(self, length: int) -> None:
        """Sends off what waits."""
        pool = self._pools.pop(length)
        pool.timer.cancel()
        task = asyncio.get_running_loop().create_task(self._exchange(pool))
        self._tasks.add(task)  # the loop itself would forget it
        task.add_done_callback(self._tasks.discard)

    async def _exchange(self, pool: _Pool) -> None:
        try:
            mixed = mix([requests for requests, _ in pool.waiting], self._prg)
            handed = mixed.hand_back(await self._answers(mixed.requests))
        except BaseException as error:
            # It is each client's to see, and not the loop's, unless it ends the loop.
            for _, turn in pool.waiting:
                if not turn.done():
                    turn.set_exception(error if isinstance(error, Exception) else _broken_off())
            if not isinstance(error, Exception):
                raise
            return
        for (_, turn), own in zip(pool.waiting, handed, strict=True):
            if not turn.done():  # its client may have left
                turn.set_result(own)

    async def _answers(self, sealed: list[bytes]) -> list[bytes]:
        answers: list[bytes] = []
        for start in range(0, len(sealed), self._mix.requests):
            answers += await self._forward(sealed[start : start + self._mix.requests])
        return answers


def _broken_off() -> ServiceError:
    return ServiceError(
        "the relay broke off: got no answer of the gateway; expected an answer to each request; "
        "ask anew"
    )
