"""Masks: streams of uniform ring elements that two clients agree on and that cancel in the sum.

A pair of clients derives a seed of 128 bits from X25519 with HKDF-SHA256, bound to the protocol,
the round, the use, the two places and the two public keys; the one adds the mask of the seed and
the other subtracts it. The mask is the stream of AES-128 in counter mode.

Hidden: a vector to which the mask of a seed is added looks uniform to whoever does not have the
seed, if X25519 (the Diffie-Hellman problem on Curve25519), HKDF and AES-128 hold, and if the seed
masks one vector only. Not covered: that a public key belongs to the client it is said to be of, and
anything against whoever has one of both private keys.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR

from keyhole.errors import InputError, ShapeError
from keyhole.private.hpke import PrivateKey, expand, extract
from keyhole.private.prg import SEED_BYTES
from keyhole.private.secure_sum.fixed_point import RingArray

__all__ = ["ROUND_BYTES", "add_mask", "add_masks", "pair_seed"]

ROUND_BYTES = 16
"""Of the name of a round."""

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
        own: private key of the one.
        other: public key of the other, 32 bytes.
        round: name of the round, 16 bytes.
        low: place of the client with the lower number.
        high: place of the other.
        use: name of what the secret is for, at most 255 bytes; those of different uses are
            unrelated.

    Raises:
        MalformedError: not a public key, or one of low order.
        InputError: places that are equal or in the wrong order, or a name of another length.

    >>> one, two = (PrivateKey(bytes([n]) * 32) for n in (1, 2))
    >>> seed = pair_seed(one, two.public, bytes(16), 0, 1)
    >>> len(seed), seed == pair_seed(two, one.public, bytes(16), 0, 1)
    (16, True)
    """
    if not 0 <= low < high < _PLACES:
        raise InputError(
            "places of a pair that are equal or in the wrong order",
            got=f"{low} and {high}",
            allowed=f"0 <= low < high < {_PLACES}",
            fix="name the lower place first",
        )
    if len(round) != ROUND_BYTES or len(use) > _LONGEST_USE:
        raise InputError(
            "the name of a round or of a use of another length",
            got=f"{len(round)} and {len(use)} bytes",
            allowed=f"{ROUND_BYTES} and at most {_LONGEST_USE} bytes",
            fix="take the round from the settings",
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
        seed: 16 bytes.
        sign: 1 adds, -1 subtracts.
        first: the place in the mask of the first element of `out`, so that a long vector can be
            masked in pieces.

    Raises:
        InputError: a seed of another length, another sign or a negative place.
        ShapeError: an array that is of no ring, not contiguous or cannot be written.

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
    """Adds the masks of many seeds: as `add_mask` for each, while a piece of `out` is at hand.

    Args:
        out: contiguous uint16 or uint32 of any shape.
        masks: seed and sign of each.
        first: the place in the masks of the first element of `out`.

    Raises:
        InputError: a seed of another length, another sign or a negative place; nothing is added.
        ShapeError: an array that is of no ring, not contiguous or cannot be written.
    """
    flat = _flat(out)
    if first < 0:
        raise InputError("a negative place", got=first, allowed="0 or more", fix="count from 0")
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
            "a seed of another length, or another sign",
            got=f"{len(seed)} bytes and sign {sign}",
            allowed=f"{SEED_BYTES} bytes, and 1 or -1",
            fix="take the seed from pair_seed or Prg.fresh().bytes(16)",
        )
    block, within = divmod(begin, _BLOCK)
    stream = Cipher(AES(bytes(seed)), CTR(block.to_bytes(_BLOCK, "big"))).encryptor()
    stream.update(bytes(within))
    return stream


def _flat(out: RingArray) -> RingArray:
    """The same memory as a vector: `reshape` alone would copy what is not contiguous."""
    if out.dtype not in (np.uint16, np.uint32) or not out.flags.carray:
        raise ShapeError(
            "an array to which no mask can be added in place",
            got=f"{out.dtype}, contiguous: {out.flags.c_contiguous}",
            allowed="contiguous uint16 or uint32 that can be written",
            fix="make it with FixedPoint.encode",
        )
    return out.reshape(-1)
