"""The coordinator: which device takes part in a round, and when the round closes.

A state machine without sockets and without a clock of its own: whoever calls passes the time, and
state goes in and comes out.

    open --(goal reached)--> closed
      \\---(time is up)-----> closed

Time is monotonic seconds of one process: what the clock on the wall does is of no consequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import inf
from typing import Literal, TypeAlias

from keyhole.errors import InputError
from keyhole.serving.tables import Current

__all__ = ["Admission", "Admit", "Gathering", "Pace", "Terms", "Wait", "admit", "gather", "opened"]


@dataclass(frozen=True)
class Admission:
    """A device takes part in a round.

    Args:
        round: its identifier.
        number: t.
        fetch_after: seconds to wait before the first request, so that not all come at once.
    """

    round: str
    number: int
    fetch_after: float


@dataclass(frozen=True)
class Wait:
    """A device comes back in so many seconds."""

    seconds: float


@dataclass(frozen=True)
class Pace:
    """How devices are spread over time.

    Args:
        spread: seconds over which the devices of a round begin to fetch.
        again: seconds, on average, until a device without a round asks again.

    Raises:
        InputError: a number is negative, or `again` is 0.
    """

    spread: float = 0.0
    again: float = 5.0

    def __post_init__(self) -> None:
        if not (0 <= self.spread < inf and 0 < self.again < inf):
            raise InputError(
                "the pace of devices is out of range",
                got=f"spread {self.spread} s, again {self.again} s",
                allowed="a spread from 0, and again above 0",
                fix="choose other seconds",
            )


Admit: TypeAlias = Callable[[str, Current | None, bool], Admission | Wait]
"""`(device, current round, whether it has sent its update) -> what it is told`."""


def admit(
    device: str,
    current: Current | None,
    has_sent: bool,
    pace: Pace,
    uniform: Callable[[], float],
) -> Admission | Wait:
    """Tells a device that checks in whether it takes part.

    Args:
        device: its name.
        current: the newest round; None before the first.
        has_sent: whether its update of that round is here already.
        pace: how devices are spread.
        uniform: draws from [0, 1).
    """
    is_open = current is not None and current.phase == "open"
    if current is None or not is_open or has_sent or not _takes_part(device, current):
        return Wait(pace.again * (0.5 + uniform()))
    return Admission(current.round, current.number, pace.spread * uniform())


def _takes_part(device: str, current: Current) -> bool:
    return current.cohort is None or device in current.cohort


@dataclass(frozen=True)
class Terms:
    """When a round closes.

    Args:
        goal: updates that close it, 1 or more.
        seconds: after which it closes with what has arrived.

    Raises:
        InputError: a number is out of range.
    """

    goal: int
    seconds: float = inf

    def __post_init__(self) -> None:
        if self.goal < 1 or not self.seconds > 0:
            raise InputError(
                "a round could never close",
                got=f"goal {self.goal}, {self.seconds} seconds",
                allowed="a goal from 1, and seconds above 0",
                fix="choose other terms",
            )


@dataclass(frozen=True)
class Gathering:
    """What has arrived in a round.

    Args:
        since: when the round was opened.
        arrived: devices, in the order in which their updates were seen.
        closed: why it takes no more; None while it is open.
    """

    since: float
    arrived: tuple[str, ...] = ()
    closed: Literal["goal", "time"] | None = None


def opened(now: float) -> Gathering:
    """A round that opens now."""
    return Gathering(now)


def gather(state: Gathering, terms: Terms, here: Iterable[str], now: float) -> Gathering:
    """Takes note of the updates that are here; closes the round once its terms are met.

    Args:
        state: of the round; a closed one stays as it is.
        terms: of the round.
        here: all devices whose update is here, in any order, those already known included.
        now: monotonic seconds.

    >>> state = gather(opened(0.0), Terms(goal=2, seconds=60), ["b"], now=1.0)
    >>> gather(state, Terms(goal=2, seconds=60), ["a", "b"], now=2.0)
    Gathering(since=0.0, arrived=('b', 'a'), closed='goal')
    """
    if state.closed is not None:
        return state
    known = set(state.arrived)
    arrived = (*state.arrived, *sorted(set(here) - known))
    if len(arrived) >= terms.goal:
        return replace(state, arrived=arrived, closed="goal")
    is_over = now - state.since >= terms.seconds
    return replace(state, arrived=arrived, closed="time" if is_over else None)
