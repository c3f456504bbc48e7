"""The tag model of the Stack Overflow experiment: one logistic regression per tag."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from keyhole.models.losses import masked_mean
from keyhole.models.model import Batch, Model
from keyhole.models.sparse_logistic import sparse_sgd
from keyhole.primitives.cuts import Cut
from keyhole.primitives.keyspace import KeySpace
from keyhole.types import Tree

__all__ = ["tag_regression"]


def tag_regression(words: int = 10_000, tags: int = 500) -> Model:
    r"""Returns one-vs-rest logistic regression on binary bags of words.

    The loss of an example is the binary cross-entropy summed over tags,
    $\sum_t \log(1 + e^{s_t}) - y_t s_t$ with scores $s = W^\top x + b$. Key k of "word" selects
    row k of W; the bias is broadcast. A batch holds "words", int32 (n, most words), the places of
    an example's words among the client's keys, -1 where there are no more and each counted once;
    and "tags", float32 (n, tags), 0 or 1.

    >>> model = tag_regression()
    >>> model.layout.server_size, model.layout.client_size(word=100)
    (5000500, 50500)
    """

    def init(seed: int) -> Tree:
        del seed  # convex: every run starts at zero, and rows that nobody touches cost nothing
        return {"kernel": np.zeros((words, tags), np.float32), "bias": np.zeros(tags, np.float32)}

    cut = Cut(KeySpace("word", words), {"kernel": 0})
    return Model(init, _loss, _predict, (cut,), plain_sgd=sparse_sgd)


def _predict(params: Tree, batch: Batch) -> jax.Array:
    """Scores of the tags, (n, tags); a tag is more likely than not where its score is positive."""
    words, kernel = batch["words"], params["kernel"]
    scores = _bags(words, len(kernel), kernel.dtype) @ kernel + params["bias"][None, :]
    is_outside = jnp.any(words >= len(kernel), axis=1)  # shows as NaN, never as a missing word
    return jnp.where(is_outside[:, None], jnp.nan, scores)


def _loss(params: Tree, batch: Batch, mask: jax.Array) -> jax.Array:
    scores = _predict(params, batch)
    losses = jax.nn.softplus(scores) - batch["tags"] * scores
    return masked_mean(jnp.sum(losses, axis=1), mask)


def _bags(words: jax.Array, num_words: int, dtype: jnp.dtype) -> jax.Array:
    """Binary bags of words, (n, num_words)."""
    place = jnp.where(words < 0, num_words, words)  # beyond the end, where "drop" drops it
    rows = jnp.arange(len(words), dtype=words.dtype)[:, None]
    return jnp.zeros((len(words), num_words), dtype).at[rows, place].set(1.0, mode="drop")
