"""Convolution and pooling with derivatives written for the CPU.

XLA runs a convolution fast on a CPU only in one layout: images (n, height, width, features),
kernels (height, width, in, out), stride one. The derivatives it generates are convolutions in other
layouts; here they are brought into that one by explicit transposes.

The CNN of the EMNIST experiment: two convolutions, the second cut into filters.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from keyhole.arrays import Array, Tree
from keyhole.models.client_update import Batch
from keyhole.models.dense import cross_entropy, masked_mean
from keyhole.models.model import Model, dense_layer, glorot
from keyhole.primitives.keyspace import KeySpace
from keyhole.primitives.layout import Cut


@jax.custom_vjp
def convolve(images: jax.Array, kernel: jax.Array) -> jax.Array:
    """Slides an odd-sized kernel over images padded with zeros to keep their size.

    Args:
        images: float (n, height, width, in).
        kernel: float (k, k, in, out), k odd.

    >>> convolve(jnp.ones((1, 3, 3, 1)), jnp.ones((3, 3, 1, 1)))[0, :, :, 0]
    Array([[4., 6., 4.],
           [6., 9., 6.],
           [4., 6., 4.]], dtype=float32)
    """
    return _convolve(images, kernel, kernel.shape[0] // 2)


def _convolve(images: jax.Array, kernel: jax.Array, pad: int) -> jax.Array:
    """The one layout that is fast."""
    return lax.conv_general_dilated(
        images, kernel, (1, 1), [(pad, pad)] * 2, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def _convolve_forward(
    images: jax.Array, kernel: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return convolve(images, kernel), (images, kernel)


def _convolve_backward(
    saved: tuple[jax.Array, jax.Array], grad: jax.Array
) -> tuple[jax.Array, jax.Array]:
    images, kernel = saved
    pad = kernel.shape[0] // 2
    # The images: the kernel turned by half a turn, its in and out swapped.
    by_images = _convolve(grad, kernel[::-1, ::-1].transpose(0, 1, 3, 2), pad)
    # The kernel: input features are the batch, examples the features, the gradient the kernel.
    by_kernel = _convolve_wide(images.transpose(3, 1, 2, 0), grad.transpose(1, 2, 0, 3), pad)
    return by_images, by_kernel.transpose(1, 2, 0, 3)


def _convolve_wide(images: jax.Array, kernel: jax.Array, pad: int) -> jax.Array:
    """With a kernel as large as the images: 8 outputs at a time take two thirds of the time."""
    if len(images) < 8:  # too little work in each part
        return _convolve(images, kernel, pad)
    parts = (kernel[..., i : i + 8] for i in range(0, kernel.shape[3], 8))
    return jnp.concatenate([_convolve(images, part, pad) for part in parts], axis=3)


convolve.defvjp(_convolve_forward, _convolve_backward)


@jax.custom_vjp
def max_pool(images: jax.Array) -> jax.Array:
    """Returns the largest of each 2 x 2 square; the first of equals receives the derivative.

    Args:
        images: float (n, height, width, features), height and width even.
    """
    return _pool_forward(images)[0]


def _pool_forward(images: jax.Array) -> tuple[jax.Array, jax.Array]:
    a, b, c, d = (images[:, i::2, j::2] for i in (0, 1) for j in (0, 1))
    top, bottom = jnp.maximum(a, b), jnp.maximum(c, d)
    pooled = jnp.maximum(top, bottom)
    # Where the largest stands, 0..3 in reading order: a quarter of the memory of the images.
    first = jnp.where(
        a == pooled, 0, jnp.where(b == pooled, 1, jnp.where(c == pooled, 2, 3))
    ).astype(jnp.int8)
    return pooled, first


def _pool_backward(first: jax.Array, grad: jax.Array) -> tuple[jax.Array]:
    n, height, width, features = grad.shape
    place = jnp.arange(4, dtype=jnp.int8).reshape(1, 1, 2, 1, 2, 1)
    spread = jnp.where(first[:, :, None, :, None, :] == place, grad[:, :, None, :, None, :], 0.0)
    return (spread.reshape(n, 2 * height, 2 * width, features),)


max_pool.defvjp(_pool_forward, _pool_backward)


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
            "dense2": dense_layer(rng, hidden, classes),
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
