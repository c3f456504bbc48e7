"""The demo: topic prediction from bags of words, with and without select, on data made here.

Users write posts about two of twenty topics. Words have Zipf-like frequencies; a topic
prefers a few words of its own. The model is one softmax regression, vocabulary x topics. A user
uses a tenth of the vocabulary, so most of what a broadcast sends is of no use to that user.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from keyhole.delivery.ways import broadcast, on_demand
from keyhole.primitives.cuts import Cut
from keyhole.primitives.keyspace import Keys, KeySpace
from keyhole.primitives.layout import ClientKeys, Layout
from keyhole.server.optimizers import SGD
from keyhole.server.state import ServerState
from keyhole.training.buffering import Buffering
from keyhole.training.clients import Clients
from keyhole.training.cohort import Cohorts
from keyhole.training.loop import Run, start_run
from keyhole.training.plan import Plan
from keyhole.training.randomness import generator
from keyhole.types import Array, Tree

__all__ = ["ARMS", "Arm", "Outcome", "Posts", "accuracy", "make_users", "run_arm", "start_arm"]

WORD = KeySpace("word", 4000)
TOPICS = 20
TRAIN_USERS, TEST_USERS, POSTS, WORDS_PER_POST = 400, 100, 30, 20
PREFERRED, PREFERENCE = 0.05, 12.0  # share of the words that a topic prefers, and how much
COHORT, BATCH, CLIENT_LR, SERVER_LR = 30, 10, 0.5, 2.0

# Places of the data's randomness (see keyhole.training.randomness).
_TOPICS, _USERS = 0, 1


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
    bytes_down: float
    bytes_up: float


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


def start_arm(arm: Arm, users: list[Posts], seed: int, buffering: Buffering | None = None) -> Run:
    """Returns a run of one arm, in memory.

    Args:
        arm: which line of the comparison.
        users: as `make_users` returns them.
        seed: of the cohorts; all arms see the same.
        buffering: for asynchronous rounds; synchronous if not given.
    """
    model = {
        "kernel": np.zeros((WORD.num_keys, TOPICS), np.float32),
        "bias": np.zeros(TOPICS, np.float32),
    }
    layout = Layout.of(model, Cut(WORD, {"kernel": 0}))
    is_select = arm.keys_per_client is not None
    clients = Clients(
        TRAIN_USERS,
        users.__getitem__,
        choose=_top_words if is_select else _all_words,
        train=_client_update,
        localize=_localize,
    )
    plan = Plan(
        Cohorts(TRAIN_USERS, COHORT),
        {"word": WORD.num_keys if arm.keys_per_client is None else arm.keys_per_client},
        seed=seed,
        deliver=on_demand if is_select else broadcast,
        buffering=buffering,
    )
    return start_run(ServerState.dense(layout, model, SGD(SERVER_LR)), clients, plan)


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
        Accuracy, and numbers and bytes that a client received per round, on average.
    """
    run = start_arm(arm, users, seed)
    for _ in run.rounds(rounds):
        done()
    down = float(np.mean([record.bytes_down for record in run.records]))
    up = float(np.mean([record.bytes_up for record in run.records]))
    size = down / np.dtype(np.float32).itemsize
    return Outcome(accuracy(run.state, users), size, down, up)


def accuracy(state: ServerState, users: list[Posts]) -> float:
    """How many posts of unseen users the server's model assigns to their topic."""
    model, unseen = state.model(), users[TRAIN_USERS:]
    words = np.concatenate([user.words for user in unseen])
    topics = np.concatenate([user.topics for user in unseen])
    logits = _bags(words, WORD.all_keys()) @ model["kernel"] + model["bias"]
    return float(np.mean(logits.argmax(axis=1) == topics))


def _write_posts(cumulative: Array, rng: np.random.Generator) -> Posts:
    """One user: two topics, and for each post words drawn from the topic's distribution."""
    topics = rng.choice(rng.choice(TOPICS, size=2, replace=False), size=POSTS)
    draws = rng.random((POSTS, WORDS_PER_POST))
    words = [np.searchsorted(cumulative[t], d) for t, d in zip(topics, draws, strict=True)]
    return Posts(np.minimum(words, WORD.num_keys - 1), topics)


def _top_words(posts: Posts, most: Mapping[str, int], _: np.random.Generator) -> Keys:
    """The user's most frequent words, ties to the smaller key."""
    words, counts = np.unique(posts.words, return_counts=True)
    return WORD.keys(words[np.argsort(-counts, kind="stable")][: most["word"]])


def _all_words(_: Posts, __: Mapping[str, int], ___: np.random.Generator) -> Keys:
    return WORD.all_keys()


def _localize(posts: Posts, keys: ClientKeys) -> dict[str, Array]:
    """Posts as bags of the words that were selected."""
    assert isinstance(keys, Keys)
    return {"bags": _bags(posts.words, keys), "topics": posts.topics}


def _client_update(model: Tree, posts: Mapping[str, Array], _: np.random.Generator) -> Tree:
    """One epoch of mini-batch SGD: start minus end."""
    kernel, bias = model["kernel"].copy(), model["bias"].copy()
    for start in range(0, POSTS, BATCH):
        x, topics = (posts[name][start : start + BATCH] for name in ("bags", "topics"))
        error = (_softmax(x @ kernel + bias) - np.eye(TOPICS, dtype=np.float32)[topics]) / len(x)
        kernel -= CLIENT_LR * (x.T @ error)
        bias -= CLIENT_LR * error.sum(axis=0)
    return {"kernel": model["kernel"] - kernel, "bias": model["bias"] - bias}


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
