"""Draws: some of the numbers below n, each at most once, at the cost of those drawn."""

from __future__ import annotations

import numpy as np

from keyhole.types import KeyArray

__all__ = ["draw_distinct"]


def draw_distinct(below: int, count: int, rng: np.random.Generator) -> KeyArray:
    """Draws different numbers, uniformly and in random order.

    These are the first `count` places of a Fisher-Yates shuffle of 0..below-1, of which only the
    numbers that moved are held: time and memory go by `count`. Of equal generators, a smaller draw
    is the beginning of a larger one.

    Args:
        below: n, from 0 to 2^63.
        count: how many; all n in random order if there are not more.
        rng: where the draw comes from.

    Returns:
        int64 (min(count, n),), in the order drawn.

    >>> draw_distinct(10**12, 3, np.random.default_rng(0)).tolist()
    [636961687321, 269786713764, 40973523938]
    """
    count = min(count, below)
    partners = rng.integers(np.arange(count), below - 1, endpoint=True).tolist()
    moved: dict[int, int] = {}
    drawn = []
    for place, partner in enumerate(partners):
        drawn.append(moved.get(partner, partner))
        moved[partner] = moved.get(place, place)
    return np.array(drawn, np.int64)
