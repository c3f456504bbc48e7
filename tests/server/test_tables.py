"""Lazy tables return the bytes of dense ones, and memory grows with what was touched."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyhole.errors import InputError, KeySpaceError
from keyhole.primitives.coding import uniform
from keyhole.server.initial import Normal, Uniform, Zeros
from keyhole.server.optimizers import SGD, Adagrad, Adam, Momentum, Yogi
from keyhole.server.tables import DenseTable, KeyIndex, LazyTable, RowInitial
from tests.helpers import SEEDS

OPTIMIZERS = [SGD(0.1), Momentum(0.1), Adagrad(0.1), Adam(0.1), Yogi(0.1)]
STARTS = [Zeros(), Uniform(0.5), Normal(0.02)]


def start(width, initial=None, seed=3):
    return RowInitial(seed, ((width, *(initial or Normal(0.1)).code),))


def step(table, keys, rows, now):
    table.step(table.reserve(keys), rows, now)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: type(o).__name__)
@pytest.mark.parametrize("initial", STARTS, ids=lambda i: type(i).__name__)
@given(
    touches=st.lists(st.sets(st.integers(0, 29), max_size=8), max_size=12),
    width=st.sampled_from([1, 8]),
    seed=SEEDS,
)
def test_lazy_and_dense_hold_the_same_bytes(optimizer, initial, touches, width, seed):
    rng = np.random.default_rng(seed)
    every = np.arange(30)
    rows_start = start(width, initial, seed)
    dense = DenseTable(rows_start.rows(every), optimizer)
    lazy = LazyTable(30, rows_start, optimizer)
    for now, touched in enumerate(touches, start=1):
        keys = np.array(sorted(touched), np.int64)
        rows = rng.normal(size=(len(keys), width)).astype(np.float32)
        step(dense, keys, rows, now)
        step(lazy, keys, rows, now)
        assert dense.rows(every, now).tobytes() == lazy.rows(every, now).tobytes()
        np.testing.assert_array_equal(dense.touched_after(now - 1), lazy.touched_after(now - 1))
    assert len(lazy) == len(set().union(*touches))


def test_reading_makes_no_rows():
    lazy = LazyTable(10**12, start(4), Adam(0.1))
    before = lazy.nbytes
    lazy.rows(np.arange(0, 10**12, 10**7), now=0)
    assert len(lazy) == 0
    assert lazy.nbytes == before


def test_the_largest_key_space_works():
    lazy = LazyTable(2**63, start(2), SGD(0.5))
    last = np.array([2**63 - 1])
    before = lazy.rows(last, 0)
    step(lazy, last, np.ones((1, 2), np.float32), 1)
    np.testing.assert_array_equal(lazy.rows(last, 1), before - np.float32(0.5))


@pytest.mark.parametrize("width", [1, 64])
def test_memory_grows_with_touched_rows_and_not_with_keys(width):
    """Rows, two moments, step: 12 width + 4 bytes; index: 16 bytes at least half full, and a key.

    Slabs double, so twice that may be set aside, and the old slab lives while it is copied.
    """
    touched, rounds = 20_000, 5
    tracemalloc.start()
    lazy = LazyTable(10**9, start(width), Adam(0.1))
    rng = np.random.default_rng(0)
    for now in range(1, rounds + 1):
        keys = np.unique(rng.integers(0, 10**9, touched))
        step(lazy, keys, np.ones((len(keys), width), np.float32), now)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    row = 12 * width + 4 + 4 * 16 + 8
    assert len(lazy) > 0.99 * touched * rounds
    assert peak < 3 * row * touched * rounds + (8 * width + 64) * touched
    assert lazy.nbytes < 2.5 * row * len(lazy)


@given(keys=st.lists(st.sets(st.integers(0, 2**63 - 1)), max_size=6))
def test_the_index_is_a_dictionary_that_numbers_keys_as_they_come(keys):
    index, expected = KeyIndex(), {}
    for batch in keys:
        array = np.array(sorted(batch), np.int64)
        for key in array.tolist():
            expected.setdefault(key, len(expected))
        np.testing.assert_array_equal(index.claim(array), [expected[k] for k in array.tolist()])
    np.testing.assert_array_equal(index.keys, np.array(list(expected), np.int64))
    if expected:
        np.testing.assert_array_equal(index.find(index.keys), np.arange(len(expected)))


def test_the_index_keeps_its_slots_while_it_grows():
    index = KeyIndex()
    for batch in range(20):
        index.claim(np.arange(batch * 1000, batch * 1000 + 1500) * 2**40)
    every = np.arange(20 * 1000 + 500) * 2**40
    np.testing.assert_array_equal(index.find(every), np.arange(len(every)))
    assert np.all(index.find(every + 1) == -1)


@given(seed=SEEDS, keys=st.lists(st.integers(0, 2**63 - 1), max_size=5))
def test_uniform_rows_are_those_of_noise(seed, keys):
    keys = np.array(keys, np.int64)
    expected = np.float32(0.5) * (np.float32(2) * uniform(seed, keys, 6) - np.float32(1))
    np.testing.assert_array_equal(start(6, Uniform(0.5), seed).rows(keys), expected)


def test_normal_rows_have_the_asked_spread():
    """2e5 numbers: mean within 5 / sqrt(2e5) = 0.011 of 0 and deviation within 0.008 of 1."""
    rows = start(20, Normal(1.0)).rows(np.arange(10_000))
    assert abs(rows.mean()) < 0.011
    assert abs(rows.std() - 1) < 0.008
    assert 0.66 < np.mean(np.abs(rows) < 1) < 0.70  # 0.683
    assert np.corrcoef(rows[:, 0], rows[:, 1])[0, 1] < 0.05


def test_columns_of_a_row_start_as_their_parameters_do():
    columns = ((3, *Zeros().code), (2, *Uniform(1.0).code))
    rows = RowInitial(1, columns).rows(np.arange(100))
    assert np.all(rows[:, :3] == 0)
    assert np.all(rows[:, 3:] != 0)
    assert not np.array_equal(rows, RowInitial(2, columns).rows(np.arange(100)))


@pytest.mark.parametrize("table", ["dense", "lazy"])
@pytest.mark.parametrize("keys", [[-1], [5], [0, 9]])
def test_keys_outside_a_table_are_refused_without_naming_them(table, keys):
    tables = {
        "dense": DenseTable(np.zeros((5, 2), np.float32), SGD(1)),
        "lazy": LazyTable(5, start(2), SGD(1)),
    }
    with pytest.raises(KeySpaceError, match=r"1 such keys of \d; expected 0\.\.4"):
        tables[table].rows(np.array(keys), 0)


@pytest.mark.parametrize("scale", [0, -1, float("nan"), float("inf")])
@pytest.mark.parametrize("kind", [Uniform, Normal])
def test_impossible_scales_are_refused(kind, scale):
    with pytest.raises(InputError, match="scale is out of range"):
        kind(scale)


def test_impossible_seeds_are_refused():
    with pytest.raises(InputError, match="seed is out of range"):
        start(2, seed=-1)
