"""Decides whose update counts and when a round closes, as state machines.

What drives a round (the simulation in process or on Ray, the slice service, Flower) tells the
machine what happened and when, and reads from it what became of each client. A machine has no
socket, no clock and no randomness. Time is monotonic seconds of one process.

    open --(goal reached, or everyone has answered, or time is up)--> closed

`RoundMachine` is a synchronous round. `StreamMachine` is an asynchronous one, which is one server
step: clients start whenever others have ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal, TypeAlias

import numpy as np

from keyhole.errors import InputError
from keyhole.sampling import Cohorts, Outcome

Why: TypeAlias = Literal["goal", "time", "everyone"]
"""Why a round closed: enough updates, no more time, or nobody left to wait for."""


@dataclass(frozen=True)
class Terms:
    """When a round closes.

    Args:
        goal: updates that close it; with 0 it closes at once.
        seconds: after which it closes with what has arrived.
    """

    goal: int
    seconds: float = inf

    def __post_init__(self) -> None:
        if self.goal < 0 or not self.seconds > 0:
            raise InputError(
                f"a round could never close: got goal {self.goal}, {self.seconds} seconds; "
                "expected a goal from 0, and seconds above 0; choose other terms"
            )


def terms_of(cohorts: Cohorts, asked: Sequence[int], seconds: float = inf) -> Terms:
    """Returns when a round with these clients closes: all of them are waited for unless more were
    asked than the round needs."""
    goal = min(cohorts.size, len(asked)) if cohorts.over_selection > 1 else len(asked)
    return Terms(goal, seconds)


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
    """A client has answered with what cannot be added up, or says that it cannot answer.

    Args:
        is_empty: it had nothing to train on.
    """

    client: int
    now: float = 0.0
    is_empty: bool = False


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


class RoundMachine:
    """One synchronous round.

    Args:
        asked: the clients, those asked beyond the goal included.

    >>> machine = RoundMachine(Terms(goal=1, seconds=60), asked=[4, 9], now=0.0)
    >>> machine.handle(Answered(9, now=2.0))
    >>> machine.closed, machine.outcomes
    ('goal', {4: 'late', 9: 'sent'})
    """

    def __init__(self, terms: Terms, asked: Sequence[int], now: float = 0.0) -> None:
        self.terms = terms
        self.asked = tuple(asked)
        self.deadline = now + terms.seconds
        self.closed: Why | None = None
        self._taken: list[int] = []
        self._outcomes: dict[int, Outcome | None] = dict.fromkeys(asked)  # None: still at work
        self._reached: set[int] = set()
        self._at_work = len(self._outcomes)
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
    def outcomes(self) -> dict[int, Outcome]:
        """What became of everyone asked, in the order asked; nobody's is open once it is closed."""
        return {
            client: outcome for client, outcome in self._outcomes.items() if outcome is not None
        }

    def handle(self, event: Event) -> None:
        """Takes note of an event.

        What is past the deadline closes the round before it counts itself: an answer that is seen
        too late is late, however the driver was held up. Clients that were not asked do not count.
        """
        if self.closed is None and event.now >= self.deadline:
            self._close("time")
        if isinstance(event, Elapsed) or event.client not in self._outcomes:
            return
        if self.closed is None:
            self._hear(event)
        elif isinstance(event, Answered) and self._outcomes[event.client] != "sent":
            self._outcomes[event.client] = "late"

    def _hear(self, event: Reached | Answered | Refused | Dropped) -> None:
        """Takes note of what a client that was asked did while the round is open."""
        outcome = self._outcomes[event.client]
        if isinstance(event, Reached):
            self._reached.add(event.client)
            return
        if outcome in ("sent", "refused", "empty"):
            return  # a second answer
        if outcome is None:
            self._at_work -= 1
        elif isinstance(event, Dropped):
            return  # it was known to be lost; who was thought lost may still answer
        if isinstance(event, Answered):
            self._outcomes[event.client] = "sent"
            self._taken.append(event.client)
        elif isinstance(event, Refused):
            self._outcomes[event.client] = "empty" if event.is_empty else "refused"
        else:
            self._outcomes[event.client] = self._lost(event.client)
        self._close_if_done()

    def _lost(self, client: int) -> Outcome:
        return "lost_after" if client in self._reached else "lost_before"

    def _close_if_done(self) -> None:
        if len(self._taken) >= self.terms.goal:
            self._close("goal")
        elif not self._at_work:
            self._close("everyone")

    def _close(self, why: Why) -> None:
        self.closed = why
        for client, outcome in self._outcomes.items():
            if outcome is None:  # after the goal, others would still answer; later they would not
                self._outcomes[client] = "late" if why == "goal" else self._lost(client)
        self._at_work = 0


