"""Select functions in batches: the plain definition, key by key, whatever psi does."""

from functools import cache

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

import keyhole as kh
from keyhole.delivery.records import Coding
from keyhole.delivery.sources import FunctionSource, coding_of
from keyhole.errors import ShapeError
from keyhole.models.transpose import batch_select
from keyhole.primitives.coding import HalfPrecision, Quantized, decode
from tests.helpers import assert_trees_equal, key_lists

ROW = kh.KeySpace("row", 6)
X = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)


def as_tree(x, k):
    return {"row": x[k], "total": x[k].max(), "first": (x[k, 0], jnp.int32(k))}


def branch(x, k):
    """Cannot be traced over the key, and returns NumPy arrays."""
    return np.asarray(x[k]) if k % 2 else -np.asarray(x[k])


SELECTS = {
    "row": lambda x, k: x[k],
    "nothing of x": lambda x, k: jnp.zeros((2, 2)),
    "not linear": lambda x, k: jnp.tanh(x @ x[k]),
    "tree": as_tree,
    "branch": branch,
    "scalar": lambda x, k: x[k, 1],
}


def source_of(psi, coding=None):
    return FunctionSource.of(batch_select(psi, X, ROW), X, ROW, coding or coding_of(psi))


def slices_of(source, keys):
    return source.records.decode(source.read(keys))


@cache
def source_named(name):
    """Made once, when a test first asks: tracing a select function takes a while."""
    return source_of(SELECTS[name] if name in SELECTS else TRANSFORMED[name])


@pytest.mark.parametrize("name", SELECTS)
@given(keys=key_lists(ROW))
def test_a_batch_is_the_slice_of_each_key(name, keys):
    found = slices_of(source_named(name), keys.array)
    for place, key in enumerate(keys):
        expected = kh.tree.flatten(SELECTS[name](jnp.asarray(X), key))
        assert found.keys() == expected.keys()
        for path, leaf in expected.items():
            np.testing.assert_allclose(found[path][place], leaf, rtol=1e-6)


TRANSFORMED = {
    (name, coding): (transform(SELECTS[name]))
    for name in ("row", "branch")
    for coding, transform in {
        "uint8": lambda psi: Quantized(psi, 8, 5),
        "uint4": lambda psi: Quantized(psi, 4, 7),
        "half": HalfPrecision,
    }.items()
}


@pytest.mark.parametrize("name", TRANSFORMED)
@given(keys=key_lists(ROW))
def test_coded_slices_are_those_of_the_transformed_select_function(name, keys):
    assert source_named(name).records.coding.kind == name[1]
    found = slices_of(source_named(name), keys.array)["."]
    expected = [decode(TRANSFORMED[name](jnp.asarray(X), key)) for key in keys]
    assert_trees_equal(list(found), [np.asarray(e) for e in expected])


def test_trees_are_coded_as_the_transformed_select_function_does():
    def psi(x, k):
        return {"b": x[k] * x.dtype.type(3), "a": x[:2]}

    transformed = Quantized(psi, 8, 5)
    found = slices_of(source_of(psi, Coding("uint8", 5)), np.arange(6))
    for key in range(6):
        expected = decode(transformed(jnp.asarray(X), key))
        assert_trees_equal({p: found[p][key] for p in ("a", "b")}, expected)


@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 9])
def test_any_number_of_keys_is_compiled_no_more(count):
    traced = []

    def psi(x, k):
        traced.append(k)
        return x[k]

    select_batch = batch_select(psi, X, ROW, batch=4)
    before = len(traced)
    keys = np.arange(count) % 6
    for _ in range(2):
        np.testing.assert_array_equal(select_batch(X, keys)["."], X[keys])
    assert len(traced) == before


def test_a_batch_is_computed_from_the_value_it_is_given():
    select_batch = batch_select(SELECTS["row"], X, ROW)
    np.testing.assert_array_equal(select_batch(2 * X, np.array([4]))["."], 2 * X[[4]])


def test_a_value_of_another_dtype_is_refused():
    select_batch = batch_select(SELECTS["row"], X, ROW)
    with pytest.raises(ShapeError, match="differ in shape or dtype"):
        select_batch(X.astype(np.float64), np.array([4]))


@pytest.mark.parametrize(
    "psi",
    [
        lambda x, k: np.asarray(x[k])[: 2 + k % 2],
        lambda x, k: np.asarray(x[k], np.float32 if k % 2 else np.float64),
        lambda x, k: np.float32(x[k, 0]) if k % 2 else int(x[k, 0]),
    ],
)
def test_slices_of_two_shapes_or_dtypes_are_refused(psi):
    source = source_of(psi)
    with pytest.raises(ShapeError, match="differ in shape or dtype"):
        source.read(np.array([0, 1]))


LARGE = kh.KeySpace("large", 100_000)
WHOLE = np.arange(1000, dtype=np.float32)
WIDE = {
    "a key times a large number": (WHOLE, lambda x, k: x[(k * 40503) % 1000]),
    "a key beyond 64 bits": (WHOLE, lambda x, k: x[(k * 10**15 * k) % 1000]),
    "32 bits on purpose": (WHOLE, lambda x, k: x[(jnp.asarray(k) * 40503) % 1000]),
    "int64": (2**40 + np.arange(1000), lambda x, k: x[k % 1000]),
    "uint64": (2**63 + np.arange(1000, dtype=np.uint64), lambda x, k: x[k % 1000]),
    "float64": (np.arange(1000) / 3, lambda x, k: {"a": -x[k % 1000], "b": x[:2]}),
    "a key in 16 bits": (np.arange(1000, dtype=np.int16), lambda x, k: x[k % 1000] + k % 9),
    "the key itself": (WHOLE, lambda x, k: (k, 3 * k)),
    "a default dtype": (WHOLE, lambda x, k: jnp.concatenate([x[k % 9, None], jnp.zeros(2)])),
}


@pytest.mark.parametrize("name", WIDE)
def test_wide_keys_and_numbers_are_those_of_the_definition(name):
    x, psi = WIDE[name]
    keys = np.array([60_000, 0, 3, 99_999, 77_777, 53_022])
    found = batch_select(psi, x, LARGE)(x, keys)
    for place, key in enumerate(keys.tolist()):
        for path, leaf in kh.tree.flatten(psi(x, key)).items():
            expected = np.asarray(leaf)
            assert found[path].dtype == expected.dtype
            assert found[path][place].tobytes() == expected.tobytes()


@pytest.mark.parametrize("name", ["a key times a large number", "int64", "uint64", "float64"])
def test_wide_numbers_are_compiled_too(name):
    calls = []
    x, psi = WIDE[name]
    select_batch = batch_select(lambda x, k: calls.append(k) or psi(x, k), x, LARGE)
    before = len(calls)
    select_batch(x, np.arange(1000))
    assert len(calls) == before
