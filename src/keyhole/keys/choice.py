"""Choices: which keys a client selects, given what occurs in its data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from keyhole.keys.counts import KeyCounts
from keyhole.primitives.layout import ClientKeys
from keyhole.types import KeyArray

__all__ = ["Choice", "choose_with"]


class Choice(Protocol):
    """A way to choose keys of one key space: `(counts, keys_per_client, rng) -> keys`."""

    def __call__(
        self, counts: KeyCounts, keys_per_client: int, rng: np.random.Generator, /
    ) -> KeyArray:
        """Returns at most `keys_per_client` different keys, in the order they are to have."""
        ...


def choose_with(
    choices: Mapping[str, Choice], count_keys: Callable[[Any], Mapping[str, KeyCounts]]
) -> Callable[[Any, Mapping[str, int], np.random.Generator], ClientKeys]:
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
    >>> words, neurons = choose(np.array([5, 9, 9]), most, np.random.default_rng(0))
    >>> list(words), len(neurons)
    ([9], 3)
    """

    def choose(data: Any, most: Mapping[str, int], rng: np.random.Generator) -> ClientKeys:
        counted = count_keys(data)
        return [
            counts.space.keys(choices[name](counts, most[name], own_rng))
            for (name, counts), own_rng in zip(
                counted.items(), rng.spawn(len(counted)), strict=True
            )
        ]

    return choose
