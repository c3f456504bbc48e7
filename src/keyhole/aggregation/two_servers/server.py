"""Adds up the shares of many clients at one of the two servers, which tell it nothing.

Every position of every bucket gives a row of pseudo-random elements for each client: that is the
work, and it is the same for all keys. The rows of all clients at a position are added while they
are at hand, and once to the row of its key, which lies anywhere in the table: what a big table
costs is divided among the clients.

The inner loop computes `convert` of `client.py`; tests hold both together. All positions are
worked on alike, whatever their control bits. The sum of both shares is the plain sum in the ring,
bit for bit. Each server adds its own noise where the params ask for it, so that the sum is
protected from the other one, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from keyhole.aggregation.privacy.noise import add_ring_noise
from keyhole.aggregation.sum_server import Noise
from keyhole.aggregation.two_servers.client import (
    Corrections,
    read_sparse_own,
    read_sparse_public,
    row_blocks,
    rows_aes,
    tree_aes,
)
from keyhole.aggregation.two_servers.params import SparseParams, SumParams
from keyhole.compiled import has_aes, load_compiler, loop
from keyhole.crypto.codec import Body
from keyhole.crypto.dpf import grow_trees, root_seeds
from keyhole.crypto.prg import SEED_BYTES, FixedKeyAes, SeedArray
from keyhole.crypto.ring import RingArray, add_mask
from keyhole.errors import ReplayError

T = TypeVar("T")


@loop("keyhole.crypto.aes_loops", can=has_aes)
def add_streams(
    total: RingArray,
    keys: NDArray[np.uint8],
    seeds: NDArray[np.uint64],
    control: NDArray[np.bool_],
    corrections: RingArray,
    members: NDArray[np.int32],
) -> None:
    """Adds the rows of all clients at positions, without their sign, to those of the keys that lie
    there in `total`, (num_keys, row); rows of positions without a key, -1, are lost.

    Args:
        keys: (clients, 16), of AES.
        seeds: (clients, positions, 2); `control` is (clients, positions).
        corrections: (clients, buckets, row, filled up to whole blocks).
        members: (positions,): of the buckets, one after the other.
    """
    ciphers = [FixedKeyAes(key.tobytes()) for key in keys]
    blocks = corrections.shape[2] * corrections.itemsize // SEED_BYTES
    size, count = len(members) // corrections.shape[1], max(1, _TILE // (blocks * SEED_BYTES))
    for start in range(0, len(members), count):
        places = np.arange(start, min(start + count, len(members)))
        rows = np.zeros((len(places), corrections.shape[2]), total.dtype)
        for at, cipher in enumerate(ciphers):
            rows += cipher.expand(seeds[at, places].view(np.uint8), blocks).view(total.dtype)
            mask = -control[at, places].astype(total.dtype)  # all ones, or none
            rows += corrections[at, places // size] & mask[:, None]
        there = members[places] >= 0
        np.add.at(total, members[places][there], rows[there, : total.shape[1]])


_TILE = 96 << 10  # bytes of rows that are made together: what stays in a core's cache
_NODES = 16 << 20  # bytes of seeds of all clients that are held at once, if a bucket has no more
_MAX_NODES = 256 << 20  # of them in any case, unless one client's bucket alone has more


@dataclass(frozen=True, repr=False)
class ClientShare:
    """One client's point functions, as one server holds them; the root is 16 secret bytes."""

    root: bytes
    corrections: Corrections

    def __repr__(self) -> str:
        return f"ClientShare({self.corrections!r})"


