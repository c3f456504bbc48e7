"""From names of the whole model to places among a client's keys; the cost follows the client."""

from __future__ import annotations

import numpy as np

from keyhole.types import Array, KeyArray

__all__ = ["pad_rows", "places_of"]


def places_of(names: Array, keys: KeyArray) -> Array:
    """Where each name stands among the keys, int64; -1 where it does not.

    Args:
        names: any shape, of the key space.
        keys: (m,), each once.

    >>> places_of(np.array([7, 3, 5]), np.array([5, 7])).tolist()
    [1, -1, 0]
    """
    if not len(keys):
        return np.full(np.shape(names), -1, np.int64)
    order = np.argsort(keys, kind="stable")
    at = np.minimum(np.searchsorted(keys, names, sorter=order), len(keys) - 1)
    return np.where(keys[order[at]] == names, order[at], -1)


def pad_rows(row: Array, value: Array, rows: int) -> Array:
    """Values side by side in the row they belong to, int32 (rows, most), -1 after the last.

    Args:
        row: (n,), rising.
        value: (n,).
        rows: how many there are.

    >>> pad_rows(np.array([0, 0, 2]), np.array([4, 5, 6]), 3).tolist()
    [[4, 5], [-1, -1], [6, -1]]
    """
    counts = np.bincount(row, minlength=rows)
    within = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    padded = np.full((rows, max(1, counts.max(initial=0))), -1, np.int32)
    padded[row, within] = value
    return padded
