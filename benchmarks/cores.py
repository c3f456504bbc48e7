"""Clients per second on all cores over those on one: training alone, as a round drives it.

    python benchmarks/cores.py [--check] [--quick] [--json]

The same cohort trains with one thread and with one for each core, in turns. Wall time decides here:
whether cores work at the same time does not show in CPU time. So the machine must be quiet; what
the threads were given of it stands beside the ratio, as CPU seconds per second. That the updates
have the same bytes is checked in every turn.
"""

from __future__ import annotations

import hashlib
import os
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np

from harness import Goal, finish, machine_facts, parser, progress
from keyhole import tree
from keyhole.arrays import keep_freed_memory
from keyhole.experiments.experiment import Experiment
from keyhole.experiments.opening import open_data
from keyhole.experiments.specs import spec_of
from keyhole.primitives.report import Report
from keyhole.rounds.clients import Jobs, choose_all
from keyhole.rounds.cores import Cores, use_one_thread
from keyhole.rounds.workers import count_cores

RESULTS = Path(__file__).parent / "results" / "cores.json"
TURNS, AT_LEAST = 5, 1.7
TASKS = {"emnist_cnn": 16, "emnist_2nn": 64, "so_word": 8, "so_tag": 64, "movies": 64}
HELD_TO_GOAL = "emnist_cnn", "emnist_2nn", "so_word"


@dataclass(frozen=True)
class Cell:
    """Clients per second of wall time, medians, and what all threads were given: CPU seconds per
    second."""

    task: str
    clients: int
    cores: int
    one: float
    all: float
    ratio: float
    given: float

    def goals(self) -> list[Goal]:
        """Two cores train 1.7 times as many clients; more cores in proportion."""
        if self.task not in HELD_TO_GOAL or self.cores < 2:
            return []
        at_least = 1 + (AT_LEAST - 1) * (self.cores - 1)
        return [Goal(f"{self.task}: clients per second, all cores over one", self.ratio, at_least)]


def measure_cell(task: str, count: int) -> Cell:
    """Trains a cohort in turns; the first one compiles."""
    spec = spec_of(task)
    experiment = Experiment(spec, open_data(spec))
    run = experiment.start(0, None)
    clients, layout = experiment.clients, run.state.layout
    asked = list(range(min(count, clients.count)))
    keys = dict(zip(asked, choose_all(clients, asked, 0, layout, run.parts), strict=True))
    jobs = Jobs((0, 0, 0), keys, lambda client: run.state.lend(keys[client]))

    def train(cores: int) -> tuple[str, float, float]:
        wall, cpu, digest = time.perf_counter(), time.process_time(), hashlib.sha256()
        for report in Cores(cores)(clients, jobs):
            _note(digest, report)
        return (
            digest.hexdigest(),
            time.perf_counter() - wall,
            time.process_time() - cpu,
        )

    sides = (1, count_cores())
    for cores in sides:
        train(cores)
    turns = [[train(cores) for cores in sides] for _ in range(TURNS)]
    if len({digest for turn in turns for digest, _, _ in turn}) > 1:
        raise SystemExit(f"{task}: updates differ by the number of threads")
    one, many = (statistics.median(turn[side][1] for turn in turns) for side in (0, 1))
    ratio = statistics.median(turn[0][1] / turn[1][1] for turn in turns)
    given = statistics.median(turn[1][2] / turn[1][1] for turn in turns)
    return Cell(task, len(asked), sides[1], len(asked) / one, len(asked) / many, ratio, given)


def _note(digest: hashlib._Hash, report: Report) -> None:
    for path, leaf in tree.flatten(report.update).items():
        digest.update(path.encode())
        digest.update(np.ascontiguousarray(leaf).data)


def main() -> int:
    """Measures, prints, and checks what was promised."""
    use_one_thread()
    keep_freed_memory()
    flags = parser(__doc__ or "", RESULTS).parse_args()
    facts = machine_facts()
    print(f"{facts}, load {os.getloadavg()[0]:.1f}")
    cells = []
    for task, count in TASKS.items():
        if flags.quick and task not in ("emnist_2nn", "so_tag"):
            continue
        progress(task)
        cell = measure_cell(task, count)
        cells.append(cell)
        print(
            f"{task:<11} {cell.one:8.1f} clients a second on one core, {cell.all:8.1f} on"
            f" {cell.cores}: {cell.ratio:.2f} times; threads were given {cell.given:.2f} cores"
        )
    return finish(flags, "cores", cells, [goal for cell in cells for goal in cell.goals()])


if __name__ == "__main__":
    sys.exit(main())