def add_clients(
    total: RingArray, terms: SparseParams, party: int, clients: Sequence[ClientShare]
) -> None:
    """Adds the shares of clients, without the sign of the party, to `total` (num_keys, row)."""
    node_bytes = terms.bucket_size * (SEED_BYTES + 1)
    together = max(1, _MAX_NODES // node_bytes)
    for first in range(0, len(clients), together):
        some = clients[first : first + together]
        roots = [root_seeds(client.root, terms.num_buckets) for client in some]
        step = max(1, _NODES // (node_bytes * len(some)))
        for start in range(0, terms.num_buckets, step):
            buckets = slice(start, min(start + step, terms.num_buckets))
            _add_buckets(total, terms, party, some, [seeds[buckets] for seeds in roots], buckets)


def _add_buckets(
    total: RingArray,
    terms: SparseParams,
    party: int,
    clients: Sequence[ClientShare],
    roots: Sequence[SeedArray],
    buckets: slice,
) -> None:
    """As `add_clients`, for some buckets."""
    size, count = terms.bucket_size, len(roots[0])
    seeds = np.empty((len(clients), count * size, 2), np.uint64)
    control = np.empty(seeds.shape[:2], np.bool_)
    blocks = row_blocks(terms.row, terms.dtype)
    filled = blocks * SEED_BYTES // terms.dtype.itemsize
    rows = np.zeros((len(clients), count, filled), terms.dtype)
    for at, (client, root) in enumerate(zip(clients, roots, strict=True)):
        own = client.corrections
        nodes, bits = grow_trees(
            tree_aes(own.nonce), root, party, own.seeds[buckets], own.bits[buckets], size
        )
        seeds[at], control[at] = nodes.reshape(-1, 2), bits.reshape(-1)
        rows[at, :, : terms.row] = own.rows[buckets]
    keys = np.stack([rows_aes(client.corrections.nonce).key for client in clients])
    members = terms.placement.members()[buckets].reshape(-1)
    add_streams(total, keys, seeds, control, rows, members)


_MAX_WAITING = 64  # clients that are added together: then what a big table costs hardly counts
_MAX_BYTES = 256 << 20  # of their messages


class SparsePart:
    """Of point functions. What clients sent waits until there are enough to be added together."""

    def __init__(self, terms: SparseParams, party: int) -> None:
        load_compiler()
        self._terms, self._party = terms, party
        self._waiting: list[ClientShare] = []
        self._total: RingArray | None = np.zeros((terms.num_keys, terms.row), terms.dtype)

    def add(self, public: bytes, own: bytes) -> None:
        """Adds what one client sent; raises MalformedError or StaleError, and adds nothing."""
        root, _ = read_sparse_own(self._terms, self._party, own)
        self._waiting.append(ClientShare(root, read_sparse_public(self._terms, public)))
        held = len(self._waiting)
        if held >= _MAX_WAITING or held * self._terms.public_bytes >= _MAX_BYTES:
            self._work()

    def take(self) -> RingArray:
        """Returns the share, once."""
        self._work()
        total, self._total = _there(self._total), None
        if self._party == 1:
            np.negative(total, out=total)
        return total

    def _work(self) -> None:
        """Adds those that wait. If that breaks off the sum is lost: half of one is not released."""
        if self._waiting:
            total, self._total = _there(self._total), None
            add_clients(total, self._terms, self._party, self._waiting)
            self._waiting.clear()
            self._total = total


class DensePart:
    """Of all rows: server 0 adds masks, server 1 what is left of rows without them."""

    def __init__(self, terms: SumParams, place: int, party: int) -> None:
        self._party = party
        self._total: RingArray | None = np.zeros(terms.shape(place), terms.dtype)

    def add(self, public: bytes, own: bytes) -> None:
        """Adds what one client sent; its length has been checked."""
        total = _there(self._total)
        if self._party == 0:
            add_mask(total, own, 1)
        else:
            total += np.frombuffer(own, total.dtype.newbyteorder("<")).reshape(total.shape)

    def take(self) -> RingArray:
        """Returns the share, once."""
        total, self._total = _there(self._total), None
        return total


class TwoServerAdder:
    """Adds up all parts; tables are made when the first client is added."""

    def __init__(self, terms: SumParams, party: int) -> None:
        self._terms, self._party = terms, party
        self._parts: list[SparsePart | DensePart] = []
        self._counted: list[RingArray] | None = None  # tables, once their counts were told

    def check_own(self, own: bytes) -> None:
        """Implements `ShareAdder.check_own`."""
        for part, piece in self._sparse(_split(own, self._terms.own_lengths(self._party))):
            read_sparse_own(part, self._party, piece)

    def check_public(self, public: bytes) -> None:
        """Implements `ShareAdder.check_public`."""
        for part, piece in self._sparse(_split(public, self._terms.public_lengths)):
            read_sparse_public(part, piece)

    def add(self, public: bytes, own: bytes) -> None:
        """Implements `ShareAdder.add`."""
        if not self._parts:
            self._parts = [
                SparsePart(self._terms.sparse[place], self._party)
                if part.is_sparse
                else DensePart(self._terms, place, self._party)
                for place, part in enumerate(self._terms.parts)
            ]
        publics = _split(public, self._terms.public_lengths)
        owns = _split(own, self._terms.own_lengths(self._party))
        for part, *pieces in zip(self._parts, publics, owns, strict=True):
            part.add(*pieces)

    def counts(self, noise: Noise) -> bytes:
        """Implements `CountingAdder.counts`."""
        terms, self._counted = self._terms, [part.take() for part in self._parts]
        self._parts = []
        keys = zip(self._counted, terms.counted_keys, strict=True)
        whole = np.concatenate([table[:, -1] for table, count in keys if count] or [_NOTHING])
        whole = np.ascontiguousarray(whole, terms.dtype)
        if terms.count_noise:
            add_ring_noise(whole, terms.count_noise, noise(len(terms.parts)))
        return whole.astype(terms.dtype.newbyteorder("<"), copy=False).tobytes()

    def drop(self, one: bytes, other: bytes) -> int:
        """Implements `CountingAdder.drop`. With noise, counts are as near as that lets them be."""
        terms, tables, dropped, start = self._terms, _there(self._counted), 0, 0
        little = terms.dtype.newbyteorder("<")
        both = np.frombuffer(one, little) + np.frombuffer(other, little)
        counts = both.astype(terms.dtype, copy=False).view(f"i{terms.dtype.itemsize}")
        for table, keys in zip(tables, terms.counted_keys, strict=True):
            own = counts[start : start + keys]
            is_rare = own < terms.min_per_key
            table[: len(own)][is_rare] = 0
            dropped += int(np.count_nonzero(is_rare & (own > 0)))
            start += keys
        return dropped

    def take(self, noise: Noise) -> Sequence[Body]:
        """Implements `ShareAdder.take`."""
        parts, self._parts, terms = self._parts, [], self._terms
        tables = iter(self._counted) if self._counted is not None else (p.take() for p in parts)
        pieces: list[Body] = []
        for place, total in enumerate(tables):
            if terms.noise:
                add_ring_noise(total, terms.ring_noise, noise(place))
            given = total[:, : terms.given_shape(place)[1]]
            little = np.ascontiguousarray(given, terms.dtype.newbyteorder("<"))
            pieces.append(little.reshape(-1).data.cast("B"))
        self._counted = None
        return pieces

    def _sparse(self, pieces: Sequence[bytes]) -> Iterator[tuple[SparseParams, bytes]]:
        """The pieces of a message that are of sparse parts, with the terms of each."""
        for sparse, part, piece in zip(self._terms.sparse, self._terms.parts, pieces, strict=True):
            if part.is_sparse:
                yield sparse, piece


def _split(data: bytes, lengths: Sequence[int]) -> list[bytes]:
    pieces, start = [], 0
    for length in lengths:
        pieces.append(data[start : start + length])
        start += length
    return pieces


_NOTHING = np.zeros(0, np.uint32)


def _there(total: T | None) -> T:
    if total is None:
        raise ReplayError(
            "a share of a sum is given out once: got a request for one that was given out, or lost "
            "when adding broke off; expected one; keep what was given out, or run the round again"
        )
    return total


def tables_of(terms: SumParams, payload: memoryview) -> list[RingArray]:
    """Returns the share of each part, (num_keys, row) ring, which lies in the payload."""
    shapes = [terms.given_shape(place) for place in range(len(terms.parts))]
    whole = np.frombuffer(payload, terms.dtype.newbyteorder("<")).astype(terms.dtype, copy=False)
    borders = np.cumsum([rows * row for rows, row in shapes])[:-1]
    pieces = np.split(whole, borders)
    return [piece.reshape(shape) for piece, shape in zip(pieces, shapes, strict=True)]
