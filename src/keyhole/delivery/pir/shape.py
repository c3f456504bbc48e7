"""Chooses how a table is retrieved from one server: one function of public numbers.

Slots of a polynomial are buckets. A row is cut into s pieces of whole words, and each piece lies in
three buckets (`crypto.cuckoo` says why), so that m clients' keys, s m pieces, find a bucket of
their own. Position p of all buckets is one plaintext polynomial for each chunk of b bits of a
piece. The question has one ciphertext a position, the reply one for each chunk, and the hint one
for each chunk and each polynomial of a secret:

    question  54 bits    x N x G x positions    = 54 x 3 K s
    reply     23 to 26   x N x G x chunks       ~ 1.2 x 8 x row bytes x N G / s
    hint      30 or so   x 2048 x G x chunks    ~ 1.5 x 8 x row bytes x 2048 G / s

Cutting rows makes questions longer, hint and reply shorter; few keys of a small table pay for it.
Beside a table of popular keys each piece lies in one bucket, where the same piece of other keys may
be in its way: all pieces of a key find a bucket, or none does. Questions and work are a third.

Noise. In steps of 1/t, the phase that a client decodes is off by three independent errors:
errors of the question times the table, rounding of the hint times the secret, rounding of the
reply. Each is sub-Gaussian with its variance, or for the first with sigma^2 |d|^2 (Canonne, Kamath
and Steinke 2020), where |d|^2 is what uniform coefficients have: the table is masked with public
random bits first, so that it does not depend on what slices hold. A coefficient is wrong if their
sum passes half a step: with V their variances' sum, with at most 2 exp(-1 / 8V).

Security. A question is a sample of the Module-LWE problem for every position: polynomials of degree
N times rank 2048 / N, q of 54 bits, secrets and errors of the discrete Gaussian with standard
deviation 3.2. `ESTIMATES` has what the lattice estimator says of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import exp, inf, sqrt
from types import MappingProxyType

import numpy as np

from keyhole.crypto.bits import packed_bytes
from keyhole.crypto.cuckoo import MAX_IN_BUCKETS
from keyhole.crypto.ntt import MAX_DEGREE, next_prime
from keyhole.delivery.pir.database import PirParams
from keyhole.delivery.pir.messages import FRAME_BYTES, REPLY_BYTES
from keyhole.delivery.popular import PLACES_A_KEY
from keyhole.errors import InputError

DIMENSION = 2048
"""N times the number of polynomials of a secret."""

PRIMES = (134_176_769, 134_111_233)
"""q is their product: 1 modulo 4096, the largest and a next one below 2^27."""

MODULUS = PRIMES[0] * PRIMES[1]
"""q."""

SIGMA = 3.2
"""Standard deviation of secrets and errors."""

QUESTION_BITS = 54
"""Bits of a coefficient of a question: 27 for each prime."""

POSITIONS_AT_ONCE = 8
"""Positions whose products are added up together; an encoded table has whole such groups."""

LANES = 32
"""Chunks that are transformed side by side."""

TOGETHER = 8
"""Questions that are multiplied in one pass: more of them are no faster."""

HINT_HEAD_BYTES = 8 + 32
"""What a hint begins with: its magic and a digest."""

ESTIMATES: Mapping[str, float] = MappingProxyType(
    {"usvp": 132.3, "bdd": 131.3, "dual_hybrid": 133.9}
)
"""Attack -> log2 of its operations, n = 2048, q = 2^54, sigma 3.2 for secret and error, by the
lattice estimator (malb/lattice-estimator 27a581b, June 2026, MATZOV costs): not run by our tests.
docs/decisions/0031 has the commands."""

SECURITY_BITS = min(ESTIMATES.values())
"""Of the best attack that the estimator knows."""

_DEGREES = (256, 512, 1024, 2048)
_CHUNK_BITS = (16, 17, 18, 19, 20)
_PIECES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 32)
_HINT_BITS = range(26, 33)
_REPLY_BITS = range(19, 29)
_ROOM = 1.3  # buckets for each piece that is asked for
_HASHES = 3
_FAILURE = 2.0**-40
_WORD = 64


@dataclass(frozen=True)
class RingShape:
    """How a table of K rows is retrieved from by m keys a question.

    Args:
        num_keys: K.
        row_bytes: of a row.
        max_keys: m.
        pieces: s, that a row is cut into.
        degree: N.
        groups: G, polynomials that all buckets take.
        chunk_bits: b; t is the first prime above 2^b that is 1 modulo 4096.
        reply_bits: of a coefficient.
        hint_bits: likewise.
        single: whether a piece lies in one bucket, out of those for its place in rows.

    >>> shape = shape_of(num_keys=100_000, row_bytes=2160, max_keys=1000)
    >>> shape.degree, shape.positions, shape.chunks, shape.reply_bits, shape.hint_bits
    (2048, 147, 864, 23, 31)
    >>> round(shape.total_bytes / 1e6, 1), shape.failure < 2**-40
    (14.0, True)
    """

    num_keys: int
    row_bytes: int
    max_keys: int
    pieces: int
    degree: int
    groups: int
    chunk_bits: int
    reply_bits: int = 0
    hint_bits: int = 0
    single: bool = False

    @staticmethod
    def of(params: PirParams) -> RingShape:
        """Returns the shape under params."""
        return shape_of(params.num_keys, params.row_bytes, params.max_keys, params.single)

    @property
    def modulus(self) -> int:
        """t."""
        return plain_modulus(self.chunk_bits)

    @property
    def rank(self) -> int:
        """Polynomials of a secret."""
        return DIMENSION // self.degree

    @property
    def buckets(self) -> int:
        """Slots of all groups."""
        return self.groups * self.degree

    @property
    def items(self) -> int:
        """Pieces of all rows."""
        return self.num_keys * self.pieces

    @property
    def hashes(self) -> int:
        """Buckets that hold each piece: one where every piece has a bucket for itself."""
        return 1 if self.single or self.items <= self.buckets else _HASHES

    @property
    def kind_buckets(self) -> int:
        """Buckets of each hash; where pieces have one, of the pieces at one place in rows."""
        return self.buckets // (self.pieces if self.single else self.hashes)

    @property
    def at_position(self) -> int:
        """Items that have one position, each in a bucket of every hash."""
        return self.kind_buckets * (self.pieces if self.single else 1)

    @property
    def positions(self) -> int:
        """P, of a bucket."""
        return -(-self.items // self.at_position)

    @property
    def parts(self) -> int:
        """Groups of eight positions."""
        return -(-self.positions // POSITIONS_AT_ONCE)

    @property
    def row_words(self) -> int:
        """Words of a row."""
        return -(-8 * self.row_bytes // _WORD)

    @property
    def piece_words(self) -> int:
        """Words of a piece."""
        return -(-self.row_words // self.pieces)

    @property
    def chunks(self) -> int:
        """C, of a piece."""
        return -(-self.piece_words * _WORD // self.chunk_bits)

    @property
    def lane_blocks(self) -> int:
        """Groups of 32 chunks."""
        return -(-self.chunks // LANES)

    @property
    def question_numbers(self) -> int:
        """Coefficients of a question."""
        return self.positions * self.buckets

    @property
    def reply_numbers(self) -> int:
        """Coefficients of a reply."""
        return self.buckets * self.chunks

    @property
    def hint_numbers(self) -> int:
        """Coefficients of the hint."""
        return self.rank * self.reply_numbers

    @property
    def query_bytes(self) -> int:
        """The number of bytes of a query."""
        return FRAME_BYTES + packed_bytes(self.question_numbers, QUESTION_BITS)

    @property
    def reply_bytes(self) -> int:
        """The number of bytes of its reply."""
        return REPLY_BYTES + packed_bytes(self.reply_numbers, self.reply_bits)

    @property
    def hint_bytes(self) -> int:
        """The number of bytes of the hint, the same for every client of a round."""
        return HINT_HEAD_BYTES + packed_bytes(self.hint_numbers, self.hint_bits)

    @property
    def total_bytes(self) -> int:
        """The number of bytes of all that one client sends and receives in a round."""
        return self.hint_bytes + self.query_bytes + self.reply_bytes

    @property
    def encoded_bytes(self) -> int:
        """The number of bytes of the encoded table."""
        return self.parts * self.part_bytes

    @property
    def block_bytes(self) -> int:
        """The number of bytes of 32 chunks of eight positions."""
        return 4 * len(PRIMES) * POSITIONS_AT_ONCE * self.buckets * LANES

    @property
    def part_bytes(self) -> int:
        """The number of bytes of eight positions of the encoded table."""
        return self.block_bytes * self.lane_blocks

    @property
    def products(self) -> int:
        """Multiplications of one answer."""
        return len(PRIMES) * self.positions * self.buckets * self.lane_blocks * LANES

    @property
    def variance(self) -> float:
        """V, of the noise in steps of 1/t."""
        t, terms = self.modulus, self.positions * self.degree
        squares = terms * t * t / 12 * (1 + 8 / sqrt(terms))  # of the coefficients of the table
        asked = (SIGMA**2 + 1 / 12) * squares * (t / MODULUS) ** 2
        hint = SIGMA**2 * DIMENSION * _rounded(self.hint_bits) * t * t
        return asked + hint + _rounded(self.reply_bits) * t * t

    @property
    def failure(self) -> float:
        """A bound of the probability that one coefficient or more of a reply is decoded wrongly;
        the paths of rows show that, and the client does without those keys."""
        return 2 * self.reply_numbers * exp(-1 / (8 * self.variance))


def _rounded(bits: int) -> float:
    """The variance of rounding to 2^-bits, in units of one: a step has a twelfth, and numbers are
    2^-36 too small at most before."""
    return (1 / 12 + 4.0 ** (bits - 36)) / 4.0**bits


@lru_cache(maxsize=8)  # a pure function of a number
def plain_modulus(chunk_bits: int) -> int:
    """Returns t for chunks of some bits.

    >>> plain_modulus(16), plain_modulus(20)
    (65537, 1073153)
    """
    return next_prime(1 << chunk_bits, 2 * MAX_DEGREE)


@lru_cache(maxsize=4096)  # a pure function of four numbers
def shape_of(num_keys: int, row_bytes: int, max_keys: int, single: bool = False) -> RingShape:
    """Returns the shape with the fewest bytes of all that are wrong with at most 2^-40 a question.

    Raises:
        InputError: more keys than buckets are made for.
    """
    found, smallest = None, inf
    for shape in _layouts(num_keys, row_bytes, max_keys, single):
        for rounded in _roundings(shape):
            if rounded.total_bytes < smallest:
                found, smallest = rounded, rounded.total_bytes
    if found is None:
        raise InputError(
            f"table too large for one server of private retrieval: got {num_keys} keys, {max_keys} "
            f"a query; expected {MAX_IN_BUCKETS} keys at most, and noise that leaves numbers "
            "readable; divide the table"
        )
    return found


def _layouts(num_keys: int, row_bytes: int, max_keys: int, single: bool) -> Iterator[RingShape]:
    """Shapes before rounding. More slots than needed pay only where every piece has its own."""
    room = PLACES_A_KEY if single else _ROOM
    words = -(-8 * row_bytes // _WORD)
    for pieces in _PIECES:
        if pieces > words or num_keys * pieces > MAX_IN_BUCKETS:
            return
        needed = min(int(np.ceil(room * max_keys * pieces)), num_keys * pieces)
        degree = next((n for n in _DEGREES if n >= needed), MAX_DEGREE)
        all_items = next((n for n in _DEGREES if n >= num_keys * pieces), degree)
        for n in {degree, all_items}:
            for bits in _CHUNK_BITS:
                groups = -(-needed // n)
                numbers = num_keys, row_bytes, max_keys, pieces, n, groups, bits
                yield RingShape(*numbers, single=single)


def _roundings(shape: RingShape) -> Iterator[RingShape]:
    """A shape with each number of bits for the hint, and the fewest for the reply beside it."""
    for hint in _HINT_BITS:
        for reply in _REPLY_BITS:
            if shape.chunk_bits + 1 < reply <= hint:
                rounded = _with_bits(shape, reply, hint)
                if rounded.failure <= _FAILURE:
                    yield rounded
                    break


def _with_bits(shape: RingShape, reply: int, hint: int) -> RingShape:
    return replace(shape, reply_bits=reply, hint_bits=hint)
