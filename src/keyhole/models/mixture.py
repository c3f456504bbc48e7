"""A mixture of experts: one key is a whole expert (sections 2.4 and 3.1).

Jacobs et al., Adaptive Mixtures of Local Experts, 1991, Eq. 1.3.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from keyhole.arrays import Tree
from keyhole.models.client_update import Batch
from keyhole.models.dense import masked_mean
from keyhole.models.model import HIDDEN_LOGIT, Model, dense_layer
from keyhole.primitives.keyspace import KeySpace
from keyhole.primitives.layout import Cut


def mixture(
    pixels: int = 784, features: int = 32, experts: int = 8, hidden: int = 128, classes: int = 62
) -> Model:
    r"""Returns a shared trunk, experts of one hidden layer behind it, and a gate that mixes them.

    With features $h = relu(A^\top x + a)$ of the trunk, expert k says
    $p_k(y | x) = softmax(C_k^\top relu(B_k^\top h + b_k) + c_k)_y$, the gate weighs it with
    $g_k(x) = softmax_k(w_k^\top h + v_k)$ over the experts that are there, and

    $\ell = -\log \sum_k g_k(x) \, p_k(y | x)$.

    Probabilities are mixed, not scores: an example trains the experts by how well each of them
    explained it, so they part ways. Key k of "expert" selects both layers of expert k and its
    column of the gate; the trunk is broadcast. A batch holds "pixels", float32 (n, pixels) or any
    shape that flattens to it, and "label", int32 (n,).

    An expert is 32 * 128 + 128 + 128 * 62 + 62 numbers and 33 of the gate; the trunk 784 * 32 + 32.

    >>> model = mixture()
    >>> model.layout.server_size, model.layout.client_size(expert=2)
    (123160, 49630)
    """

    def init(seed: int) -> Tree:
        rng = np.random.Generator(np.random.Philox(seed))
        return {
            "trunk": dense_layer(rng, pixels, features),
            "gate": dense_layer(rng, features, experts),
            "inner": dense_layer(rng, features, hidden, experts),
            "outer": dense_layer(rng, hidden, classes, experts),
        }

    expert = KeySpace("expert", experts)
    layers = {f"{name}/{leaf}": 0 for name in ("inner", "outer") for leaf in ("kernel", "bias")}
    cut = Cut(expert, {**layers, "gate/kernel": 1, "gate/bias": 0})
    return Model(init, _loss, _predict, (cut,), hide_padding=_hide_padding)


def _predict(params: Tree, batch: Batch) -> jax.Array:
    """The logarithms of the probabilities of all classes, (n, classes)."""
    # Ink is 1: an image of nearly all ones would hold the trunk back at any rate that is stable.
    x = batch["pixels"].reshape(len(batch["pixels"]), -1)
    h = jax.nn.relu(x @ params["trunk"]["kernel"] + params["trunk"]["bias"][None, :])
    gate = jax.nn.log_softmax(h @ params["gate"]["kernel"] + params["gate"]["bias"][None, :])
    says = jax.nn.log_softmax(_experts(params, h), axis=-1)
    return jax.nn.logsumexp(gate.T[:, :, None] + says, axis=0)


def _experts(params: Tree, h: jax.Array) -> jax.Array:
    """The scores that each expert gives, (experts, n, classes)."""
    inner, outer = params["inner"], params["outer"]
    neurons = jnp.einsum("nf,kfh->knh", h, inner["kernel"]) + inner["bias"][:, None, :]
    scores = jnp.einsum("knh,khc->knc", jax.nn.relu(neurons), outer["kernel"])
    return jnp.asarray(scores + outer["bias"][:, None, :])


def _loss(params: Tree, batch: Batch, mask: jax.Array) -> jax.Array:
    chosen = jnp.take_along_axis(_predict(params, batch), batch["label"][:, None], axis=1)
    return masked_mean(-chosen[:, 0], mask)


def _hide_padding(params: Tree, slots: Mapping[str, jax.Array]) -> Tree:
    """Gives padded experts a weight of 0 in the gate."""
    gate = params["gate"]
    bias = jnp.where(slots["expert"], gate["bias"], HIDDEN_LOGIT)
    return {**params, "gate": {**gate, "bias": bias}}
