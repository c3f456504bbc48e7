"""Shares rows at secret keys between two servers: the params, point functions and messages.

Params are the public facts that clients and both servers agree on beforehand; buckets follow from
them (`crypto/cuckoo.py`). There is no stash here: a row sent for the whole table would cost a
server as much as a third of all buckets. Instead there are a few buckets more, which weigh where
keys are few, and a key without a bucket is left out.

A point function has a row as value: zero everywhere but at one secret position. The tree is that of
`crypto/dpf.py`, with a leaf for every position. At a position with seed s and control bit t, party
b's share of the row is

    (-1)^b (convert(s) + t * correction)

in the ring, where convert stretches a seed to a row and the correction makes both shares add up to
the secret row at the secret position (Boyle, Gilboa and Ishai, EUROCRYPT 2015 and CCS 2016, for
any group). Everywhere else both parties have the same seed and bit, and the shares cancel.

Hidden: position and row, from a party that holds one of the two roots, for seeds of 127 bits and
AES under a fixed key as a circular correlation-robust hash. Not hidden: anything from a party that
holds both roots.

    public   client to server 0, which relays it to server 1: head, nonce (16), control bits (two
             per level, of all buckets, 8 per byte from the lowest), seed corrections (16 per level
             and bucket), row corrections (a row of little-endian ring elements per bucket)
    own      client to one server: head, root (16), SHA-256 of public (32), check (16)

A head (`Framing`) is magic (4, here "KHW1"), kind (u8), server (u8, 0 in what both get), zero
(u16), name of the round (16), SHA-256 of the params (32). The check is the first half of the
SHA-256 of all before it; it finds damage and no forger: messages travel through TLS. A public
message has no check, since both own messages hold its digest.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from keyhole.arrays import KeyArray
from keyhole.crypto.codec import read_facts
from keyhole.crypto.cuckoo import Placement
from keyhole.crypto.dpf import Bits, share_paths
from keyhole.crypto.prg import SEED_BYTES, FixedKeyAes, SeedArray, fixed_key
from keyhole.crypto.ring import RingArray, RingBits, ring_dtype
from keyhole.errors import InputError, MalformedError, StaleError

CHECK_BYTES = 16
_HEAD = struct.Struct("<4sBBH16s32s")
HEAD_BYTES = _HEAD.size


class Named(Protocol):
    """Terms of a sum."""

    @property
    def round(self) -> bytes:
        """16 bytes, its name."""
        ...

    @property
    def digest(self) -> bytes:
        """SHA-256 of the encoded terms."""
        ...


@dataclass(frozen=True)
class Framing:
    """A family of messages.

    Args:
        magic: four bytes that begin each.
        kinds: name of a kind -> its number.
    """

    magic: bytes
    kinds: Mapping[str, int]

    def head(self, terms: Named, kind: str, party: int) -> bytes:
        """Of a message under these terms."""
        return _HEAD.pack(self.magic, self.kinds[kind], party, 0, terms.round, terms.digest)

    def check_head(self, terms: Named, kind: str, party: int, data: bytes | memoryview) -> None:
        """Raises MalformedError for another message, StaleError for one of another sum."""
        magic, number, server, zero, name, digest = _HEAD.unpack_from(data)
        if (magic, number, server, zero) != (self.magic, self.kinds[kind], party, 0):
            kind_wanted = f"a message of kind {kind!r}, server {party}, version 1"
            raise malformed("another head", kind_wanted)
        if name != terms.round or digest != terms.digest:
            raise StaleError(
                "a message of another sum",
                got="another round, or other terms",
                allowed="the round and terms of this sum",
                fix="fetch the terms anew and share the update again",
            )

    @staticmethod
    def sealed(*pieces: bytes) -> bytes:
        """A message of these pieces, with its check."""
        message = b"".join(pieces)
        return message + sha256(message).digest()[:CHECK_BYTES]

    @staticmethod
    def check_seal(data: bytes | memoryview) -> None:
        """Raises MalformedError unless the check is that of the message."""
        body, check = memoryview(data)[:-CHECK_BYTES], bytes(data[-CHECK_BYTES:])
        if sha256(body).digest()[:CHECK_BYTES] != check:
            raise malformed("a wrong check", "the check of its bytes")

    @staticmethod
    def check_length(data: bytes | memoryview, length: int) -> None:
        """Raises MalformedError unless the message is as long as its terms make it."""
        if len(data) != length:
            raise malformed(f"{len(data)} bytes", f"{length} bytes")


def malformed(got: str, allowed: str) -> MalformedError:
    """The error of a message that cannot be read."""
    return MalformedError(
        "a message of a sum cannot be read",
        got=got,
        allowed=allowed,
        fix="send it as docs/wire.md describes it, under the terms of the sum",
    )


_MAGIC = b"KHV1"
_FORM = struct.Struct("<4sBBH16sQQQQ")
_MAX = 2**31 - 1  # of keys, as in a placement, and of every other number
_NAME_BYTES = 16
_HASHES = 3  # buckets that hold a key
_SPARE_BUCKETS = 8


@dataclass(frozen=True)
class SparseParams:
    """The public facts of one sparse sum. The lengths of messages and the work of servers depend
    on these alone.

    Args:
        round: 16 bytes: its name. A name is used once.
        num_keys: K.
        width: ring elements of a row.
        max_keys: m, to which every client's keys are padded.
        bits: of an element of the ring.
        min_clients: below which neither server releases anything. With 1 the sum may be one
            client's update.
        with_counts: a row has one more element, the last: how many clients sent the key, modulo
            the ring. The trainer, which combines the shares, learns it.

    Raises:
        InputError: a number is out of range.

    >>> terms = SparseParams(bytes(16), 100_000, 500, 1000, bits=32, min_clients=10)
    >>> terms.num_buckets, terms.bucket_size, terms.depth
    (1308, 230, 8)
    """

    round: bytes
    num_keys: int
    width: int
    max_keys: int
    bits: RingBits
    min_clients: int
    with_counts: bool = False

    def __post_init__(self) -> None:
        ring_dtype(self.bits)
        numbers = self.num_keys, self.width, self.max_keys, self.min_clients
        if len(self.round) != _NAME_BYTES or min(numbers) < 1 or max(numbers) > _MAX:
            raise _bad(f"a name of {len(self.round)} bytes and the numbers {numbers}")
        if self.max_keys > self.num_keys:
            raise _bad(f"{self.max_keys} of {self.num_keys} keys")

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of ring elements."""
        return ring_dtype(self.bits)

    @property
    def row(self) -> int:
        """Ring elements of a row, with its count if there is one."""
        return self.width + self.with_counts

    @property
    def num_buckets(self) -> int:
        """B, of which each takes one key of a client.

        Up to 3 keys have a bucket each that holds the whole table: none is ever left out. Else it
        is 1.3 m + 8. Measured, as the fraction of clients with uniform keys that lose a key (4 to
        10 x 10^5 clients up to m = 48, 3 to 0.7 x 10^5 above):

            m       4     8     16    24    32    48    64  100  150  300
            lost    1e-6  7e-6  2e-5  1e-5  1e-5  7e-6  0   0    0    0
        """
        few = self.max_keys <= _HASHES
        return self.max_keys if few else -(-13 * self.max_keys // 10) + _SPARE_BUCKETS

    @cached_property
    def placement(self) -> Placement:
        """Where keys lie."""
        return Placement(self.num_keys, self.num_buckets, min(_HASHES, self.num_buckets))

    @property
    def bucket_size(self) -> int:
        """Positions of a bucket."""
        return self.placement.bucket_size

    @property
    def depth(self) -> int:
        """Levels of a bucket's tree: every position is a leaf."""
        return (self.bucket_size - 1).bit_length()

    @cached_property
    def digest(self) -> bytes:
        """32 bytes that stand for all of it in every message."""
        return sha256(self.encode()).digest()

    def encode(self) -> bytes:
        """Returns the terms as everybody fetches them."""
        return _FORM.pack(
            _MAGIC,
            self.bits,
            self.with_counts,
            0,
            self.round,
            self.num_keys,
            self.width,
            self.max_keys,
            self.min_clients,
        )

    @staticmethod
    def decode(data: bytes) -> SparseParams:
        """Returns the terms that `data` holds.

        Raises:
            MalformedError: they are not terms of this version.
        """
        return read_facts(data, "terms of a sparse sum", _unpack)


def _unpack(data: bytes) -> SparseParams:
    _, bits, counts, _, name, num_keys, width, max_keys, minimum = _FORM.unpack(data)
    return SparseParams(name, num_keys, width, max_keys, bits, minimum, counts == 1)


def _bad(got: str) -> InputError:
    return InputError(
        "terms of a sparse sum that make no sense",
        got=got,
        allowed=f"a name of {_NAME_BYTES} bytes; 1..{_MAX}; no more keys a client than there are",
        fix="check num_keys, width, max_keys and min_clients",
    )


_TREE, _ROWS = b"keyhole-sum-tree", b"keyhole-sum-rows"


@dataclass(frozen=True, repr=False)
class Corrections:
    """What both parties receive alike, for n point functions.

    Args:
        nonce: 16 bytes that belong to this client's message alone.
        seeds: (n, depth, 16) uint8, control bits clear.
        bits: (n, depth, 2) bool, of the left and the right child.
        rows: (n, row) ring.
    """

    nonce: bytes
    seeds: NDArray[np.uint8]
    bits: Bits
    rows: RingArray

    def __repr__(self) -> str:
        return f"Corrections({len(self.rows)} points)"


def tree_aes(nonce: bytes) -> FixedKeyAes:
    """What grows the trees of one client."""
    return FixedKeyAes(fixed_key(nonce, _TREE))


def rows_aes(nonce: bytes) -> FixedKeyAes:
    """What stretches the seeds of one client's positions to rows."""
    return FixedKeyAes(fixed_key(nonce, _ROWS))


def row_blocks(row: int, dtype: np.dtype[Any]) -> int:
    """Blocks of AES that cover a row."""
    return -(-row * dtype.itemsize // SEED_BYTES)


def convert(seeds: SeedArray, row: int, dtype: np.dtype[Any], nonce: bytes) -> RingArray:
    """Returns the rows of seeds (..., 16): (..., row), little-endian elements."""
    whole = rows_aes(nonce).expand(seeds.reshape(-1, SEED_BYTES), row_blocks(row, dtype))
    cut = whole.view(dtype.newbyteorder("<"))[:, :row].astype(dtype, copy=False)
    return cut.reshape(*seeds.shape[:-1], row)


def share_rows_at(
    points: KeyArray, rows: RingArray, depth: int, nonce: bytes, roots: tuple[bytes, bytes]
) -> Corrections:
    """Shares rows at secret positions, one of each in every tree.

    Args:
        points: (n,) int64 of [0, 2^depth).
        rows: (n, row) ring.
        depth: of the trees.
        nonce: 16 bytes, used once; no secret.
        roots: 16 bytes of either party: fresh, secret, for one use.
    """
    seed_words, bit_words, ends, control = share_paths(tree_aes(nonce), points, depth, roots)
    one, other = convert(ends, rows.shape[1], rows.dtype, nonce)
    # At the point one control bit is set: the correction counts once, with that party's sign.
    missing = rows - one + other
    return Corrections(
        nonce, seed_words, bit_words, np.where(control[1][:, None], -missing, missing)
    )


_SPARSE_FRAMING = Framing(b"KHW1", {"public": 1, "own": 2})
_DIGEST_BYTES = 32

SPARSE_OWN_BYTES = HEAD_BYTES + SEED_BYTES + _DIGEST_BYTES + CHECK_BYTES
"""Of a client's own message to one server."""


def sparse_public_bytes(terms: SparseParams) -> int:
    """Of a client's public message."""
    return HEAD_BYTES + SEED_BYTES + sum(_public_parts(terms))


def sparse_upload_bytes(terms: SparseParams) -> int:
    """Of all that a client sends: once what is public, and a message to each server."""
    return sparse_public_bytes(terms) + 2 * SPARSE_OWN_BYTES


def pack_sparse_public(terms: SparseParams, corrections: Corrections) -> bytes:
    """Returns what both servers receive alike."""
    bits = np.packbits(corrections.bits, bitorder="little").tobytes()
    rows = corrections.rows.astype(terms.dtype.newbyteorder("<"), copy=False)
    head = _SPARSE_FRAMING.head(terms, "public", 0)
    return b"".join([head, corrections.nonce, bits, corrections.seeds.tobytes(), rows.tobytes()])


def read_sparse_public(terms: SparseParams, data: bytes) -> Corrections:
    """Returns the corrections of a public message.

    Raises:
        MalformedError: another length or head, or a bit that is always zero is not.
        StaleError: of another round, or under other terms.
    """
    _SPARSE_FRAMING.check_length(data, sparse_public_bytes(terms))
    _SPARSE_FRAMING.check_head(terms, "public", 0, data)
    nonce = data[HEAD_BYTES : HEAD_BYTES + SEED_BYTES]
    raw = np.frombuffer(data, np.uint8, offset=HEAD_BYTES + SEED_BYTES)
    packed, seeds, rows = np.split(raw, np.cumsum(_public_parts(terms))[:2])
    count, depth = terms.num_buckets, terms.depth
    bits = np.unpackbits(packed, bitorder="little").astype(np.bool_)
    used = 2 * depth * count
    seeds = seeds.reshape(count, depth, SEED_BYTES)
    if bits[used:].any() or (seeds[:, :, 0] & 1).any():
        raise malformed("spare bits that are set", "zeros")
    ring = rows.view(terms.dtype.newbyteorder("<")).reshape(count, terms.row)
    return Corrections(bytes(nonce), seeds, bits[:used].reshape(count, depth, 2), ring)


def pack_sparse_own(terms: SparseParams, party: int, root: bytes, public: bytes) -> bytes:
    """Returns what one server receives alone."""
    return _SPARSE_FRAMING.sealed(
        _SPARSE_FRAMING.head(terms, "own", party), root, sha256(public).digest()
    )


def read_sparse_own(terms: SparseParams, party: int, data: bytes) -> tuple[bytes, bytes]:
    """Returns the root of a client, and the digest of its public message.

    Raises:
        MalformedError: another length, check or head, or for the other server.
        StaleError: of another round, or under other terms.
    """
    _SPARSE_FRAMING.check_length(data, SPARSE_OWN_BYTES)
    _SPARSE_FRAMING.check_seal(data)
    _SPARSE_FRAMING.check_head(terms, "own", party, data)
    body = bytes(data[HEAD_BYTES:-CHECK_BYTES])
    return body[:SEED_BYTES], body[SEED_BYTES:]


def _public_parts(terms: SparseParams) -> tuple[int, int, int]:
    """Bytes of control bits, seed corrections and row corrections."""
    count, depth = terms.num_buckets, terms.depth
    row = terms.row * terms.dtype.itemsize
    return -(-2 * depth * count // 8), depth * count * SEED_BYTES, count * row
