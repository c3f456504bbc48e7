"""Losses of a masked batch."""

from __future__ import annotations

import jax
import jax.numpy as jnp

__all__ = ["cross_entropy", "masked_mean"]


def masked_mean(values: jax.Array, mask: jax.Array) -> jax.Array:
    """The mean of `values` where `mask` holds, both of one shape; 0 where it holds nowhere.

    >>> float(masked_mean(jnp.array([1.0, 5.0, jnp.nan]), jnp.array([True, True, False])))
    3.0
    """
    total = jnp.sum(jnp.where(mask, values, 0.0))
    return total / jnp.maximum(jnp.sum(mask, dtype=values.dtype), 1.0)


@jax.custom_vjp
def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    r"""The negative log-likelihood of each label, $\log \sum_j e^{s_j} - s_{label}$.

    Args:
        logits: s, float (n, classes).
        labels: int (n,).

    Returns:
        Float (n,). The derivative is softmax minus one-hot, written out: it reuses the exponentials
        of the forward pass, which are what this loss costs.
    """
    return _forward(logits, labels)[0]


def _forward(
    logits: jax.Array, labels: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    largest = jnp.max(logits, axis=1)
    powers = jnp.exp(logits - largest[:, None])
    total = jnp.sum(powers, axis=1)
    chosen = jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0]
    return jnp.log(total) + (largest - chosen), (powers, total, labels)


def _backward(
    saved: tuple[jax.Array, jax.Array, jax.Array], weight: jax.Array
) -> tuple[jax.Array, None]:
    powers, total, labels = saved
    is_label = jnp.arange(powers.shape[1], dtype=labels.dtype)[None, :] == labels[:, None]
    softmax = powers * (weight / total)[:, None]
    return softmax - jnp.where(is_label, weight[:, None], 0.0), None


cross_entropy.defvjp(_forward, _backward)
