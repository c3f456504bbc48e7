"""Hand-written derivatives equal those that JAX generates."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from keyhole.models.cnn import convolve, max_pool
from keyhole.models.dense import multiply


def plain_convolve(images, kernel):
    return lax.conv_general_dilated(
        images, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def plain_pool(images):
    return lax.reduce_window(images, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("side", [1, 3, 5])
def test_convolution_and_its_derivatives(side):
    images, kernel, out = normal(0, 2, 6, 4, 3), normal(1, side, side, 3, 5), normal(2, 2, 6, 4, 5)
    found, found_vjp = jax.vjp(convolve, images, kernel)
    expected, expected_vjp = jax.vjp(plain_convolve, images, kernel)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    for a, b in zip(found_vjp(out), expected_vjp(out), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_a_product_and_its_derivatives():
    rows, kernel, out = normal(0, 7, 3), normal(1, 3, 5), normal(2, 7, 5)
    found, found_vjp = jax.vjp(multiply, rows, kernel)
    np.testing.assert_allclose(found, rows @ kernel, rtol=1e-5, atol=1e-5)
    by_rows, by_kernel = found_vjp(out)
    np.testing.assert_allclose(by_rows, out @ kernel.T, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(by_kernel, rows.T @ out, rtol=1e-5, atol=1e-5)


def test_pooling_and_its_derivative():
    images, out = normal(0, 2, 6, 4, 3), normal(1, 2, 3, 2, 3)
    found, found_vjp = jax.vjp(max_pool, images)
    expected, expected_vjp = jax.vjp(plain_pool, images)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(found_vjp(out)[0], expected_vjp(out)[0])


def test_the_first_of_equals_receives_the_derivative():
    images = jnp.asarray([[1.0, 2.0], [2.0, 2.0]]).reshape(1, 2, 2, 1)
    (grad,) = jax.vjp(max_pool, images)[1](jnp.full((1, 1, 1, 1), 7.0))
    assert grad.reshape(-1).tolist() == [0, 7, 0, 0]


def test_a_nan_is_not_pooled_away():
    images = jnp.asarray([[1.0, jnp.nan], [2.0, 3.0]]).reshape(1, 2, 2, 1)
    assert np.isnan(max_pool(images)).all()
