"""What the benchmarks share: timing, the memcpy yardstick, goals, and how results are kept.

Contestants take turns, one sample each, so that noise on the machine meets all of them. CPU time
decides, since it can be compared on a busy machine; wall time is shown beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

SAMPLES = 5
MIN_SAMPLE_SECONDS = 0.02


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: medians over the samples, and how they were taken."""

    cpu: float
    wall: float
    samples: int
    calls_per_sample: int


@dataclass(frozen=True)
class Goal:
    """A value that must reach a bound."""

    name: str
    value: float
    at_least: float

    def is_met(self) -> bool:
        return self.value >= self.at_least

    def __str__(self) -> str:
        return f"{self.name}: {self.value:.2f}, goal {self.at_least:.2f}"


def measure(
    contestants: Mapping[str, Callable[[], object]], samples: Mapping[str, int] | None = None
) -> dict[str, Timing]:
    """Times each contestant in turn: warm-up, then samples of at least 20 ms each.

    Args:
        contestants: what to call, by name.
        samples: a smaller number of samples for those that take seconds; otherwise 5.

    Returns:
        The medians by name.
    """
    counts = {name: (samples or {}).get(name, SAMPLES) for name in contestants}
    calls = {name: _calls_per_sample(work, counts[name]) for name, work in contestants.items()}
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in contestants}
    for turn in range(max(counts.values())):
        for name, work in contestants.items():
            if turn < counts[name]:
                taken[name].append(_sample(work, calls[name]))
    return {name: _median(taken[name], calls[name]) for name in contestants}


def _calls_per_sample(work: Callable[[], object], samples: int) -> int:
    """Warms up and says how many calls fill a sample; a single-sample contestant is not warmed."""
    if samples == 1:
        return 1
    work()
    _, wall = _sample(work, 1)
    return max(1, round(MIN_SAMPLE_SECONDS / max(wall, 1e-9)))


def _sample(work: Callable[[], object], calls: int) -> tuple[float, float]:
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(calls):
        work()
    return (time.process_time() - cpu) / calls, (time.perf_counter() - wall) / calls


def _median(taken: list[tuple[float, float]], calls: int) -> Timing:
    cpu, wall = (statistics.median(side) for side in zip(*taken, strict=True))
    return Timing(cpu, wall, len(taken), calls)


def aligned_zeros(shape: tuple[int, ...], dtype: type = np.float32) -> np.ndarray:
    """Warm zeros that start on a cache line, which NumPy's large arrays do not."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.zeros(size + 64, np.uint8)
    memory.fill(0)  # touches every page
    start = -memory.ctypes.data % 64
    return memory[start : start + size].view(dtype).reshape(shape)


def memcpy(source: np.ndarray, target: np.ndarray) -> Callable[[], None]:
    """The yardstick: the same bytes from one warm array to another."""
    return lambda: np.copyto(target, source)


def machine_facts() -> dict[str, object]:
    """Processor, cores, date and commit, to stand beside every number."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor()


def _commit() -> str:
    """The commit, with + for uncommitted changes; 'none' outside a repository."""
    here = Path(__file__).parent
    command = ["git", "describe", "--always", "--dirty=+", "--abbrev=12"]
    done = subprocess.run(command, cwd=here, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "none"


def parser(description: str, results: Path) -> argparse.ArgumentParser:
    """The flags that every benchmark has."""
    flags = argparse.ArgumentParser(description=description)
    flags.add_argument("--check", action="store_true", help="exit 1 if a goal is missed")
    flags.add_argument("--quick", action="store_true", help="small cells only")
    flags.add_argument(
        "--json", nargs="?", const=results, type=Path, metavar="PATH", help="also write JSON"
    )
    return flags


def progress(text: str) -> None:
    """Says on stderr what is being measured."""
    print(text, file=sys.stderr, flush=True)


def left_out(what: str, install: str) -> None:
    """Says on stdout, among the results, what was not measured and how to have it measured."""
    print(f"left out  {what}; to measure it: {install}", flush=True)


def run_steps(
    flags: argparse.Namespace, name: str, steps: Iterable[tuple[str, Callable[[], object]]]
) -> int:
    """Measures cell after cell, shows each and its goals, and finishes.

    Args:
        flags: parsed from `parser`.
        name: of the benchmark.
        steps: what is measured next, and the work, which returns a cell with `goals()`.
    """
    print(machine_facts())
    cells: list[object] = []
    for step, work in steps:
        progress(step)
        cells.append(work())
        print(cells[-1], flush=True)
    goals = [goal for cell in cells for goal in cell.goals()]  # type: ignore[attr-defined]
    for goal in goals:
        print(f"{'met   ' if goal.is_met() else 'MISSED'}  {goal}")
    return finish(flags, name, cells, goals)


def finish(
    flags: argparse.Namespace, name: str, cells: Iterable[object], goals: Iterable[Goal]
) -> int:
    """Writes the JSON if asked, checks the goals if asked, and returns the exit code.

    Args:
        flags: parsed from `parser`.
        name: of the benchmark.
        cells: dataclasses, one for each measured cell.
        goals: what was promised.
    """
    missed = [goal for goal in goals if not goal.is_met()]
    if flags.json:
        record = {"benchmark": name, "machine": machine_facts()}
        record["cells"] = [asdict(cell) for cell in cells]  # type: ignore[call-overload]
        record["missed"] = [str(goal) for goal in missed]
        flags.json.write_text(json.dumps(record, indent=1) + "\n")
    if not flags.check:
        return 0
    for goal in missed:
        print(f"missed  {goal}")
    return 1 if missed else 0
