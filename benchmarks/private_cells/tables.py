"""Tables of random slices, and the memory that they are copied to."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from keyhole.delivery.base import PrivateTable
from keyhole.delivery.paths import Top, top_of
from keyhole.delivery.pir.database import Database

RECORD = 2048  # bytes of a slice
_PIECE = 1 << 16  # slices drawn at a time


@dataclass(frozen=True)
class Table:
    """A database and how long it took to make.

    Args:
        database: the slices with their paths.
        top: what rows are compared with.
        record_bytes: of a slice.
        build_cpu: seconds, for the tree and the database.
    """

    database: Database
    top: Top
    record_bytes: int
    build_cpu: float

    @property
    def records(self) -> np.ndarray:
        """(K, record_bytes), without copying them."""
        return self.database.rows.view(np.uint8)[:, : self.record_bytes]

    @property
    def gigabytes(self) -> float:
        """What a scan passes over: slices and paths."""
        return self.database.rows.nbytes / 1e9


def make_table(num_keys: int, record_bytes: int = RECORD) -> Table:
    """Random slices; what they were made from is gone when this returns."""
    rng = np.random.default_rng(num_keys)
    records = np.empty((num_keys, record_bytes), np.uint8)
    for start in range(0, num_keys, _PIECE):
        piece = records[start : start + _PIECE]
        piece[:] = np.frombuffer(rng.bytes(piece.size), np.uint8).reshape(piece.shape)
    start_cpu = time.process_time()
    table = PrivateTable.of("benchmark", bytes(32), records, num_keys)
    database = Database.of(table)
    build_cpu = time.process_time() - start_cpu
    top = Top.of(num_keys, table.tree.root, top_of(table.tree))
    return Table(database, top, record_bytes, build_cpu)
