"""Messages of a sparse sum between a client and two servers, and between the servers.

    public   client to server 0, which relays it to server 1: head, nonce (16), control bits (two a
             level, of all buckets, 8 a byte from the lowest), seed corrections (16 a level and
             bucket), row corrections (a row of little-endian ring elements a bucket)
    own      client to one server: head, root (16), SHA-256 of public (32), check (16)
    list     one server to the other: head, number of clients (u64), SHA-256 of all places and
             digests (32), places of the clients, ascending (u64 each), check (16)

The head is magic "KHW1", kind (u8), server (u8, 0 in a public message), zero (u16), name of the
round (16), SHA-256 of the terms (32). The check is the first half of the SHA-256 of all before it;
a public message has none, since both own messages hold its digest. It finds damage and no forger:
all of them travel through TLS.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from keyhole.errors import MalformedError, StaleError
from keyhole.private.prg import SEED_BYTES
from keyhole.private.secure_sum.sparse_points import Corrections
from keyhole.private.secure_sum.sparse_terms import SparseTerms

__all__ = [
    "OWN_BYTES",
    "ClientList",
    "check_length",
    "pack_list",
    "pack_own",
    "pack_public",
    "public_bytes",
    "read_list",
    "read_own",
    "read_public",
    "upload_bytes",
]

Kind: TypeAlias = Literal["public", "own", "list"]

_MAGIC = b"KHW1"
_KINDS: dict[Kind, int] = {"public": 1, "own": 2, "list": 3}
_HEAD = struct.Struct("<4sBBH16s32s")
_CHECK_BYTES, _DIGEST_BYTES = 16, 32
_LIST = struct.Struct("<Q32s")

OWN_BYTES = _HEAD.size + SEED_BYTES + _DIGEST_BYTES + _CHECK_BYTES
"""Of a client's own message to one server."""


@dataclass(frozen=True)
class ClientList:
    """Whom a server has added up.

    Args:
        clients: (n,) uint64, ascending.
        digest: 32 bytes, of the places and of the digests of all public messages.
    """

    clients: NDArray[np.uint64]
    digest: bytes


def public_bytes(terms: SparseTerms) -> int:
    """Of a client's public message."""
    return _HEAD.size + SEED_BYTES + sum(_public_parts(terms))


def upload_bytes(terms: SparseTerms) -> int:
    """Of all that a client sends: once what is public, and a message to each server."""
    return public_bytes(terms) + 2 * OWN_BYTES


def pack_public(terms: SparseTerms, corrections: Corrections) -> bytes:
    """Returns what both servers receive alike."""
    bits = np.packbits(corrections.bits, bitorder="little").tobytes()
    rows = corrections.rows.astype(terms.dtype.newbyteorder("<"), copy=False)
    head = _head(terms, "public", 0)
    return b"".join([head, corrections.nonce, bits, corrections.seeds.tobytes(), rows.tobytes()])


def read_public(terms: SparseTerms, data: bytes) -> Corrections:
    """Returns the corrections of a public message.

    Raises:
        MalformedError: another length or head, or a bit that is always zero is not.
        StaleError: of another round, or under other terms.
    """
    check_length(data, public_bytes(terms))
    _check_head(terms, "public", 0, data)
    nonce = data[_HEAD.size : _HEAD.size + SEED_BYTES]
    raw = np.frombuffer(data, np.uint8, offset=_HEAD.size + SEED_BYTES)
    packed, seeds, rows = np.split(raw, np.cumsum(_public_parts(terms))[:2])
    count, depth = terms.num_buckets, terms.depth
    bits = np.unpackbits(packed, bitorder="little").astype(np.bool_)
    used = 2 * depth * count
    seeds = seeds.reshape(count, depth, SEED_BYTES)
    if bits[used:].any() or (seeds[:, :, 0] & 1).any():
        raise _malformed("spare bits that are set", "zeros")
    ring = rows.view(terms.dtype.newbyteorder("<")).reshape(count, terms.row)
    return Corrections(bytes(nonce), seeds, bits[:used].reshape(count, depth, 2), ring)


