"""Shares: how many keys of each key space, where several are cut alike (sections 4.1.3 and 5.4)."""

from __future__ import annotations

from collections.abc import Iterable

from keyhole.errors import InputError
from keyhole.primitives.keyspace import KeySpace

__all__ = ["share_of_keys"]


def share_of_keys(spaces: Iterable[KeySpace], alpha: float) -> dict[str, int]:
    """Returns m = alpha K for each key space, rounded, and at least 1.

    The paper's three kinds of run differ in the spaces that alpha applies to; with alpha = 1 all
    are training without select:

    - structured: `share_of_keys(spaces, 1) | share_of_keys([word], alpha)`
    - random: `share_of_keys(spaces, 1) | share_of_keys([neuron], alpha)`
    - mixed: `share_of_keys(spaces, alpha)`

    each with `choose_with({"word": top, "neuron": independent}, count_keys)`.

    Args:
        spaces: such as the spaces of a layout.
        alpha: above 0, at most 1.

    Returns:
        Key space -> keys per client, as `Plan` takes it.

    Raises:
        InputError: alpha is out of range.

    >>> word, neuron = KeySpace("word", 10_000), KeySpace("neuron", 2048)
    >>> share_of_keys([word, neuron], 0.1)
    {'word': 1000, 'neuron': 205}
    """
    if not 0 < alpha <= 1:
        raise InputError(
            "share of keys is out of range",
            got=alpha,
            allowed="above 0, at most 1",
            fix="1 selects all keys",
        )
    return {space.name: max(1, round(alpha * space.num_keys)) for space in spaces}
