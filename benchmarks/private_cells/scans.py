"""Scans of the whole table, one query and many in one pass, against memcpy of the same bytes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from harness import Goal, Timing, measure, memcpy
from keyhole.delivery.pir.scan import plain_scan_rows, scan_rows
from private_cells.tables import Table

ONE_GOAL, MANY_GOAL = 0.9, 3.0  # of memcpy
MANY = (32, 128)


@dataclass(frozen=True)
class Cell:
    """One table.

    Args:
        num_keys: K.
        gigabytes: of the table, paths included.
        build_cpu: seconds to copy the slices and make their tree and paths.
        memcpy: of the table.
        scans: of 1, 32 and 128 queries in one pass.
    """

    num_keys: int
    gigabytes: float
    build_cpu: float
    memcpy: Timing
    scans: dict[int, Timing]

    def ratio(self, queries: int) -> float:
        """CPU time of memcpy over that of one query."""
        return self.memcpy.cpu * queries / self.scans[queries].cpu

    def speed(self, queries: int) -> float:
        """Gigabytes of the table for each query and CPU-second."""
        return self.gigabytes * queries / self.scans[queries].cpu

    def goals(self) -> list[Goal]:
        goals = {1: ONE_GOAL, **dict.fromkeys(MANY, MANY_GOAL)}
        return [
            Goal(f"scan K={self.num_keys}, {q} in one pass, over memcpy", self.ratio(q), bound)
            for q, bound in goals.items()
        ]

    def __str__(self) -> str:
        scans = ", ".join(
            f"{q} queries {self.ratio(q):.2f} ({self.speed(q):.1f} GB/s each)" for q in self.scans
        )
        return (
            f"scan   K={self.num_keys:.0e}: memcpy {self.gigabytes / self.memcpy.cpu:.1f} GB/s;"
            f" over memcpy: {scans}; built in {self.build_cpu:.2f} s"
        )


def measure_scans(table: Table) -> Cell:
    """Checks one query of each pass against NumPy where that takes no minutes, then times all."""
    rows = table.database.rows
    rng, target = np.random.default_rng(1), np.zeros_like(rows)
    target.fill(0)  # touches every page
    asked = {q: rng.integers(0, 256, (q, -(-len(rows) // 8)), dtype=np.uint8) for q in (1, *MANY)}
    for bits in asked.values():
        if not np.array_equal(scan_rows(rows, bits)[-1:], plain_scan_rows(rows, bits[-1:])):
            raise SystemExit("scan_rows differs from numpy")
    scans = {str(q): lambda bits=bits: scan_rows(rows, bits) for q, bits in asked.items()}
    timings = measure({"memcpy": memcpy(rows, target), **scans})
    return Cell(
        len(rows),
        table.gigabytes,
        table.build_cpu,
        timings["memcpy"],
        {q: timings[str(q)] for q in asked},
    )
