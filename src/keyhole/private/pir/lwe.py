"""Products modulo 2^32, and the public matrix of learning with errors.

Everything that clients and servers compute is one product of matrices: queries are secrets times
the public matrix, a reply is queries times the table, the hint the public matrix times the table,
and a client opens a reply with its secrets times the hint. Unsigned numbers of 32 bits wrap as q
does, so every product is exact.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from hashlib import blake2b

import numpy as np
from numba import njit
from numpy.typing import NDArray

from keyhole.private.pir.database import Database
from keyhole.private.pir.lwe_shape import DIMENSION, LweShape
from keyhole.private.prg import SEED_BYTES, Prg

__all__ = ["BLOCK", "Columns", "Words", "add_product", "matrix_seed", "public_matrix"]

Words = NDArray[np.uint32]
"""Numbers modulo 2^32."""

BLOCK = 2048
"""Columns of the public matrix that are in memory at once: 8 MB."""


def matrix_seed(round: bytes, shape: LweShape) -> bytes:
    """The public seed of the matrix: a hash of the round and the shape, so that whoever names
    rounds can draw matrices but not make one."""
    facts = struct.pack("<QQQ", shape.num_keys, shape.record_bytes, shape.most_keys)
    return blake2b(round + facts, digest_size=SEED_BYTES, person=b"keyhole-lwe").digest()


def public_matrix(seed: bytes, columns: int) -> Iterator[Words]:
    """Yields the transpose of A in blocks (1024, width), all but the last of width 2048.

    A block is the next 1024 x width words of the AES-128-CTR stream of the seed, little-endian, row
    by row.
    """
    stream = Prg(seed)
    for start in range(0, columns, BLOCK):
        block = np.empty((DIMENSION, min(BLOCK, columns - start)), "<u4")
        stream.fill(block.view(np.uint8))
        yield block.astype(np.uint32, copy=False)


def add_product(out: Words, weights: Words, table: Words | NDArray[np.uint8]) -> None:
    """out += weights @ table modulo 2^32.

    Args:
        out: (q, n), rows one after the other in memory, as are those of the others.
        weights: (q, c).
        table: (c, n), of bytes or words.
    """
    fixed = np.ascontiguousarray(table).view()
    fixed.setflags(write=False)  # one compiled form for tables that are read-only and others
    _add_product(out, np.ascontiguousarray(weights), fixed)


class Columns:
    """The table as a matrix of bytes, a column of r slices one after the other in memory.

    Args:
        database: the slices with their tags.
        shape: how they lie in columns.
    """

    def __init__(self, database: Database, shape: LweShape) -> None:
        cells, r = database.rows.view(np.uint8), shape.slices_per_column
        self._full = len(cells) // r
        self._shape = shape
        self._stride = cells.shape[1]
        self._whole = cells[: self._full * r].reshape(self._full, -1)
        # The slices that are left, if r does not divide K.
        self._rest = cells[self._full * r :].reshape(1, -1)

    def product(self, weights: Iterable[Words], count: int) -> Words:
        """Returns weights times the columns, in one pass: (count, r, row_bytes).

        Args:
            weights: (count, width) for consecutive columns, all of them in the end.
            count: of rows.
        """
        r, start = self._shape.slices_per_column, 0
        out = np.zeros((count, r * self._stride), np.uint32)
        for some in weights:
            stop = min(start + some.shape[1], self._full)
            add_product(out, some[:, : stop - start], self._whole[start:stop])
            if start + some.shape[1] > self._full:
                rest = np.zeros((count, self._rest.shape[1]), np.uint32)
                add_product(rest, some[:, stop - start :], self._rest)
                out[:, : rest.shape[1]] += rest
            start += some.shape[1]
        return out.reshape(count, r, self._stride)[:, :, : self._shape.row_bytes]


# Wide panels, so that a call is worth its cost; few columns, so that they stay in the cache while
# all rows of weights meet them.
_PANEL = 4096
_DEPTH = 16
_STEP = 8


@njit(cache=True, nogil=True)
def _add_product(out, weights, table):  # type: ignore[no-untyped-def]
    depth, width = table.shape
    for top in range(0, depth, _DEPTH):
        bottom = min(top + _DEPTH, depth)
        eights = top + (bottom - top) // _STEP * _STEP
        for left in range(0, width, _PANEL):
            panel = slice(left, min(left + _PANEL, width))
            for row in range(len(weights)):
                sums, factors = out[row][panel], weights[row]
                for k in range(top, eights, _STEP):
                    _add_eight(
                        sums,
                        factors[k : k + _STEP],
                        table[k][panel],
                        table[k + 1][panel],
                        table[k + 2][panel],
                        table[k + 3][panel],
                        table[k + 4][panel],
                        table[k + 5][panel],
                        table[k + 6][panel],
                        table[k + 7][panel],
                    )
                for k in range(eights, bottom):
                    _add_one(sums, factors[k], table[k][panel])


@njit(cache=True, nogil=True)
def _add_eight(out, f, a, b, c, d, e, g, h, i):  # type: ignore[no-untyped-def]
    """Eight at a time: a sum is loaded and stored once for eight products."""
    word = np.uint32  # products of 32 bits, eight in a vector; without it they have 64
    f0, f1, f2, f3, f4, f5, f6, f7 = f[0], f[1], f[2], f[3], f[4], f[5], f[6], f[7]
    for n in range(len(out)):
        first = word(f0 * a[n]) + word(f1 * b[n]) + word(f2 * c[n]) + word(f3 * d[n])
        second = word(f4 * e[n]) + word(f5 * g[n]) + word(f6 * h[n]) + word(f7 * i[n])
        out[n] += word(first) + word(second)


@njit(cache=True, nogil=True)
def _add_one(out, factor, row):  # type: ignore[no-untyped-def]
    for n in range(len(out)):
        out[n] += np.uint32(factor * row[n])
