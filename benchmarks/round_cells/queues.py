"""Servers in simulated time: requests wait for a core, then for the line, first come, first served.

When an answer will have been sent is known as soon as its request arrives, so a queue needs no
events of its own.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from heapq import heapreplace

from keyhole.service.limits import Limits

WAITING = Limits().waiting  # requests that one worker lets wait; it has one worker for each core


@dataclass
class Queue:
    """One server.

    Args:
        cores: that answer.
        gbit: of its line, a second.
        since: no work is done before.
    """

    cores: int
    gbit: float
    since: float = 0.0
    cpu_seconds: float = field(default=0.0, init=False)
    line_seconds: float = field(default=0.0, init=False)
    longest: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._free = [self.since] * self.cores
        self._line = self.since
        self._ends: deque[float] = deque()
        self._limit = WAITING * self.cores

    def serve(self, now: float, cpu: float, size: int) -> float | None:
        """When a request that arrives now is answered; None if too many wait, and it is refused.

        Args:
            now: seconds; never less than before.
            cpu: seconds of a core that it takes.
            size: bytes over the line.
        """
        ends = self._ends
        while ends and ends[0] <= now:
            ends.popleft()
        if len(ends) >= self._limit:
            return None
        done = max(now, self._free[0]) + cpu
        heapreplace(self._free, done)
        sending = 8e-9 * size / self.gbit
        self._line = end = max(done, self._line) + sending
        self.cpu_seconds += cpu
        self.line_seconds += sending
        ends.append(end)
        if len(ends) > self.longest:
            self.longest = len(ends)
        return end

    def use(self, seconds: float) -> dict[str, float]:
        """Share of a time that its cores and its line were busy."""
        return {
            "CPU": self.cpu_seconds / self.cores / seconds,
            "line": self.line_seconds / seconds,
        }
