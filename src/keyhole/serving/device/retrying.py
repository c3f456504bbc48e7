"""Retrying: how often a device tries again, and how long it waits in between."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from keyhole.errors import DamageError, InputError, ServiceError

__all__ = ["Attempts", "Clock", "Retry", "jitter"]


@dataclass(frozen=True)
class Retry:
    """How a device tries again: exponential back-off with full jitter.

    The i-th wait is drawn from `[0, min(longest_wait, first_wait * 2^i)]`, so that devices which
    fail together do not come back together. Where the service says when to come back, that is the
    least wait, though never more than `longest_wait`.

    Args:
        attempts: how often a request is tried in a row without getting anywhere.
        first_wait: seconds.
        longest_wait: seconds.
        seed: of the jitter; None draws it from the system.
        tell: called with the reason of a failure, in words without a key, before the wait; also
            from several threads at once.

    Raises:
        InputError: a number is out of range.
    """

    attempts: int = 8
    first_wait: float = 0.5
    longest_wait: float = 60.0
    seed: int | None = None
    tell: Callable[[str], object] = lambda _: None

    def __post_init__(self) -> None:
        if self.attempts < 1 or not 0 <= self.first_wait <= self.longest_wait < inf:
            raise InputError(
                "retrying is out of range",
                got=f"{self.attempts} attempts, waits {self.first_wait} to {self.longest_wait} s",
                allowed="1 attempt or more, waits from 0 that do not shrink",
                fix="choose other numbers",
            )

    def wait(self, failures: int, after: float | None, uniform: float) -> float:
        """Seconds to wait after so many failures in a row, 1 or more.

        Args:
            failures: in a row.
            after: what the service asks for, in seconds, if it does.
            uniform: drawn from [0, 1).

        >>> Retry(first_wait=1.0).wait(3, None, 0.5), Retry(longest_wait=9).wait(1, 600, 0.5)
        (2.0, 9)
        """
        # Doublings beyond 63 would leave the floats; the longest wait is reached long before.
        drawn = uniform * min(self.longest_wait, self.first_wait * 2.0 ** min(failures - 1, 63))
        return min(self.longest_wait, drawn + (after or 0.0))


@dataclass(frozen=True)
class Clock:
    """How time passes; tests bring their own.

    Only differences of `monotonic` are used: what the clock on the wall does is of no consequence.
    """

    sleep: Callable[[float], object] = time.sleep
    monotonic: Callable[[], float] = time.monotonic


class Attempts:
    """The failures of one request in a row; waits after each, and gives up in the end.

    Args:
        what: is asked for, in words for the error; names no key.
        retry: how often, and how long to wait.
        uniform: draws from [0, 1).
        clock: to wait by.
        stop: once set, nothing is tried again.
    """

    def __init__(
        self,
        what: str,
        retry: Retry,
        uniform: Callable[[], float],
        clock: Clock,
        stop: threading.Event | None = None,
    ) -> None:
        self._what, self._retry, self._uniform = what, retry, uniform
        self._clock, self._stop = clock, stop
        self._failures = self._damages = 0

    def got_further(self) -> None:
        """A part of the answer is here: what failed before does not count any more, but for
        damage, which makes all parts worthless."""
        self._failures = 0

    def failed(
        self, reason: str, after: float | None = None, error: DamageError | None = None
    ) -> None:
        """Waits, if there is another attempt.

        Args:
            reason: why it failed.
            after: seconds that the service asks to wait.
            error: the damage, if that was it; raised instead of a ServiceError in the end.

        Raises:
            ServiceError: that was the last attempt, or the device is to stop.
        """
        self._failures += error is None
        self._damages += error is not None
        failures = self._failures + self._damages
        self._check_stop()
        if failures >= self._retry.attempts:
            raise error or ServiceError(
                f"no usable answer: {self._what}",
                got=f"{reason}, the last of {failures} failures in a row",
                allowed="an answer",
                fix="check that the service runs and can be reached, then try again",
            )
        self._retry.tell(reason)
        self._clock.sleep(self._retry.wait(failures, after, self._uniform()))
        self._check_stop()

    def _check_stop(self) -> None:
        if self._stop is not None and self._stop.is_set():
            raise ServiceError(
                f"stopped: {self._what}",
                got="a stop event",
                allowed="no stop before the answer",
                fix="take part again when there is time",
            )


def jitter(retry: Retry) -> Callable[[], float]:
    """Draws from [0, 1), from the seed of `retry` or from the system."""
    return random.Random(retry.seed).random
