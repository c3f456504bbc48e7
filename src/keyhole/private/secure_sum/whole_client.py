"""The client of a sum of whole updates at two servers: an update becomes two shares.

Rows at secret keys of sparse parts become point functions (`sparse_client.py`); of dense parts
server 0 gets the seed of a mask and server 1 what is left when the mask is taken away.

Hidden from each server: keys, their number up to `most_keys` of each part, and rows, if both do not
collude, AES under a fixed key is a circular correlation-robust hash, and in counter mode it is a
pseudo-random function. Not hidden: who takes part. Not prevented: a client that lies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from keyhole.errors import KeySpaceError, ShapeError
from keyhole.private.asking import distinct_keys
from keyhole.private.prg import SEED_BYTES, Prg
from keyhole.private.secure_sum.fixed_point import RingArray
from keyhole.private.secure_sum.sparse_client import dense_shares, share_rows
from keyhole.private.secure_sum.whole_messages import pack_own, pack_public
from keyhole.private.secure_sum.whole_terms import WholeTerms
from keyhole.types import KeyArray

__all__ = ["WholeShares", "share_update"]


@dataclass(frozen=True, repr=False)
class WholeShares:
    """What one client sends, once. Whoever has both messages of `to` can read the update.

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
        return f"WholeShares({len(self.public)} bytes, and {own} for the servers)"


def share_update(
    terms: WholeTerms, rows: Sequence[tuple[KeyArray, RingArray]], prg: Prg | None = None
) -> WholeShares:
    """Shares an update between both servers.

    Args:
        terms: of the sum.
        rows: of each part its keys (m,), all different, and (m, width) ring for them.
        prg: where all randomness comes from; a fresh one if left out.

    Raises:
        KeySpaceError: keys outside a part, repeated or too many.
        ShapeError: rows of another shape or ring, or of another number of parts.

    >>> from keyhole.private.secure_sum.whole_terms import PartTerms
    >>> parts = PartTerms(1000, 4, 10, is_sparse=True), PartTerms(3, 2, 3, is_sparse=False)
    >>> terms = WholeTerms(bytes(16), parts, most_clients=2, least_clients=2)
    >>> few, all = np.array([7, 3]), np.arange(3)
    >>> rows = [(few, np.ones((2, 4), np.uint32)), (all, np.ones((3, 2), np.uint32))]
    >>> share_update(terms, rows)
    WholeShares(3210 bytes, and 240 and 248 for the servers)
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
    for place, (keys, values) in enumerate(rows):
        if terms.parts[place].is_sparse:
            shared = share_rows(terms.sparse[place], keys, values, prg)
            publics.append(shared.public)
            messages = shared.to
            unplaced += int(np.count_nonzero(~shared.is_placed))
        else:
            messages = _dense(terms, place, np.asarray(keys), values, prg)
        for mine, message in zip(own, messages, strict=True):
            mine.append(message)
    public = pack_public(terms, prg.bytes(SEED_BYTES), publics)
    one, other = (pack_own(terms, party, public, own[party]) for party in (0, 1))
    return WholeShares(public, (one, other), unplaced)


def _dense(
    terms: WholeTerms, place: int, keys: KeyArray, rows: RingArray, prg: Prg
) -> tuple[bytes, bytes]:
    """The seed for server 0, and all rows minus their mask for server 1."""
    part = terms.parts[place]
    if len(distinct_keys(keys, part.num_keys, part.most_keys)[0]) != len(keys):
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
