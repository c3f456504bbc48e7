"""The answer of one server under learning with errors, against memcpy of the same bytes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from harness import Goal, Timing, measure, memcpy
from keyhole.delivery.pir.lwe import BLOCK, Columns, LweShape
from private_cells.tables import Table

GOAL = 0.6  # of memcpy
PUBLISHED = 10.0  # GB/s of one core: SimplePIR (Henzinger et al., USENIX Security 2023)
KEYS_TOGETHER = 32


@dataclass(frozen=True)
class Cell:
    """One table; the hint, which no client waits for, is not made.

    Args:
        num_keys: K.
        gigabytes: of the table, paths included.
        memcpy: of the table.
        one: the answer to one key.
        together: the answers to 32 keys in one pass.
    """

    num_keys: int
    gigabytes: float
    memcpy: Timing
    one: Timing
    together: Timing

    def goals(self) -> list[Goal]:
        ratio = self.memcpy.cpu / self.one.cpu
        return [Goal(f"LWE answer K={self.num_keys} over memcpy", ratio, GOAL)]

    def __str__(self) -> str:
        one = self.gigabytes / self.one.cpu
        together = self.gigabytes * KEYS_TOGETHER / self.together.cpu
        return (
            f"LWE    K={self.num_keys:.0e}: over memcpy {self.memcpy.cpu / self.one.cpu:.2f};"
            f" {one:.1f} GB/s for one key, {together:.1f} for {KEYS_TOGETHER} in one pass;"
            f" published {PUBLISHED:.0f}"
        )


def measure_answers(table: Table) -> Cell:
    """Checks a few bytes against NumPy, then times products with random queries."""
    database = table.database
    shape = LweShape(database.num_keys, database.public.row_bytes, 1)
    columns, target = Columns(database, shape), np.zeros_like(database.rows)
    target.fill(0)  # touches every page
    asked = {count: _random_query(shape, count) for count in (1, KEYS_TOGETHER)}
    _check(table, shape, columns.product(asked[1], 1), np.concatenate(asked[1], axis=1))
    timings = measure(
        {
            "memcpy": memcpy(database.rows, target),
            "one": lambda: columns.product(asked[1], 1),
            "together": lambda: columns.product(asked[KEYS_TOGETHER], KEYS_TOGETHER),
        },
        samples={"together": 3},
    )
    return Cell(database.num_keys, table.gigabytes, **timings)


def _random_query(shape: LweShape, count: int) -> list[np.ndarray]:
    """Words (count, columns) in the blocks that a server takes them in."""
    rng = np.random.default_rng(3)
    words = rng.integers(0, 2**32, (count, shape.columns), dtype=np.uint32)
    return [np.ascontiguousarray(words[:, i : i + BLOCK]) for i in range(0, shape.columns, BLOCK)]


def _check(table: Table, shape: LweShape, found: np.ndarray, words: np.ndarray) -> None:
    first = table.records[:: shape.slices_per_column, :8].astype(np.uint32)
    if not np.array_equal(found[0, 0, :8], (words[0][:, None] * first).sum(0, np.uint32)):
        raise SystemExit("the product differs from numpy")
