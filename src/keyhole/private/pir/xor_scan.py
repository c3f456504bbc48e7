"""Scans: the XOR of the rows that the bits of a query select, at the speed of memory.

Which rows are read, and in what order, follows from shapes; but for this: a server that answers few
queries skips the rows whose bit is 0. Those bits are its own share of a query, which looks random
to it whatever the keys are, so that what it skips tells it (and whoever watches its memory) nothing
that it did not know. An observer of both servers is not covered.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from keyhole.errors import ShapeError
from keyhole.private.pir.scan_kernels import BLOCK, fold_few, fold_many

__all__ = ["plain_scan_buckets", "plain_scan_rows", "scan_buckets", "scan_rows"]

_MANY = 5  # queries from which tables pay: they cost what four queries cost without


def scan_rows(
    rows: NDArray[np.uint64], bits: NDArray[np.uint8], visits: NDArray[np.int64] | None = None
) -> NDArray[np.uint64]:
    """Answers queries over all rows, in one pass if there are five or more.

    Args:
        rows: (K, words) uint64, contiguous.
        bits: (q, ceil(K / 8)) uint8: bit j of byte i is row 8 i + j; bits beyond K are ignored.
        visits: (K,) int64, raised by one whenever a row is read; for tests.

    Returns:
        (q, words) uint64.

    Raises:
        ShapeError: arrays that do not fit each other.

    >>> rows = np.array([[1], [2], [4]], np.uint64)
    >>> scan_rows(rows, np.array([[0b101], [0b110]], np.uint8))
    array([[5],
           [6]], dtype=uint64)
    """
    if bits.ndim != 2:
        raise _misfit(f"bits {bits.shape}")
    everything = np.empty((0, 0), np.int32)
    return _scan(rows, everything, len(rows), bits[:, None], visits)[:, 0]


def scan_buckets(
    rows: NDArray[np.uint64],
    members: NDArray[np.int32],
    bits: NDArray[np.uint8],
    visits: NDArray[np.int64] | None = None,
) -> NDArray[np.uint64]:
    """Answers queries over every bucket, in one pass if there are five or more clients.

    Args:
        rows: (K, words) uint64, contiguous.
        members: (B, size) int32: the keys of each bucket, -1 where there is none.
        bits: (q, B, ceil(size / 8)) uint8: bit j of byte i is position 8 i + j; others are ignored.
        visits: (K,) int64, raised by one whenever a row is read; for tests.

    Returns:
        (q, B, words) uint64.

    Raises:
        ShapeError: arrays that do not fit each other, or members that are not keys.
    """
    if members.ndim != 2 or members.dtype != np.int32 or not members.size:
        raise _misfit(f"members {members.dtype} {members.shape}")
    if members.max() >= len(rows):
        raise _misfit(f"a member beyond {len(rows)} rows")
    if bits.ndim != 3 or bits.shape[1] != len(members):
        raise _misfit(f"bits {bits.shape} for members {members.shape}")
    return _scan(rows, members, members.shape[1], bits, visits)


def plain_scan_rows(rows: NDArray[np.uint64], bits: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """What `scan_rows` computes, as one reads it."""
    chosen = np.unpackbits(bits, axis=-1, count=len(rows), bitorder="little").astype(bool)
    sums = [np.bitwise_xor.reduce(rows[each], axis=0) for each in chosen]
    return np.array(sums, np.uint64).reshape(len(bits), rows.shape[1])


def plain_scan_buckets(
    rows: NDArray[np.uint64], members: NDArray[np.int32], bits: NDArray[np.uint8]
) -> NDArray[np.uint64]:
    """What `scan_buckets` computes, as one reads it."""
    # An empty position is a row of zeros behind the last one.
    rows = np.vstack([rows, np.zeros_like(rows[:1])])
    sums = [plain_scan_rows(rows[keys], bits[:, b]) for b, keys in enumerate(members)]
    return np.stack(sums, axis=1)


def _scan(
    rows: NDArray[np.uint64],
    ids: NDArray[np.int32],
    size: int,
    bits: NDArray[np.uint8],
    visits: NDArray[np.int64] | None,
) -> NDArray[np.uint64]:
    """Both scans: bits (q, B, bytes) to (q, B, words)."""
    if rows.ndim != 2 or rows.dtype != np.uint64 or not rows.flags.c_contiguous or not rows.size:
        raise _misfit(f"rows {rows.dtype} {rows.shape}")
    if bits.dtype != np.uint8 or bits.shape[2] != -(-size // 8):
        raise _misfit(f"bits {bits.dtype} {bits.shape} for {size} positions")
    seen = np.empty(0, np.int64) if visits is None else visits
    if visits is not None and visits.shape != (len(rows),):
        raise _misfit(f"visits {visits.shape}")
    rows, ids, bits = (_read_only(each) for each in (rows, ids, bits))
    out = np.zeros((*bits.shape[:2], rows.shape[1]), np.uint64)
    if len(bits) >= _MANY:
        fold_many(rows, ids, size, _words(bits), out, seen)
        return out
    for query, answer in zip(bits, out, strict=True):
        fold_few(rows, ids, size, query, answer, seen)
    return out


def _read_only(array: NDArray[Any]) -> NDArray[Any]:
    """A view that is contiguous and read-only: kernels are compiled once, for such arrays."""
    view = np.ascontiguousarray(array).view()
    view.setflags(write=False)
    return view


def _words(bits: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """Bits (q, B, bytes) as words (B, blocks, q): what one block needs lies together."""
    queries, buckets, count = bits.shape
    blocks = -(-count * 8 // BLOCK)
    padded = np.zeros((queries, buckets, blocks * BLOCK // 8), np.uint8)
    padded[..., :count] = bits
    return np.ascontiguousarray(padded.view("<u4").transpose(1, 2, 0), np.uint32)


def _misfit(got: str) -> ShapeError:
    return ShapeError(
        "arrays that cannot be scanned together",
        got=got,
        allowed="rows uint64 (K, words), members int32 (B, size), bits uint8 of one bit a position",
        fix="take rows from Database, members from Placement and bits from a query",
    )
