"""Turns real numbers into ring elements of 16 or 32 bits, and masks that cancel in a sum.

A number is clipped to +-clip, multiplied by a scale and rounded to one of its two neighbours, to
the upper one with the probability of its fraction: right on average. The scale is the largest power
of two at which a whole cohort of numbers at the clip, each rounded away from zero, stays below half
of the ring. Nothing is hidden here: masks and shares do that, and they need whole numbers.

A pair of clients derives a seed of 128 bits from X25519 with HKDF-SHA256, bound to the protocol,
the round, the use, the two places and the two public keys; the one adds the mask of the seed and
the other subtracts it. The mask is the stream of AES-128 in counter mode.

Hidden: a vector to which the mask of a seed is added looks uniform to anyone who does not have the
seed, if X25519 (the Diffie-Hellman problem on Curve25519), HKDF and AES-128 hold, and if the seed
masks one vector only. Not covered: that a public key belongs to the client it is said to be of, and
anything against anyone who has one of the two private keys.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, Literal, TypeAlias

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR
from numpy.typing import NDArray

from keyhole.compiled import loop
from keyhole.crypto.hpke import PrivateKey, expand, extract
from keyhole.crypto.prg import SEED_BYTES, Prg
from keyhole.errors import InputError, NotFiniteError, ShapeError

RingBits: TypeAlias = Literal[16, 32]
"""Bits of an element of a ring: its numbers are added modulo 2^16 or 2^32."""

RingArray: TypeAlias = NDArray[np.unsignedinteger[Any]]
"""Elements of a ring, uint16 or uint32; NumPy's sums and differences of them wrap."""

_MIN_STEPS = 64  # of the clip: 6 bits and a sign
_MAX_CLIP = 2.0**64  # with it every sum, and every step, is an ordinary float32
_ROUNDING_CHUNK = 64 << 10  # numbers rounded together: their random words stay in cache


def ring_dtype(bits: int) -> np.dtype[Any]:
    """Returns the dtype of the elements of a ring.

    >>> ring_dtype(16)
    dtype('uint16')
    """
    if bits not in (16, 32):
        raise InputError(
            f"ring size is not supported: got {bits} bits; expected 16 or 32; take 32; 16 halves "
            "the bytes where numbers may be coarse"
        )
    return np.dtype(np.uint16 if bits == 16 else np.uint32)


