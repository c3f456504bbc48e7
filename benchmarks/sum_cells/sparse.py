"""Sparse sums at two servers: bytes of a client, and CPU time of every party."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import numpy as np

from harness import Goal
from keyhole.aggregation.two_servers.client import SparseShares, share_rows
from keyhole.aggregation.two_servers.params import SparseParams
from keyhole.aggregation.two_servers.server import SparsePart
from sum_cells.cohort import Cohort, timed

BYTES_GOAL = 1.5  # times the bytes in the clear
# Seconds of a server for one client. Work grows with K; K = 10^6 may cost ten times as much.
SERVER_GOALS = {(10**5, 1000): 0.06, (10**6, 1000): 0.6}
PIECE = 1 << 14  # rows compared at a time


@dataclass(frozen=True)
class Cell:
    """One cohort; CPU times in seconds.

    Args:
        cohort: who takes part.
        up: bytes of one client to both servers.
        clear: bytes of the same update as it is.
        client: of one client, median.
        server: of one server for one client: reading, adding all, giving out its share.
        unplaced: keys of all clients that found no bucket.
    """

    cohort: Cohort
    up: int
    clear: int
    client: float
    server: float
    unplaced: int

    def goals(self) -> list[Goal]:
        shape = (self.cohort.num_keys, self.cohort.keys_per_client)
        if shape not in SERVER_GOALS:
            return []
        bound, where = SERVER_GOALS[shape], f"K={self.cohort.num_keys} m={shape[1]}"
        return [
            Goal(f"{BYTES_GOAL} x clear over upload {where}", BYTES_GOAL * self.clear / self.up, 1),
            Goal(f"{bound} s over server per client {where}", bound / self.server, 1),
        ]

    def __str__(self) -> str:
        return (
            f"sparse {self.cohort}: {self.up} bytes up, {self.up / self.clear:.3f} x clear; client"
            f" {1e3 * self.client:.1f} ms; server {self.server:.3f} s a client;"
            f" {self.unplaced} keys without a bucket"
        )


def measure_sparse(cohort: Cohort) -> Cell:
    """Runs a sum; what comes out is compared with the plain sum, for every key."""
    _warm_up()
    counts = len(cohort.survivors)
    terms = SparseParams(
        bytes(16),
        cohort.num_keys,
        cohort.width,
        cohort.keys_per_client,
        bits=32,
        min_clients=counts,
    )
    shares, spent = [], []
    for client in cohort.survivors:  # a client that drops sends nothing, and nothing is undone
        update = cohort.update(client)
        made, took = timed(lambda update=update: share_rows(terms, *update))
        shares.append(made)
        spent.append(took)
    totals, worked = _serve(terms, shares)
    np.add(totals[0], totals[1], out=totals[0])
    unplaced = sum(int((~made.is_placed).sum()) for made in shares)
    _compare(cohort, totals[0], shares)
    up = len(shares[0].public) + sum(map(len, shares[0].to))
    server = statistics.mean(worked) / counts
    return Cell(cohort, up, cohort.clear_bytes, statistics.median(spent), server, unplaced)


def _serve(terms: SparseParams, shares: list[SparseShares]) -> tuple[list[np.ndarray], list[float]]:
    """Both servers' shares of the sum, and what they took in all."""

    def serve(party: int) -> np.ndarray:
        part = SparsePart(terms, party)
        for made in shares:
            part.add(made.public, made.to[party])
        return part.take()

    totals, worked = zip(*(timed(lambda p=party: serve(p)) for party in (0, 1)), strict=True)
    return list(totals), list(worked)


def _compare(cohort: Cohort, total: np.ndarray, shares: list[SparseShares]) -> None:
    """Every row of the sum, piece by piece; rows of unplaced keys are taken out first."""
    keys, _, rows = cohort.plain_sum()
    for client, made in zip(cohort.survivors, shares, strict=True):
        some, added = cohort.update(client)
        missing = ~made.is_placed
        rows[np.searchsorted(keys, some[missing])] -= added[missing]
    for start in range(0, len(total), PIECE):
        piece = total[start : start + PIECE]
        low, high = np.searchsorted(keys, (start, start + len(piece)))
        expected = np.zeros_like(piece)
        expected[keys[low:high] - start] = rows[low:high]
        if not np.array_equal(piece, expected):
            raise SystemExit("the sparse sum is not the plain sum")


def _warm_up() -> None:
    """Compiles."""
    small = Cohort(2, 0, 2000, 100, 8)
    terms = SparseParams(bytes(16), 2000, 8, 100, bits=32, min_clients=2)
    _serve(terms, [share_rows(terms, *small.update(client)) for client in range(2)])
