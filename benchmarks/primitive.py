"""Select and deselect of a cohort's rows, against memcpy and NumPy.

50 clients hold m distinct uniform keys each, so keys repeat across clients only. Gather copies
their 50 m rows out of the table; deselect adds 50 m rows into it. All values are ratios of CPU
time: memcpy of the same 50 m rows over the contestant (1.00 is as fast as memcpy). The same keys
are used in every repetition, so small jobs run in cache for every contestant, memcpy included. All
arrays start on a cache line: a row of 256 bytes is 4 lines then, not 5, worth a third at d = 64.

Where what memcpy moves stays in the cache and the table does not, memcpy is no yardstick: rows at
random places come from memory. There the goal is a loop over the same rows at the speed of C, which
neither checks keys nor fetches ahead.

    python benchmarks/primitive.py --check
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numba import njit

from harness import (
    Goal,
    Timing,
    aligned_zeros,
    finish,
    machine_facts,
    measure,
    memcpy,
    parser,
    progress,
)
from keyhole.server.rows import gather_rows, scatter_add_rows

CLIENTS = 50
TABLES = ((10_000, 500), (100_000, 500), (1_000_000, 64))
KEYS_PER_CLIENT = (100, 1_000, 10_000)
GOALS = {"gather": 0.7, "deselect": 0.5}
OVER_LOOP = 1.0
CACHE = 32e6  # bytes that may stay in the cache that cores share
NUMPY = {"gather": "numpy.take", "deselect": "numpy.add.at"}
SLOW_ROWS = 100_000  # add.at takes seconds above: one sample instead of five
RESULTS = Path(__file__).parent / "results" / "primitive.json"


@dataclass(frozen=True)
class Cell:
    """One operation on one table with one number of keys."""

    operation: str
    num_keys: int
    width: int
    keys_per_client: int
    gigabytes: float
    memcpy: Timing
    loop: Timing
    ours: Timing
    two_threads: Timing
    numpy: Timing
    numpy_unchecked: Timing | None = None

    def ratio(self, who: Timing) -> float:
        """CPU time of memcpy over that of another."""
        return self.memcpy.cpu / who.cpu

    def wall_ratio(self, who: Timing) -> float:
        """Wall time of memcpy over that of another."""
        return self.memcpy.wall / who.wall

    @property
    def is_memcpy_in_cache(self) -> bool:
        """Whether the cache holds both sides of memcpy, and not the table."""
        return 2e9 * self.gigabytes < CACHE < 4 * self.num_keys * self.width

    def goals(self) -> tuple[Goal, Goal]:
        """Fast enough beside memcpy, or beside a loop where that is from the cache; and no slower
        than NumPy."""
        where = f"{self.operation} n={self.num_keys} d={self.width} m={self.keys_per_client}"
        beside_numpy = self.numpy.cpu / self.ours.cpu
        beside_memcpy = Goal(f"{where} over memcpy", self.ratio(self.ours), GOALS[self.operation])
        beside_loop = Goal(f"{where} over a loop", self.loop.cpu / self.ours.cpu, OVER_LOOP)
        return (
            beside_loop if self.is_memcpy_in_cache else beside_memcpy,
            Goal(f"{where} over {NUMPY[self.operation]}", beside_numpy, 1.0),
        )


@njit(cache=True)
def _copy_rows(table, keys, out):
    for i in range(len(keys)):
        source, target = table[np.uint64(keys[i])], out[i]
        for j in range(len(target)):  # the compiler makes vectors of it
            target[j] = source[j]


@njit(cache=True)
def _add_rows(table, keys, rows):
    for i in range(len(keys)):
        target, source = table[np.uint64(keys[i])], rows[i]
        for j in range(len(source)):
            target[j] += source[j]


def cohort_keys(num_keys: int, keys_per_client: int, rng: np.random.Generator) -> np.ndarray:
    """(50 m,) keys, distinct within a client."""
    clients = (rng.choice(num_keys, keys_per_client, replace=False) for _ in range(CLIENTS))
    return np.concatenate([keys.astype(np.int64) for keys in clients])


def measure_gather(
    table: np.ndarray, keys: np.ndarray, _: np.random.Generator
) -> dict[str, Timing]:
    """Checks that all agree, then times them into one warm output."""
    out, source = aligned_zeros((2, len(keys), table.shape[1]))
    np.copyto(source, table[keys])
    for threads in (1, 2):
        if not np.array_equal(gather_rows(table, keys, out, threads=threads), source):
            raise SystemExit("gather_rows differs from numpy")
    return measure(
        {
            "memcpy": memcpy(source, out),
            "loop": lambda: _copy_rows(table, keys, out),
            "ours": lambda: gather_rows(table, keys, out),
            "numpy": lambda: np.take(table, keys, axis=0),
            # NumPy without its check of keys, into a warm output: what is left is the copying.
            "numpy_unchecked": lambda: np.take(table, keys, axis=0, out=out, mode="clip"),
            "two_threads": lambda: gather_rows(table, keys, out, threads=2),
        }
    )


def measure_deselect(
    table: np.ndarray, keys: np.ndarray, rng: np.random.Generator
) -> dict[str, Timing]:
    """Checks that all agree bit for bit, then times them on the same table and rows."""
    rows, out = aligned_zeros((2, len(keys), table.shape[1]))
    rng.random(out=rows, dtype=rows.dtype)
    _check_deselect(table, keys, rows)
    return measure(
        {
            "memcpy": memcpy(rows, out),
            "loop": lambda: _add_rows(table, keys, rows),
            "ours": lambda: scatter_add_rows(table, keys, rows),
            "numpy": lambda: np.add.at(table, keys, rows),
            "two_threads": lambda: scatter_add_rows(table, keys, rows, threads=2),
        },
        samples={"numpy": 1} if len(keys) > SLOW_ROWS else None,
    )


def _check_deselect(table: np.ndarray, keys: np.ndarray, rows: np.ndarray) -> None:
    """Compares whole results where add.at takes no seconds, else those of the first rows."""
    keys, rows = keys[:SLOW_ROWS], rows[:SLOW_ROWS]
    expected = table.copy()
    np.add.at(expected, keys, rows)
    for threads in (1, 2):
        added = table.copy()
        scatter_add_rows(added, keys, rows, threads=threads)
        if not np.array_equal(added, expected):
            raise SystemExit("scatter_add_rows differs from numpy")


MEASURES = {"gather": measure_gather, "deselect": measure_deselect}


def cells(keys_per_client: tuple[int, ...]) -> Iterator[Cell]:
    """Measures every cell, one table at a time."""
    rng = np.random.default_rng(0)
    for num_keys, width in TABLES:
        table = aligned_zeros((num_keys, width))
        rng.random(out=table, dtype=table.dtype)
        for m in keys_per_client:
            keys = cohort_keys(num_keys, m, rng)
            gigabytes = len(keys) * width * table.itemsize / 1e9
            for operation in GOALS:
                progress(f"{operation} n={num_keys} d={width} m={m}")
                timings = MEASURES[operation](table, keys, rng)
                yield Cell(operation, num_keys, width, m, gigabytes, **timings)


def print_table(measured: list[Cell]) -> None:
    """GB/s of memcpy, then CPU ratios (wall ratios in brackets)."""
    facts = machine_facts()
    print(f"{facts['cpu']}, {facts['cores']} cores, {facts['date']}, commit {facts['commit']}")
    print("ratios to memcpy of the same bytes: CPU time (wall time); above 1 is faster than memcpy")
    head = ("operation", "n", "d", "m", "memcpy GB/s", "keyhole", "2 threads", "loop", "numpy")
    print("{:9} {:>8} {:>4} {:>6} {:>12} {:>13} {:>13} {:>13} {:>13} unchecked".format(*head))
    for cell in measured:
        speed = cell.gigabytes / cell.memcpy.cpu
        ratios = " ".join(
            f"{cell.ratio(who):6.2f} ({cell.wall_ratio(who):4.2f})"
            for who in (cell.ours, cell.two_threads, cell.loop, cell.numpy, cell.numpy_unchecked)
            if who is not None
        )
        place = f"{cell.num_keys:8} {cell.width:4} {cell.keys_per_client:6}"
        notes = " *" if cell.keys_per_client == cell.num_keys else ""
        notes += " +" if cell.numpy.samples == 1 else ""
        print(f"{cell.operation:9} {place} {speed:12.1f} {ratios}{notes}")
    print("* every client takes all keys   + numpy timed once, without warm-up: it takes seconds")


def main() -> int:
    """Measures, prints, and checks what was promised."""
    flags = parser(__doc__ or "", RESULTS).parse_args()
    measured = list(cells(KEYS_PER_CLIENT[:1] if flags.quick else KEYS_PER_CLIENT))
    print_table(measured)
    goals = [goal for cell in measured for goal in cell.goals()]
    return finish(flags, "primitive", measured, goals)


if __name__ == "__main__":
    sys.exit(main())
