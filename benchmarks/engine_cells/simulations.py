"""Ray beside Flower's own simulation, which runs on the same Ray: the same round, 2 workers each.

Flower runs in a process of its own, since both want to start Ray. Its actors are warm: they have
built the population and compiled before the clock starts. Replies are looked for every 5 ms, where
Flower itself waits for 100 ms; clients are told no keys, and no strategy is run.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from engine_cells.crowd import Crowd
from engine_cells.on_ray import WORKERS
from engine_cells.spent import Spent, spent_by
from harness import Goal
from keyhole.arrays import keep_freed_memory
from keyhole.engines.ray.engine import RayEngine
from keyhole.rounds.round import in_process

AHEAD = 5.0  # times
PATIENCE = 600.0  # seconds for Flower's process


@dataclass(frozen=True)
class Cell:
    """A round three times.

    Args:
        crowd: who takes part.
        alone: in one process.
        ours: on Ray.
        flower: on Flower's simulation; none where Flower is not installed.
        versions: of Ray and of Flower.
        is_full: whether the goals are held against it.
    """

    crowd: Crowd
    alone: Spent
    ours: Spent
    flower: Spent | None
    versions: dict[str, str]
    is_full: bool

    def goals(self) -> list[Goal]:
        if self.flower is None or not self.is_full:
            return []
        ratios = {"wall": self.flower.wall / self.ours.wall, "CPU": self.flower.cpu / self.ours.cpu}
        return [
            Goal(f"time of Flower's simulation over ours, {what}, {self.crowd}", ratio, AHEAD)
            for what, ratio in ratios.items()
        ]

    def __str__(self) -> str:
        told = [f"in process {self._rate(self.alone)}", f"Ray {self._rate(self.ours)}"]
        if self.flower is None:
            told.append("Flower is not installed: nothing to compare with")
        else:
            told.append(f"Flower {self._rate(self.flower)}")
            told.append(f"CPU added to training {self.added(self.flower):.1f} times ours")
        return f"simulation  {self.crowd}: {'; '.join(told)}"

    def added(self, flower: Spent) -> float:
        """CPU time that Flower adds to the round in one process, over what we add."""
        return (flower.cpu - self.alone.cpu) / max(self.ours.cpu - self.alone.cpu, 0.01)

    def _rate(self, spent: Spent) -> str:
        rate = self.crowd.clients / spent.wall
        return f"{spent.wall:.3f} s ({rate:.0f} clients/s, CPU {spent.cpu:.2f} s)"


def measure_simulations(crowd: Crowd, rounds: int, is_full: bool) -> Cell:
    """Ours first, then Flower's."""
    keep_freed_memory()
    run = crowd.round()
    with RayEngine(crowd, WORKERS) as engine:
        contestants = {"alone": lambda: run(in_process), "ours": lambda: run(engine)}
        spent = spent_by(contestants, rounds, alone="alone")
    versions = {name: importlib.metadata.version(name) for name in ("ray",)}
    if importlib.util.find_spec("flwr") is None:
        return Cell(crowd, **spent, flower=None, versions=versions, is_full=is_full)
    versions["flwr"] = importlib.metadata.version("flwr")
    return Cell(
        crowd, **spent, flower=_by_flower(crowd, rounds), versions=versions, is_full=is_full
    )


def _by_flower(crowd: Crowd, rounds: int) -> Spent:
    numbers = crowd.clients, crowd.keys_per_client, int(crowd.is_idle), rounds
    with tempfile.TemporaryDirectory(prefix="engines-") as home:  # Flower leaves a file there
        done = subprocess.run(
            [sys.executable, "-m", "engine_cells.flower_process", *map(str, numbers)],
            cwd=Path(__file__).parents[1],
            env={**os.environ, "FLWR_HOME": home},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
    said = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not said:
        raise SystemExit(f"Flower's simulation failed:\n{done.stderr[-2000:]}")
    return Spent(**json.loads(said[-1]))
