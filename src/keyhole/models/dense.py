"""Losses of a masked batch; the product of a dense layer, with derivatives written for the CPU.

The 2NN of the EMNIST experiment: two hidden layers, the first cut into neurons.
"""

from __future__ import annotations

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from keyhole.arrays import Tree
from keyhole.models.client_update import Batch
from keyhole.models.model import Model, dense_layer
from keyhole.primitives.keyspace import KeySpace
from keyhole.primitives.layout import Cut


def masked_mean(values: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns the mean of `values` where `mask` holds, both of one shape; 0 where it holds nowhere.

    >>> float(masked_mean(jnp.array([1.0, 5.0, jnp.nan]), jnp.array([True, True, False])))
    3.0
    """
    total = jnp.sum(jnp.where(mask, values, 0.0))
    return total / jnp.maximum(jnp.sum(mask, dtype=values.dtype), 1.0)


@jax.custom_vjp
def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    r"""Returns the negative log-likelihood of each label, $\log \sum_j e^{s_j} - s_{label}$.

    Args:
        logits: s, float (n, classes).
        labels: int (n,).
    """
    return _loss_forward(logits, labels)[0]


def _loss_forward(
    logits: jax.Array, labels: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    largest = jnp.max(logits, axis=1)
    powers = jnp.exp(logits - largest[:, None])
    total = jnp.sum(powers, axis=1)
    chosen = jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0]
    return jnp.log(total) + (largest - chosen), (powers, total, labels)


def _loss_backward(
    saved: tuple[jax.Array, jax.Array, jax.Array], weight: jax.Array
) -> tuple[jax.Array, None]:
    powers, total, labels = saved
    is_label = jnp.arange(powers.shape[1], dtype=labels.dtype)[None, :] == labels[:, None]
    softmax = powers * (weight / total)[:, None]
    return softmax - jnp.where(is_label, weight[:, None], 0.0), None


cross_entropy.defvjp(_loss_forward, _loss_backward)


@jax.custom_vjp
def multiply(rows: jax.Array, kernel: jax.Array) -> jax.Array:
    """rows @ kernel, for hundreds of rows.

    XLA has two routines for products on a CPU, and takes the slower one where the first factor is
    transposed, as it is in the derivative by the kernel. Transposing it beforehand, behind a
    barrier that keeps XLA from undoing it, halves the time of that derivative.

    Args:
        rows: float (n, in).
        kernel: float (in, out).
    """
    return rows @ kernel


def _forward(rows: jax.Array, kernel: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return rows @ kernel, (rows, kernel)


def _backward(saved: tuple[jax.Array, jax.Array], grad: jax.Array) -> tuple[jax.Array, jax.Array]:
    rows, kernel = saved
    return grad @ kernel.T, lax.optimization_barrier(rows.T) @ grad


multiply.defvjp(_forward, _backward)


def two_layer(pixels: int = 784, neurons: int = 200, hidden: int = 200, classes: int = 62) -> Model:
    """Returns pixels - neurons - hidden - classes with ReLU and a softmax.

    Key k of "neuron" selects column k of the first kernel, its bias, and row k of the second
    kernel: (pixels + 1 + hidden) numbers. A batch holds "pixels", float32 (n, pixels) or any shape
    that flattens to it, and "label", int32 (n,).

    >>> model = two_layer()
    >>> model.layout.server_size, model.layout.client_size(neuron=50)
    (209662, 61912)
    """

    def init(seed: int) -> Tree:
        rng = np.random.Generator(np.random.Philox(seed))
        sizes = (pixels, neurons, hidden, classes)
        fans = enumerate(pairwise(sizes), start=1)
        return {f"dense{i}": dense_layer(rng, *fan) for i, fan in fans}

    neuron = KeySpace("neuron", neurons)
    cut = Cut(neuron, {"dense1/kernel": 1, "dense1/bias": 0, "dense2/kernel": 0})
    return Model(init, _loss, _predict, (cut,))


def _predict(params: Tree, batch: Batch) -> jax.Array:
    """Logits, (n, classes)."""
    x = batch["pixels"].reshape(len(batch["pixels"]), -1)
    for name in ("dense1", "dense2"):
        x = jax.nn.relu(x @ params[name]["kernel"] + params[name]["bias"][None, :])
    last = params["dense3"]
    return jnp.asarray(x @ last["kernel"] + last["bias"][None, :])


def _loss(params: Tree, batch: Batch, mask: jax.Array) -> jax.Array:
    return masked_mean(cross_entropy(_predict(params, batch), batch["label"]), mask)
