"""Derives random streams and checks sizes, for all synthetic data."""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from keyhole.arrays import Array
from keyhole.errors import InputError

FACTS = {
    "source": "synthetic: drawn from a seed, no person's data",
    "licence": "none needed",
}


class DataStream(IntEnum):
    """What a stream is for; the world is what all clients of a dataset have in common."""

    WRITER = 1
    POSTS_WORLD = 2
    POSTS_USER = 3
    RATINGS_WORLD = 4
    RATINGS_USER = 5


def stream(seed: int, source: DataStream, client: int = 0) -> np.random.Generator:
    """Returns the generator of one client, whatever other clients there are.

    >>> one, other = (stream(7, DataStream.WRITER, 3).integers(100) for _ in "ab")
    >>> one == other
    np.True_
    """
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, source, client])))


def zipf_ends(count: int, offset: float, power: float = 1.0) -> Array:
    r"""Returns the distribution function of $p_r \propto (r + offset)^{-power}$, r = 0..count-1.

    `np.searchsorted(zipf_ends(...), u, side="right")` turns u, uniform in [0, 1), into a rank.

    >>> zipf_ends(3, offset=1.0).round(3).tolist()
    [0.545, 0.818, 1.0]
    """
    ends: Array = np.cumsum((np.arange(count) + offset) ** -power)
    ends /= ends[-1]
    return ends


def check_size(name: str, value: int, minimum: int, limit: int | None = None) -> None:
    """Demands a whole number from `minimum` to `limit`.

    >>> check_size("writers", 0, 1)
    Traceback (most recent call last):
    keyhole.errors.InputError: synthetic data cannot have this number of writers: got 0; ...
    """
    is_whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not (is_whole and minimum <= value and (limit is None or value <= limit)):
        to = "" if limit is None else f" to {limit}"
        raise InputError(
            f"synthetic data cannot have this number of {name}: got {value!r}; expected a whole "
            f"number from {minimum}{to}; choose {name} in that range"
        )
