"""The demo: topic prediction from bags of words, with and without select, on data made here.

Users write posts about two of twenty topics. Words have Zipf-like frequencies; a topic
prefers a few words of its own. The model is one softmax regression, vocabulary x topics. A user
uses a tenth of the vocabulary, so most of what a broadcast sends is of no use to that user.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from keyhole.primitives.cuts import Cut
from keyhole.primitives.keyspace import Keys, KeySpace
from keyhole.primitives.layout import Layout
from keyhole.primitives.placement import ClientValue, at_clients, at_server
from keyhole.server.submodels import deselect_submodels_mean, select_submodels
from keyhole.training import generator, train, train_with_select
from keyhole.types import Array, Tree

__all__ = ["ARMS", "Arm", "Outcome", "Posts", "make_users", "run_arm"]

WORD = KeySpace("word", 4000)
TOPICS = 20
TRAIN_USERS, TEST_USERS, POSTS, WORDS_PER_POST = 400, 100, 30, 20
PREFERRED, PREFERENCE = 0.05, 12.0  # share of the words that a topic prefers, and how much
COHORT, BATCH, CLIENT_LR, SERVER_LR = 30, 10, 0.5, 2.0

# Places of randomness within a run (see keyhole.training.randomness).
_TOPICS, _USERS, _COHORTS = 0, 1, 2


@dataclass(frozen=True)
class Posts:
    """The posts of one user: words (posts, words per post) and the topic of each (posts,)."""

    words: Array
    topics: Array


@dataclass(frozen=True)
class Arm:
    """One line of the comparison; `keys_per_client` None means no select at all."""

    name: str
    keys_per_client: int | None


ARMS = (
    Arm("no select", None),
    Arm("all own words", WORD.num_keys),
    Arm("top 100 words", 100),
    Arm("top 20 words", 20),
)


@dataclass(frozen=True)
class Outcome:
    """What an arm reached and what it cost a client, on average over its rounds."""

    accuracy: float
    client_size: float
    client_bytes: float


def make_users(seed: int) -> list[Posts]:
    """Returns the users of a run: those to train on, then those to test on."""
    rng = generator(seed, _TOPICS)
    frequency = 1.0 / (10.0 + np.arange(WORD.num_keys))
    preferred = rng.random((TOPICS, WORD.num_keys)) < PREFERRED
    weights = np.where(preferred, PREFERENCE, 1.0) * frequency
    cumulative = np.cumsum(weights / weights.sum(axis=1, keepdims=True), axis=1)
    return [
        _write_posts(cumulative, generator(seed, _USERS, user))
        for user in range(TRAIN_USERS + TEST_USERS)
    ]


def run_arm(
    arm: Arm, users: list[Posts], seed: int, rounds: int, done: Callable[[], None]
) -> Outcome:
    """Trains one arm and evaluates it on users it has not seen.

    Args:
        arm: which line of the comparison.
        users: as `make_users` returns them.
        seed: of the cohorts; all arms see the same.
        rounds: T.
        done: called after each round, for a progress bar.

    Returns:
        Accuracy, and numbers and bytes that a client received per round.
    """
    model = {
        "kernel": np.zeros((WORD.num_keys, TOPICS), np.float32),
        "bias": np.zeros(TOPICS, np.float32),
    }
    layout = Layout.of(model, Cut(WORD, {"kernel": 0}))
    chosen: list[int] = []
    cohorts = _cohorts(users[:TRAIN_USERS], seed, rounds)
    if arm.keys_per_client is None:
        steps = train(
            at_server(model), cohorts, partial(_client_update, WORD.all_keys()), _server_update
        )
    else:
        steps = train_with_select(
            at_server(model),
            cohorts,
            choose=partial(_top_words, arm.keys_per_client, chosen.append),
            deliver=partial(select_submodels, layout),
            client_update=lambda slices, posts, keys: _client_update(keys, slices, posts),
            aggregate=partial(deselect_submodels_mean, layout),
            server_update=_server_update,
        )
    for step in steps:
        model = step.value
        done()
    m = np.mean(chosen) if chosen else WORD.num_keys
    fixed, per_key = (part.record.itemsize for part in layout.parts)
    received = float(fixed + per_key * m)
    return Outcome(
        accuracy=_accuracy(model, users[TRAIN_USERS:]),
        client_size=received / model["kernel"].itemsize,
        client_bytes=received,
    )


def _write_posts(cumulative: Array, rng: np.random.Generator) -> Posts:
    """One user: two topics, and for each post words drawn from the topic's distribution."""
    topics = rng.choice(rng.choice(TOPICS, size=2, replace=False), size=POSTS)
    draws = rng.random((POSTS, WORDS_PER_POST))
    words = [np.searchsorted(cumulative[t], d) for t, d in zip(topics, draws, strict=True)]
    return Posts(np.minimum(words, WORD.num_keys - 1), topics)


def _cohorts(users: list[Posts], seed: int, rounds: int) -> Iterator[ClientValue[Posts]]:
    for t in range(rounds):
        cohort = generator(seed, _COHORTS, t).choice(len(users), size=COHORT, replace=False)
        yield at_clients({int(user): users[user] for user in cohort})


def _top_words(most: int, count: Callable[[int], Any], posts: Posts) -> Keys:
    """The user's most frequent words, ties to the smaller key; reports how many there are."""
    words, counts = np.unique(posts.words, return_counts=True)
    keys = WORD.keys(words[np.argsort(-counts, kind="stable")][:most])
    count(len(keys))
    return keys


def _client_update(keys: Keys, model: Tree, posts: Posts) -> Tree:
    """One epoch of mini-batch SGD on the words that were selected: start minus end."""
    kernel, bias = model["kernel"].copy(), model["bias"].copy()
    bags = _bags(posts.words, keys)
    for start in range(0, POSTS, BATCH):
        x, topics = bags[start : start + BATCH], posts.topics[start : start + BATCH]
        error = (_softmax(x @ kernel + bias) - np.eye(TOPICS, dtype=np.float32)[topics]) / len(x)
        kernel -= CLIENT_LR * (x.T @ error)
        bias -= CLIENT_LR * error.sum(axis=0)
    return {"kernel": model["kernel"] - kernel, "bias": model["bias"] - bias}


def _server_update(model: Tree, update: Tree) -> Tree:
    return {name: model[name] - np.float32(SERVER_LR) * update[name] for name in model}


def _bags(words: Array, keys: Keys) -> Array:
    """Binary bags of words over the selected keys, float32 (posts, m); other words are left out."""
    column = np.full(WORD.num_keys, -1)
    column[keys.array] = np.arange(len(keys))
    bags = np.zeros((len(words), len(keys) + 1), np.float32)
    np.put_along_axis(bags, column[words], 1.0, axis=1)
    return bags[:, :-1]


def _softmax(logits: Array) -> Array:
    odds: Array = np.exp(logits - logits.max(axis=1, keepdims=True))
    total: Array = odds.sum(axis=1, keepdims=True)
    return np.divide(odds, total)


def _accuracy(model: Tree, users: list[Posts]) -> float:
    words = np.concatenate([user.words for user in users])
    topics = np.concatenate([user.topics for user in users])
    logits = _bags(words, WORD.all_keys()) @ model["kernel"] + model["bias"]
    return float(np.mean(logits.argmax(axis=1) == topics))
