"""The demo: topic prediction from bags of words, with and without select, on data made on the spot.

Users write posts about two of twenty topics. A post is a set of words: some of its topic, some that everyone
uses. The model is one softmax regression, vocabulary x topics. A user knows a few hundred of its words, so
most of what a broadcast sends is of no use to that user.
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

__all__ = ["ARMS", "Arm", "Outcome", "Posts", "run_arm"]

WORD = KeySpace("word", 4000)
TOPICS = 20
USERS, TEST_USERS, POSTS, WORDS_PER_POST = 400, 100, 30, 20
COHORT, BATCH, CLIENT_LR, SERVER_LR = 30, 10, 0.5, 2.0

# Places of randomness within a run (see keyhole.training.randomness).
_USERS, _COHORTS = 0, 1


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


def run_arm(arm: Arm, seed: int, rounds: int, done: Callable[[], None]) -> Outcome:
    """Trains one arm and evaluates it on users it has not seen.

    Args:
        arm: which comparison line.
        seed: of data, cohorts and nothing else: all arms see the same.
        rounds: T.
        done: called after each round, for a progress bar.

    Returns:
        Accuracy, and numbers and bytes that a client received per round.
    """
    users = [_write_posts(generator(seed, _USERS, user)) for user in range(USERS + TEST_USERS)]
    model = {"kernel": np.zeros((WORD.num_keys, TOPICS), np.float32), "bias": np.zeros(TOPICS, np.float32)}
    layout = Layout.of(model, Cut(WORD, {"kernel": 0}))
    chosen: list[int] = []
    cohorts = _cohorts(users[:USERS], seed, rounds)
    if arm.keys_per_client is None:
        steps = train(at_server(model), cohorts, partial(_client_update, WORD.all_keys()), _server_update)
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
    m = float(np.mean(chosen)) if chosen else float(WORD.num_keys)
    fixed, per_key = layout.client_size(word=0), TOPICS
    size = fixed + per_key * m
    return Outcome(_accuracy(model, users[USERS:]), size, size * model["kernel"].itemsize)


def _write_posts(rng: np.random.Generator) -> Posts:
    """One user: two topics, and words of Zipf-like frequency, a third of them everyone's."""
    topics = rng.choice(rng.choice(TOPICS, size=2, replace=False), size=POSTS)
    per_topic = WORD.num_keys // (TOPICS + 1)
    rank = np.minimum(rng.zipf(1.3, size=(POSTS, WORDS_PER_POST)), per_topic) - 1
    is_common = rng.random((POSTS, WORDS_PER_POST)) < 1 / 3
    block = np.where(is_common, TOPICS, topics[:, None])
    return Posts(block * per_topic + rank, topics)


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
    odds = np.exp(logits - logits.max(axis=1, keepdims=True))
    return odds / odds.sum(axis=1, keepdims=True)


def _accuracy(model: Tree, users: list[Posts]) -> float:
    words = np.concatenate([user.words for user in users])
    topics = np.concatenate([user.topics for user in users])
    logits = _bags(words, WORD.all_keys()) @ model["kernel"] + model["bias"]
    return float(np.mean(logits.argmax(axis=1) == topics))
