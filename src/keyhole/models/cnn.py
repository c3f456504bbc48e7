"""The CNN of the EMNIST experiment: two convolutions, the second cut into filters."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from keyhole.models.convolution import convolve, max_pool
from keyhole.models.losses import cross_entropy, masked_mean
from keyhole.models.model import Batch, Model, glorot
from keyhole.primitives.cuts import Cut
from keyhole.primitives.keyspace import KeySpace
from keyhole.types import Array, Tree

__all__ = ["cnn"]


def cnn(
    side: int = 28, filters: tuple[int, int] = (32, 64), hidden: int = 512, classes: int = 62
) -> Model:
    """Returns conv 5x5 - pool - conv 5x5 - pool - dense - dense, with ReLU and a softmax.

    Key k of "filter" selects filter k of the second convolution, its bias, and the rows of the
    first dense kernel that it feeds, one for each of its 7 x 7 places. That kernel is stored as
    (7, 7, filters, hidden), so the cut is one axis. A batch holds "pixels", float32
    (n, side, side), and "label", int32 (n,).

    >>> model = cnn()
    >>> model.layout.server_size, model.layout.client_size(filter=8)
    (1690046, 240262)
    """
    first, second = filters
    pooled = side // 4

    def init(seed: int) -> Tree:
        rng = np.random.Generator(np.random.Philox(seed))
        flat = pooled * pooled * second
        return {
            "conv1": _layer(glorot(rng, 5, 5, 1, first, fan_in=25, fan_out=25 * first)),
            "conv2": _layer(
                glorot(rng, 5, 5, first, second, fan_in=25 * first, fan_out=25 * second)
            ),
            "dense1": _layer(
                glorot(rng, pooled, pooled, second, hidden, fan_in=flat, fan_out=hidden)
            ),
            "dense2": _layer(glorot(rng, hidden, classes, fan_in=hidden, fan_out=classes)),
        }

    axes = {"conv2/kernel": 3, "conv2/bias": 0, "dense1/kernel": 2}
    return Model(init, _loss, _predict, (Cut(KeySpace("filter", second), axes),))


def _layer(kernel: Array) -> Tree:
    return {"kernel": kernel, "bias": np.zeros(kernel.shape[-1], np.float32)}


def _predict(params: Tree, batch: Batch) -> jax.Array:
    """Logits, (n, classes)."""
    x = batch["pixels"][..., None]
    for name in ("conv1", "conv2"):
        # A maximum commutes with adding a bias and with ReLU: pooling first leaves them a quarter
        # of the work and the same numbers.
        x = max_pool(convolve(x, params[name]["kernel"]))
        x = jax.nn.relu(x + params[name]["bias"][None, None, None, :])
    hidden = params["dense1"]["kernel"].shape[-1]
    x = x.reshape(len(x), -1) @ params["dense1"]["kernel"].reshape(-1, hidden)
    x = jax.nn.relu(x + params["dense1"]["bias"][None, :])
    return jnp.asarray(x @ params["dense2"]["kernel"] + params["dense2"]["bias"][None, :])


def _loss(params: Tree, batch: Batch, mask: jax.Array) -> jax.Array:
    return masked_mean(cross_entropy(_predict(params, batch), batch["label"]), mask)
