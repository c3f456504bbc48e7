"""What rounds take: wall time, and the CPU time of this process and all that it has started.

Ray's own processes are below the one that started it, so what they take is counted. The first
rounds of a contestant are not.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from slice_peers.processes import cpu_seconds

WARM_UP = 2


@dataclass(frozen=True)
class Spent:
    """Seconds of one round, medians; CPU time is counted in ticks of 10 ms."""

    cpu: float
    wall: float
    rounds: int


def spent_by(
    contestants: Mapping[str, Callable[[], object]], rounds: int, warm_up: int = WARM_UP
) -> dict[str, Spent]:
    """Lets contestants take turns, one round each."""
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in contestants}
    for turn in range(warm_up + rounds):
        for name, work in contestants.items():
            sample = _sample(work)
            if turn >= warm_up:
                taken[name].append(sample)
    return {name: _median(samples) for name, samples in taken.items()}


def _sample(work: Callable[[], object]) -> tuple[float, float]:
    cpu, wall = cpu_seconds(os.getpid()), time.perf_counter()
    work()
    wall = time.perf_counter() - wall
    return cpu_seconds(os.getpid()) - cpu, wall


def _median(samples: list[tuple[float, float]]) -> Spent:
    cpu, wall = (statistics.median(side) for side in zip(*samples, strict=True))
    return Spent(cpu, wall, len(samples))
