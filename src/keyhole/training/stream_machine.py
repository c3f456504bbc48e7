"""Asynchronous rounds as a state machine: who is started, whose update counts, when a step is due.

Clients start whenever others have ended, and a round is one server step. Events in, commands out;
no sockets, no clock, no randomness.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, overload

from keyhole.training.buffering import Buffering

__all__ = ["CountIn", "Ended", "LeaveOut", "Start", "Started", "StreamMachine", "WhyStep"]

_PATIENCE = 100  # clients per update waited for, before a round counts as one with nobody left

WhyStep: TypeAlias = Literal["goal", "everyone"]
"""Why a round has closed: with a step, or without one where clients only ever drop out or nobody is
left to start."""


@dataclass(frozen=True)
class Started:
    """So many clients have started; fewer than were to, where no more are left."""

    clients: int


@dataclass(frozen=True)
class Ended:
    """A client has ended its part.

    Args:
        version: the step whose slices it was given.
        has_sent: whether an update came of it.
    """

    version: int
    has_sent: bool


@dataclass(frozen=True)
class CountIn:
    """The update counts, so many steps old."""

    staleness: int


@dataclass(frozen=True)
class LeaveOut:
    """Nothing came of it, or the update is too old to count."""

    is_stale: bool


@dataclass(frozen=True)
class Start:
    """So many more clients are to start."""

    clients: int


class StreamMachine:
    """One asynchronous round, from one server step to the next.

    Args:
        buffering: how rounds go.
        step: steps that the server has made.
        at_work: clients that are under way from earlier rounds.

    Attributes:
        closed: why the round has closed; None while it goes on. What ends later belongs to the
            next.

    >>> machine = StreamMachine(Buffering(concurrency=2, goal=1), step=3, at_work=0)
    >>> machine.fill()
    Start(clients=2)
    >>> machine.handle(Started(2))
    >>> machine.handle(Ended(version=1, has_sent=True))
    CountIn(staleness=2)
    >>> machine.closed
    'goal'
    """

    def __init__(self, buffering: Buffering, step: int, at_work: int) -> None:
        self._buffering = buffering
        self._step = step
        self._at_work = at_work
        self._counted = 0
        self._ended = 0
        self.closed: WhyStep | None = None

    @property
    def counted(self) -> int:
        """Updates that count so far."""
        return self._counted

    def fill(self) -> Start:
        """How many clients are to start now, so that as many are at work as should be."""
        return Start(max(0, self._buffering.concurrency - self._at_work))

    @overload
    def handle(self, event: Started) -> None: ...

    @overload
    def handle(self, event: Ended) -> CountIn | LeaveOut: ...

    def handle(self, event: Started | Ended) -> CountIn | LeaveOut | None:
        """Takes note of what has happened; returns whether an update counts."""
        if isinstance(event, Started):
            self._at_work += event.clients
            if not self._at_work:
                self.closed = "everyone"
            return None
        return self._end(event)

    def _end(self, event: Ended) -> CountIn | LeaveOut:
        self._at_work -= 1
        self._ended += 1
        age = self._step - event.version
        is_stale = event.has_sent and age > self._buffering.most_staleness
        counts = event.has_sent and not is_stale
        self._counted += counts
        if self._counted >= self._buffering.goal:
            self.closed = "goal"
        elif self._ended >= _PATIENCE * self._buffering.goal:
            self.closed = "everyone"
        return CountIn(age) if counts else LeaveOut(is_stale)
