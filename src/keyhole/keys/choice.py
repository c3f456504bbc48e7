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
    """Returns what `Clients.choose` takes: one choice for each key space.

    Args:
        choices: key space -> how its keys are chosen.
        count_keys: `client's data -> {key space: counts}`.
    """

    def choose(data: Any, most: Mapping[str, int], rng: np.random.Generator) -> ClientKeys:
        return [
            counts.space.keys(choices[name](counts, most[name], rng))
            for name, counts in count_keys(data).items()
        ]

    return choose
