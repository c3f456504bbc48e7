"""Chooses among all keys, whatever a client's data, or among groups of keys (section 4.1.2).

Nothing in the pixels of an image names a filter. Every client draws keys of its own, or all clients
of a round draw the same ones ("fixed" in section 5.3): that is `RunParts.shared_keys`.

`rolling` and `nested` are the sub-models of other papers: a window that moves with the rounds, and
the first keys, of which larger devices hold more.

With groups, fewer slices need to be made (section 6). Either the groups are the keys of the model,
as with `select_buckets`: then a client counts buckets and any choice picks among them. Or the model
is cut by single keys and a client takes all members of the buckets it picks, so that what its keys
tell is no more than its buckets.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from keyhole.arrays import KeyArray
from keyhole.errors import InputError
from keyhole.keys.choice import Choice, KeyContext, KeyCounts, draw_distinct
from keyhole.primitives.keyspace import Buckets
from keyhole.sampling import check_count


def independent(context: KeyContext) -> KeyArray:
    """Chooses m of all keys, uniformly and without replacement: a random sub-model (section 5.3).

    The cost goes by m, not by the size of the key space.

    Returns:
        int64 (m,), or all keys if there are not more; in the order drawn. Of equal generators, the
        choice of m keys is the beginning of that of m + 1: where all clients of a round draw
        the same keys, a small device has some of those of a large one.

    >>> from keyhole import KeySpace
    >>> filters = KeyCounts.none(KeySpace("filter", 64))
    >>> independent(KeyContext(filters, 4, np.random.default_rng(0))).tolist()
    [54, 41, 33, 19]
    """
    return draw_distinct(context.space.num_keys, context.max_keys, context.rng)


def every(context: KeyContext) -> KeyArray:
    """Chooses all keys: training without select (section 5.2, m = n).

    Returns:
        int64 (K,), rising.

    Raises:
        InputError: a client may hold fewer keys than there are.

    >>> from keyhole import KeySpace
    >>> filters = KeyCounts.none(KeySpace("filter", 3))
    >>> every(KeyContext(filters, 3, np.random.default_rng(0))).tolist()
    [0, 1, 2]
    """
    space = context.space
    if context.max_keys < space.num_keys:
        raise InputError(
            f"a client cannot hold all keys of {space.name!r}: got {context.max_keys} keys per "
            f"client; expected {space.num_keys}; let keys_per_client be the size of the key space, "
            "or choose fewer keys"
        )
    return np.arange(space.num_keys, dtype=np.int64)


def rolling(context: KeyContext) -> KeyArray:
    """Chooses a window of m keys that begins one key later in each round: FedRolex.

    All clients of a round have the same window, a smaller device the beginning of it; after the
    last key comes the first. In K rounds every key is chosen m times.

    Returns:
        int64 (m,), or all keys if there are not more.

    Alam et al., FedRolex: Model-Heterogeneous Federated Learning with Rolling Sub-Model Extraction,
    2022.

    >>> from keyhole import KeySpace
    >>> neurons, rng = KeyCounts.none(KeySpace("neuron", 5)), np.random.default_rng(0)
    >>> [rolling(KeyContext(neurons, 3, rng, round=t)).tolist() for t in (0, 1, 4)]
    [[0, 1, 2], [1, 2, 3], [4, 0, 1]]
    """
    return _window(context, context.round)


def rolling_by(step: int) -> Choice:
    """Returns `rolling` whose window begins `step` keys later in each round.

    With step m, keys take turns: in K / m rounds every key is chosen once.

    >>> from keyhole import KeySpace
    >>> neurons, rng = KeyCounts.none(KeySpace("neuron", 6)), np.random.default_rng(0)
    >>> [rolling_by(3)(KeyContext(neurons, 3, rng, round=t)).tolist() for t in (0, 1, 2)]
    [[0, 1, 2], [3, 4, 5], [0, 1, 2]]
    """
    check_count("step", step, 1)
    return lambda context: _window(context, step * context.round)


def _window(context: KeyContext, start: int) -> KeyArray:
    """As many keys as a client may hold, from `start` on; after the last comes the first."""
    total, at = context.space.num_keys, start % context.space.num_keys
    held = min(context.max_keys, total)
    first = min(held, total - at)
    return np.concatenate([at + np.arange(first), np.arange(held - first)])


def nested(context: KeyContext) -> KeyArray:
    """Chooses the first m keys, so that the keys of a smaller device are among those of a larger
    one: HeteroFL, and the ordered dropout of FjORD.

    How many they are is up to the device: `RunParts.devices` has classes of them. Keys that no
    device can hold are never trained.

    Diao et al., HeteroFL: Computation and Communication Efficient Federated Learning for
    Heterogeneous Clients, 2021. Horvath et al., FjORD: Fair and Accurate Federated Learning under
    Heterogeneous Targets with Ordered Dropout, 2021.

    >>> from keyhole import KeySpace
    >>> neurons, rng = KeyCounts.none(KeySpace("neuron", 5)), np.random.default_rng(0)
    >>> nested(KeyContext(neurons, 3, rng, round=7)).tolist()
    [0, 1, 2]
    """
    return _window(context, 0)


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
    >>> counts = KeyCounts.of(word, np.array([4, 5, 4, 9]))
    >>> choose(KeyContext(counts, 4, np.random.default_rng(0))).tolist()
    [4, 5, 8, 9]
    """

    def choose(context: KeyContext) -> KeyArray:
        limit = context.max_keys
        if 0 < limit < buckets.size:
            raise InputError(
                f"a client cannot hold one bucket: got {limit} keys per client; expected "
                f"{buckets.size} or more; make smaller buckets or raise keys_per_client"
            )
        counts = count_buckets(context.counts, buckets)
        about = replace(context, counts=counts, norms=None, users=None)  # those are of keys
        chosen = choice(replace(about, max_keys=limit // buckets.size))
        members = (buckets.members(int(bucket)).array for bucket in chosen)
        return np.concatenate([np.empty(0, np.int64), *members])

    return choose
