"""Sets up ratings: clients select the movies they rated, and keep their taste to themselves.

Not an experiment of the paper: fine-grained sparsity (section 2.3) where a key is a row of an
embedding, as the words of section 5.2 are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from keyhole.arrays import Array
from keyhole.data.federated import Column, Dataset, FederatedData, hold_out
from keyhole.experiments.specs import DEFAULTS
from keyhole.experiments.task import Metrics, TaskKind, TaskParts, places_of
from keyhole.keys.choice import KeyCounts
from keyhole.models.factorization import factorization
from keyhole.models.model import Model
from keyhole.primitives.layout import KeysBySpace
from keyhole.rounds.evaluate import predictor
from keyhole.server.state import ServerState

MIN_STARS, MAX_STARS = 0.5, 5.0
HELD_OUT = 0.2  # of the users, for validation
ASKED = 5  # of a validation user's ratings, one in this many is predicted from the others

Ratings = dict[str, Array]
"""One user's: "movie" int64 (n,), as the dataset numbers them, and "stars" float32 (n,)."""


def _make(dataset: Dataset, sizes: Mapping[str, int], is_tuning: bool = False) -> TaskParts:
    train, test = dataset.splits["train"], dataset.splits["test"]
    model = factorization(len(dataset.names["items"]), sizes["factors"])
    (space,) = model.layout.spaces
    metrics = {"test": _rmse_on(_same_users(train, test), model, train)}
    if is_tuning:
        train, held = hold_out(train, HELD_OUT, np.random.default_rng(1))
        users = [_divide(_ratings(held.client(i))) for i in range(len(held))]
        metrics["validation"] = _rmse_on(users, model, train)
    return TaskParts(
        model=model,
        clients=len(train),
        data=lambda client: _ratings(train.client(client)),
        count_keys=lambda own: {"movie": KeyCounts.of(space, own["movie"])},
        localize=_localize,
        metrics=metrics,
    )


def _same_users(train: FederatedData, test: FederatedData) -> list[tuple[Ratings, Ratings]]:
    """The known and the asked ratings of everybody who has both."""
    place = {name: i for i, name in enumerate(train.client_ids)}
    return [
        (_ratings(train.client(place[name])), _ratings(test.client(i)))
        for i, name in enumerate(test.client_ids)
        if name in place
    ]


def rmse_of_means(train: FederatedData, asked: Ratings) -> float:
    """Returns the error of saying a movie's mean rating, that of all ratings for a movie without
    one.

    >>> columns = {"item": np.array([0, 0, 1]), "half_stars": np.array([2, 4, 10], np.uint8)}
    >>> train = FederatedData.of(["ann"], [3], columns)
    >>> rmse_of_means(train, {"movie": np.array([0]), "stars": np.array([3.5], np.float32)})
    2.0
    """
    known = [_ratings(train.client(i)) for i in range(len(train))]
    movie, stars = (np.concatenate([own[name] for own in known]) for name in ("movie", "stars"))
    size = 1 + max(movie.max(), asked["movie"].max())
    counts, sums = np.bincount(movie, minlength=size), np.bincount(movie, stars, size)
    means = np.where(counts > 0, sums / np.maximum(counts, 1), stars.mean())
    return _rmse(means[asked["movie"]], asked["stars"])


def _ratings(columns: Mapping[str, Column]) -> Ratings:
    movie, half_stars = np.asarray(columns["item"]), np.asarray(columns["half_stars"])
    return {"movie": movie.astype(np.int64), "stars": half_stars.astype(np.float32) / 2}


def _divide(own: Ratings) -> tuple[Ratings, Ratings]:
    """A user's ratings that are known, and those that are asked for."""
    is_asked = np.arange(len(own["movie"])) % ASKED == 0
    known, asked = ({name: a[at] for name, a in own.items()} for at in (~is_asked, is_asked))
    return known, asked


def _localize(own: Ratings, keys: KeysBySpace) -> Ratings:
    """The ratings of the movies that the client holds; at least one rating, if of no movie."""
    place = places_of(own["movie"], keys["movie"].array).astype(np.int32)
    kept = np.flatnonzero(place >= 0) if (place >= 0).any() else np.arange(1)
    return {"movie": place[kept], "stars": own["stars"][kept]}


def _rmse_on(
    users: Sequence[tuple[Ratings, Ratings]], model: Model, train: FederatedData
) -> Metrics:
    """The error on each user's asked ratings, its taste fitted to the known ones."""
    batches = [batch for known, asked in users if len((batch := _batch(known, asked))["movie"])]
    limit = max(len(batch["movie"]) for batch in batches)
    predict = predictor(model, lambda stars: stars, batch_size=limit)  # a user is one batch
    asked = [{n: a[~batch["is_known"]] for n, a in batch.items()} for batch in batches]
    together = {n: np.concatenate([a[n] for a in asked]) for n in ("movie", "stars")}
    of_means = rmse_of_means(train, together)

    def metrics(state: ServerState) -> dict[str, float]:
        params = state.model()
        said = [predict(params, batch)[~batch["is_known"]] for batch in batches]
        stars = np.clip(np.concatenate(said), MIN_STARS, MAX_STARS)
        return {"rmse": _rmse(stars, together["stars"]), "rmse_of_means": of_means}

    return metrics


def _batch(known: Ratings, asked: Ratings) -> dict[str, Array]:
    """Known ratings, then asked ones: what fills up a batch repeats the last, which is not fitted.
    Empty where nothing is asked."""
    is_known = np.arange(len(known["movie"]) + len(asked["movie"])) < len(known["movie"])
    both = {name: np.concatenate([known[name], asked[name]]) for name in ("movie", "stars")}
    batch = {"movie": both["movie"].astype(np.int32), "stars": both["stars"], "is_known": is_known}
    return batch if not is_known.all() else {name: a[:0] for name, a in batch.items()}


def _rmse(predicted: Array, stars: Array) -> float:
    return float(np.sqrt(np.mean((predicted - stars) ** 2, dtype=np.float64)))


MOVIES = TaskKind(
    name="movies",
    about="Predict a user's ratings by matrix factorisation; a key is a movie, taste stays local.",
    kind="ratings",
    defaults=DEFAULTS["movies"],
    metric="rmse",
    splits=("test",),
    make=_make,
)
