"""Chooses among the keys that occur in a client's own data (section 4.1.1).

A client with fewer own keys than it may hold gets those it has, none included. The three choices
are compared in the ablation of section 5.2.
"""

from __future__ import annotations

import numpy as np

from keyhole.arrays import KeyArray
from keyhole.keys.choice import KeyCounts, draw_distinct


def top(counts: KeyCounts, keys_per_client: int, _: np.random.Generator | None = None) -> KeyArray:
    """Chooses the keys that occur most often: "Top" of section 5.2.

    Args:
        counts: what occurs in the client's data.
        keys_per_client: m.
        _: not used; the keys of a client are the same in every round.

    Returns:
        int64 (at most m,), the most frequent first, ties to the smaller key. The choice of m keys
        is the beginning of that of m + 1.

    >>> from keyhole import KeySpace
    >>> counts = KeyCounts.of(KeySpace("word", 100), np.array([5, 9, 9, 2, 7, 7]))
    >>> top(counts, 3).tolist()
    [7, 9, 2]
    """
    # Keys rise, so a stable sort leaves ties to the smaller one.
    order = np.argsort(-counts.counts, kind="stable")
    return counts.keys[order[:keys_per_client]]


def random_own(counts: KeyCounts, keys_per_client: int, rng: np.random.Generator) -> KeyArray:
    """Chooses at random among the client's own keys: "Random" of section 5.2.

    Args:
        counts: what occurs in the client's data.
        keys_per_client: m.
        rng: of this client in this round.

    Returns:
        int64 (at most m,), in the order drawn.

    >>> from keyhole import KeySpace
    >>> counts = KeyCounts.of(KeySpace("word", 100), np.array([5, 9, 9, 2, 7, 7]))
    >>> sorted(random_own(counts, 10, np.random.default_rng(0)).tolist())
    [2, 5, 7, 9]
    """
    return counts.keys[draw_distinct(len(counts.keys), keys_per_client, rng)]


def random_top(counts: KeyCounts, keys_per_client: int, rng: np.random.Generator) -> KeyArray:
    """Chooses m at random among the 2m keys that occur most often: "Random Top" of section 5.2.

    Args:
        counts: what occurs in the client's data.
        keys_per_client: m.
        rng: of this client in this round.

    Returns:
        int64 (at most m,), in the order drawn.

    >>> from keyhole import KeySpace
    >>> counts = KeyCounts.of(KeySpace("word", 100), np.array([5, 9, 9, 2, 7, 7]))
    >>> random_top(counts, 1, np.random.default_rng(0)).tolist()  # of 7 and 9
    [9]
    """
    candidates = top(counts, 2 * keys_per_client)
    return candidates[draw_distinct(len(candidates), keys_per_client, rng)]
