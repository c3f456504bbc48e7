"""Chooses among all keys, whatever a client's data, or among groups of keys (section 4.1.2).

Nothing in the pixels of an image names a filter. Every client draws keys of its own, or all clients
of a round draw the same ones ("fixed" in section 5.3): that is `RunParts.shared_keys`.

With groups, fewer slices need to be made (section 6). Either the groups are the keys of the model,
as with `select_buckets`: then a client counts buckets and any choice picks among them. Or the model
is cut by single keys and a client takes all members of the buckets it picks, so that what its keys
tell is no more than its buckets.
"""

from __future__ import annotations

import numpy as np

from keyhole.arrays import KeyArray
from keyhole.errors import InputError
from keyhole.keys.choice import Choice, KeyCounts, draw_distinct
from keyhole.primitives.keyspace import Buckets


def independent(counts: KeyCounts, keys_per_client: int, rng: np.random.Generator) -> KeyArray:
    """Chooses m of all keys, uniformly and without replacement: a random sub-model (section 5.3).

    The cost goes by m, not by the size of the key space.

    Args:
        counts: names the key space; what occurs is not used.
        keys_per_client: m.
        rng: of this client in this round, or of the round.

    Returns:
        int64 (m,), or all keys if there are not more; in the order drawn. Of equal generators, the
        choice of m keys is the beginning of that of m + 1: where all clients of a round draw
        the same keys, a small device has some of those of a large one.

    >>> from keyhole import KeySpace
    >>> filters = KeyCounts.none(KeySpace("filter", 64))
    >>> independent(filters, 4, np.random.default_rng(0)).tolist()
    [54, 41, 33, 19]
    """
    return draw_distinct(counts.space.num_keys, keys_per_client, rng)


def every(
    counts: KeyCounts, keys_per_client: int, _: np.random.Generator | None = None
) -> KeyArray:
    """Chooses all keys: training without select (section 5.2, m = n).

    Args:
        counts: names the key space; what occurs is not used.
        keys_per_client: m, the size of the key space or more.
        _: not used.

    Returns:
        int64 (K,), rising.

    Raises:
        InputError: a client may hold fewer keys than there are.

    >>> from keyhole import KeySpace
    >>> every(KeyCounts.none(KeySpace("filter", 3)), 3).tolist()
    [0, 1, 2]
    """
    if keys_per_client < counts.space.num_keys:
        raise InputError(
            f"a client cannot hold all keys of {counts.space.name!r}: got {keys_per_client} keys "
            f"per client; expected {counts.space.num_keys}; let keys_per_client be the size of the "
            "key space, or choose fewer keys"
        )
    return np.arange(counts.space.num_keys, dtype=np.int64)


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
                f"a client cannot hold one bucket: got {keys_per_client} keys per client; expected "
                f"{buckets.size} or more; make smaller buckets or raise keys_per_client"
            )
        chosen = choice(count_buckets(counts, buckets), keys_per_client // buckets.size, rng)
        members = (buckets.members(int(bucket)).array for bucket in chosen)
        return np.concatenate([np.empty(0, np.int64), *members])

    return choose
