"""Encodes the messages of a two-server sum: of clients, between the servers, and the shares.

    public   client to server 0, which relays it to server 1: head, nonce (16), the public message
             of every sparse part ("KHW1")
    own      client to one server: head, SHA-256 of public (32), then for every part: of a sparse
             one its own message ("KHW1"), of a dense one the seed (16) to server 0, or all rows
             minus their mask to server 1; check (16)
    list     one server to the other: head, SHA-256 of the cohort's names (32), number of clients
             (u64), their places in the cohort, ascending (u64 each), SHA-256 of each one's public
             message (32 each), check (16)
    agreed   as list, after both were reduced: head, SHA-256 of the names (32), number (u64),
             SHA-256 of places and digests (32), check (16)
    share    one server to the trainer: head, number of clients (u64), SHA-256 of places and
             digests (32), all rows of all parts, check (16)

Heads (magic "KHX1") and checks are those of `sparse.Framing`; a public message has no check, since
both own messages hold its digest. Numbers and ring elements are little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256

import numpy as np

from keyhole.aggregation.two_servers.params import SumParams
from keyhole.aggregation.two_servers.sparse import (
    CHECK_BYTES,
    HEAD_BYTES,
    SPARSE_OWN_BYTES,
    Framing,
    malformed,
    sparse_public_bytes,
)
from keyhole.crypto.prg import SEED_BYTES
from keyhole.crypto.ring import RingArray

_FRAMING = Framing(b"KHX1", {"public": 1, "own": 2, "list": 3, "agreed": 4, "share": 5})
_DIGEST_BYTES = 32
_COUNT = struct.Struct("<Q")
_AGREED = struct.Struct("<32sQ32s")
_SHARE = struct.Struct("<Q32s")


@dataclass(frozen=True)
class Agreed:
    """Whom a server will add.

    Args:
        cohort: SHA-256 of the names of everybody asked, in order.
        clients: how many.
        digest: SHA-256 of their places and of the digests of their public messages.
    """

    cohort: bytes
    clients: int
    digest: bytes


@dataclass(frozen=True, repr=False)
class Share:
    """A server's share of a sum; alone it is noise.

    Args:
        party: whose.
        clients: how many were added.
        digest: SHA-256 of their places and of the digests of their public messages.
        parts: of each part (num_keys, row) ring.
    """

    party: int
    clients: int
    digest: bytes
    parts: tuple[RingArray, ...]

    def __repr__(self) -> str:
        return f"Share(party {self.party}, {self.clients} clients)"


def public_bytes(terms: SumParams) -> int:
    """Of a client's public message."""
    return HEAD_BYTES + SEED_BYTES + sum(_public_lengths(terms))


def own_bytes(terms: SumParams, party: int) -> int:
    """Of a client's own message to one server."""
    return HEAD_BYTES + _DIGEST_BYTES + sum(_own_lengths(terms, party)) + CHECK_BYTES


def upload_bytes(terms: SumParams) -> int:
    """Of all that a client sends."""
    return public_bytes(terms) + sum(own_bytes(terms, party) for party in (0, 1))


def share_bytes(terms: SumParams) -> int:
    """Of the share that a server gives out."""
    return HEAD_BYTES + _SHARE.size + terms.table_bytes + CHECK_BYTES


def pack_public(terms: SumParams, nonce: bytes, parts: Sequence[bytes]) -> bytes:
    """Returns what both servers receive alike: of the sparse parts."""
    return b"".join([_FRAMING.head(terms, "public", 0), nonce, *parts])


def read_public(terms: SumParams, data: bytes) -> list[bytes]:
    """Returns the public message of each part, empty for a dense one.

    Raises:
        MalformedError: another length or head.
        StaleError: of another round, or under other terms.
    """
    _FRAMING.check_length(data, public_bytes(terms))
    _FRAMING.check_head(terms, "public", 0, data)
    return _split(data, HEAD_BYTES + SEED_BYTES, _public_lengths(terms))


def pack_own(terms: SumParams, party: int, public: bytes, parts: Sequence[bytes]) -> bytes:
    """Returns what one server receives alone."""
    return _FRAMING.sealed(
        b"".join([_FRAMING.head(terms, "own", party), sha256(public).digest(), *parts])
    )


def read_own(terms: SumParams, party: int, data: bytes) -> tuple[bytes, list[bytes]]:
    """Returns the digest of a client's public message, and what is for each part.

    Raises:
        MalformedError: another length, check or head, or for the other server.
        StaleError: of another round, or under other terms.
    """
    _FRAMING.check_length(data, own_bytes(terms, party))
    _FRAMING.check_seal(data)
    _FRAMING.check_head(terms, "own", party, data)
    start = HEAD_BYTES + _DIGEST_BYTES
    return bytes(data[HEAD_BYTES:start]), _split(data, start, _own_lengths(terms, party))


def list_digest(digests: Mapping[int, bytes]) -> bytes:
    """SHA-256 of places, ascending, and of the digests of public messages in the same order."""
    return sha256(_listed(digests)).digest()


