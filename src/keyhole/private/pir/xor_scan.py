"""Scans: the XOR of the rows that a query's bits select, at the speed of memory."""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

__all__ = ["scan_buckets", "scan_rows"]


def scan_rows(rows: NDArray[np.uint64], bits: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """bits (q, ceil(K/8)) -> (q, words)."""
    out = np.zeros((len(bits), rows.shape[1]), np.uint64)
    for q in range(len(bits)):
        _fold(rows, np.empty(0, np.int32), len(rows), np.ascontiguousarray(bits[q]), out[q])
    return out


def scan_buckets(
    rows: NDArray[np.uint64], members: NDArray[np.int32], bits: NDArray[np.uint8]
) -> NDArray[np.uint64]:
    """bits (q, B, ceil(size/8)) -> (q, B, words)."""
    out = np.zeros((bits.shape[0], bits.shape[1], rows.shape[1]), np.uint64)
    for b in range(bits.shape[1]):
        for q in range(len(bits)):
            _fold(rows, members[b], members.shape[1], np.ascontiguousarray(bits[q, b]), out[q, b])
    return out


@njit(cache=True, nogil=True)
def _fold(rows, ids, count, bits, out):  # type: ignore[no-untyped-def]
    for i in range(count):
        if bits[i >> 3] >> (i & 7) & 1:
            key = ids[i] if len(ids) else i
            if key >= 0:
                for w in range(rows.shape[1]):
                    out[w] ^= rows[key, w]
