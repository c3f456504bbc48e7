"""The batch of point queries that fetches many keys: a small one in every bucket, and a stash.

What it looks like follows from the terms. A client puts each of its keys into one query of it, and
a random point into every query that is left.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from keyhole.private.dpf import Domain
from keyhole.private.pir.cuckoo import BatchShape, Placement, batch_shape, place
from keyhole.private.pir.terms import Terms
from keyhole.private.prg import Prg
from keyhole.types import KeyArray

__all__ = ["Batch", "Points"]


@dataclass(frozen=True, repr=False)
class Points:
    """The points of one client's batch.

    Args:
        in_buckets: (num_buckets,) int64: a position in each bucket.
        in_stash: (stash,) int64: keys.
        slots: (u,) int64: the query that each key is in, buckets first; -1 if there was no room.
    """

    in_buckets: KeyArray
    in_stash: KeyArray
    slots: NDArray[np.int64]

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
        """Returns the batch of a table."""
        shape = batch_shape(terms.most_keys, terms.num_keys)
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
            prg: of the points of queries that are left.
        """
        buckets = prg.below(self.bucket.num_points, self.shape.num_buckets)
        stash = prg.below(self.table.num_points, self.shape.stash)
        slots = np.full(len(keys), -1, np.int64)
        if self.placement is not None:
            choices = self.placement.buckets_of(keys)
            slots[:] = place(choices, self.shape.num_buckets)
            row, column = np.nonzero(choices == slots[:, None])
            buckets[slots[row]] = self.placement.positions_of(keys)[row, column]
        left = np.flatnonzero(slots < 0)[: self.shape.stash]
        slots[left] = self.shape.num_buckets + np.arange(len(left))
        stash[: len(left)] = keys[left]
        return Points(buckets, stash, slots)
