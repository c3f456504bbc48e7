"""The tag model: the kernel over non-zeros equals gradient steps on the loss."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyhole import tree
from keyhole.errors import ShapeError
from keyhole.models.logistic import _probability_minus, sparse_sgd, tag_regression
from tests.helpers import SEEDS, assert_trees_close

MODEL = tag_regression(words=30, tags=6)
LOSS_GRAD = jax.jit(jax.grad(MODEL.loss))


def by_gradients(params, examples, batches, client_lr):
    """The twin: one gradient step of the loss per batch, on dense bags of words."""
    for batch in batches:
        chosen = {name: array[np.maximum(batch, 0)] for name, array in examples.items()}
        grads = LOSS_GRAD(params, chosen, batch >= 0)
        params = tree.map_leaves(lambda w, g: w - np.float32(client_lr) * g, params, grads)
    return params


# Few shapes, since the twin compiles each of them.
@given(seed=SEEDS, m=st.sampled_from([1, 12]), n=st.integers(1, 9), batch_size=st.just(4))
def test_sparse_steps_equal_gradient_steps(seed, m, n, batch_size):
    rng = np.random.default_rng(seed)
    params = {
        "kernel": rng.standard_normal((m, 6)).astype(np.float32),
        "bias": rng.standard_normal(6).astype(np.float32),
    }
    examples = {
        "words": rng.integers(-1, m, (n, 5)).astype(np.int32),  # repeats count once
        "tags": rng.integers(0, 2, (n, 6)).astype(np.float32),
    }
    batches = rng.integers(-1, n, (3, batch_size))
    update, _ = sparse_sgd(params, examples, batches, 0.5)
    end = by_gradients(params, examples, batches, 0.5)
    expected = tree.map_leaves(np.subtract, params, end)
    assert_trees_close(update, expected, rtol=1e-4, atol=1e-5)


def test_the_loss_is_the_cross_entropy_summed_over_tags():
    """Scores 0 for 6 tags: each costs log 2 whatever the truth."""
    batch = {"words": jnp.array([[0, -1]]), "tags": jnp.array([[1.0, 0, 0, 0, 0, 0]])}
    loss = jax.jit(MODEL.loss)(MODEL.init(0), batch, jnp.array([True]))
    assert float(loss) == pytest.approx(6 * np.log(2), rel=1e-6)


def test_repeated_words_count_once():
    params = {"kernel": jnp.ones((3, 6)), "bias": jnp.zeros(6)}
    scores = jax.jit(MODEL.predict)(params, {"words": jnp.array([[2, 2, 1, -1]])})
    assert scores.tolist() == [[2.0] * 6]


def test_arguments_are_not_mutated():
    params = {"kernel": np.ones((3, 6), np.float32), "bias": np.ones(6, np.float32)}
    examples = {"words": np.zeros((1, 1), np.int32), "tags": np.zeros((1, 6), np.float32)}
    update, _ = sparse_sgd(params, examples, np.array([[0]]), 0.5)
    assert (update["kernel"][0] > 0).all()
    assert (params["kernel"] == 1).all()
    assert (params["bias"] == 1).all()


def test_a_word_beyond_the_kernel_is_refused():
    examples = {"words": np.array([[3]], np.int32), "tags": np.zeros((1, 6), np.float32)}
    params = {"kernel": np.zeros((3, 6), np.float32), "bias": np.zeros(6, np.float32)}
    with pytest.raises(ShapeError, match=r"got place 3; expected -1\.\.2"):
        sparse_sgd(params, examples, np.array([[0]]), 0.5)
    assert np.isnan(MODEL.predict(params, {"words": jnp.array([[3]])})).all()


def test_probabilities_are_right_to_float32_rounding_and_nan_is_not_hidden():
    scores = np.concatenate([np.linspace(-90, 90, 20001), [0.0]]).astype(np.float32)
    found = scores.copy()
    _probability_minus(found, np.zeros_like(scores), np.empty(len(scores), np.int32))
    exact = 1 / (1 + np.exp(-scores.clip(-87, 87).astype(np.float64)))
    np.testing.assert_allclose(found, exact, rtol=4e-7)
    bad = np.array([np.nan, np.inf, -np.inf], np.float32)
    _probability_minus(bad, np.zeros_like(bad), np.empty(3, np.int32))
    assert np.isnan(bad).all()
