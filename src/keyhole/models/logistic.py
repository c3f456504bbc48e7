"""The tag model of the Stack Overflow experiment: one logistic regression per tag, with plain SGD
over the words that occur, at a cost that does not depend on the number of keys.

`tests/models/test_logistic.py` holds the loss and the steps together.
"""

from __future__ import annotations

from math import log

import jax
import jax.numpy as jnp
import numba
import numpy as np

from keyhole.arrays import Array, Tree
from keyhole.errors import ShapeError
from keyhole.models.client_update import Batch
from keyhole.models.dense import masked_mean
from keyhole.models.model import Model
from keyhole.primitives.keyspace import KeySpace
from keyhole.primitives.layout import Cut


def sparse_sgd(
    params: Tree, examples: Batch, batches: Array, client_lr: float
) -> tuple[Tree, float]:
    """Returns the parameters minus what they are after one gradient step per batch, and the mean
    loss of the examples as their steps met them.

    Args:
        params: "kernel" float32 (m, tags) and "bias" float32 (tags,).
        examples: "words" int32 (n, most words), -1 for none, and "tags" float32 (n, tags).
        batches: examples of each step, int64 (steps, batch size), -1 for none.
    """
    start, first = _rows(params["kernel"]), _rows(params["bias"])
    kernel, bias = start.copy(), first.copy()
    words = np.ascontiguousarray(examples["words"], np.int32)
    tags = np.ascontiguousarray(examples["tags"], np.float32)
    _check_places(words, len(kernel))
    rate = np.float32(client_lr)
    total = _descend(start, first, kernel, bias, words, tags, batches, rate)
    return {"kernel": kernel, "bias": bias}, total / max(1, int((batches >= 0).sum()))


def _rows(array: Array) -> Array:
    """Numbers as the kernel takes them; read-only ones would need a second compilation."""
    found = np.ascontiguousarray(array, np.float32)
    return found if found.flags.writeable else found.copy()


def sparse_scores(params: Tree, words: Array) -> Array:
    """Returns the scores of all tags, float32 (n, tags): `predict` over the words that occur.

    Args:
        words: int32 (n, most words), -1 for none, each once in a row.
    """
    kernel = np.ascontiguousarray(params["kernel"], np.float32)
    _check_places(words, len(kernel))
    scores = np.tile(np.asarray(params["bias"], np.float32), (len(words), 1))
    _add_all_rows(kernel, np.ascontiguousarray(words, np.int32), scores)
    return scores


def _check_places(words: Array, rows: int) -> None:
    if words.max(initial=-1) >= rows:
        raise ShapeError(
            f"a word is no row of this client's kernel: got place {words.max()}; expected "
            f"-1..{rows - 1}; count words among the client's own keys and leave out the rest"
        )


_FAST = {"contract", "reassoc", "nsz"}
_MAX = np.float32(87)  # beyond, e^x leaves float32; a probability is 0 or 1 long before


@numba.njit(cache=True, nogil=True, fastmath=_FAST)
def _descend(
    start: Array,
    first: Array,
    kernel: Array,
    bias: Array,
    words: Array,
    tags: Array,
    batches: Array,
    client_lr: np.float32,
) -> float:
    """Turns a copy of the start into start minus end; returns the sum of the losses. The scores of
    a whole batch are computed before any row moves."""
    errors = np.empty((batches.shape[1], len(bias)), np.float32)
    scratch = np.empty(len(bias), np.int32)
    own = np.empty((batches.shape[1], words.shape[1]), np.int32)
    counts = np.empty(batches.shape[1], np.int64)
    seen = np.zeros(len(kernel), np.int64)  # which visit last used a word; the first is 1
    visit, total = 1, 0.0
    for b in range(len(batches)):
        filled = 0
        for place in range(batches.shape[1]):
            example = batches[b, place]
            if example >= 0:
                counts[filled] = _distinct(words[example], seen, visit, own[filled])
                visit += 1
                for t in range(len(bias)):  # a slice takes two seconds longer to compile
                    errors[filled, t] = bias[t]
                _add_rows(kernel, own[filled, : counts[filled]], errors[filled])
                _probability_minus(errors[filled], tags[example], scratch)
                total += _cross_entropy(errors[filled])
                filled += 1
        step = client_lr / np.float32(filled if filled else 1)
        for i in range(filled):
            for t in range(len(bias)):
                errors[i, t] *= step
                bias[t] -= errors[i, t]
            for j in range(counts[i]):
                word = own[i, j]
                for t in range(len(bias)):
                    kernel[word, t] -= errors[i, t]
    for t in range(len(bias)):
        bias[t] = first[t] - bias[t]
    for k in range(len(kernel)):
        for t in range(len(bias)):
            kernel[k, t] = start[k, t] - kernel[k, t]
    return total


