"""Counts the keys in a client's data, and chooses among them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from keyhole.arrays import Array, KeyArray
from keyhole.primitives.keyspace import KeySpace
from keyhole.primitives.layout import KeysBySpace


@dataclass(frozen=True, eq=False)
class KeyCounts:
    """What a client knows when it chooses keys: the key space, and what occurs in its own data.

    Args:
        space: all keys there are.
        keys: those that occur, int64 (own,), each once, rising.
        counts: how often, int64 (own,), 1 or more.

    >>> counts = KeyCounts.of(KeySpace("word", 100), np.array([7, 3, 7]))
    >>> counts.keys.tolist(), counts.counts.tolist()
    ([3, 7], [1, 2])
    """

    space: KeySpace
    keys: KeyArray
    counts: Array

    @staticmethod
    def of(space: KeySpace, occurrences: Array) -> KeyCounts:
        """Counts keys in the order they occur in; out of range is an error."""
        found, counts = np.unique(space.keys(occurrences).array, return_counts=True)
        return KeyCounts(space, found, counts.astype(np.int64))

    @staticmethod
    def none(space: KeySpace) -> KeyCounts:
        """Nothing in the data names a key, as with pixels and filters."""
        return KeyCounts(space, np.empty(0, np.int64), np.empty(0, np.int64))


def draw_distinct(below: int, count: int, rng: np.random.Generator) -> KeyArray:
    """Draws different numbers, uniformly and in random order.

    These are the first `count` places of a Fisher-Yates shuffle of 0..below-1, of which only the
    numbers that moved are held: time and memory go by `count`. Of equal generators, a smaller draw
    is the beginning of a larger one.

    Args:
        below: n, from 0 to 2^63.
        count: how many; all n in random order if there are not more.

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


class Choice(Protocol):
    """A way to choose keys of one key space: `(counts, keys_per_client, rng) -> keys`."""

    def __call__(
        self, counts: KeyCounts, keys_per_client: int, rng: np.random.Generator, /
    ) -> KeyArray:
        """Returns at most `keys_per_client` different keys, in the order they are to have."""
        ...


def choose_with(
    choices: Mapping[str, Choice], count_keys: Callable[[Any], Mapping[str, KeyCounts]]
) -> Callable[[Any, Mapping[str, int], np.random.Generator], KeysBySpace]:
    """Returns what `Clients.choose` takes: one choice for each key space (section 4.1.3).

    Each key space has random numbers of its own, so what is drawn in one does not depend on the
    client's data in another.

    Args:
        choices: key space -> how its keys are chosen.
        count_keys: `client's data -> {key space: counts}`, all key spaces in the same order at
            every client.

    >>> from keyhole import KeySpace
    >>> from keyhole.keys import independent, top
    >>> word, neuron = KeySpace("word", 100), KeySpace("neuron", 8)
    >>> choose = choose_with(
    ...     {"word": top, "neuron": independent},
    ...     lambda own: {"word": KeyCounts.of(word, own), "neuron": KeyCounts.none(neuron)},
    ... )
    >>> most = {"word": 1, "neuron": 3}
    >>> keys = choose(np.array([5, 9, 9]), most, np.random.default_rng(0))
    >>> list(keys["word"]), len(keys["neuron"])
    ([9], 3)
    """

    def choose(data: Any, limit: Mapping[str, int], rng: np.random.Generator) -> KeysBySpace:
        counted = count_keys(data)
        own_rngs = rng.spawn(len(counted))
        return {
            name: counts.space.keys(choices[name](counts, limit[name], own_rng))
            for (name, counts), own_rng in zip(counted.items(), own_rngs, strict=True)
        }

    return choose
