"""Combined keys: choices made of other choices."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from keyhole.keys.choice import Choice
from keyhole.keys.counts import KeyCounts
from keyhole.keys.draws import draw_distinct
from keyhole.keys.softmax import check_share, num_negatives
from keyhole.types import KeyArray

__all__ = ["always", "with_negatives"]


def always(first: Sequence[int], choice: Choice) -> Choice:
    """Returns a choice in which some keys come first at every client, such as the special words.

    They count towards keys_per_client; a client that may hold fewer gets the first of them.

    Args:
        first: the keys that all clients hold, each once, in order.
        choice: picks the rest; it does not see `first` among the client's own keys. It is asked for
            m keys, of which the first that are not in `first` fill up what is left.

    >>> from keyhole import KeySpace
    >>> from keyhole.keys.structured import top
    >>> counts = KeyCounts.of(KeySpace("word", 100), np.array([1, 1, 1, 9, 9, 5]))
    >>> always([0, 1], top)(counts, 3, np.random.default_rng(0)).tolist()
    [0, 1, 9]
    """

    def choose(counts: KeyCounts, keys_per_client: int, rng: np.random.Generator) -> KeyArray:
        given = counts.space.keys(first).array
        is_other = ~np.isin(counts.keys, given)
        others = KeyCounts(counts.space, counts.keys[is_other], counts.counts[is_other])
        chosen = choice(others, keys_per_client, rng)
        rest = chosen[~np.isin(chosen, given)]
        return np.concatenate([given, rest])[:keys_per_client]

    return choose


def with_negatives(choice: Choice, share: float) -> Choice:
    """Returns a choice of own keys followed by random others, for a sampled softmax.

    Where a client selects outputs too, its softmax runs over its own words only and never learns
    that other words are wrong (end of section 4.1.1). Random others stand for the words that
    were not chosen; `sampled_correction` says for how many each.

    Args:
        choice: picks the m - round(share m) keys that come first.
        share: which share of m are others, at least 0 and below 1. They are drawn uniformly and
            without replacement from all keys that `choice` did not pick.

    Raises:
        InputError: the share is out of range.

    >>> from keyhole import KeySpace
    >>> from keyhole.keys.structured import top
    >>> counts = KeyCounts.of(KeySpace("word", 100), np.array([1, 1, 1, 9, 9, 5]))
    >>> with_negatives(top, 0.5)(counts, 4, np.random.default_rng(0)).tolist()
    [1, 9, 85, 64]
    """
    check_share(share)

    def choose(counts: KeyCounts, keys_per_client: int, rng: np.random.Generator) -> KeyArray:
        sampled = num_negatives(keys_per_client, share)
        chosen = choice(counts, keys_per_client - sampled, rng)
        return np.concatenate([chosen, _draw_others(counts.space.num_keys, chosen, sampled, rng)])

    return choose


def _draw_others(num_keys: int, taken: KeyArray, count: int, rng: np.random.Generator) -> KeyArray:
    """Keys that are not `taken`, drawn by their rank among those: no list of all keys is made."""
    ranks = draw_distinct(num_keys - len(taken), count, rng)
    # The i-th taken key, in rising order, has `key - i` free keys below it.
    free_below = np.sort(taken) - np.arange(len(taken))
    return ranks + np.searchsorted(free_below, ranks, side="right")
