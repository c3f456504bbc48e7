"""A stampede on slices that are expensive to compute: once for each key, or for each request."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.pool import Pool
from pathlib import Path

import numpy as np

from harness import Goal, progress
from slice_peers.contest import Contestant, burst
from slice_peers.load import Job, ask, http_length
from slice_peers.processes import free_port, script, serving
from slice_peers.published import RECORD, current_round, query

CLIENTS, KEYS_PER_CLIENT, NUM_KEYS = 1000, 200, 10**5
OF_NAIVE = 0.55


@dataclass(frozen=True)
class Cell:
    """Medians over the samples; evaluations are the most that were seen."""

    requested: int
    distinct: int
    evaluations: int
    cpu: float
    wall: float
    naive_evaluations: int
    naive_cpu: float
    naive_wall: float

    def goals(self) -> list[Goal]:
        once = Goal(
            "stampede: distinct keys over evaluations", self.distinct / self.evaluations, 1.0
        )
        cpu = self.cpu / self.naive_cpu
        return [once, Goal("stampede: naive CPU over ours", 1 / cpu, 1 / OF_NAIVE)]


def measure(pool: Pool, root: Path, samples: int) -> Cell:
    """Both policies in turns, every time in a new process that has computed nothing yet."""
    keys = _zipf_keys()
    taken: dict[str, list[tuple[int, float, float]]] = {"slab": [], "naive": []}
    for sample in range(samples):
        progress(f"stampede, {sample + 1} of {samples}")
        for policy, found in taken.items():
            found.append(_stampede(pool, policy, root / "counts", keys))
    evaluations = {policy: max(each[0] for each in found) for policy, found in taken.items()}
    median = {
        policy: [statistics.median(each[at] for each in found) for at in (1, 2)]
        for policy, found in taken.items()
    }
    return Cell(
        CLIENTS * KEYS_PER_CLIENT,
        len(np.unique(np.concatenate(keys))),
        evaluations["slab"],
        *median["slab"],
        evaluations["naive"],
        *median["naive"],
    )


def _zipf_keys() -> list[np.ndarray]:
    """The key of rank r is asked for in proportion to 1 / r."""
    rng = np.random.default_rng(7)
    weights = 1 / np.arange(1, NUM_KEYS + 1)
    drawn = rng.choice(NUM_KEYS, (CLIENTS, KEYS_PER_CLIENT), p=weights / weights.sum())
    return list(rng.permutation(NUM_KEYS)[drawn])


def _stampede(
    pool: Pool, policy: str, counts: Path, keys: Sequence[np.ndarray]
) -> tuple[int, float, float]:
    """Evaluations, CPU and wall seconds of a server whom all clients ask at once."""
    counts.write_bytes(bytes(4 * NUM_KEYS))
    port = free_port()
    with serving(script("service", policy, port, counts), port) as pid:
        name = current_round(port)
        # One key of the first client, so that what a process does once is not counted.
        warm = ask(port, query(name, 0, keys[0][:1]), http_length)
        requests = [query(name, 0, one) for one in keys]
        head = len(warm) - RECORD + len(str(KEYS_PER_CLIENT * RECORD)) - len(str(RECORD))
        answers = [head + KEYS_PER_CLIENT * RECORD] * len(requests)
        job = Job(port, requests, answers, connections=0, seconds=0)
        outcome, cpu = burst(pool, Contestant(pid, job))
        if outcome.errors:
            raise RuntimeError(f"{policy} left {outcome.errors} clients without slices")
    warm_up = 1 if policy == "naive" else 0
    return int(np.fromfile(counts, np.uint32).sum()) - warm_up, cpu, outcome.wall
