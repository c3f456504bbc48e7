"""What rounds take: wall time, and CPU time, of one process on one core or of all processes.

Ray's own processes are below the one that started it, so what they take is counted for rounds on
Ray, and not for rounds in one process. The first rounds of a contestant do not count.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from slice_peers.processes import cpu_seconds

WARM_UP = 2


@dataclass(frozen=True)
class Spent:
    """Seconds of one round, medians; CPU time is counted in ticks of 10 ms."""

    cpu: float
    wall: float
    rounds: int


def spent_by(
    contestants: Mapping[str, Callable[[], object]], rounds: int, alone: str = ""
) -> dict[str, Spent]:
    """Lets contestants take turns, one round each.

    Args:
        contestants: what to call, by name.
        rounds: that count, of each.
        alone: the name of the one that works in this process, on one core.
    """
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in contestants}
    for turn in range(WARM_UP + rounds):
        for name, work in contestants.items():
            sample = _sample_alone(work) if name == alone else _sample(work, _all_processes)
            if turn >= WARM_UP:
                taken[name].append(sample)
    return {name: _median(samples) for name, samples in taken.items()}


def _sample(work: Callable[[], object], cpu_time: Callable[[], float]) -> tuple[float, float]:
    cpu, wall = cpu_time(), time.perf_counter()
    work()
    wall = time.perf_counter() - wall
    return cpu_time() - cpu, wall


def _sample_alone(work: Callable[[], object]) -> tuple[float, float]:
    with _one_core():
        return _sample(work, time.process_time)


def _all_processes() -> float:
    return cpu_seconds(os.getpid())


@contextmanager
def _one_core() -> Iterator[None]:
    """All threads of this process share a core: XLA has one beside the one that calls it."""
    cores = os.sched_getaffinity(0)
    _settle({min(cores)})
    try:
        yield
    finally:
        _settle(cores)


def _settle(cores: set[int]) -> None:
    for thread in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(thread.name), cores)


def _median(samples: list[tuple[float, float]]) -> Spent:
    cpu, wall = (statistics.median(side) for side in zip(*samples, strict=True))
    return Spent(cpu, wall, len(samples))
