"""The clients of a benchmark: their keys and rows, made when they are asked for."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

Result = TypeVar("Result")


@dataclass(frozen=True)
class Cohort:
    """Clients with uniform keys and uniform rows of the ring of 32 bits.

    Args:
        clients: N, of which some drop.
        lost: how many drop: the first ones.
        num_keys: K.
        keys_per_client: m.
        width: d, elements of a row.
    """

    clients: int
    lost: int
    num_keys: int
    keys_per_client: int
    width: int

    @property
    def survivors(self) -> range:
        """Whose rows are in the sum."""
        return range(self.lost, self.clients)

    @property
    def clear_bytes(self) -> int:
        """Of one client's update as it is: keys of 4 bytes and rows."""
        return self.keys_per_client * 4 * (1 + self.width)

    def update(self, client: int) -> tuple[np.ndarray, np.ndarray]:
        """Keys (m,) and rows (m, width) of one client, the same at every call."""
        rng = np.random.default_rng((client, self.num_keys))
        keys = rng.choice(self.num_keys, self.keys_per_client, replace=False)
        shape = (self.keys_per_client, self.width)
        return keys, rng.integers(0, 2**32, shape, dtype=np.uint32)

    def plain_sum(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Keys, counts and sums of the survivors: what every way must give."""
        updates = [self.update(client) for client in self.survivors]
        keys, counts = np.unique(np.concatenate([keys for keys, _ in updates]), return_counts=True)
        rows = np.zeros((len(keys), self.width), np.uint32)
        for some, added in updates:
            rows[np.searchsorted(keys, some)] += added
        return keys, counts, rows

    def __str__(self) -> str:
        return (
            f"N={self.clients} ({self.lost} lost) m={self.keys_per_client}"
            f" K={self.num_keys:.0e} d={self.width}"
        )


def timed(work: Callable[[], Result]) -> tuple[Result, float]:
    """What a call returns, and its CPU time in seconds."""
    start = time.process_time()
    result = work()
    return result, time.process_time() - start
