"""The 2NN of the EMNIST experiment: two hidden layers, the first cut into neurons."""

from __future__ import annotations

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np

from keyhole.models.losses import cross_entropy, masked_mean
from keyhole.models.model import Batch, Model, glorot
from keyhole.primitives.cuts import Cut
from keyhole.primitives.keyspace import KeySpace
from keyhole.types import Tree

__all__ = ["two_layer"]


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
        return {
            f"dense{i}": {
                "kernel": glorot(rng, a, b, fan_in=a, fan_out=b),
                "bias": np.zeros(b, np.float32),
            }
            for i, (a, b) in enumerate(pairwise(sizes), start=1)
        }

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