@numba.njit(cache=True, nogil=True)
def _distinct(words: Array, seen: Array, visit: int, own: Array) -> int:
    """Collects the words of an example, each once; returns how many there are."""
    count = 0
    for word in words:
        if word >= 0 and seen[word] != visit:
            seen[word] = visit
            own[count] = word
            count += 1
    return count


@numba.njit(cache=True, nogil=True, fastmath=_FAST)
def _add_rows(kernel: Array, own: Array, scores: Array) -> None:
    """Adds rows to the scores, four at a time: scores are read and written a quarter as often."""
    at = 0
    while at + 4 <= len(own):
        a, b, c, d = kernel[own[at]], kernel[own[at + 1]], kernel[own[at + 2]], kernel[own[at + 3]]
        for t in range(len(scores)):
            scores[t] += (a[t] + b[t]) + (c[t] + d[t])
        at += 4
    for j in range(at, len(own)):
        row = kernel[own[j]]
        for t in range(len(scores)):
            scores[t] += row[t]


@numba.njit(cache=True, nogil=True)
def _add_all_rows(kernel: Array, words: Array, scores: Array) -> None:
    """Adds the rows of each example's words to its scores."""
    own = np.empty(words.shape[1], np.int32)
    for i in range(len(words)):
        count = 0
        for word in words[i]:
            if word >= 0:
                own[count] = word
                count += 1
        _add_rows(kernel, own[:count], scores[i])


@numba.njit(cache=True, nogil=True, fastmath=_FAST)
def _probability_minus(scores: Array, tags: Array, powers: Array) -> None:
    """Turns scores s into 1 / (1 + e^-s) - tag, to 2e-7 of the probability.

    The C library's exp takes one number at a time. This one is plain arithmetic, which the compiler
    does on whole vectors: e^x = 2^n e^r with n whole and |r| <= ln(2) / 2, and a polynomial in r
    (the coefficients are those of the Cephes library's expf). What is not finite becomes NaN.
    """
    f = np.float32
    for t in range(len(scores)):
        x = min(max(-scores[t], -_MAX), _MAX) + f(0) * scores[t]
        n = np.floor(x * f(1.44269504) + f(0.5))
        r = x - n * f(0.693359375) + n * f(2.12194440e-4)
        p = f(1.9875691500e-4)
        p = p * r + f(1.3981999507e-3)
        p = p * r + f(8.3334519073e-3)
        p = p * r + f(4.1665795894e-2)
        p = p * r + f(1.6666665459e-1)
        p = p * r + f(5.0000001201e-1)
        scores[t] = p * r * r + r + f(1)
        powers[t] = (np.int32(n) + np.int32(127)) << np.int32(23)  # 2^n, bit by bit
    scale = powers.view(np.float32)
    for t in range(len(scores)):
        scores[t] = f(1) / (f(1) + scores[t] * scale[t]) - tags[t]


_SURE = 2.0**-24  # a probability in float32 that is wrong by more counts as wrong by this


@numba.njit(cache=True, nogil=True, fastmath=_FAST)
def _cross_entropy(errors: Array) -> float:
    """The loss of an example, of its probabilities minus its tags: the sum of -log(1 - |error|).

    A logarithm takes one number at a time, and is taken of a product: 32 factors, none below 2^-24,
    take vectors and stay above 2^-768.
    """
    total, product = 0.0, 1.0
    for start in range(0, len(errors), 32):
        if product < 2.0**-200:
            total -= log(product)
            product = 1.0
        for t in range(start, min(start + 32, len(errors))):
            right = 1.0 - abs(np.float64(errors[t]))
            product *= _SURE if right < _SURE else right
    return total - log(product)


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
