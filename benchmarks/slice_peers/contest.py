"""Contestants take turns under the same load; what counts is work per CPU-second of the server."""

from __future__ import annotations

import multiprocessing
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.pool import Pool

from slice_peers.load import Job, Outcome, ask, http_length, prepare, run
from slice_peers.processes import cpu_seconds

SAMPLES, SECONDS, WARM_UP, CONNECTIONS = 5, 0.6, 0.1, 16
LOAD_CORE = 1


@dataclass(frozen=True)
class Contestant:
    """A server under load, and what it is asked."""

    pid: int
    job: Job


@dataclass(frozen=True)
class Score:
    """Medians over the samples.

    Args:
        per_cpu_second: clients answered for each CPU-second of the server.
        per_second: clients answered in a second.
        answer_bytes: of one client, head included.
    """

    per_cpu_second: float
    per_second: float
    answer_bytes: float


@contextmanager
def load_process() -> Iterator[Pool]:
    """A process on a core of its own that puts load on servers."""
    context = multiprocessing.get_context("forkserver")
    with context.Pool(1, prepare, (LOAD_CORE,)) as pool:
        yield pool


def http_contestant(server: tuple[int, int], requests: Sequence[bytes]) -> Contestant:
    """Asks everything once, to warm the server up and to learn how long answers are."""
    answers = [len(ask(server[0], request, http_length)) for request in requests]
    return contestant(server, requests, answers)


def contestant(
    server: tuple[int, int], requests: Sequence[bytes], answers: Sequence[int]
) -> Contestant:
    """A server whose answers have a known length."""
    port, pid = server
    return Contestant(pid, Job(port, list(requests), list(answers), CONNECTIONS, SECONDS))


def burst(pool: Pool, one: Contestant) -> tuple[Outcome, float]:
    """One run, and the CPU time that it took the server."""
    before = cpu_seconds(one.pid)
    outcome = pool.apply(run, (one.job,))
    return outcome, cpu_seconds(one.pid) - before


def compare(
    pool: Pool, contestants: Mapping[str, Contestant], seconds: float = SECONDS
) -> dict[str, Score]:
    """Loads each in turn: a short warm-up, then five samples."""
    for one in contestants.values():
        burst(pool, _lasting(one, WARM_UP))
    taken: dict[str, list[tuple[Outcome, float]]] = {name: [] for name in contestants}
    for _ in range(SAMPLES):
        for name, one in contestants.items():
            taken[name].append(burst(pool, _lasting(one, seconds)))
    return {name: _score(name, samples) for name, samples in taken.items()}


def _lasting(one: Contestant, seconds: float) -> Contestant:
    return replace(one, job=replace(one.job, seconds=seconds))


def _score(name: str, samples: Sequence[tuple[Outcome, float]]) -> Score:
    if any(outcome.errors for outcome, _ in samples):
        raise RuntimeError(f"{name} left requests without an answer")
    return Score(
        _median(samples, lambda outcome, cpu: outcome.answered / cpu),
        _median(samples, lambda outcome, _: outcome.answered / outcome.wall),
        _median(samples, lambda outcome, _: outcome.bytes / outcome.answered),
    )


def _median(
    samples: Sequence[tuple[Outcome, float]], value: Callable[[Outcome, float], float]
) -> float:
    return statistics.median(value(outcome, cpu) for outcome, cpu in samples)