_PATIENCE = 100  # clients per update waited for, before a round counts as one with nobody left

WhyStep: TypeAlias = Literal["goal", "everyone"]
"""Why a round has closed: with a step, or without one where clients only ever drop out or nobody is
left to start."""


def fade(staleness: int) -> float:
    """Weighs an update by its age: 1 / sqrt(1 + s), as Nguyen et al. do."""
    return float((1.0 + staleness) ** -0.5)


def no_delay(_: np.random.Generator) -> float:
    """Returns 0 seconds: every client answers at once."""
    return 0.0


def exponential(rng: np.random.Generator) -> float:
    """Clients take a random time of mean 1: most are quick, some take long."""
    return float(rng.exponential())


@dataclass(frozen=True)
class Buffering:
    """How asynchronous rounds go.

    Args:
        concurrency: clients at work at any time.
        goal: updates that a step waits for.
        max_staleness: an update older than this many steps is left out.
        weight: staleness -> factor of an update.
        duration: rng -> how long a client takes, 0 or more, in any unit.

    Raises:
        InputError: a number is out of range.
    """

    concurrency: int
    goal: int
    max_staleness: int = 20
    weight: Callable[[int], float] = fade
    duration: Callable[[np.random.Generator], float] = no_delay

    def __post_init__(self) -> None:
        for name, minimum in (("concurrency", 1), ("goal", 1), ("max_staleness", 0)):
            if getattr(self, name) < minimum:
                raise InputError(
                    f"{name} is out of range: got {getattr(self, name)}; expected {minimum} or "
                    "more; choose another"
                )

    def draw_duration(self, rng: np.random.Generator) -> float:
        """Returns how long a client takes; refuses what is no length of time."""
        drawn = float(self.duration(rng))
        if not 0 <= drawn < float("inf"):
            raise InputError(
                f"a client's duration is out of range: got {drawn}; expected a finite number from "
                "0; let duration return how long a client takes"
            )
        return drawn


class StreamMachine:
    """One asynchronous round, from one server step to the next.

    Args:
        at_work: clients that are under way from earlier rounds.

    Attributes:
        counted: updates that count so far.
        closed: why the round has closed; None while it goes on. What ends later belongs to the
            next.

    >>> machine = StreamMachine(Buffering(concurrency=2, goal=1), step=3, at_work=0)
    >>> machine.vacant
    2
    >>> machine.start(2)
    >>> machine.end(version=1, has_sent=True)
    2
    >>> machine.closed
    'goal'
    """

    def __init__(self, buffering: Buffering, step: int, at_work: int) -> None:
        self._buffering = buffering
        self._step = step
        self._at_work = at_work
        self._ended = 0
        self.counted = 0
        self.closed: WhyStep | None = None

    @property
    def vacant(self) -> int:
        """How many clients are to start now, so that as many are at work as should be."""
        return max(0, self._buffering.concurrency - self._at_work)

    def start(self, clients: int) -> None:
        """Takes note of clients that have started: fewer than were to, where no more are left."""
        self._at_work += clients
        if not self._at_work:
            self.closed = "everyone"

    def end(self, version: int, has_sent: bool) -> int | None:
        """Takes note of a client that was given the slices of step `version`, and has ended.

        Returns how many steps old its update is; None where none came, or it is too old to count.
        """
        self._at_work -= 1
        self._ended += 1
        age = self._step - version
        counts = has_sent and age <= self._buffering.max_staleness
        self.counted += counts
        if self.counted >= self._buffering.goal:
            self.closed = "goal"
        elif self._ended >= _PATIENCE * self._buffering.goal:
            self.closed = "everyone"
        return age if counts else None
