"""The sparse sum at one server: sketches under a secure sum, and what other ways would send."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import numpy as np

from harness import Goal
from keyhole.aggregation.masked.params import SecAggParams
from keyhole.aggregation.masked.sketch import SketchShape, decode, encode
from sum_cells.cohort import Cohort, timed
from sum_cells.parties import run_timed

ROOM = 1.02  # times the distinct keys of the round before


@dataclass(frozen=True)
class Cell:
    """One cohort; CPU times in seconds.

    Args:
        cohort: who takes part.
        distinct: keys that came out.
        up: bytes of one client, sized from the round before.
        up_cautious: if it were sized from N m and K.
        up_dense: of a vector of all keys.
        clear: of the update as it is.
        encode: of one client, median.
        mask: of one client, median.
        add: of the server for all masked sketches.
        unmask: of the server.
        decode: of the server.
    """

    cohort: Cohort
    distinct: int
    up: int
    up_cautious: int
    up_dense: int
    clear: int
    encode: float
    mask: float
    add: float
    unmask: float
    decode: float

    def goals(self) -> list[Goal]:
        """None: a sketch has the size that it has."""
        return []

    def __str__(self) -> str:
        sizes = [self.up, self.up_cautious, self.up_dense, self.clear]
        up, cautious, dense, clear = (f"{size / 1e6:.1f}" for size in sizes)
        return (
            f"sketch {self.cohort}: {self.distinct} distinct keys; {up} MB up ({cautious} sized"
            f" from N m, {dense} dense, {clear} clear); client encodes in"
            f" {1e3 * self.encode:.0f} ms, masks in {self.mask:.2f} s; server adds in"
            f" {self.add:.2f} s, unmasks in {self.unmask:.2f} s, decodes in {self.decode:.2f} s"
        )


def measure_sketches(cohort: Cohort) -> Cell:
    """Runs a sum; keys, counts and rows are compared with the plain sum."""
    before = [cohort.update(10_000 + client)[0] for client in range(cohort.clients)]
    distinct = int(ROOM * len(np.unique(np.concatenate(before))))
    shape, cautious = (
        _shape(cohort, limit)
        for limit in (distinct, min(cohort.clients * cohort.keys_per_client, cohort.num_keys))
    )
    encoded: list[float] = []

    def sketch_of(client: int) -> np.ndarray:
        sketch, took = timed(lambda: encode(shape, *cohort.update(client)))
        encoded.append(took)
        return sketch

    _warm_up()
    settings = SecAggParams(bytes(16), cohort.clients, shape.length)
    spent = run_timed(settings, sketch_of, range(cohort.lost))
    decoded, took = timed(lambda: decode(shape, spent.total, len(cohort.survivors)))
    keys, counts, rows = cohort.plain_sum()
    if not (
        np.array_equal(decoded.keys, keys)
        and np.array_equal(decoded.counts, counts)
        and np.array_equal(decoded.rows, rows)
    ):
        raise SystemExit("what the sketches decode to is not the plain sum")
    return Cell(
        cohort,
        len(keys),
        spent.up,
        4 * cautious.length,
        4 * cohort.num_keys * cohort.width,
        cohort.clear_bytes,
        statistics.median(encoded),
        spent.mask,
        spent.add,
        spent.unmask,
        took,
    )


def _shape(cohort: Cohort, max_distinct: int) -> SketchShape:
    limit = min(max_distinct, cohort.num_keys)
    return SketchShape(
        cohort.num_keys, cohort.width, limit, b"a public seed...", 32, max_clients=cohort.clients
    )


def _warm_up() -> None:
    """Compiles."""
    shape = SketchShape(100, 1, 5, bytes(16), 32)
    decode(shape, encode(shape, np.arange(5), np.ones((5, 1), np.uint32)), 1)