@dataclass(frozen=True)
class FixedPoint:
    """How real numbers become elements of a ring, so that a sum cannot overflow by construction.

    scale = max 2^e with cohort * (clip * 2^e + 1) < 2^(bits - 1)

    Args:
        clip: numbers beyond +-clip are clipped to it; 2^-64 to 2^64.
        cohort: max clients whose numbers are added. That no more are is the caller's part.

    Raises:
        InputError: an unusable clip or cohort, or a ring so small that fewer than 64
            steps are left from 0 to the clip.

    >>> FixedPoint(clip=1.0, cohort=50).scale == 2**25
    True
    >>> FixedPoint(clip=1.0, cohort=50, bits=16).scale
    512.0
    """

    clip: float
    cohort: int
    bits: RingBits = 32

    def __post_init__(self) -> None:
        ring_dtype(self.bits)
        if not 1 / _MAX_CLIP <= self.clip <= _MAX_CLIP:  # NaN is not
            raise InputError(
                f"clip is out of range: got {self.clip}; expected 2^-64 to 2^64; clip at the size "
                "that a number of an update rarely exceeds"
            )
        if self.cohort < 1:
            raise InputError(
                f"cohort has no clients: got {self.cohort}; expected 1 or more; count again"
            )
        if self.clip * self.scale < _MIN_STEPS:  # fewer than 6 bits and a sign: mostly noise
            other = "" if self.bits == 32 else "32 bits or "
            raise InputError(
                f"a ring of {self.bits} bits is too small for sums of {self.cohort} numbers: got "
                f"{self.clip * self.scale:g} steps up to the clip; expected {_MIN_STEPS} or more; "
                f"take {other}a smaller cohort"
            )

    @cached_property
    def scale(self) -> float:
        """Steps per unit, a power of two: multiplying by it is exact."""
        # clip * scale + 1 < room, in whole and rational numbers: floats would decide it wrongly
        # where both sides are all but equal. If there is no room the scale is 0.
        steps = Fraction(2 ** (self.bits - 1), self.cohort) - 1
        if steps <= 0:
            return 0.0
        bound = steps / Fraction(self.clip)
        exponent = math.floor(math.log2(bound)) + 1
        while Fraction(2) ** exponent >= bound:
            exponent -= 1
        return 2.0**exponent

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the elements: uint16 or uint32."""
        return ring_dtype(self.bits)

    @property
    def rounding(self) -> float:
        """The most that one encoded number can be off, within the clip: 1 / scale."""
        return 1.0 / self.scale

    def encode(self, values: NDArray[np.floating[Any]], prg: Prg) -> RingArray:
        """Returns numbers as elements of the ring, rounded at random and right on average.

        The probability of rounding up is that of 32 random bits: on average a number is off by
        at most 2^-33 of a step. What is a whole number of steps is not rounded. `prg` is a
        client's own: anyone who foresees it learns a little more than the sum says.

        >>> FixedPoint(1.0, 50, 16).encode(np.array([0.5, -0.25, 7.0]), Prg(bytes(16)))
        array([  256, 65408,   512], dtype=uint16)
        """
        if not np.issubdtype(values.dtype, np.floating):
            raise ShapeError(
                f"only floats are encoded: got {values.dtype}; expected a float dtype; cast"
            )
        width: type[np.floating[Any]] = np.float32 if values.dtype.itemsize <= 4 else np.float64
        flat = np.ascontiguousarray(values, width).reshape(-1)
        out = np.empty(flat.shape, self.dtype)
        words = np.empty(min(_ROUNDING_CHUNK, flat.size), np.uint32)
        lost = 0
        for start in range(0, flat.size, _ROUNDING_CHUNK):
            piece = slice(start, min(start + _ROUNDING_CHUNK, flat.size))
            drawn = words[: piece.stop - start]
            prg.fill(drawn.view(np.uint8))
            lost += round_numbers(flat[piece], drawn, self.clip, self.scale, out[piece])
        if lost:
            raise NotFiniteError(
                f"NaN or infinity among numbers that are to be added up: got {lost} of "
                f"{flat.size}; expected finite numbers; leave this update out"
            )
        return out.reshape(values.shape)

    def decode(self, sums: RingArray) -> NDArray[np.float32]:
        """Returns sums of at most `cohort` encoded numbers as real numbers.

        A sum of more than 24 bits is rounded to the nearest float32.

        >>> FixedPoint(1.0, 50, 16).decode(np.array([256, 65408], np.uint16))
        array([ 0.5 , -0.25], dtype=float32)
        """
        if sums.dtype != self.dtype:
            raise ShapeError(
                f"sums belong to another ring: got {sums.dtype}; expected {self.dtype}; encode and "
                "decode with the same settings"
            )
        numbers = sums.view(f"i{self.bits // 8}").astype(np.float32)
        numbers *= np.float32(self.rounding)
        return numbers


@loop("keyhole.crypto.loops")
def round_numbers(
    values: NDArray[np.floating[Any]],
    words: NDArray[np.uint32],
    clip: float,
    scale: float,
    out: RingArray,
) -> int:
    """Writes clipped, scaled and rounded numbers; returns how many were not finite.

    The fraction is compared with the random word rather than added to it: 53 bits do not hold a
    number of 31 bits and a fraction of 33, and a whole number could be rounded up.
    """
    lost = values.size - int(np.count_nonzero(np.isfinite(values)))
    # NaN becomes the clip: its conversion would be undefined.
    scaled = np.fmax(np.fmin(values.astype(np.float64), clip), -clip)
    scaled *= scale
    floor = np.floor(scaled)
    scaled -= floor
    is_up = words + 0.5 < scaled * 4294967296.0
    out[:] = (floor.astype(np.int32) + is_up).astype(out.dtype)
    return lost


ROUND_BYTES = 16
"""Bytes of the name of a round."""

_PROTOCOL = b"keyhole secure sum 1"
_CHUNK = 256 << 10  # bytes a call: what stays in the cache of a core
_BLOCK = 16  # bytes of a block of AES
_PLACES = 2**32
_LONGEST_USE = 255


def pair_seed(
    own: PrivateKey, other: bytes, round: bytes, low: int, high: int, *, use: bytes = b"mask"
) -> bytes:
    """Returns the secret of 16 bytes that two clients share in a round: the same for both.

    HKDF-SHA256 with the round as salt, the X25519 agreement as secret and as info
    protocol (20 bytes) | length of use (1) | use | low (4) | high (4) | both public keys
    (32 each, the lesser first); numbers are big-endian.

    Args:
        other: public key of the other, 32 bytes.
        low: place of the client with the lower number.
        use: name of what the secret is for; those of different uses are unrelated.

    >>> one, two = (PrivateKey(bytes([n]) * 32) for n in (1, 2))
    >>> seed = pair_seed(one, two.public, bytes(16), 0, 1)
    >>> len(seed), seed == pair_seed(two, one.public, bytes(16), 0, 1)
    (16, True)
    """
    if not 0 <= low < high < _PLACES:
        raise InputError(
            f"places of a pair are equal or in the wrong order: got {low} and {high}; expected 0 "
            f"<= low < high < {_PLACES}; name the lower place first"
        )
    if len(round) != ROUND_BYTES or len(use) > _LONGEST_USE:
        raise InputError(
            f"name of the round or of the use has the wrong length: got {len(round)} and "
            f"{len(use)} bytes; expected {ROUND_BYTES} and at most {_LONGEST_USE} bytes; take the "
            "round from the settings"
        )
    agreed = own.agree(other)
    # The curve ignores the highest bit of a public key; both keys as they were sent do not.
    publics = b"".join(sorted((own.public, bytes(other))))
    info = struct.pack(f">20sB{len(use)}sII", _PROTOCOL, len(use), use, low, high) + publics
    return expand(extract(round, agreed), info, SEED_BYTES)


def add_mask(out: RingArray, seed: bytes, sign: int, first: int = 0) -> None:
    """Adds the mask of a seed to ring elements in place, or subtracts it.

    Element i of the mask is bytes i * b to (i + 1) * b of the stream of `Prg(seed)` as a
    little-endian number, with b bytes an element.

    Args:
        out: contiguous uint16 or uint32 of any shape.
        sign: 1 adds, -1 subtracts.
        first: the place in the mask of the first element of `out`, so that a long vector can be
            masked in pieces.

    >>> vector = np.zeros(2, np.uint32)
    >>> add_mask(vector, bytes(16), 1)
    >>> [hex(element) for element in vector]  # AES-128 of zeros: 66e94bd4 ef8a2c3b ...
    ['0xd44be966', '0x3b2c8aef']
    >>> add_mask(vector, bytes(16), -1)
    >>> vector
    array([0, 0], dtype=uint32)
    """
    add_masks(out, [(seed, sign)], first)


def add_masks(out: RingArray, masks: Iterable[tuple[bytes, int]], first: int = 0) -> None:
    """Adds the masks of many (seed, sign): as `add_mask` for each, while a piece of `out` is at
    hand."""
    flat = _flat(out)
    if first < 0:
        raise InputError(f"first is negative: got {first}; expected 0 or more; count from 0")
    begin = first * out.itemsize
    streams = [(_stream(seed, sign, begin), sign) for seed, sign in masks]
    if not flat.size:
        return
    step = min(_CHUNK // out.itemsize, flat.size)
    zeros = memoryview(bytes(step * out.itemsize))
    mask = np.empty(step, out.dtype.newbyteorder("<"))
    for start in range(0, flat.size, step):
        piece = flat[start : start + step]
        drawn = mask[: piece.size]
        for stream, sign in streams:
            stream.update_into(zeros[: drawn.nbytes], drawn.data.cast("B"))
            (np.add if sign == 1 else np.subtract)(piece, drawn, out=piece)


def _stream(seed: bytes, sign: int, begin: int) -> CipherContext:
    """The stream of a seed from a byte on."""
    if len(seed) != SEED_BYTES or sign not in (1, -1):
        raise InputError(
            f"seed length or sign is wrong: got {len(seed)} bytes and sign {sign}; expected "
            f"{SEED_BYTES} bytes, and 1 or -1; take the seed from pair_seed or "
            "Prg.fresh().bytes(16)"
        )
    block, within = divmod(begin, _BLOCK)
    stream = Cipher(AES(bytes(seed)), CTR(block.to_bytes(_BLOCK, "big"))).encryptor()
    stream.update(bytes(within))
    return stream


def _flat(out: RingArray) -> RingArray:
    """The same memory as a vector: `reshape` alone would copy what is not contiguous."""
    if out.dtype not in (np.uint16, np.uint32) or not out.flags.carray:
        raise ShapeError(
            f"array cannot be masked in place: got {out.dtype}, contiguous: "
            f"{out.flags.c_contiguous}; expected contiguous uint16 or uint32 that can be written; "
            "make it with FixedPoint.encode"
        )
    return out.reshape(-1)
