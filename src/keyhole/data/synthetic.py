"""Synthetic data of any kind: made on the spot from a seed, the same bytes every time."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature

from keyhole.data.federated import Dataset, Kind
from keyhole.data.synthetic_posts import make_posts
from keyhole.data.synthetic_ratings import make_ratings
from keyhole.data.synthetic_writers import make_writers
from keyhole.errors import InputError

__all__ = ["make_synthetic"]

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

    Raises:
        InputError: there is no such kind or size, or a size is out of range.

    >>> make_synthetic("ratings", 7, users=3).kind
    'ratings'
    >>> make_synthetic("ratings", 7, movies=3)
    Traceback (most recent call last):
    keyhole.errors.InputError: synthetic ratings have no such size: got movies, allowed is ...
    """
    if kind not in _MAKERS:
        raise InputError(
            "no such kind of synthetic data",
            got=repr(kind),
            allowed=", ".join(_MAKERS),
            fix="choose one of them",
        )
    allowed = [name for name in signature(_MAKERS[kind]).parameters if name != "seed"]
    unknown = sorted(sizes.keys() - set(allowed))
    if unknown:
        raise InputError(
            f"synthetic {kind} have no such size",
            got=", ".join(unknown),
            allowed=", ".join(allowed),
            fix="name one of these or none",
        )
    return _MAKERS[kind](seed, **sizes)
