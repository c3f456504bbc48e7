"""Derived deselect functions: the transpose of psi, also for trees, overlaps and branches on the
key."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import keyhole as kh
from keyhole.errors import KeySpaceError, NotLinearError, ShapeError
from keyhole.models.transpose import derive_deselect
from tests.helpers import SEEDS, assert_trees_equal, key_lists

ROW = kh.KeySpace("row", 6)
X = np.arange(18, dtype=np.float32).reshape(6, 3)


def window(x, k):
    """Rows k and k + 1, the last joined to the first: neighbouring keys overlap."""
    return x[k] + 2 * x[(k + 1) % 6]


def as_tree(x, k):
    return {"row": x[k], "total": x[k].sum(), "first": (x[k, 0],)}


def all_of_it(x, k):
    return x * (k + 1)


def branch(x, k):
    """Slices of different shapes: cannot be traced over the key."""
    return x[k, :2] if k % 2 else x[k]


LINEAR = {"row": lambda x, k: x[k], "window": window, "tree": as_tree, "branch": branch}
LINEAR["mixing"] = lambda x, k: jnp.ones((2, 6)) @ x * x.dtype.type(3)


@pytest.mark.parametrize("name", LINEAR)
@settings(max_examples=10)
@given(seed=SEEDS, keys=key_lists(ROW))
def test_the_derived_deselect_is_the_transpose(name, seed, keys):
    """<psi(x), u> = <x, phi(u)>, exactly: all numbers are small and whole."""
    rng = np.random.default_rng(seed)
    x = rng.integers(-9, 10, size=(6, 3)).astype(np.float32)
    slices = [jax.tree.map(np.asarray, LINEAR[name](jnp.asarray(x), k)) for k in keys]
    update = jax.tree.map(lambda a: rng.integers(-9, 10, a.shape).astype(np.float32), slices)
    total = phi(name)(update, keys)
    pairs = zip(jax.tree.leaves(slices), jax.tree.leaves(update), strict=True)
    assert sum(float(np.vdot(y, u)) for y, u in pairs) == float(np.vdot(x, total))


@cache
def phi(name):
    return derive_deselect(LINEAR[name], X, ROW)


def test_overlapping_keys_add_up():
    phi = derive_deselect(window, X, ROW)
    one = np.ones(3, np.float32)
    total = phi([one, one], ROW.keys([0, 1]))
    np.testing.assert_array_equal(total[:, 0], [1, 3, 2, 0, 0, 0])


def test_a_server_value_may_be_a_tree_with_parts_that_no_key_touches():
    x = {"w": X, "unused": np.ones(2, np.float32)}
    total = derive_deselect(lambda x, k: x["w"][k], x, ROW)([X[0]], ROW.keys([5]))
    assert_trees_equal(
        total, {"w": np.eye(6, dtype=np.float32)[:, [5]] * X[0], "unused": np.zeros(2, np.float32)}
    )


def test_shapes_alone_are_enough():
    like = jax.ShapeDtypeStruct((6, 3), jnp.float32)
    phi = derive_deselect(lambda x, k: x[k], like, ROW)
    assert phi([X[1]], ROW.keys([4]))[4].tolist() == X[1].tolist()


def test_no_keys_give_zeros():
    assert not derive_deselect(window, X, ROW)([], ROW.keys([])).any()


def test_it_is_a_deselect_function_of_eq_5():
    keys = ROW.place([[0, 2], [2]])
    updates = kh.select(kh.at_server(X), keys, lambda x, k: x[k])
    mean = kh.deselect_mean(updates, keys, derive_deselect(lambda x, k: x[k], X, ROW)).value
    np.testing.assert_array_equal(mean, X * np.array([[0.5], [0], [1], [0], [0], [0]], np.float32))


def square(x, k):
    return x[k] * x[k]


def shifted(x, k):
    return x[k] + 1


def constant(x, k):
    return jnp.ones(3)


def rounded(x, k):
    return jnp.round(x[k])


def normalised(x, k):
    return x[k] / jnp.sum(x[k])


def positive(x, k):
    return jnp.where(x[k] > 0, x[k], 0.0)


def peeking(x, k):
    return x[k] if x[0, 0] > 0 else 2 * x[k]


def only_the_last_key_is_odd(x, k):
    return jnp.sin(x[k]) if k == 5 else x[k]


def test_a_branch_that_is_not_linear_is_found_when_its_key_is_used():
    def odd_one_out(x, k):
        return x[k] ** 2 if k == 3 else x[k]

    wide = kh.KeySpace("row", 1000)
    phi = derive_deselect(odd_one_out, np.zeros((1000, 2), np.float32), wide)
    one = np.ones(2, np.float32)
    assert phi([one], wide.keys([4]))[4].tolist() == [1, 1]
    with pytest.raises(NotLinearError, match="odd_one_out"):
        phi([one], wide.keys([3]))


def test_float64_is_taken_as_jax_holds_it_and_integers_are_refused():
    phi = derive_deselect(lambda x, k: x[k], np.zeros((6, 3)), ROW)
    assert phi([np.ones(3)], ROW.keys([2])).sum() == 3
    with pytest.raises(ShapeError, match="got int32; expected floating point"):
        derive_deselect(lambda x, k: x[k], np.zeros((6, 3), np.int32), ROW)


NOT_LINEAR = [
    square,
    shifted,
    constant,
    rounded,
    normalised,
    positive,
    peeking,
    only_the_last_key_is_odd,
]


@pytest.mark.parametrize("psi", NOT_LINEAR, ids=lambda psi: psi.__name__)
def test_a_function_that_is_not_linear_is_named_and_asked_for_its_deselect(psi):
    with pytest.raises(NotLinearError, match=psi.__name__) as raised:
        derive_deselect(psi, X, ROW)
    assert "pass your own deselect_fn" in raised.value.fix


def test_the_operation_that_is_not_linear_is_named():
    with pytest.raises(NotLinearError, match="'round'"):
        derive_deselect(rounded, X, ROW)


def test_an_update_needs_one_slice_per_key():
    with pytest.raises(ShapeError, match="got 1 slices; expected 2"):
        phi("row")([X[0]], ROW.keys([1, 2]))


def test_keys_of_another_space_are_refused():
    with pytest.raises(KeySpaceError, match="another key space"):
        phi("row")([X[0]], kh.KeySpace("column", 6).keys([1]))


def unrolled(x, k):
    return window(x, k) if k >= 0 else x[k]


@settings(max_examples=8)
@given(st.data())
def test_traced_and_unrolled_keys_agree(data):
    """`branch` without its branch runs traced, with a useless one unrolled."""
    keys = data.draw(key_lists(ROW))

    update = [X[i % 6] for i in range(len(keys))]
    np.testing.assert_array_equal(
        phi("window")(update, keys), derive_deselect(unrolled, X, ROW)(update, keys)
    )
