"""The transformer of the next-word experiment, cut into words and feed-forward neurons."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from keyhole.arrays import Array, Tree
from keyhole.errors import InputError
from keyhole.models.client_update import Batch
from keyhole.models.dense import cross_entropy, masked_mean, multiply
from keyhole.models.model import HIDDEN_LOGIT, Model, dense_layer
from keyhole.primitives.keyspace import KeySpace
from keyhole.primitives.layout import Cut

PAD = 0
"""The token that fills up a sentence, as a client counts its words: its first word key."""


@dataclass(frozen=True)
class TransformerSizes:
    """Sizes of the model; the defaults are the paper's, with 4 special words in the vocabulary."""

    words: int = 10_004
    embedding: int = 96
    width: int = 512
    heads: int = 8
    neurons: int = 2048

    def __post_init__(self) -> None:
        if self.embedding % 2:
            raise InputError(
                f"positions take pairs of features: got embedding {self.embedding}; expected an "
                "even number; add one"
            )
        if self.width % self.heads:
            raise InputError(
                f"heads do not divide the width: got width {self.width}, heads {self.heads}; "
                "expected a width that is a multiple of heads; change one of them"
            )


def transformer(sizes: TransformerSizes | None = None, is_tied: bool = False) -> Model:
    """Returns a language model with one post-norm causal block.

    Embedding - dense - (attention, add, norm, feed-forward, add, norm) - dense - logits. Key k of
    "word" selects row k of the embedding and the weights and bias of output k; key k of "neuron"
    selects column k of the first feed-forward kernel, its bias, and row k of the second. The output
    kernel is stored as (words, embedding), so that a word is a row of it. There is no dropout: the
    paper does not mention it, and one epoch on 64 sentences gives it little to do.

    A batch holds "tokens", int32 (n, length + 1), counted within the client's own words: token i is
    its i-th word key, and its first word key is the padding token. Positions 0..length-1 predict
    positions 1..length; a padding token is no target.

    A client's softmax runs over its own words. Where some of them are random ones that stand for
    the words it does not hold (end of section 4.1.1), a batch also holds "own", int32 (n,), how
    many words are not random, counted from the first, and "correction", float32 (n,), what
    is added to the logits of the others in the loss; both are the same in each example. See
    `keyhole.keys.sampled_correction` for the two numbers and for what they leave biased.

    Args:
        is_tied: logits reuse the embedding and have no bias, as in the Field Guide's code.

    >>> transformer().layout.server_size, transformer(is_tied=True).layout.server_size
    (5182068, 4211680)
    """
    s = sizes or TransformerSizes()

    def init(seed: int) -> Tree:
        rng = np.random.Generator(np.random.Philox(seed))
        return _init(rng, s, is_tied)

    def predict(params: Tree, batch: Batch) -> jax.Array:
        return _logits(params, batch["tokens"], s.heads)

    def loss(params: Tree, batch: Batch, mask: jax.Array) -> jax.Array:
        tokens = batch["tokens"]
        logits = _logits(params, tokens[:, :-1], s.heads)
        if "correction" in batch:
            logits = logits + _correction(batch, logits.shape[-1])[:, None, :]
        targets = tokens[:, 1:]
        is_target = mask[:, None] & (targets != PAD)
        losses = cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))
        return masked_mean(losses, is_target.reshape(-1))

    word_axes = {"embedding": 0} | ({} if is_tied else {"output/kernel": 0, "output/bias": 0})
    neuron_axes = {"ffn_in/kernel": 1, "ffn_in/bias": 0, "ffn_out/kernel": 0}
    cuts = (
        Cut(KeySpace("word", s.words), word_axes),
        Cut(KeySpace("neuron", s.neurons), neuron_axes),
    )
    return Model(init, loss, predict, cuts, hide_padding=_hide_padding)


