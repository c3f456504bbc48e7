"""Computes with learning with errors: the layout of a table, products modulo 2^32, errors, queries.

Everything that clients and servers compute is one product of matrices: queries are secrets times
the public matrix, a reply is queries times the table, the hint the public matrix times the table,
and a client opens a reply with its secrets times the hint. Unsigned numbers of 32 bits wrap as q
does, so every product is exact. The layout follows from whole numbers only, so that clients and
servers on any machine choose the same. Errors are of a discrete Gaussian, by a table of its
distribution.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from decimal import Decimal, localcontext
from functools import lru_cache
from hashlib import blake2b
from math import exp, isqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keyhole.arrays import KeyArray
from keyhole.compiled import loop
from keyhole.crypto.prg import SEED_BYTES, Prg
from keyhole.delivery.pir.database import Database, PirParams
from keyhole.delivery.pir.messages import FRAME_BYTES, REPLY_BYTES

DIMENSION = 1024
"""n, of a secret."""

SIGMA = 6.4
"""Standard deviation of an error."""

WORD_BYTES = 4
"""Bytes of a number modulo q = 2^32."""

SCALE_BITS = 24
"""Bits of q / p = 2^24, what a byte is multiplied by: p = 256."""

HINT_HEAD_BYTES = 8 + 32
"""What a hint begins with: its magic and a digest."""

_MODULUS = 256  # p: entries of the matrix are bytes
_SAFETY_BITS = 40
_EXPONENT = 52_428_800  # 2^63 / (p^4 sigma^2)


def failure_of_byte(columns: int, modulus: int = _MODULUS) -> float:
    """Returns a bound of the probability that noise changes one entry of a column: 2 exp(-t^2 / (2
    s^2)) with t = q / 2p and s = sigma sqrt(columns) p/2. For bytes it is 2 exp(-52428800 /
    columns).

    The noise of a byte is the sum of (d - 128) e over the columns, d a byte of the table and e an
    error. A discrete Gaussian is sub-Gaussian with its sigma (Canonne, Kamath and Steinke 2020), so
    the bound holds for every table.

    >>> failure_of_byte(2**20) < 2**-71, failure_of_byte(2**20, modulus=294) < 2**-40
    (True, True)
    """
    return 2 * exp(-(2**63) / (modulus**4 * SIGMA**2 * columns))


def max_columns(max_keys: int, row_bytes: int) -> int:
    """Returns the columns up to which one of all bytes of a query fails with at most 2^-40."""
    bits = 1 + _SAFETY_BITS + (max_keys * row_bytes).bit_length()
    return 1000 * _EXPONENT // (694 * bits)  # 0.694 is above log(2)


@dataclass(frozen=True)
class LweShape:
    """How slices lie in the matrix: key k is slice k mod r of column k div r.

    r is what makes the fewest bytes: hint, and max_keys queries with their replies. The hint and a
    reply grow with r, a query shrinks. The rounding to whole columns is left out of the choice.

    >>> shape = LweShape(num_keys=100_000, row_bytes=2160, max_keys=1000)
    >>> shape.slices_per_column, shape.columns
    (5, 20000)
    >>> round(shape.total_bytes / 1e6, 1)
    167.4
    """

    num_keys: int
    row_bytes: int
    max_keys: int

    @staticmethod
    def of(params: PirParams) -> LweShape:
        """Returns the shape under params."""
        return LweShape(params.num_keys, params.row_bytes, params.max_keys)

    @property
    def slices_per_column(self) -> int:
        """r."""
        minimum = -(-self.num_keys // max_columns(self.max_keys, self.row_bytes))
        each = self.row_bytes * (DIMENSION + self.max_keys)
        ideal = isqrt(self.max_keys * self.num_keys // each)
        near = (min(max(r, minimum, 1), self.num_keys) for r in (ideal, ideal + 1))
        return min(near, key=lambda r: (self._bytes_with(r), r))

    @property
    def columns(self) -> int:
        """Columns of the matrix: the length of a query in words."""
        return -(-self.num_keys // self.slices_per_column)

    @property
    def query_bytes(self) -> int:
        """The number of bytes of a query for `max_keys` keys."""
        return FRAME_BYTES + WORD_BYTES * self.max_keys * self.columns

    @property
    def reply_bytes(self) -> int:
        """The number of bytes of its reply."""
        words = self.max_keys * self.slices_per_column * self.row_bytes
        return REPLY_BYTES + WORD_BYTES * words

    @property
    def hint_bytes(self) -> int:
        """The number of bytes of the hint, which every client fetches once a round."""
        words = DIMENSION * self.slices_per_column * self.row_bytes
        return HINT_HEAD_BYTES + WORD_BYTES * words

    @property
    def total_bytes(self) -> int:
        """The number of bytes of all that one client sends and receives in a round."""
        return self.hint_bytes + self.query_bytes + self.reply_bytes

    @property
    def failure(self) -> float:
        """A bound of the probability that one byte or more of a query is decoded wrongly; its
        path shows that, and the client does without the slice."""
        return self.max_keys * self.row_bytes * failure_of_byte(self.columns)

    def _bytes_with(self, r: int) -> int:
        up = self.max_keys * -(-self.num_keys // r)
        return up + r * self.row_bytes * (DIMENSION + self.max_keys)


Words = NDArray[np.uint32]
"""Numbers modulo 2^32."""

BLOCK = 2048
"""Columns of the public matrix that are in memory at once: 8 MB."""


def matrix_seed(round: bytes, shape: LweShape) -> bytes:
    """Returns the public seed of the matrix: a hash of the round and the shape, so that anyone who
    names rounds can draw matrices but not make one."""
    facts = struct.pack("<QQQ", shape.num_keys, shape.row_bytes, shape.max_keys)
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
    """out += weights @ table modulo 2^32: (q, n), rows one after the other in memory, (q, c), and
    (c, n) of bytes or words."""
    fixed: Any = np.ascontiguousarray(table).view()
    fixed.setflags(write=False)  # one compiled form for tables that are read-only and others
    multiply_into(out, np.ascontiguousarray(weights), fixed)


@loop("keyhole.delivery.pir.lwe_loops")
def multiply_into(out: Words, weights: Words, table: Words | NDArray[np.uint8]) -> None:
    """Adds weights @ table modulo 2^32 to `out`; see `add_product`.

    The machine multiplies matrices of doubles: weights are cut into limbs of 11 bits, so that a sum
    of 1024 of their products with words stays below 2^53 and is exact.
    """
    count, limbs = len(weights), np.arange(0, 32, _LIMB, dtype=np.uint32)[:, None, None]
    factors = (weights >> limbs & np.uint32((1 << _LIMB) - 1)).astype(np.float64)
    factors = factors.reshape(-1, weights.shape[1])
    for top in range(0, table.shape[0], _DEPTH):
        for left in range(0, table.shape[1], _PANEL):
            panel = table[top : top + _DEPTH, left : left + _PANEL].astype(np.float64)
            products = (factors[:, top : top + _DEPTH] @ panel).astype(np.uint64)
            shifted = products.astype(np.uint32).reshape(-1, count, panel.shape[1]) << limbs
            out[:, left : left + _PANEL] += shifted.sum(axis=0, dtype=np.uint32)


_LIMB = 11  # bits: 11 + 32 + 10 are the 53 of a double
_DEPTH = 1024
_PANEL = 512  # columns that are doubles at once: 4 MB


class Columns:
    """The table as a matrix of bytes, a column of r slices one after the other in memory."""

    def __init__(self, database: Database, shape: LweShape) -> None:
        cells, r = database.rows.view(np.uint8), shape.slices_per_column
        self._full = len(cells) // r
        self._shape = shape
        self._stride = cells.shape[1]
        self._whole = cells[: self._full * r].reshape(self._full, -1)
        # The slices that are left, if r does not divide K.
        self._rest = cells[self._full * r :].reshape(1, -1)

    def product(self, weights: Iterable[Words], count: int) -> Words:
        """Returns weights times the columns, in one pass: (count, r, row_bytes). The weights are
        (count, width) for consecutive columns, all of them in the end."""
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


_REACH = 64  # 10 sigma: what lies beyond has less than 2^-74 and falls to the rounding
_DIGITS = 60


def draw_errors(prg: Prg, shape: tuple[int, ...]) -> NDArray[np.int32]:
    """Returns errors of the discrete Gaussian with mean 0 and standard deviation 6.4.

    Every error takes one word of 64 bits and as many steps as any other. Each of its values comes
    up with its probability to within 2^-64, the whole distribution to within 2^-57.
    """
    words = np.empty(shape, "<i8")
    prg.fill(words.view(np.uint8))
    out = np.empty(shape, np.int32)
    lowest, steps = thresholds()
    count_steps(words.reshape(-1), steps, lowest, out.reshape(-1))
    return out


@lru_cache(maxsize=1)  # a pure function of constants
def thresholds() -> tuple[int, NDArray[np.int64]]:
    """Returns the lowest value and the steps of the distribution: the value of a word is the lowest
    one plus the number of steps that are not above the word, all as signed numbers of 64 bits."""
    with localcontext() as context:
        context.prec = _DIGITS
        spread = 2 * Decimal(str(SIGMA)) ** 2
        values = range(-_REACH, _REACH + 1)
        weights = [(-Decimal(x * x) / spread).exp() for x in values]
        total, below, steps = sum(weights), Decimal(0), []
        for weight in weights:
            below += weight
            steps.append(int((below / total * 2**64).to_integral_value()))
    lowest = -_REACH + sum(step == 0 for step in steps)
    kept = [step - 2**63 for step in steps if 0 < step < 2**64]
    table = np.array(kept, np.int64)
    table.setflags(write=False)
    return lowest, table


@loop("keyhole.delivery.pir.lwe_loops")
def count_steps(
    words: NDArray[np.int64], steps: NDArray[np.int64], lowest: int, out: NDArray[np.int32]
) -> None:
    """Writes `lowest` plus the number of steps that are not above each word. Every word is compared
    with every step, so that the work does not depend on the words."""
    out[:] = lowest
    for step in steps:
        out += words >= step


@dataclass(frozen=True, repr=False)
class Opening:
    """What opens replies to queries: the secret of each, (u, 1024), and the sum of its errors."""

    secrets: Words
    errors: Words

    def __repr__(self) -> str:
        """Secrets stay secret: printing shows how many there are."""
        return f"Opening({len(self.secrets)} queries)"

    def decode(self, rows: Words, slices: NDArray[np.int64], hint: Words) -> NDArray[np.uint8]:
        """Returns the bytes of one slice, which `slices` (u,) says, of each column, (u, row_bytes);
        `rows`, (u or more, r, row_bytes), are the reply, the hint is (r, 1024, row_bytes)."""
        out = np.empty((len(slices), rows.shape[2]), np.uint8)
        for each in np.unique(slices):
            mine = np.flatnonzero(slices == each)
            mask = np.zeros((len(mine), rows.shape[2]), np.uint32)
            add_product(mask, self.secrets[mine], hint[each])
            noisy = rows[mine, each] - mask - np.uint32(128) * self.errors[mine, None]
            out[mine] = (noisy + np.uint32(1 << (SCALE_BITS - 1))) >> np.uint32(SCALE_BITS)
        return out


def encrypt(columns: KeyArray, length: int, seed: bytes, prg: Prg) -> tuple[Words, Opening]:
    """Returns queries A s + e + 2^24 u, (m, length), each with a new secret, and their opening.

    The public matrix is made block by block, once for all queries: 1024 products for each of its
    columns and each query, in memory for the queries and about 8 MB and 12 KB per query more.
    `columns`, (m,) below `length`, is what each query asks for; `seed` is of the public matrix.
    """
    count = len(columns)
    words = np.empty((count, DIMENSION), "<u4")
    prg.fill(words.view(np.uint8))
    secrets, sums = words.astype(np.uint32, copy=False), np.zeros(count, np.uint32)
    queries = np.empty((count, length), "<u4")
    starts = range(0, length, BLOCK)
    for start, block in zip(starts, public_matrix(seed, length), strict=True):
        some = draw_errors(prg, (count, block.shape[1])).view(np.uint32)
        sums += some.sum(axis=1, dtype=np.uint32)
        add_product(some, secrets, block)
        queries[:, start : start + BLOCK] = some
    queries[np.arange(count), columns] += np.uint32(1 << SCALE_BITS)
    return queries, Opening(secrets, sums)
