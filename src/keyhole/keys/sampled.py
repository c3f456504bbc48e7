"""Sampled keys: a client chooses among all keys, whatever its data (section 4.1.2).

Nothing in the pixels of an image names a filter. Every client draws keys of its own, or all clients
of a round draw the same ones ("fixed" in section 5.3): that is `Plan.shared_keys`.
"""

from __future__ import annotations

import numpy as np

from keyhole.errors import InputError
from keyhole.keys.counts import KeyCounts
from keyhole.keys.draws import draw_distinct
from keyhole.types import KeyArray

__all__ = ["every", "independent"]


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
            f"a client cannot hold all keys of {counts.space.name!r}",
            got=f"{keys_per_client} keys per client",
            allowed=counts.space.num_keys,
            fix="let keys_per_client be the size of the key space, or choose fewer keys",
        )
    return np.arange(counts.space.num_keys, dtype=np.int64)
