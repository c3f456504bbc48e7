"""Bucketed keys: a client chooses groups of keys, so that fewer slices need to be made (section 6).

Either the groups are the keys of the model, as with `select_buckets`: then a client counts buckets
and any choice picks among them. Or the model is cut by single keys and a client takes all members
of the buckets it picks, so that whoever sees its keys sees no more than its buckets.
"""

from __future__ import annotations

import numpy as np

from keyhole.errors import InputError
from keyhole.keys.choice import Choice
from keyhole.keys.counts import KeyCounts
from keyhole.primitives.keymaps import Buckets
from keyhole.types import KeyArray

__all__ = ["count_buckets", "whole_buckets"]


def count_buckets(counts: KeyCounts, buckets: Buckets) -> KeyCounts:
    """Adds up the counts of the keys in each bucket.

    Args:
        counts: of the keys that are grouped.
        buckets: how.

    Returns:
        Counts over `buckets.space`, with the same total.

    Raises:
        KeySpaceError: the counts are of another key space.

    >>> from keyhole import KeySpace
    >>> word = KeySpace("word", 10)
    >>> counts = KeyCounts.of(word, np.array([0, 3, 3, 9]))
    >>> by_bucket = count_buckets(counts, Buckets(word, size=4))
    >>> by_bucket.keys.tolist(), by_bucket.counts.tolist()
    ([0, 2], [3, 1])
    """
    held_by, _ = buckets.split(counts.space.keys(counts.keys))
    found, place = np.unique(held_by.array, return_inverse=True)
    totals = np.zeros(len(found), np.int64)
    np.add.at(totals, place, counts.counts)
    return KeyCounts(buckets.space, found, totals)


def whole_buckets(choice: Choice, buckets: Buckets) -> Choice:
    """Returns a choice of single keys that takes buckets as a whole.

    Args:
        choice: picks among buckets, as many as surely fit: m // size.
        buckets: how keys are grouped.

    Returns:
        A choice of at most m keys: the members of each bucket side by side, buckets in the order
        of `choice`. It raises InputError where not even one bucket fits.

    >>> from keyhole import KeySpace
    >>> from keyhole.keys.structured import top
    >>> word = KeySpace("word", 10)
    >>> choose = whole_buckets(top, Buckets(word, size=2))
    >>> choose(KeyCounts.of(word, np.array([4, 5, 4, 9])), 4, np.random.default_rng(0)).tolist()
    [4, 5, 8, 9]
    """

    def choose(counts: KeyCounts, keys_per_client: int, rng: np.random.Generator) -> KeyArray:
        if 0 < keys_per_client < buckets.size:
            raise InputError(
                "a client cannot hold one bucket",
                got=f"{keys_per_client} keys per client",
                allowed=f"{buckets.size} or more",
                fix="make smaller buckets or raise keys_per_client",
            )
        chosen = choice(count_buckets(counts, buckets), keys_per_client // buckets.size, rng)
        members = (buckets.members(int(bucket)).array for bucket in chosen)
        return np.concatenate([np.empty(0, np.int64), *members])

    return choose
