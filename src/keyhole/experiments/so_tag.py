"""Sets up Stack Overflow tag prediction: clients select the words they use (section 5.2).

One logistic regression for each of the t most common tags, on binary bags of the n most common
words; words outside the vocabulary and tags outside the t are dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np

from keyhole.arrays import Array
from keyhole.data.federated import Column, Dataset, FederatedData, Ragged, draw_pool
from keyhole.experiments.specs import DEFAULTS
from keyhole.experiments.task import (
    Metrics,
    TaskKind,
    TaskParts,
    check_words,
    pad_rows,
    places_of,
)
from keyhole.keys.choice import KeyCounts
from keyhole.models.logistic import sparse_scores, tag_regression
from keyhole.primitives.keyspace import KeySpace
from keyhole.primitives.layout import KeysBySpace
from keyhole.rounds.evaluate import recall_at
from keyhole.server.state import ServerState

MAX_EVALUATED = 10_000


@dataclass(frozen=True, eq=False)
class Bags:
    """Posts as sets of words and tags.

    Args:
        post: int64 (occurrences,), the post of each word, rising.
        word: int64 (occurrences,), the word; each once in a post.
        tags: bool (posts, tags).
    """

    post: Array
    word: Array
    tags: Array

    @staticmethod
    def of(columns: Mapping[str, Column], words: int, tags: int) -> Bags:
        """Sets of the most common words, those of the title included, and the most common tags."""
        body, title, named = (_ragged(columns[name]) for name in ("words", "title", "tags"))
        post = np.concatenate([body.row_numbers, title.row_numbers])
        word = np.concatenate([body.flat, title.flat]).astype(np.int64)
        known = word < words
        pairs = np.sort(post[known] * np.int64(words) + word[known])  # np.unique hashes them first
        is_first = np.ones(len(pairs), bool)
        np.not_equal(pairs[1:], pairs[:-1], out=is_first[1:])
        pairs = pairs[is_first]
        marks = np.zeros((len(body), tags), bool)
        is_common = named.flat < tags
        marks[named.row_numbers[is_common], named.flat[is_common]] = True
        post = pairs // words
        return Bags(post, pairs - post * words, marks)  # np.divmod takes several times as long


def _ragged(column: Column) -> Ragged:
    assert isinstance(column, Ragged)
    return column


def _make(dataset: Dataset, sizes: Mapping[str, int], is_tuning: bool = False) -> TaskParts:
    del is_tuning  # the source has users to validate on
    words, tags = sizes["words"], sizes["tags"]
    space, train = KeySpace("word", words), dataset.splits["train"]
    check_words(dataset, words)
    return TaskParts(
        model=tag_regression(words, tags),
        clients=len(train),
        data=lambda client: Bags.of(train.client(client), words, tags),
        count_keys=lambda bags: {"word": KeyCounts.of(space, bags.word)},
        localize=_localize,
        metrics={
            name: _recall_on(dataset.splits[name], words, tags) for name in ("validation", "test")
        },
    )


def _localize(bags: Bags, keys: KeysBySpace) -> dict[str, Array]:
    """Examples of the tag model: the places of a post's words among the client's keys."""
    place = places_of(bags.word, keys["word"].array)
    is_own = place >= 0
    words = pad_rows(bags.post[is_own], place[is_own], len(bags.tags))
    return {"words": words, "tags": bags.tags.astype(np.float32)}


def _recall_on(split: FederatedData, words: int, tags: int) -> Metrics:
    @cache
    def pool() -> Bags:
        return Bags.of(draw_pool(split, MAX_EVALUATED, np.random.default_rng(0)), words, tags)

    def metrics(state: ServerState) -> dict[str, float]:
        bags = pool()
        scores = sparse_scores(state.model(), pad_rows(bags.post, bags.word, len(bags.tags)))
        return {"recall_at_5": recall_at(5, scores, *np.nonzero(bags.tags))}

    return metrics


SO_TAG = TaskKind(
    name="so_tag",
    about="Predict the tags of a post from its words by logistic regression; a key is a word.",
    kind="posts",
    defaults=DEFAULTS["so_tag"],
    metric="recall_at_5",
    splits=("validation", "test"),
    make=_make,
)
