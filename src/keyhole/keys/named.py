"""Choices by name, as a command takes them."""

from __future__ import annotations

from keyhole.errors import InputError
from keyhole.keys.choice import Choice
from keyhole.keys.sampled import every, independent
from keyhole.keys.structured import random_own, random_top, top

__all__ = ["CHOICES", "choice_named"]

CHOICES: dict[str, Choice] = {
    "top": top,
    "random": random_own,
    "random-top": random_top,
    "independent": independent,
    "all": every,
}
"""Ways to choose keys that need no settings: the paper's sections 5.2 and 5.3."""


def choice_named(name: str) -> Choice:
    """Returns the choice of that name.

    Args:
        name: a key of `CHOICES`, in any case.

    Raises:
        InputError: there is no such choice.

    >>> choice_named("Random-Top").__name__
    'random_top'
    """
    if name.lower() not in CHOICES:
        raise InputError(
            "no such way to choose keys",
            got=name,
            allowed=", ".join(CHOICES),
            fix="choose one of them, or pass a function: docs/own-keys.md",
        )
    return CHOICES[name.lower()]
