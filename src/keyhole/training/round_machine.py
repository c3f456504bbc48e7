"""The round as a state machine: events in, commands out; no sockets, no clock, no randomness.

Whoever drives a round (the simulation in process or on Ray, the slice service, Flower) tells the
machine what happened and when, and does what it says. Which client counts is decided here alone.

    open --(goal reached)----------> closed, a sum of those taken
      |----(everyone has answered)-> closed, likewise
      '----(time is up)------------> closed, or given up where fewer than the least are here

Time is monotonic seconds of one process: what the clock on the wall does is of no consequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal, TypeAlias

from keyhole.errors import InputError
from keyhole.training.fate import Fate

__all__ = [
    "Answered",
    "Close",
    "Command",
    "Discard",
    "Dropped",
    "Elapsed",
    "Event",
    "GiveUp",
    "Reached",
    "Refused",
    "RoundMachine",
    "Take",
    "Terms",
    "Why",
]

Why: TypeAlias = Literal["goal", "time", "everyone"]
"""Why a round closed: enough updates, no more time, or nobody left to wait for."""


@dataclass(frozen=True)
class Terms:
    """When a round closes.

    Args:
        goal: updates that close it; with 0 it closes at once.
        least: with fewer updates when it closes, it is given up: the server makes no step.
        seconds: after which it closes with what has arrived.

    Raises:
        InputError: a number is out of range.
    """

    goal: int
    least: int = 1
    seconds: float = inf

    def __post_init__(self) -> None:
        if self.goal < 0 or self.least < 0 or not self.seconds > 0:
            raise InputError(
                "a round could never close",
                got=f"goal {self.goal}, least {self.least}, {self.seconds} seconds",
                allowed="a goal and a least number from 0, and seconds above 0",
                fix="choose other terms",
            )


@dataclass(frozen=True)
class Reached:
    """A client has its slices."""

    client: int
    now: float = 0.0


@dataclass(frozen=True)
class Answered:
    """A client's update is here."""

    client: int
    now: float = 0.0


@dataclass(frozen=True)
class Refused:
    """A client has answered with what cannot be added up, or says that it cannot answer."""

    client: int
    now: float = 0.0


@dataclass(frozen=True)
class Dropped:
    """A client is known to be gone."""

    client: int
    now: float = 0.0


@dataclass(frozen=True)
class Elapsed:
    """Nothing but time has passed."""

    now: float


Event: TypeAlias = Reached | Answered | Refused | Dropped | Elapsed


@dataclass(frozen=True)
class Take:
    """The update of this client counts."""

    client: int


@dataclass(frozen=True)
class Discard:
    """The answer of this client does not count: it is late, a second one, or was not asked for."""

    client: int
    why: Literal["late", "duplicate", "unknown"]


@dataclass(frozen=True)
class Close:
    """The round takes no more; those taken are to be added up."""

    why: Why


@dataclass(frozen=True)
class GiveUp:
    """The round takes no more, and too few were taken for a step."""

    why: Why
    taken: int


Command: TypeAlias = Take | Discard | Close | GiveUp


class RoundMachine:
    """One synchronous round.

    Args:
        terms: when it closes.
        asked: the clients, those asked beyond the goal included.
        now: when it opened.

    >>> machine = RoundMachine(Terms(goal=1, seconds=60), asked=[4, 9], now=0.0)
    >>> machine.handle(Answered(9, now=2.0))
    (Take(client=9), Close(why='goal'))
    >>> machine.handle(Answered(4, now=3.0))
    (Discard(client=4, why='late'),)
    >>> machine.fates
    {4: 'late', 9: 'sent'}
    """

    def __init__(self, terms: Terms, asked: Sequence[int], now: float = 0.0) -> None:
        self.terms = terms
        self.asked = tuple(asked)
        self.deadline = now + terms.seconds
        self.closed: Why | None = None
        self._taken: list[int] = []
        self._fates: dict[int, Fate | None] = dict.fromkeys(asked)  # None: still at work
        self._reached: set[int] = set()
        self._at_work = len(self._fates)
        if terms.goal == 0 or not self._at_work:
            self._close("goal" if terms.goal == 0 else "everyone")

    @property
    def taken(self) -> tuple[int, ...]:
        """Clients whose updates count, in the order in which they arrived."""
        return tuple(self._taken)

    @property
    def missing(self) -> int:
        """How many more updates reach the goal."""
        return max(0, self.terms.goal - len(self._taken))

    @property
    def is_given_up(self) -> bool:
        """Whether the round closed with too few for a step."""
        return self.closed is not None and len(self._taken) < self.terms.least

    @property
    def fates(self) -> dict[int, Fate]:
        """What became of everyone asked, in the order asked; nobody's is open once it is closed."""
        return {client: fate for client, fate in self._fates.items() if fate is not None}

    def handle(self, event: Event) -> tuple[Command, ...]:
        """Takes note of an event; returns what is to be done, in order.

        What is past the deadline closes the round before it counts itself: an answer that is seen
        too late is late, however the driver was held up.
        """
        closing = self._close("time") if self.closed is None and self._is_over(event.now) else ()
        if isinstance(event, Elapsed):
            return closing
        if event.client not in self._fates:
            return (*closing, Discard(event.client, "unknown"))
        return (*closing, *self._hear(event))

    def _hear(self, event: Reached | Answered | Refused | Dropped) -> tuple[Command, ...]:
        """Takes note of what a client that was asked did."""
        if self.closed is not None:
            return self._hear_after(event)
        fate = self._fates[event.client]
        if isinstance(event, Reached):
            self._reached.add(event.client)
            return ()
        if fate in ("sent", "refused"):
            is_answer = isinstance(event, Answered)
            return (Discard(event.client, "duplicate"),) if is_answer else ()
        if fate is None:
            self._at_work -= 1
        elif isinstance(event, Dropped):
            return ()  # it was known to be lost; whoever was thought lost may still answer
        if isinstance(event, Answered):
            self._fates[event.client] = "sent"
            self._taken.append(event.client)
            return (Take(event.client), *self._close_if_done())
        self._fates[event.client] = (
            "refused" if isinstance(event, Refused) else self._lost(event.client)
        )
        return self._close_if_done()

    def _hear_after(self, event: Reached | Answered | Refused | Dropped) -> tuple[Command, ...]:
        """A closed round only tells late answers from second ones."""
        if not isinstance(event, Answered):
            return ()
        if self._fates[event.client] == "sent":
            return (Discard(event.client, "duplicate"),)
        self._fates[event.client] = "late"
        return (Discard(event.client, "late"),)

    def _lost(self, client: int) -> Fate:
        return "lost_after" if client in self._reached else "lost_before"

    def _is_over(self, now: float) -> bool:
        return now >= self.deadline

    def _close_if_done(self) -> tuple[Command, ...]:
        if len(self._taken) >= self.terms.goal:
            return self._close("goal")
        return self._close("everyone") if not self._at_work else ()

    def _close(self, why: Why) -> tuple[Command, ...]:
        self.closed = why
        for client, fate in self._fates.items():
            if fate is None:  # after the goal, others would still answer; after the deadline, not
                self._fates[client] = "late" if why == "goal" else self._lost(client)
        self._at_work = 0
        return (GiveUp(why, len(self._taken)) if self.is_given_up else Close(why),)
