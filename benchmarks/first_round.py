"""Time to the first round of the demo: a fresh process, with nothing compiled before.

Time of `keyhole demo --rounds 1`, imports, compilation and all four arms included, with an empty
compilation cache and with a filled one. The goal is 6 s of CPU time with the empty one; wall time,
which says less on a busy machine, stands beside it.

    python benchmarks/first_round.py --check
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from harness import Goal, finish, machine_facts, parser, progress

MAX_SECONDS = 6.0
RESULTS = Path(__file__).parent / "results" / "first_round.json"
COMMAND = [
    sys.executable,
    "-c",
    "from keyhole.cli.main import main; main()",
    "demo",
    "--rounds",
    "1",
]


@dataclass(frozen=True)
class Cell:
    """One start."""

    cache: str
    wall_seconds: float
    cpu_seconds: float


def start(cache: str, directory: str) -> Cell:
    """Runs the command in a process of its own."""
    progress(f"first round, {cache} cache")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    environment = {**os.environ, "NUMBA_CACHE_DIR": directory}
    subprocess.run(COMMAND, env=environment, check=True, capture_output=True)
    wall = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return Cell(cache, wall, cpu)


def main() -> int:
    """Measures, prints, and checks what was promised."""
    flags = parser(__doc__ or "", RESULTS).parse_args()
    with tempfile.TemporaryDirectory() as directory:
        cells = [start(cache, directory) for cache in ("empty", "filled")]
    facts = machine_facts()
    print(f"{facts['cpu']}, {facts['cores']} cores, {facts['date']}, commit {facts['commit']}")
    for cell in cells:
        print(f"{cell.cache:6} cache: {cell.wall_seconds:5.1f} s, CPU {cell.cpu_seconds:5.1f} s")
    goal = Goal("6 s over the CPU time of a first round", MAX_SECONDS / cells[0].cpu_seconds, 1.0)
    return finish(flags, "first_round", cells, [goal])


if __name__ == "__main__":
    sys.exit(main())
