"""The client of a sparse sum at two servers: rows at secret keys become two shares.

Each key goes to one of the buckets that hold it, no two to the same, and each bucket is one point
function (`sparse_points.py`): at the key's position the row, or at a random one a row of zeros if
no key went there. What is sent is one row a bucket, whatever the number of keys in the table.

Hidden: keys, their number up to `most_keys`, and rows, from each server, if both do not collude and
AES under a fixed key is a circular correlation-robust hash. Not hidden: who takes part. Not
prevented: a client that lies. It can share any rows at any number of keys, of any size, and so
spoil a sum; neither server can see it.

A client relies on its terms: whoever decides that a device takes part checks `least_clients`, and
with `Rounds` that it has not taken part in the round before.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from keyhole.errors import KeySpaceError, ShapeError
from keyhole.private.asking import distinct_keys
from keyhole.private.pir.cuckoo import place
from keyhole.private.prg import SEED_BYTES, Prg
from keyhole.private.secure_sum.fixed_point import RingArray
from keyhole.private.secure_sum.masks import add_mask
from keyhole.private.secure_sum.sparse_messages import pack_own, pack_public
from keyhole.private.secure_sum.sparse_points import share_rows_at
from keyhole.private.secure_sum.sparse_terms import SparseTerms
from keyhole.types import KeyArray

__all__ = ["SparseShares", "dense_shares", "share_rows"]


@dataclass(frozen=True, repr=False)
class SparseShares:
    """What one client sends, once. Whoever has both messages of `to` can read the rows.

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
    terms: SparseTerms, keys: KeyArray, rows: RingArray, prg: Prg | None = None
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

    >>> terms = SparseTerms(bytes(16), 1000, 4, 10, bits=32, least_clients=2)
    >>> shares = share_rows(terms, np.array([7, 3]), np.ones((2, 4), np.uint32))
    >>> shares, int(shares.is_placed.sum())
    (SparseShares(3138 bytes and 120 for each server), 2)
    """
    keys = np.asarray(keys)
    if len(distinct_keys(keys, terms.num_keys, terms.most_keys)[0]) != len(keys):
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
    public = pack_public(terms, corrections)
    one, other = (pack_own(terms, party, roots[party], public) for party in (0, 1))
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
    terms: SparseTerms, keys: KeyArray, rows: RingArray, prg: Prg
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


def _check_rows(terms: SparseTerms, count: int, rows: RingArray) -> None:
    if rows.shape != (count, terms.width) or rows.dtype != terms.dtype:
        raise ShapeError(
            "rows that do not fit their keys or the terms",
            got=f"{rows.dtype} of shape {rows.shape}",
            allowed=f"{terms.dtype} of shape ({count}, {terms.width})",
            fix="encode them with FixedPoint of the same ring",
        )
