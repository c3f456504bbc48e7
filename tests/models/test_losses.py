"""The cross-entropy and its written-out derivative."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from keyhole.models.dense import cross_entropy, masked_mean


def plain(logits, labels):
    return -jax.nn.log_softmax(logits)[jnp.arange(len(labels)), labels]


def test_cross_entropy_and_its_derivative():
    rng = np.random.default_rng(0)
    logits = (10 * rng.standard_normal((6, 5))).astype(np.float32)
    labels, weight = rng.integers(0, 5, 6), rng.random(6, np.float32)

    @partial(jax.jit, static_argnums=0)
    def value_and_derivative(function, logits):
        value, pull = jax.vjp(lambda s: function(s, labels), logits)
        return value, pull(weight)[0]

    found, expected = (value_and_derivative(f, logits) for f in (cross_entropy, plain))
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-4, atol=1e-6)


def test_huge_logits_do_not_overflow():
    logits = jnp.array([[1e4, -1e4], [3e4, 3e4]])
    np.testing.assert_allclose(
        cross_entropy(logits, jnp.array([0, 1])), [0.0, np.log(2)], rtol=1e-6
    )


def test_a_hidden_class_has_no_share():
    shown, hidden = jnp.array([[1.0, 2.0]]), jnp.array([[1.0, 2.0, -1e30]])
    label = jnp.array([0])
    np.testing.assert_array_equal(cross_entropy(shown, label), cross_entropy(hidden, label))


def test_a_mean_over_nothing_is_zero():
    assert masked_mean(jnp.ones(3), jnp.zeros(3, bool)) == 0
