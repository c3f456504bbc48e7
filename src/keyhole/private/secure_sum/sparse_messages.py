"""Messages of a sparse sum between a client and two servers, and between the servers.

    public   client to server 0, which relays it to server 1: head, nonce (16), control bits (two a
             level, of all buckets, 8 a byte from the lowest), seed corrections (16 a level and
             bucket), row corrections (a row of little-endian ring elements a bucket)
    own      client to one server: head, root (16), SHA-256 of public (32), check (16)
    list     one server to the other: head, number of clients (u64), SHA-256 of all places and
             digests (32), places of the clients, ascending (u64 each), check (16)

Heads (magic "KHW1") and checks are those of `framing`; a public message has no check, since
both own messages hold its digest.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray

from keyhole.private.prg import SEED_BYTES
from keyhole.private.secure_sum.framing import CHECK_BYTES, HEAD_BYTES, Framing, malformed
from keyhole.private.secure_sum.sparse_points import Corrections
from keyhole.private.secure_sum.sparse_terms import SparseTerms

__all__ = [
    "OWN_BYTES",
    "ClientList",
    "pack_list",
    "pack_own",
    "pack_public",
    "public_bytes",
    "read_list",
    "read_own",
    "read_public",
    "upload_bytes",
]

_FRAMING = Framing(b"KHW1", {"public": 1, "own": 2, "list": 3})
_DIGEST_BYTES = 32
_LIST = struct.Struct("<Q32s")

OWN_BYTES = HEAD_BYTES + SEED_BYTES + _DIGEST_BYTES + CHECK_BYTES
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
    return HEAD_BYTES + SEED_BYTES + sum(_public_parts(terms))


def upload_bytes(terms: SparseTerms) -> int:
    """Of all that a client sends: once what is public, and a message to each server."""
    return public_bytes(terms) + 2 * OWN_BYTES


def pack_public(terms: SparseTerms, corrections: Corrections) -> bytes:
    """Returns what both servers receive alike."""
    bits = np.packbits(corrections.bits, bitorder="little").tobytes()
    rows = corrections.rows.astype(terms.dtype.newbyteorder("<"), copy=False)
    head = _FRAMING.head(terms, "public", 0)
    return b"".join([head, corrections.nonce, bits, corrections.seeds.tobytes(), rows.tobytes()])


def read_public(terms: SparseTerms, data: bytes) -> Corrections:
    """Returns the corrections of a public message.

    Raises:
        MalformedError: another length or head, or a bit that is always zero is not.
        StaleError: of another round, or under other terms.
    """
    _FRAMING.check_length(data, public_bytes(terms))
    _FRAMING.check_head(terms, "public", 0, data)
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


def pack_own(terms: SparseTerms, party: int, root: bytes, public: bytes) -> bytes:
    """Returns what one server receives alone."""
    return _FRAMING.sealed(_FRAMING.head(terms, "own", party), root, sha256(public).digest())


def read_own(terms: SparseTerms, party: int, data: bytes) -> tuple[bytes, bytes]:
    """Returns the root of a client, and the digest of its public message.

    Raises:
        MalformedError: another length, check or head, or for the other server.
        StaleError: of another round, or under other terms.
    """
    _FRAMING.check_length(data, OWN_BYTES)
    _FRAMING.check_seal(data)
    _FRAMING.check_head(terms, "own", party, data)
    body = bytes(data[HEAD_BYTES:-CHECK_BYTES])
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
    return _FRAMING.sealed(
        _FRAMING.head(terms, "list", party), _LIST.pack(len(clients), whole), places
    )


def read_list(terms: SparseTerms, party: int, data: bytes) -> ClientList:
    """Returns the list of server `party`.

    Raises:
        MalformedError: another length, check or head, or from the other server.
        StaleError: of another round, or under other terms.
    """
    start = HEAD_BYTES + _LIST.size
    if len(data) < start + CHECK_BYTES:
        raise malformed(f"{len(data)} bytes", f"{start + CHECK_BYTES} bytes or more")
    _FRAMING.check_seal(data)
    _FRAMING.check_head(terms, "list", party, data)
    count, digest = _LIST.unpack_from(data, HEAD_BYTES)
    _FRAMING.check_length(data, start + 8 * count + CHECK_BYTES)
    clients = np.frombuffer(data, "<u8", count, start).astype(np.uint64)
    if (clients[1:] <= clients[:-1]).any():
        raise malformed("places that do not ascend", "each client once, ascending")
    return ClientList(clients, digest)


def _public_parts(terms: SparseTerms) -> tuple[int, int, int]:
    """Bytes of control bits, seed corrections and row corrections."""
    count, depth = terms.num_buckets, terms.depth
    row = terms.row * terms.dtype.itemsize
    return -(-2 * depth * count // 8), depth * count * SEED_BYTES, count * row
