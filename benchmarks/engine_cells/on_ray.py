"""Ray beside one process: the same rounds, with 2 workers and with none, in turns."""

from __future__ import annotations

from dataclasses import dataclass

from engine_cells.crowd import Crowd
from engine_cells.spent import Spent, spent_by
from harness import Goal
from keyhole.arrays import keep_freed_memory
from keyhole.engines.ray.engine import RayEngine
from keyhole.rounds.round import in_process

WORKERS = 2
MAX_ADDED = 2.0  # ms for each client
SHARE = 0.8  # of the rate of one process on one core
FULL = 1000  # clients


@dataclass(frozen=True)
class Cell:
    """A round in one process and on Ray.

    Args:
        crowd: who takes part.
        workers: of Ray.
        alone: the round in one process.
        on_ray: the same, of all processes.
    """

    crowd: Crowd
    workers: int
    alone: Spent
    on_ray: Spent

    @property
    def added_cpu(self) -> float:
        """Milliseconds of CPU time that Ray adds to each client."""
        return (self.on_ray.cpu - self.alone.cpu) / self.crowd.clients * 1000

    @property
    def added_wall(self) -> float:
        """Milliseconds that Ray adds to each client; below 0 where two workers save more."""
        return (self.on_ray.wall - self.alone.wall) / self.crowd.clients * 1000

    @property
    def share(self) -> float:
        """Clients a second for each worker, over clients a second of one process."""
        return self.alone.wall / self.on_ray.wall / self.workers

    @property
    def cpu_share(self) -> float:
        """The same for each second of CPU time."""
        return self.alone.cpu / self.on_ray.cpu

    def goals(self) -> list[Goal]:
        if self.crowd.clients != FULL:
            return []
        if self.crowd.is_idle:
            return [
                _below(f"{MAX_ADDED:g} ms over what Ray adds to a client, {what}, {self.crowd}", ms)
                for what, ms in {"wall": self.added_wall, "CPU": self.added_cpu}.items()
            ]
        return [
            Goal(f"Ray's rate over one process's, for each {what}, {self.crowd}", share, SHARE)
            for what, share in {"worker": self.share, "CPU second": self.cpu_share}.items()
        ]

    def __str__(self) -> str:
        n, alone, on_ray = self.crowd.clients, self.alone, self.on_ray
        return (
            f"ray  {self.crowd}: in process {alone.wall:.2f} s ({n / alone.wall:.0f} clients/s,"
            f" CPU {alone.cpu:.2f} s); {self.workers} workers {on_ray.wall:.2f} s"
            f" ({n / on_ray.wall:.0f} clients/s, CPU {on_ray.cpu:.2f} s); added to a client"
            f" {self.added_wall:.2f} ms, CPU {self.added_cpu:.2f} ms; rate for each worker"
            f" {self.share:.2f}, for each CPU second {self.cpu_share:.2f}"
        )


def measure_on_ray(crowd: Crowd, rounds: int) -> Cell:
    """Rounds in one process and on Ray take turns; Ray is up and has compiled."""
    keep_freed_memory()  # as a run does
    run = crowd.round()
    with RayEngine(crowd, WORKERS) as engine:
        contestants = {"alone": lambda: run(in_process), "on_ray": lambda: run(engine)}
        spent = spent_by(contestants, rounds, alone="alone")
        told = engine.incidents()
    if told:
        raise SystemExit(f"workers were lost: {told}")
    return Cell(crowd, WORKERS, **spent)


def _below(name: str, value: float) -> Goal:
    return Goal(name, MAX_ADDED / max(value, 1e-3), 1.0)