def pack_list(terms: SumParams, party: int, cohort: bytes, digests: Mapping[int, bytes]) -> bytes:
    """Returns the list of clients whose messages a server has.

    Args:
        terms: of the sum.
        party: whose list it is.
        cohort: SHA-256 of the names of everybody asked, in order.
        digests: of the public message of each client, by its place in the cohort.
    """
    count = _COUNT.pack(len(digests))
    return _FRAMING.sealed(
        b"".join([_FRAMING.head(terms, "list", party), cohort, count, _listed(digests)])
    )


def read_list(terms: SumParams, party: int, data: bytes) -> tuple[bytes, dict[int, bytes]]:
    """Returns the digest of the cohort, and that of each client's public message by its place.

    Raises:
        MalformedError: another length, check or head, or from the other server.
        StaleError: of another round, or under other terms.
    """
    at = HEAD_BYTES + _DIGEST_BYTES
    if len(data) < at + _COUNT.size + CHECK_BYTES:
        raise malformed(f"{len(data)} bytes", f"{at + _COUNT.size + CHECK_BYTES} bytes or more")
    _FRAMING.check_seal(data)
    _FRAMING.check_head(terms, "list", party, data)
    (count,) = _COUNT.unpack_from(data, at)
    at += _COUNT.size
    _FRAMING.check_length(data, at + (8 + _DIGEST_BYTES) * count + CHECK_BYTES)
    places = np.frombuffer(data, "<u8", count, at)
    if (places[1:] <= places[:-1]).any():
        raise malformed("places that do not ascend", "each client once, ascending")
    at += 8 * count
    digests = _split(data, at, [_DIGEST_BYTES] * count)
    cohort = bytes(data[HEAD_BYTES : HEAD_BYTES + _DIGEST_BYTES])
    return cohort, dict(zip(places.tolist(), digests, strict=True))


def pack_agreed(terms: SumParams, party: int, agreed: Agreed) -> bytes:
    """Returns whom a server will add, in a few bytes."""
    packed = _AGREED.pack(agreed.cohort, agreed.clients, agreed.digest)
    return _FRAMING.sealed(_FRAMING.head(terms, "agreed", party), packed)


def read_agreed(terms: SumParams, party: int, data: bytes) -> Agreed:
    """Returns whom server `party` will add; raises as `read_list` does."""
    _FRAMING.check_length(data, HEAD_BYTES + _AGREED.size + CHECK_BYTES)
    _FRAMING.check_seal(data)
    _FRAMING.check_head(terms, "agreed", party, data)
    return Agreed(*_AGREED.unpack_from(data, HEAD_BYTES))


def pack_share(terms: SumParams, share: Share) -> list[bytes | memoryview]:
    """Returns what a server gives out, in pieces that need not be joined."""
    head = _FRAMING.head(terms, "share", share.party) + _SHARE.pack(share.clients, share.digest)
    little = terms.dtype.newbyteorder("<")
    rows = [np.ascontiguousarray(part, little).reshape(-1).data.cast("B") for part in share.parts]
    check = sha256(head)
    for part in rows:
        check.update(part)
    return [head, *rows, check.digest()[:CHECK_BYTES]]


def read_share(terms: SumParams, party: int, data: bytes | memoryview) -> Share:
    """Returns the share of server `party`; its parts lie in `data`.

    Raises:
        MalformedError: another length, check or head, or from the other server.
        StaleError: of another round, or under other terms.
    """
    _FRAMING.check_length(data, share_bytes(terms))
    _FRAMING.check_seal(data)
    _FRAMING.check_head(terms, "share", party, data)
    clients, digest = _SHARE.unpack_from(data, HEAD_BYTES)
    at, parts = HEAD_BYTES + _SHARE.size, []
    for place in range(len(terms.parts)):
        rows, row = terms.shape(place)
        part = np.frombuffer(data, terms.dtype.newbyteorder("<"), rows * row, at)
        parts.append(part.astype(terms.dtype, copy=False).reshape(rows, row))
        at += part.nbytes
    return Share(party, clients, digest, tuple(parts))


def _listed(digests: Mapping[int, bytes]) -> bytes:
    places = sorted(digests)
    return np.array(places, "<u8").tobytes() + b"".join(digests[place] for place in places)


def _public_lengths(terms: SumParams) -> list[int]:
    return [
        sparse_public_bytes(terms.sparse[place]) if part.is_sparse else 0
        for place, part in enumerate(terms.parts)
    ]


def _own_lengths(terms: SumParams, party: int) -> list[int]:
    lengths = []
    for place, part in enumerate(terms.parts):
        rows, row = terms.shape(place)
        dense = SEED_BYTES if party == 0 else rows * row * terms.dtype.itemsize
        lengths.append(SPARSE_OWN_BYTES if part.is_sparse else dense)
    return lengths


def _split(data: bytes, start: int, lengths: Sequence[int]) -> list[bytes]:
    pieces = []
    for length in lengths:
        pieces.append(bytes(data[start : start + length]))
        start += length
    return pieces