def pack_own(terms: SparseTerms, party: int, root: bytes, public: bytes) -> bytes:
    """Returns what one server receives alone."""
    return _seal(_head(terms, "own", party) + root + sha256(public).digest())


def read_own(terms: SparseTerms, party: int, data: bytes) -> tuple[bytes, bytes]:
    """Returns the root of a client, and the digest of its public message.

    Raises:
        MalformedError: another length, check or head, or for the other server.
        StaleError: of another round, or under other terms.
    """
    check_length(data, OWN_BYTES)
    _check_sum(data)
    _check_head(terms, "own", party, data)
    body = bytes(data[_HEAD.size : -_CHECK_BYTES])
    return body[:SEED_BYTES], body[SEED_BYTES:]


def pack_list(terms: SparseTerms, party: int, digests: Mapping[int, bytes]) -> bytes:
    """Returns the list of a server's clients.

    Args:
        terms: of the sum.
        party: whose list it is.
        digests: of the public message of each client, by its place.
    """
    clients = sorted(digests)
    places = np.array(clients, "<u8").tobytes()
    whole = sha256(places + b"".join(digests[client] for client in clients)).digest()
    return _seal(_head(terms, "list", party) + _LIST.pack(len(clients), whole) + places)


def read_list(terms: SparseTerms, party: int, data: bytes) -> ClientList:
    """Returns the list of server `party`.

    Raises:
        MalformedError: another length, check or head, or from the other server.
        StaleError: of another round, or under other terms.
    """
    start = _HEAD.size + _LIST.size
    if len(data) < start + _CHECK_BYTES:
        raise _malformed(f"{len(data)} bytes", f"{start + _CHECK_BYTES} bytes or more")
    _check_sum(data)
    _check_head(terms, "list", party, data)
    count, digest = _LIST.unpack_from(data, _HEAD.size)
    check_length(data, start + 8 * count + _CHECK_BYTES)
    clients = np.frombuffer(data, "<u8", count, start).astype(np.uint64)
    if (clients[1:] <= clients[:-1]).any():
        raise _malformed("places that do not ascend", "each client once, ascending")
    return ClientList(clients, digest)


def check_length(data: bytes, length: int) -> None:
    """Refuses a message that has not the one length it can have."""
    if len(data) != length:
        raise _malformed(f"{len(data)} bytes", f"{length} bytes")


def _public_parts(terms: SparseTerms) -> tuple[int, int, int]:
    """Bytes of control bits, seed corrections and row corrections."""
    count, depth = terms.num_buckets, terms.depth
    row = terms.row * terms.dtype.itemsize
    return -(-2 * depth * count // 8), depth * count * SEED_BYTES, count * row


def _head(terms: SparseTerms, kind: Kind, party: int) -> bytes:
    return _HEAD.pack(_MAGIC, _KINDS[kind], party, 0, terms.round, terms.digest)


def _check_head(terms: SparseTerms, kind: Kind, party: int, data: bytes) -> None:
    magic, number, server, zero, round_name, digest = _HEAD.unpack_from(data)
    if (magic, number, server, zero) != (_MAGIC, _KINDS[kind], party, 0):
        raise _malformed("another head", f"a message of kind {kind!r}, server {party}, version 1")
    if round_name != terms.round or digest != terms.digest:
        raise StaleError(
            "a message of another sum",
            got="another round, or other terms",
            allowed="the round and terms of this sum",
            fix="fetch the terms anew and share the rows again",
        )


def _seal(message: bytes) -> bytes:
    return message + sha256(message).digest()[:_CHECK_BYTES]


def _check_sum(data: bytes) -> None:
    if _seal(bytes(data[:-_CHECK_BYTES])) != data:
        raise _malformed("a wrong check", "the check of its bytes")


def _malformed(got: str, allowed: str) -> MalformedError:
    return MalformedError(
        "a message of a sparse sum cannot be read",
        got=got,
        allowed=allowed,
        fix="send it as docs/wire.md describes it, under the terms of the sum",
    )
