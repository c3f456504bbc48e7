"""Makes synthetic data of any kind from a seed, the same bytes every time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from inspect import signature

from keyhole.data.federated import Dataset
from keyhole.data.posts import make_posts
from keyhole.data.ratings import make_ratings
from keyhole.data.readers.source import Kind
from keyhole.data.writers import make_writers
from keyhole.errors import InputError

GENERATOR = "1"
"""Version of the makers: raised when the same arguments give other bytes."""

_MAKERS: dict[str, Callable[..., Dataset]] = {
    "writers": make_writers,
    "posts": make_posts,
    "ratings": make_ratings,
}


def make_synthetic(kind: Kind, seed: int, **sizes: int) -> Dataset:
    """Returns the dataset named "synthetic" of a kind.

    Args:
        kind: "writers", "posts" or "ratings".
        seed: 0 or more.
        sizes: such as `users`; see `make_writers`, `make_posts` and `make_ratings`.

    Returns:
        a dataset whose facts have the seed, every size and the version of the generator, so that
        datasets that differ in an argument differ in their facts.

    Raises:
        InputError: there is no such kind or size, or a size is out of range.

    >>> make_synthetic("ratings", 7, users=3).kind
    'ratings'
    >>> make_synthetic("ratings", 7, movies=3)
    Traceback (most recent call last):
    keyhole.errors.InputError: synthetic ratings have no such size: got movies; expected ...
    """
    if kind not in _MAKERS:
        raise InputError(
            f"no such kind of synthetic data: got {kind!r}; expected {', '.join(_MAKERS)}; "
            "choose one of them"
        )
    allowed = [name for name in signature(_MAKERS[kind]).parameters if name != "seed"]
    unknown = sorted(sizes.keys() - set(allowed))
    if unknown:
        raise InputError(
            f"synthetic {kind} have no such size: got {', '.join(unknown)}; expected "
            f"{', '.join(allowed)}; name one of these or none"
        )
    made = _MAKERS[kind](seed, **sizes)
    given = signature(_MAKERS[kind]).bind(seed, **sizes)
    given.apply_defaults()
    arguments = {name: str(value) for name, value in given.arguments.items()}
    return replace(made, facts={**made.facts, **arguments, "generator": GENERATOR})
