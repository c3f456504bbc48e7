"""Encrypts questions under the Module-LWE assumption, rounds what comes of them, and opens it.

A question has one ciphertext for each position p: <a_p, s> + e_p + round(q u_p / t), with public
polynomials a_p, one secret s, an error e_p and the plaintext u_p, 1 in the slots of buckets whose
position p is wanted and 0 in the others. Times the plaintexts d_p of a chunk and summed, the first
term becomes <h, s> with h = sum d_p a_p, the hint; what is left of the reply without it is the
chunk in the wanted slots, and noise. `shape.py` says how much.

Public polynomials come from a seed, as values of the transform. Values travel and are multiplied in
this form; a reply and the hint are coefficients, rounded.

This is the client's part. What it does, and in which order, depends on public numbers alone, but
for the search for buckets and the copying of what was found. The server's part is in `encoded.py`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from keyhole.arrays import KeyArray
from keyhole.crypto.bits import pack_bits, unpack_bits
from keyhole.crypto.gaussian import draw_gaussian
from keyhole.crypto.ntt import MAX_MODULUS, Residues, transform_of
from keyhole.crypto.prg import SEED_BYTES, Prg
from keyhole.delivery.pir.shape import (
    LANES,
    MODULUS,
    POSITIONS_AT_ONCE,
    PRIMES,
    QUESTION_BITS,
    SIGMA,
    RingShape,
)
from keyhole.delivery.pir.slots import mask_of, slots_of

Wide = NDArray[np.uint64]
"""Coefficients, rounded to some bits."""

PRIME_BITS = QUESTION_BITS // 2
"""Bits of a coefficient modulo one prime."""


def public_seed(round: bytes, shape: RingShape) -> bytes:
    """Returns the public seed of a table: a hash of the round and the shape, so that anyone who
    names rounds can draw public polynomials but not make one."""
    facts = struct.pack("<QQQ", shape.num_keys, shape.row_bytes, shape.max_keys)
    return blake2b(round + facts, digest_size=SEED_BYTES, person=b"keyhole-ring").digest()


def public_parts(seed: bytes, shape: RingShape) -> Iterator[Residues]:
    """Yields the public polynomials of eight positions after the other, (rank, primes, groups, N,
    8): for each prime (rank, groups, N, 8) numbers, the lower 27 bits of the next words of 32 bits
    of the AES-128-CTR stream that are below the prime."""
    stream, each = Prg(seed), (shape.rank, shape.groups, shape.degree, POSITIONS_AT_ONCE)
    for _ in range(shape.parts):
        drawn = [_uniform(stream, prime, int(np.prod(each))).reshape(each) for prime in PRIMES]
        yield np.stack(drawn, axis=1)


def _uniform(stream: Prg, prime: int, count: int) -> Residues:
    found: list[Residues] = []
    missing = count
    while missing:
        words = np.empty(missing, "<u4")
        stream.fill(words.view(np.uint8))
        words &= np.uint32(MAX_MODULUS - 1)
        found.append(words[words < prime].astype(np.uint32, copy=False))
        missing -= len(found[-1])
    return np.concatenate(found)


@dataclass(frozen=True, repr=False)
class Opening:
    """What opens the reply to a question.

    Args:
        secret: (rank, N).
        keys: (m,) that were asked for.
        buckets: (m, s) of their pieces; -1 where a key found no place.
    """

    secret: NDArray[np.int32]
    keys: KeyArray
    buckets: NDArray[np.int64]

    def __repr__(self) -> str:
        """Secrets and keys stay secret."""
        return f"Opening({len(self.keys)} keys)"


def encrypt(keys: KeyArray, shape: RingShape, seed: bytes, prg: Prg) -> tuple[bytes, Opening]:
    """Returns a question for m keys, all different, and its opening. It takes memory for the
    question three times."""
    buckets, positions = slots_of(shape).assign(keys)
    secret = draw_gaussian(prg, SIGMA, (shape.rank, shape.degree))
    turned = [_transformed(secret.T[None], prime)[0].T for prime in PRIMES]  # (rank, N)
    wanted = np.zeros((shape.parts, shape.buckets, POSITIONS_AT_ONCE), np.uint32)
    part, within = np.divmod(positions, POSITIONS_AT_ONCE)
    is_placed = buckets >= 0
    wanted[part[is_placed], buckets[is_placed], within[is_placed]] = 1
    question = np.empty((shape.parts, POSITIONS_AT_ONCE, shape.buckets), np.uint64)
    form = (shape.groups, shape.degree, POSITIONS_AT_ONCE)
    for number, public in enumerate(public_parts(seed, shape)):
        plain = transform_of(shape.degree, shape.modulus).inverse(wanted[number].reshape(form))
        scaled = _scaled(plain, shape.modulus)
        scaled += draw_gaussian(prg, SIGMA, form)
        values = np.zeros(form, np.uint64)
        for place, prime in enumerate(PRIMES):
            masked = _transformed(scaled, prime)
            masked += _products(public[:, place], turned[place], prime)
            values |= (masked % prime).astype(np.uint64) << np.uint64(place * PRIME_BITS)
        question[number] = values.reshape(shape.buckets, -1).T
    sent = question.reshape(-1)[: shape.question_numbers]
    return pack_bits(sent, QUESTION_BITS), Opening(secret, keys, buckets)


def _transformed(numbers: NDArray[np.integer], prime: int) -> Residues:
    """Values of polynomials, (..., N, lanes) of any whole numbers, modulo a prime."""
    reduced = np.ascontiguousarray(numbers % prime, dtype=np.uint32)
    return transform_of(numbers.shape[-2], prime).forward(reduced)


def _products(values: Residues, factors: Residues, prime: int) -> Residues:
    """The sum over polynomials of products with others, given by their values: (rank, ..., N,
    lanes) and (rank, N); below 2p."""
    ring, twice = transform_of(factors.shape[-1], prime), np.uint32(2 * prime)
    total, *others = (ring.multiply(*pair) for pair in zip(values, factors, strict=True))
    for each in others:
        total += each
        np.minimum(total, total - twice, out=total)
    return total


def _scaled(plain: Residues, t: int) -> NDArray[np.int64]:
    """round(q u / t). Not floor(q / t) u: that is off by u (q mod t) / t, noise as large as t^2."""
    whole, rest = divmod(MODULUS, t)
    u = plain.astype(np.int64)
    return u * whole + (u * rest + t // 2) // t


class RingHint:
    """The hint of a table, ready for any number of replies.

    Args:
        packed: what `hint_numbers` returned.
    """

    def __init__(self, packed: memoryview, shape: RingShape) -> None:
        self._shape = shape
        numbers = unpack_bits(packed, shape.hint_numbers, shape.hint_bits)
        lanes = _in_lanes(numbers.reshape(shape.rank, *_reply_form(shape)))
        self._values = [_transformed(lanes, prime) for prime in PRIMES]

    def open(self, body: memoryview, opening: Opening) -> NDArray[np.uint8]:
        """Returns the rows of a reply, (m, row_bytes); those of keys without a place mean
        nothing."""
        shape = self._shape
        reply = unpack_bits(body, shape.reply_numbers, shape.reply_bits)
        lanes = _in_lanes(reply.reshape(_reply_form(shape)))
        mask = self._times(opening.secret)
        up, t, bits = shape.hint_bits - shape.reply_bits, np.uint64(shape.modulus), shape.hint_bits
        phase = ((lanes << np.uint64(up)) - mask) & np.uint64((1 << bits) - 1)
        rounded = (phase * t + np.uint64(1 << (bits - 1))) >> np.uint64(bits)
        plain = rounded.astype(np.uint32)  # t stands for 0
        np.minimum(plain, plain - np.uint32(shape.modulus), out=plain)
        slots = transform_of(shape.degree, shape.modulus).forward(plain)
        return _rows_of(slots, opening, shape)

    def _times(self, secret: NDArray[np.int32]) -> Wide:
        """<h, s> for every chunk modulo 2^64, (blocks, groups, N, 32): sums are whole numbers far
        below q."""
        found = []
        for values, prime in zip(self._values, PRIMES, strict=True):
            turned = _transformed(secret.T[None], prime)[0].T
            total = _products(values, turned, prime)
            found.append(transform_of(self._shape.degree, prime).inverse(total))
        low, high = found
        first, second = PRIMES
        ring, inverse = transform_of(self._shape.degree, second), pow(first, -1, second)
        high += np.uint32(2 * second) - low  # low is below the first, and so below twice the other
        turns = ring.multiply(high, np.full(self._shape.degree, inverse, np.uint32)) % second
        whole = low + np.uint64(first) * turns
        is_below = whole > np.uint64(MODULUS // 2)
        return whole - is_below * np.uint64(MODULUS)


def _reply_form(shape: RingShape) -> tuple[int, int, int]:
    return shape.groups, shape.degree, shape.chunks


def _in_lanes(numbers: Wide) -> Wide:
    """Coefficients, (..., groups, N, chunks), as polynomials side by side: (..., blocks, groups, N,
    32)."""
    *front, groups, degree, chunks = numbers.shape
    blocks = -(-chunks // LANES)
    padded = np.zeros((*front, groups, degree, blocks * LANES), np.uint64)
    padded[..., :chunks] = numbers
    parts = padded.reshape(*front, groups, degree, blocks, LANES)
    return np.ascontiguousarray(np.moveaxis(parts, -2, -4))


def _rows_of(slots: Residues, opening: Opening, shape: RingShape) -> NDArray[np.uint8]:
    """The rows of keys from the slots of all chunks, (blocks, groups, N, 32)."""
    flat = slots.reshape(len(slots), shape.buckets, LANES)
    chunks = flat[:, opening.buckets.reshape(-1)].transpose(1, 0, 2).reshape(-1, len(slots) * LANES)
    raw = np.ascontiguousarray(chunks, "<u4").view(np.uint8).reshape(*chunks.shape, 4)
    bits = np.unpackbits(raw, axis=2, bitorder="little")[:, :, : shape.chunk_bits]
    packed = np.packbits(bits.reshape(len(bits), -1), axis=1, bitorder="little")
    pieces = np.ascontiguousarray(packed[:, : 8 * shape.piece_words])
    words = pieces.view("<u8").reshape(len(opening.keys), -1)[:, : shape.row_words]
    rows = words ^ mask_of(opening.keys, shape.row_words)
    return rows.astype("<u8").view(np.uint8)[:, : shape.row_bytes]
