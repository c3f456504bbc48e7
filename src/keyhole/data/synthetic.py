"""Derives the random streams of all synthetic data, and makes ratings from them.

Ratings have low-rank taste, biases and noise, on items of Zipf popularity: an item is rated as
$3.2 + b_u + b_i + p_u^T q_i$ stars plus noise, rounded to half stars. A user rates popular items
more often, and of two equally popular ones more likely the one it will like.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from keyhole.arrays import Array
from keyhole.data.federated import Dataset, FederatedData
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


def check_sizes(**sizes: tuple[int, int]) -> None:
    """Demands whole numbers: name -> the number and its min.

    >>> check_sizes(seed=(7, 0), writers=(0, 1))
    Traceback (most recent call last):
    keyhole.errors.InputError: synthetic data cannot have this number of writers: got 0; ...
    """
    for name, (value, minimum) in sizes.items():
        is_whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
        if not (is_whole and minimum <= value):
            raise InputError(
                f"synthetic data cannot have this number of {name}: got {value!r}; expected a "
                f"whole number from {minimum}; choose {name} in that range"
            )


def draw_count(rng: np.random.Generator, min_count: int, max_count: int) -> int:
    """Draws how many examples a client has; as many clients have 20..40 as 100..200."""
    return int(min_count * ((max_count + 1) / min_count) ** rng.random())


RANK = 6  # of the taste
MIDDLE, MIN, MAX = 6.4, 1, 10  # half stars
USER_BIAS, ITEM_BIAS, TASTE, NOISE = 0.8, 1.0, 1.5, 1.0  # standard deviations, in half stars
POPULARITY_OFFSET, POPULARITY_POWER = 10.0, 0.9
LIKING = 0.3  # how much one half star more raises the logarithm of the odds of being rated
TEST_PART = 10  # one rating in this many is for testing


def make_ratings(
    seed: int, *, users: int = 600, items: int = 3000, min_ratings: int = 20, max_ratings: int = 200
) -> Dataset:
    """Returns ratings by user, a function of the arguments alone.

    The last tenth of each user's ratings is in "test", at least one; the rest in "train". The
    ratings of user i do not depend on `users`. The number of an item says nothing of its
    popularity.

    Args:
        users: 1 or more; all are in both splits.
        items: `max_ratings` or more: nobody rates an item twice.
        min_ratings: ratings of a user, 2 or more.
        max_ratings: ratings of a user, `min_ratings` or more.

    >>> data = make_ratings(7, users=3, items=300)
    >>> data.splits["test"].client(0)["half_stars"].dtype, data.names["items"][2]
    (dtype('uint8'), 'item2')
    """
    ratings = {"min_ratings": (min_ratings, 2), "max_ratings": (max_ratings, min_ratings)}
    check_sizes(seed=(seed, 0), users=(users, 1), **ratings, items=(items, max_ratings))
    world = _make_world(seed, items)
    streams = [stream(seed, DataStream.RATINGS_USER, i) for i in range(users)]
    rated = [_rate(*world, rng, min_ratings, max_ratings) for rng in streams]
    kept = [len(item) - max(1, len(item) // TEST_PART) for item, _ in rated]
    splits = {
        "train": _join([(i[:k], r[:k]) for (i, r), k in zip(rated, kept, strict=True)]),
        "test": _join([(i[k:], r[k:]) for (i, r), k in zip(rated, kept, strict=True)]),
    }
    names = {"items": [f"item{i}" for i in range(items)]}
    return Dataset("synthetic", "ratings", splits, names, FACTS)


def _make_world(seed: int, items: int) -> tuple[Array, Array, Array]:
    """Of each item: log popularity (items,), bias (items,) and factors (items, RANK)."""
    rng = stream(seed, DataStream.RATINGS_WORLD)
    place = rng.permutation(items)
    popularity = -POPULARITY_POWER * np.log(POPULARITY_OFFSET + place)
    bias = ITEM_BIAS * rng.standard_normal(items)
    return popularity, bias, rng.standard_normal((items, RANK))


def _rate(
    popularity: Array,
    bias: Array,
    factors: Array,
    rng: np.random.Generator,
    min_ratings: int,
    max_ratings: int,
) -> tuple[Array, Array]:
    """The items that one user rates, in order of time, and the half stars it gives them."""
    own_bias = USER_BIAS * rng.standard_normal()
    taste = rng.standard_normal(RANK) * (TASTE / np.sqrt(RANK))
    count = draw_count(rng, min_ratings, max_ratings)
    liked = bias + factors @ taste
    # The largest of log odds plus Gumbel noise are a draw without replacement.
    item = np.argsort(-(popularity + LIKING * liked + rng.gumbel(size=len(liked))))[:count]
    item = rng.permutation(item)
    stars = MIDDLE + own_bias + liked[item] + NOISE * rng.standard_normal(count)
    return item.astype(np.int32), np.clip(np.rint(stars), MIN, MAX).astype(np.uint8)


def _join(rated: list[tuple[Array, Array]]) -> FederatedData:
    item, half_stars = (np.concatenate(parts) for parts in zip(*rated, strict=True))
    ids = [f"user{i}" for i in range(len(rated))]
    columns = {"item": item, "half_stars": half_stars}
    return FederatedData.of(ids, [len(part) for part, _ in rated], columns)
