"""Answers questions to one server: reads them, multiplies, and rounds what comes of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numba import njit

from keyhole.crypto.bits import pack_bits, unpack_bits
from keyhole.crypto.ntt import MAX_MODULUS, Residues, transform_of
from keyhole.delivery.pir.encoded import EncodedTable, each_block
from keyhole.delivery.pir.lattice import PRIME_BITS, Wide, public_parts
from keyhole.delivery.pir.shape import (
    LANES,
    MODULUS,
    POSITIONS_AT_ONCE,
    PRIMES,
    QUESTION_BITS,
    TOGETHER,
    RingShape,
)

_RESIDUE = np.uint64(MAX_MODULUS - 1)


def read_question(body: memoryview, shape: RingShape) -> Residues:
    """Returns a question in the form that tables are multiplied with, (parts, primes, groups, N,
    8). Whatever the numbers are, sums of their products fit into a word."""
    numbers = np.zeros((shape.parts * POSITIONS_AT_ONCE, shape.buckets), np.uint64)
    sent = unpack_bits(body, shape.question_numbers, QUESTION_BITS)
    numbers.reshape(-1)[: len(sent)] = sent
    lined = numbers.reshape(-1, POSITIONS_AT_ONCE, shape.buckets).transpose(0, 2, 1)
    halves = [(lined >> np.uint64(at * PRIME_BITS)) & _RESIDUE for at in range(len(PRIMES))]
    form = (len(lined), len(PRIMES), shape.groups, shape.degree, POSITIONS_AT_ONCE)
    return np.stack(halves, axis=1).astype(np.uint32).reshape(form)


def answer(table: EncodedTable, questions: Sequence[memoryview]) -> Iterator[bytes]:
    """Yields the coefficients of the reply to each question, packed: (groups, N, chunks)."""
    shape = table.shape
    for start in range(0, len(questions), TOGETHER):
        asked = [read_question(body, shape) for body in questions[start : start + TOGETHER]]
        found = _products(table, np.stack(asked), shape.reply_bits)
        yield from (pack_bits(numbers.reshape(-1), shape.reply_bits) for numbers in found)


def hint_numbers(table: EncodedTable, seed: bytes) -> bytes:
    """Returns the coefficients of the hint, packed: (rank, groups, N, chunks)."""
    shape = table.shape
    public = np.stack(list(public_parts(seed, shape)), axis=1)
    return pack_bits(_products(table, public, shape.hint_bits).reshape(-1), shape.hint_bits)


def _products(table: EncodedTable, questions: Residues, bits: int) -> Wide:
    """Sums over all positions, rounded: (questions, groups, N, chunks)."""
    shape = table.shape
    out = np.empty((len(questions), shape.groups, shape.degree, shape.chunks), np.uint64)

    def work(block: int) -> None:
        sums = table.multiply(questions, block)
        last = block * LANES + LANES
        for one, rounded in zip(sums, out[..., block * LANES : last], strict=True):
            for values, prime in zip(one, PRIMES, strict=True):
                transform_of(shape.degree, prime).inverse(values)
            _round(one, _LOW, _HIGH, np.uint64(64 - bits), rounded)

    each_block(work, range(shape.lane_blocks))
    return out


# x / q = sum of (x c_i mod p_i) / p_i modulo 1, with c_i the inverse of q / p_i modulo p_i; each
# share is written as a number of 64 bits, so that a sum that wraps is one modulo 1.
_INVERSES = [pow(MODULUS // prime, -1, prime) for prime in PRIMES]
_LOW, _HIGH = (
    tuple(np.uint64(n) for n in (prime, inverse, (inverse << 32) // prime, (1 << 64) // prime))
    for prime, inverse in zip(PRIMES, _INVERSES, strict=True)
)


@njit(cache=True, nogil=True)
def _round(values, low, high, down, out):  # type: ignore[no-untyped-def]
    """Rounds numbers modulo q, given modulo both primes, to the upper bits of x / q."""
    half = np.uint64(1) << (down - np.uint64(1))
    for g in range(out.shape[0]):
        for n in range(out.shape[1]):
            for c in range(out.shape[2]):
                total = half + _share(values[0, g, n, c], low) + _share(values[1, g, n, c], high)
                out[g, n, c] = total >> down


@njit(cache=True, nogil=True, inline="always")
def _share(value, facts):  # type: ignore[no-untyped-def]
    """(x c mod p) / p, by the multiplication of `ntt.py`."""
    prime, inverse, scaled, share = facts
    x = np.uint64(value)
    product = np.uint32(x * inverse - ((x * scaled) >> np.uint64(32)) * prime)
    return np.uint64(min(product, np.uint32(product - np.uint32(prime)))) * share
