"""Turns a client's update into two shares, one for each server.

Of a sparse part, each key goes to one of the buckets that hold it, no two to the same, and each
bucket is one point function (`sparse.py`): at the key's position the row, or at a random one a row
of zeros if no key went there. What is sent is one row per bucket, whatever the number of keys in
the table. Of a dense part, server 0 gets the seed of a mask and server 1 what is left when the mask
is taken away.

Hidden from each server: keys, their number up to `max_keys` of each part, and rows, if the two do
not collude, AES under a fixed key is a circular correlation-robust hash, and in counter mode it is
a pseudo-random function. Not hidden: who takes part. Not prevented: a client that lies. It can
share any rows at any number of keys, of any size, and so spoil a sum; neither server can see it.

A client relies on its terms: the device's policy checks `min_clients`, and `Rounds` checks that the
device has not taken part in the round before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from keyhole.aggregation.two_servers.messages import pack_own, pack_public
from keyhole.aggregation.two_servers.params import SumParams
from keyhole.aggregation.two_servers.sparse import (
    SparseParams,
    pack_sparse_own,
    pack_sparse_public,
    share_rows_at,
)
from keyhole.arrays import KeyArray
from keyhole.crypto.cuckoo import place
from keyhole.crypto.once import distinct_keys
from keyhole.crypto.prg import SEED_BYTES, Prg
from keyhole.crypto.ring import RingArray, add_mask
from keyhole.errors import KeySpaceError, ShapeError


@dataclass(frozen=True, repr=False)
class SparseShares:
    """What one client sends, once. A party that has both messages of `to` can read the rows.

    Args:
        public: for both servers alike: sent to server 0, which relays it to server 1.
        to: one message for each server, which nobody else may see.
        is_placed: (m,) bool: the keys that found a bucket; rows of others are left out. The
            client's secret.
    """

    public: bytes
    to: tuple[bytes, bytes]
    is_placed: NDArray[np.bool_]

    def __repr__(self) -> str:
        """Printing shows what everybody sees."""
        return f"SparseShares({len(self.public)} bytes and {len(self.to[0])} for each server)"


def share_rows(
    terms: SparseParams, keys: KeyArray, rows: RingArray, prg: Prg | None = None
) -> SparseShares:
    """Shares the rows of keys between both servers.

    Args:
        terms: of the sum.
        keys: (m,) whole numbers, all different; none are allowed.
        rows: (m, width) ring: what is added to the row of each key.
        prg: where roots, nonce and random positions come from; a fresh one if left out.

    Raises:
        KeySpaceError: keys outside the table, repeated or too many.
        ShapeError: rows of another shape or ring.

    >>> terms = SparseParams(bytes(16), 1000, 4, 10, bits=32, min_clients=2)
    >>> shares = share_rows(terms, np.array([7, 3]), np.ones((2, 4), np.uint32))
    >>> shares, int(shares.is_placed.sum())
    (SparseShares(3138 bytes and 120 for each server), 2)
    """
    keys = np.asarray(keys)
    if len(distinct_keys(keys, terms.num_keys, terms.max_keys)[0]) != len(keys):
        raise KeySpaceError(
            "keys that are repeated",
            got=f"{len(keys)} keys",
            allowed="each key once",
            fix="add up the rows of equal keys first",
        )
    _check_rows(terms, len(keys), rows)
    prg = Prg.fresh() if prg is None else prg
    points, payload, is_placed = _fill_buckets(terms, keys.astype(np.int64), rows, prg)
    roots = prg.bytes(SEED_BYTES), prg.bytes(SEED_BYTES)
    corrections = share_rows_at(points, payload, terms.depth, prg.bytes(SEED_BYTES), roots)
    public = pack_sparse_public(terms, corrections)
    one, other = (pack_sparse_own(terms, party, roots[party], public) for party in (0, 1))
    return SparseShares(public, (one, other), is_placed)


def dense_shares(vector: RingArray, prg: Prg | None = None) -> tuple[bytes, RingArray]:
    """Shares a vector of which every client sends all elements.

    The mask is the stream of `Prg(seed)`: server 0 adds it with `masks.add_mask(total, seed, 1)`,
    server 1 adds the rest, and the sum of both totals is that of the vectors. Hidden from each
    server: the vector, if AES-128 is a pseudo-random function. Only clients that both servers have
    accepted may be added.

    Args:
        vector: of a ring, any shape.
        prg: where the seed comes from; a fresh one if left out.

    Returns:
        The seed for server 0 and the vector minus its mask for server 1.

    >>> seed, rest = dense_shares(np.array([1, 2, 3], np.uint32))
    >>> add_mask(rest, seed, 1)
    >>> rest
    array([1, 2, 3], dtype=uint32)
    """
    seed = (Prg.fresh() if prg is None else prg).bytes(SEED_BYTES)
    rest = np.array(vector, order="C")
    add_mask(rest, seed, -1)
    return seed, rest


def _fill_buckets(
    terms: SparseParams, keys: KeyArray, rows: RingArray, prg: Prg
) -> tuple[KeyArray, RingArray, NDArray[np.bool_]]:
    """Returns position (B,) and row (B, row) of every bucket, and which keys (m,) found one."""
    points = prg.below(terms.bucket_size, terms.num_buckets)
    payload = np.zeros((terms.num_buckets, terms.row), terms.dtype)
    choices = terms.placement.buckets_of(keys)
    buckets = place(choices, terms.num_buckets)
    row, column = np.nonzero(choices == buckets[:, None])  # at most one for each key
    points[buckets[row]] = terms.placement.positions_of(keys)[row, column]
    payload[buckets[row], : terms.width] = rows[row]
    payload[buckets[row], terms.width :] = 1
    return points, payload, buckets >= 0


def _check_rows(terms: SparseParams, count: int, rows: RingArray) -> None:
    if rows.shape != (count, terms.width) or rows.dtype != terms.dtype:
        raise ShapeError(
            "rows that do not fit their keys or the terms",
            got=f"{rows.dtype} of shape {rows.shape}",
            allowed=f"{terms.dtype} of shape ({count}, {terms.width})",
            fix="encode them with FixedPoint of the same ring",
        )


@dataclass(frozen=True, repr=False)
class SumShares:
    """What one client sends, once. A party that has both messages of `to` can read the update.

    Args:
        public: for both servers alike: sent to server 0, which relays it to server 1.
        to: one message for each server, which nobody else may see.
        unplaced: how many keys found no bucket; their rows are left out. The client's secret.
    """

    public: bytes
    to: tuple[bytes, bytes]
    unplaced: int

    def __repr__(self) -> str:
        """Printing shows what everybody sees."""
        own = " and ".join(str(len(message)) for message in self.to)
        return f"SumShares({len(self.public)} bytes, and {own} for the servers)"


def share_update(
    terms: SumParams, rows: Sequence[tuple[KeyArray, RingArray]], prg: Prg | None = None
) -> SumShares:
    """Shares an update between both servers.

    Args:
        terms: of the sum.
        rows: of each part its keys (m,), all different, and (m, width) ring for them.
        prg: where all randomness comes from; a fresh one if left out.

    Raises:
        KeySpaceError: keys outside a part, repeated or too many.
        ShapeError: rows of another shape or ring, or of another number of parts.

    >>> from keyhole.aggregation.two_servers.params import PartParams
    >>> parts = PartParams(1000, 4, 10, is_sparse=True), PartParams(3, 2, 3, is_sparse=False)
    >>> terms = SumParams(bytes(16), parts, max_clients=2, min_clients=2)
    >>> few, all = np.array([7, 3]), np.arange(3)
    >>> rows = [(few, np.ones((2, 4), np.uint32)), (all, np.ones((3, 2), np.uint32))]
    >>> share_update(terms, rows)
    SumShares(3210 bytes, and 240 and 248 for the servers)
    """
    if len(rows) != len(terms.parts):
        raise ShapeError(
            "an update of another number of parts",
            got=len(rows),
            allowed=len(terms.parts),
            fix="share it under the terms of its own round",
        )
    prg = Prg.fresh() if prg is None else prg
    publics: list[bytes] = []
    own: tuple[list[bytes], list[bytes]] = [], []
    unplaced = 0
    for part, (keys, values) in enumerate(rows):
        if terms.parts[part].is_sparse:
            shared = share_rows(terms.sparse[part], keys, values, prg)
            publics.append(shared.public)
            messages = shared.to
            unplaced += int(np.count_nonzero(~shared.is_placed))
        else:
            messages = _dense(terms, part, np.asarray(keys), values, prg)
        for mine, message in zip(own, messages, strict=True):
            mine.append(message)
    public = pack_public(terms, prg.bytes(SEED_BYTES), publics)
    one, other = (pack_own(terms, party, public, own[party]) for party in (0, 1))
    return SumShares(public, (one, other), unplaced)


def _dense(
    terms: SumParams, place: int, keys: KeyArray, rows: RingArray, prg: Prg
) -> tuple[bytes, bytes]:
    """The seed for server 0, and all rows minus their mask for server 1."""
    part = terms.parts[place]
    if len(distinct_keys(keys, part.num_keys, part.max_keys)[0]) != len(keys):
        raise KeySpaceError(
            "keys that are repeated",
            got=f"{len(keys)} keys",
            allowed="each key once",
            fix="add up the rows of equal keys first",
        )
    if rows.shape != (len(keys), part.width) or rows.dtype != terms.dtype:
        raise ShapeError(
            "rows that do not fit their keys or the terms",
            got=f"{rows.dtype} of shape {rows.shape}",
            allowed=f"{terms.dtype} of shape ({len(keys)}, {part.width})",
            fix="encode them with `terms.fixed_point`",
        )
    whole = np.zeros(terms.shape(place), terms.dtype)
    whole[keys, : part.width] = rows
    whole[keys, part.width :] = 1
    seed, rest = dense_shares(whole, prg)
    return seed, rest.astype(terms.dtype.newbyteorder("<"), copy=False).tobytes()
