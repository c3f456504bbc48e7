"""The inner loops of sketches: rows into cells, rows out of cells, and what a cell says its key is.

Elements of the ring are uint16 or uint32; all arithmetic on them wraps.
"""

from __future__ import annotations

import numpy as np
from numba import njit

__all__ = ["add_rows", "read_keys", "take_rows"]


@njit(cache=True, nogil=True)
def add_rows(table, cells, rows):  # type: ignore[no-untyped-def]
    """Adds each of rows (n, w) to all of its cells (n, h) of a table (C, w), in place."""
    for i in range(cells.shape[0]):
        for cell in cells[i]:
            for k in range(rows.shape[1]):
                table[cell, k] += rows[i, k]


@njit(cache=True, nogil=True)
def take_rows(table, cells, rows):  # type: ignore[no-untyped-def]
    """Takes each of rows (n, w) out of all of its cells (n, h) of a table (C, w), in place."""
    for i in range(cells.shape[0]):
        for cell in cells[i]:
            for k in range(rows.shape[1]):
                table[cell, k] -= rows[i, k]


@njit(cache=True, nogil=True)
def read_keys(heads, cells, key_words, word_bits, num_keys, most_clients):  # type: ignore[no-untyped-def]
    """The key that each of cells would hold if it held one alone; -1 where that cannot be.

    A cell of one key holds the key times its count, word by word. No division takes place where the
    count is not between 1 and the number of clients.
    """
    keys = np.full(cells.shape[0], -1, np.int64)
    for i in range(cells.shape[0]):
        count = np.int64(heads[cells[i], 0])
        if count < 1 or count > most_clients:
            continue
        key = np.int64(0)
        for word in range(key_words):
            total = np.int64(heads[cells[i], 1 + word])
            digit = total // count
            if digit * count != total or digit >> word_bits:
                key = np.int64(-1)
                break
            key |= digit << np.int64(word * word_bits)
        if 0 <= key < num_keys:
            keys[i] = key
    return keys
