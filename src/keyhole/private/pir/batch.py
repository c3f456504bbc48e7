"""The batch of point queries that fetches many keys: a small one in every bucket, and a stash.

What it looks like follows from the terms. A client puts each of its keys into one query of it, and
a random key into every query that is left: what comes back for that one can be checked too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from keyhole.errors import InputError
from keyhole.private.dpf import Domain
from keyhole.private.pir.cuckoo import (
    MOST_IN_BUCKETS,
    BatchShape,
    Placement,
    batch_shape,
    place,
)
from keyhole.private.pir.terms import Terms
from keyhole.private.prg import Prg
from keyhole.types import KeyArray

__all__ = ["Batch", "Points"]


@dataclass(frozen=True, repr=False)
class Points:
    """The points of one client's batch.

    Args:
        in_buckets: (num_buckets,) int64: a position in each bucket.
        keys: (num_buckets + stash,) int64: the key of each query, buckets first: a wanted one, or
            one that was drawn.
        slots: (u,) int64: the query that each key is in, buckets first; -1 if there was no room.
    """

    in_buckets: KeyArray
    keys: KeyArray
    slots: NDArray[np.int64]

    @property
    def in_stash(self) -> KeyArray:
        """The points of the stash are keys."""
        return self.keys[len(self.in_buckets) :]

    def __repr__(self) -> str:
        """Keys are private: printing shows what everybody sees."""
        return f"Points({len(self.in_buckets)} buckets, {len(self.in_stash)} in the stash)"


@dataclass(frozen=True)
class Batch:
    """The public shape of a batch.

    Args:
        shape: how many queries of either kind.
        placement: where keys lie; None without buckets.
        bucket: the points of one bucket.
        table: the points of the whole table.
    """

    shape: BatchShape
    placement: Placement | None
    bucket: Domain
    table: Domain

    @staticmethod
    def of(terms: Terms) -> Batch:
        """Returns the batch of a table.

        Raises:
            InputError: a table that is too large for the buckets that its terms demand.
        """
        shape = batch_shape(terms.most_keys, terms.num_keys)
        if shape.num_buckets and terms.num_keys > MOST_IN_BUCKETS:
            raise InputError(
                "terms of a table that is too large for buckets",
                got=f"{terms.num_keys} keys, {terms.most_keys} a query",
                allowed=f"1..{MOST_IN_BUCKETS} keys with so many a query",
                fix="check num_keys and most_keys; divide the table",
            )
        table = Domain(terms.num_keys)
        if not shape.num_buckets:
            return Batch(shape, None, Domain(1), table)
        placement = Placement(terms.num_keys, shape.num_buckets)
        return Batch(shape, placement, Domain(placement.bucket_size), table)

    @property
    def num_queries(self) -> int:
        """Of both kinds."""
        return self.shape.num_buckets + self.shape.stash

    def assign(self, keys: KeyArray, prg: Prg) -> Points:
        """Puts keys into queries: as many as can be into buckets, then into the stash.

        Args:
            keys: (u,) int64, all different.
            prg: of the keys of queries that are left.
        """
        positions, drawn = self._fill_buckets(prg)
        slots = np.full(len(keys), -1, np.int64)
        if self.placement is not None:
            choices, within = self.placement.places_of(keys)
            slots[:] = place(choices, self.shape.num_buckets)
            row, column = np.nonzero(choices == slots[:, None])
            positions[slots[row]] = within[row, column]
        left = np.flatnonzero(slots < 0)[: self.shape.stash]
        slots[left] = self.shape.num_buckets + np.arange(len(left))
        asked = np.concatenate([drawn, prg.below(self.table.num_points, self.shape.stash)])
        is_placed = slots >= 0
        asked[slots[is_placed]] = keys[is_placed]
        return Points(positions, asked, slots)

    def _fill_buckets(self, prg: Prg) -> tuple[KeyArray, KeyArray]:
        """A random key of each bucket: its position and itself, (num_buckets,) each."""
        buckets = np.arange(self.shape.num_buckets)
        positions = prg.below(self.bucket.num_points, len(buckets))
        if self.placement is None:
            return positions, positions
        keys = self.placement.keys_at(buckets, positions)
        # Few positions are empty, and no bucket is: there are more keys than buckets of a kind.
        while (again := np.flatnonzero(keys < 0)).size:
            positions[again] = prg.below(self.bucket.num_points, len(again))
            keys[again] = self.placement.keys_at(again, positions[again])
        return positions, keys
