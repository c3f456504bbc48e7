"""Sets up next-word prediction: words chosen by frequency, neurons at random (section 5.4).

Sentences of up to 20 words. Token 0 is padding, 1..n are the n most common words, then come one
token for all other words, one that begins and one that ends a sentence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np

from keyhole.arrays import Array
from keyhole.data.federated import Column, Dataset, FederatedData, Ragged, draw_pool
from keyhole.experiments.specs import DEFAULTS
from keyhole.experiments.task import Metrics, TaskKind, TaskParts, check_words, places_of
from keyhole.keys.choice import KeyCounts
from keyhole.models.model import Model
from keyhole.models.transformer import PAD, TransformerSizes, transformer
from keyhole.primitives.layout import KeysBySpace
from keyhole.rounds.evaluate import masked_accuracies, predictor
from keyhole.server.state import ServerState

LENGTH = 20
MAX_EVALUATED = 10_000  # sentences, as in Reddi et al. 2021


@dataclass(frozen=True)
class Tokens:
    """The tokens of a vocabulary of `words` words."""

    words: int

    @property
    def unknown(self) -> int:
        """Any word outside the vocabulary."""
        return self.words + 1

    @property
    def begin(self) -> int:
        """Stands before the first word; never a target."""
        return self.words + 2

    @property
    def end(self) -> int:
        """Stands after the last word of a sentence that was not cut."""
        return self.words + 3

    @property
    def special(self) -> Array:
        """The tokens that every client has, padding first, int64 (4,)."""
        return np.array([PAD, self.unknown, self.begin, self.end])

    @property
    def count(self) -> int:
        """All tokens."""
        return self.words + 4


def cut_sentences(columns: Mapping[str, Column], tokens: Tokens) -> Array:
    """Returns the sentences of posts as tokens, int32 (sentences, 21).

    A sentence is its first 20 words behind `begin`; where it has fewer, `end` and padding follow.

    >>> posts = {"words": Ragged.of([[0, 9, 1]]), "sentences": Ragged.of([[2, 1]])}
    >>> cut_sentences(posts, Tokens(words=5))[:, :5].tolist()
    [[7, 1, 6, 8, 0], [7, 2, 8, 0, 0]]
    """
    words, sentences = columns["words"], columns["sentences"]
    assert isinstance(words, Ragged)
    assert isinstance(sentences, Ragged)
    lengths = sentences.flat[sentences.flat > 0].astype(np.int64)
    ids = np.append(np.where(words.flat < tokens.words, words.flat + 1, tokens.unknown), PAD)
    starts = np.cumsum(lengths) - lengths
    place = np.arange(LENGTH)[None, :]
    at = np.minimum(starts[:, None] + place, len(ids) - 1)
    body = np.where(place < lengths[:, None], ids[at], PAD)
    body[place == lengths[:, None]] = tokens.end
    return np.pad(body, ((0, 0), (1, 0)), constant_values=tokens.begin).astype(np.int32)


def _make(dataset: Dataset, sizes: Mapping[str, int], is_tuning: bool = False) -> TaskParts:
    del is_tuning  # the source has users to validate on
    check_words(dataset, sizes["words"])
    tokens, train = Tokens(sizes["words"]), dataset.splits["train"]
    layers = {name: sizes[name] for name in ("embedding", "width", "heads", "neurons")}
    model = transformer(TransformerSizes(words=tokens.count, **layers))
    word, neuron = model.layout.spaces

    def count_keys(sentences: Array) -> dict[str, KeyCounts]:
        is_word = (sentences > PAD) & (sentences <= tokens.words)  # special tokens are no words
        return {"word": KeyCounts.of(word, sentences[is_word]), "neuron": KeyCounts.none(neuron)}

    return TaskParts(
        model=model,
        clients=len(train),
        data=lambda client: _sentences(train.client(client), tokens),
        count_keys=count_keys,
        localize=_localize,
        metrics=_metrics(dataset, model, tokens),
        always={"word": tokens.special},
        outputs="word",
    )


def _sentences(columns: Mapping[str, Column], tokens: Tokens) -> Array:
    """A client's sentences; one without a word where it has none, from which nothing is learned."""
    sentences = cut_sentences(columns, tokens)
    empty = np.array([[tokens.begin] + [PAD] * LENGTH], np.int32)
    return sentences if len(sentences) else empty


def _localize(sentences: Array, keys: KeysBySpace) -> dict[str, Array]:
    """Tokens counted among the client's words; a word it did not select is an unknown one."""
    place = places_of(sentences, keys["word"].array)
    unknown = 1  # second of the special tokens, which come first
    return {"tokens": np.where(place < 0, unknown, place).astype(np.int32)}


def _metrics(dataset: Dataset, model: Model, tokens: Tokens) -> dict[str, Metrics]:
    """Accuracy with three maskings on unseen users."""
    largest = predictor(model, lambda logits: logits.argmax(axis=-1), batch_size=64)
    masks = {
        "accuracy": np.array([PAD]),
        "accuracy_no_oov": np.array([PAD, tokens.unknown]),
        "accuracy_no_oov_no_eos": np.array([PAD, tokens.unknown, tokens.end]),
    }

    def on(split: FederatedData) -> Metrics:
        @cache
        def pool() -> Array:
            rng = np.random.default_rng(0)
            sentences = cut_sentences(draw_pool(split, MAX_EVALUATED, rng), tokens)
            return rng.permutation(sentences)[:MAX_EVALUATED]

        def metrics(state: ServerState) -> dict[str, float]:
            predicted = largest(state.model(), {"tokens": pool()[:, :-1]})
            return masked_accuracies(predicted, pool()[:, 1:], masks)

        return metrics

    return {name: on(dataset.splits[name]) for name in ("validation", "test")}


SO_WORD = TaskKind(
    name="so_word",
    about="Predict the next word with a transformer; keys are words and feed-forward neurons.",
    kind="posts",
    defaults=DEFAULTS["so_word"],
    metric="accuracy",
    splits=("validation", "test"),
    make=_make,
)
