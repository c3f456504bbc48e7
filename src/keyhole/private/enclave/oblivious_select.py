"""Oblivious select: rows by key, where the rows that are read do not depend on the keys.

For every key all rows are read, in their order, and all but one are masked to zeros:

    out[j] = OR over r of (rows[r] AND mask[j, r])
    mask[j, r] = all ones if r = keys[j], else zero

Rows are taken in tiles that stay in the cache of a core while every key passes over them, so that
the table comes from memory once for all keys. Masks are made for some keys at a time: memory beside
the output does not grow with their number.

Hidden: which rows are selected, from whoever sees the addresses that this code reads and writes.
Not covered: what a processor does beneath them, time, power, and the Python around this file, which
is not constant-time.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from keyhole.types import KeyArray

__all__ = ["oblivious_select", "oblivious_select_plain"]

_TILE = 32 << 10  # bytes of rows that all keys pass over: a first-level cache holds 48 KB
_MASKS = 1 << 20  # bytes of masks that are held at a time
_AT_ONCE = 8  # rows for each write of an output: fewer writes, and still one pointer each


def oblivious_select(
    rows: NDArray[np.uint64], keys: KeyArray
) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Selects rows by reading all of them for every key.

    Args:
        rows: (K, words), contiguous.
        keys: (m,), from -1 to K - 1; -1 selects nothing, at the same cost.

    Returns:
        The rows of the keys, (m, words), zeros for -1; and how many rows were read for each key,
        (m,): K, whatever the key.
    """
    num_keys, words = rows.shape
    out = np.zeros((len(keys), words), np.uint64)
    visited = np.zeros(len(keys), np.int64)
    tile = max(1, _TILE // max(1, 8 * words * _AT_ONCE)) * _AT_ONCE
    group = max(1, _MASKS // (8 * tile))
    for start in range(0, num_keys, tile):
        piece = rows[start : start + tile]
        for first in range(0, len(keys), group):
            some = slice(first, first + group)
            _scan_tile(piece, _masks(keys[some], start, len(piece)), out[some], visited[some])
    return out, visited


def oblivious_select_plain(rows: NDArray[np.uint64], keys: KeyArray) -> NDArray[np.uint64]:
    """The equation at the top, in NumPy: the twin that tests hold the fast one to."""
    masks = _masks(keys, 0, len(rows))
    found: NDArray[np.uint64] = np.bitwise_or.reduce(masks[:, :, None] & rows[None], axis=1)
    return found


def _masks(keys: KeyArray, start: int, count: int) -> NDArray[np.uint64]:
    """All ones where a row is a key's own, (m, count).

    They are made apart from the scan, which sees numbers and not a comparison: a compiler could
    turn a comparison into a jump past the row.
    """
    own = keys[:, None] == np.arange(start, start + count)[None, :]
    masks: NDArray[np.uint64] = np.negative(own.astype(np.uint64))
    return masks


@njit(cache=True, nogil=True)
def _scan_tile(rows, masks, out, visited):  # type: ignore[no-untyped-def]
    """Adds the masked rows of a tile to the output of every key."""
    count, words = rows.shape
    whole = count - count % _AT_ONCE
    for key in range(len(masks)):
        mask, target = masks[key], out[key]
        for r in range(0, whole, _AT_ONCE):
            a, b, c, d = mask[r], mask[r + 1], mask[r + 2], mask[r + 3]
            e, f, g, h = mask[r + 4], mask[r + 5], mask[r + 6], mask[r + 7]
            for w in range(words):
                target[w] |= (
                    (rows[r, w] & a)
                    | (rows[r + 1, w] & b)
                    | (rows[r + 2, w] & c)
                    | (rows[r + 3, w] & d)
                    | (rows[r + 4, w] & e)
                    | (rows[r + 5, w] & f)
                    | (rows[r + 6, w] & g)
                    | (rows[r + 7, w] & h)
                )
            visited[key] += _AT_ONCE
        for r in range(whole, count):
            for w in range(words):
                target[w] |= rows[r, w] & mask[r]
            visited[key] += 1
