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
        Float (n,). The derivative is softmax minus one-hot, written out because it needs one pass
        over the logits where differentiating the forward code needs three.
    """
    return _forward(logits, labels)[0]


def _forward(
    logits: jax.Array, labels: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    log_total = jax.nn.logsumexp(logits, axis=1)
    chosen = jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0]
    return log_total - chosen, (logits, labels, log_total)


def _backward(
    saved: tuple[jax.Array, jax.Array, jax.Array], weight: jax.Array
) -> tuple[jax.Array, None]:
    logits, labels, log_total = saved
    softmax = jnp.exp(logits - log_total[:, None])
    is_label = jnp.arange(logits.shape[1], dtype=labels.dtype)[None, :] == labels[:, None]
    return (softmax - is_label.astype(logits.dtype)) * weight[:, None], None


cross_entropy.defvjp(_forward, _backward)