def _init(rng: np.random.Generator, s: TransformerSizes, is_tied: bool) -> Tree:
    dense = partial(dense_layer, rng)

    def norm() -> Tree:
        return {"scale": np.ones(s.width, np.float32), "bias": np.zeros(s.width, np.float32)}

    def words(bound: float) -> Array:
        unit = rng.random((s.words, s.embedding), np.float32)
        return (2.0 * unit - 1.0) * np.float32(bound)

    params = {
        "embedding": words(0.05),
        "widen": dense(s.embedding, s.width),
        "attention": {n: dense(s.width, s.width) for n in ("query", "key", "value", "output")},
        "norm1": norm(),
        "ffn_in": dense(s.width, s.neurons),
        "ffn_out": dense(s.neurons, s.width),
        "norm2": norm(),
        "narrow": dense(s.width, s.embedding),
    }
    if not is_tied:
        bound = np.sqrt(6.0 / (s.words + s.embedding))
        params["output"] = {"kernel": words(bound), "bias": np.zeros(s.words, np.float32)}
    return params


def _hide_padding(params: Tree, slots: Mapping[str, jax.Array]) -> Tree:
    """Gives padded words a logit that no softmax sees; a tied model gets a bias for it."""
    output = params.get("output", {})
    bias = output.get("bias", jnp.zeros(len(params["embedding"]), params["embedding"].dtype))
    return {**params, "output": {**output, "bias": jnp.where(slots["word"], bias, HIDDEN_LOGIT)}}


def _logits(params: Tree, tokens: jax.Array, heads: int) -> jax.Array:
    """Scores of the next word at each place, (n, length, words)."""
    n, length = tokens.shape
    size = params["embedding"].shape[1]
    # A token that is no word of this client shows as NaN; the default would be the last word.
    x = (
        jnp.asarray(params["embedding"])
        .at[tokens.reshape(-1)]
        .get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
    )
    x = x * jnp.sqrt(jnp.float32(size))
    x = x.reshape(n, length, size) + _positions(length, size)[None, :, :]
    # Dense layers act on all places at once, as rows of one matrix.
    x = _dense(params["widen"], x.reshape(n * length, size))
    x = _norm(params["norm1"], x + _attention(params["attention"], x, n, heads))
    neurons = jax.nn.relu(_dense(params["ffn_in"], x))
    x = _norm(params["norm2"], x + _dense(params["ffn_out"], neurons))
    x = _dense(params["narrow"], x)
    output = params.get("output", {})
    logits = x @ output.get("kernel", params["embedding"]).T
    if "bias" in output:
        logits = logits + output["bias"][None, :]
    return jnp.reshape(logits, (n, length, -1))


def _correction(batch: Batch, words: int) -> jax.Array:
    """What is added to the logits of each example, (n, words): only random words have any."""
    own = jnp.asarray(batch["own"])[:, None]
    is_random = jnp.arange(words, dtype=own.dtype)[None, :] >= own
    return jnp.where(is_random, jnp.asarray(batch["correction"])[:, None], 0.0)


def _dense(layer: Tree, x: jax.Array) -> jax.Array:
    return jnp.asarray(multiply(x, layer["kernel"]) + layer["bias"][None, :])


def _norm(layer: Tree, x: jax.Array) -> jax.Array:
    """Zero mean and unit variance over the features of each row."""
    centred = x - jnp.mean(x, axis=1, keepdims=True)
    variance = jnp.mean(centred * centred, axis=1, keepdims=True)
    scale, bias = layer["scale"][None, :], layer["bias"][None, :]
    return jnp.asarray(centred * jax.lax.rsqrt(variance + 1e-6) * scale + bias)


def _attention(layers: Tree, x: jax.Array, n: int, heads: int) -> jax.Array:
    """Each place looks at itself and at what stands before it; x is (n * length, width).

    Padding comes last in a sentence, so no place that counts ever sees it.
    """
    width = x.shape[1]

    def split(name: str) -> jax.Array:
        return _dense(layers[name], x).reshape(n, -1, heads, width // heads)

    query, key, value = split("query"), split("key"), split("value")
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / jnp.sqrt(jnp.float32(width // heads))
    is_past = jnp.tril(jnp.ones(scores.shape[2:], bool))[None, None, :, :]
    weights = jax.nn.softmax(jnp.where(is_past, scores, HIDDEN_LOGIT), axis=-1)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, value)
    return _dense(layers["output"], mixed.reshape(x.shape))


def _positions(length: int, size: int) -> Array:
    """Sines in the first half of the features, cosines in the second, float32 (length, size)."""
    rate = 10_000.0 ** (-2.0 * np.arange(size // 2) / size)
    angle = np.arange(length)[:, None] * rate[None, :]
    return np.concatenate([np.sin(angle), np.cos(angle)], axis=1).astype(np.float32)
