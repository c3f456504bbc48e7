"""Laws of deselect: it is the transpose of select, and Eq. 5 adds up what remains."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import keyhole as kh
from keyhole import tree
from tests.helpers import (
    AGGREGATES,
    LAYOUTS,
    assert_trees_close,
    assert_trees_equal,
    client_keys,
    counts_of,
    model_of,
)


def inner(a, b):
    a, b = tree.flatten(a), tree.flatten(b)
    return sum(float(np.vdot(a[path], b[path])) for path in a)


def draw_updates(data, layout, clients):
    """A cohort's keys and updates of whole numbers."""
    keys = [data.draw(client_keys(layout)) for _ in range(clients)]
    updates = [data.draw(model_of(layout, counts_of(z))) for z in keys]
    return kh.at_clients(updates), kh.at_clients(keys)


@pytest.mark.parametrize("name", LAYOUTS)
@given(data=st.data())
def test_deselect_is_the_transpose_of_select(name, data):
    """<select(x), u> = <x, deselect(u)>, exactly: all numbers are small and whole."""
    layout = LAYOUTS[name]
    x, keys = data.draw(model_of(layout)), data.draw(client_keys(layout))
    u = data.draw(model_of(layout, counts_of(keys)))
    assert inner(layout.select(x, keys), u) == inner(x, layout.deselect(u, keys))


@pytest.mark.parametrize("name", LAYOUTS)
def test_deselect_is_what_jax_transposes_select_to(name):
    layout = LAYOUTS[name]
    rng = np.random.default_rng(0)
    keys = [s.keys(rng.integers(s.num_keys, size=4)) for s in layout.spaces]
    chosen = layout.keys_by_space(keys)
    like = {
        field.path: jax.ShapeDtypeStruct(field.shape, field.dtype)
        for part in layout.parts
        for field in part.fields
    }

    def slices(leaves):
        x = tree.unflatten(layout.structure, leaves)
        return [[part.select_fn(x, key) for key in part.keys_of(chosen)] for part in layout.parts]

    ones = jax.tree.map(lambda e: np.full(e.shape, 3, e.dtype), jax.eval_shape(slices, like))
    (expected,) = jax.linear_transpose(slices, like)(ones)
    update = jax.tree.map(lambda a: np.full_like(a, 3), layout.select(_zeros(layout), keys))
    found = tree.flatten(layout.deselect(update, keys))
    assert_trees_equal(found, jax.tree.map(np.asarray, expected))


def _zeros(layout):
    leaves = {f.path: np.zeros(f.shape, f.dtype) for part in layout.parts for f in part.fields}
    return tree.unflatten(layout.structure, leaves)


@pytest.mark.parametrize("name", LAYOUTS)
@given(data=st.data())
def test_mean_divides_the_sum_by_the_cohort(name, data):
    layout = LAYOUTS[name]
    updates, keys = draw_updates(data, layout, clients=4)
    total = kh.deselect_sum(updates, keys, layout.deselect).value
    mean = kh.deselect_mean(updates, keys, layout.deselect).value
    assert_trees_equal(mean, tree.map_leaves(lambda leaf: leaf / np.float32(4), total))


@given(data=st.data())
def test_per_key_mean_divides_each_row_by_those_who_chose_it(data):
    layout = LAYOUTS["rows"]
    updates, keys = draw_updates(data, layout, clients=3)
    total = kh.deselect_sum(updates, keys, layout.deselect).value["w"]
    chosen = kh.map_clients(lambda z: np.isin(np.arange(7), z[0].array).astype(int), keys)
    counts = kh.aggregate_sum(chosen).value
    mean = kh.deselect_mean_per_key(updates, keys, layout.deselect).value["w"]
    np.testing.assert_array_equal(mean, total / np.maximum(counts, 1)[:, None].astype(np.float32))


@pytest.mark.parametrize("how", AGGREGATES)
@given(data=st.data())
def test_any_aggregate_extends_to_deselect(how, data):
    layout = LAYOUTS["neurons in and out"]
    updates, keys = draw_updates(data, layout, clients=4)
    found = kh.deselect(updates, keys, layout.deselect, AGGREGATES[how])
    full = kh.map_clients(layout.deselect, updates, keys)
    assert_trees_equal(found.value, AGGREGATES[how](full).value)


@given(data=st.data(), gone=st.sets(st.integers(0, 3), max_size=3))
def test_clients_lost_after_select_leave_the_mean_of_the_rest(data, gone):
    layout = LAYOUTS["two key spaces"]
    updates, keys = draw_updates(data, layout, clients=4)
    rest = [c for c in range(4) if c not in gone]
    found = kh.deselect_mean(updates.drop(gone), keys, layout.deselect).value
    full = [None] * 4
    kh.map_clients(
        full.__setitem__, kh.at_clients(range(4)), kh.map_clients(layout.deselect, updates, keys)
    )
    assert_trees_close(found, kh.aggregate_mean(kh.at_clients([full[c] for c in rest])).value)


def test_a_cohort_that_chose_nothing_has_a_zero_mean():
    layout = LAYOUTS["rows"]
    keys = layout.spaces[0].place([[], []])
    updates = kh.at_clients([{"w": np.zeros((0, 3), np.float32)}] * 2)
    mean = kh.deselect_mean(updates, keys, layout.deselect).value["w"]
    np.testing.assert_array_equal(mean, np.zeros((7, 3), np.float32))


def test_fractions_of_an_integer_parameter_are_not_cut_off():
    row = kh.KeySpace("row", 3)
    layout = kh.Layout.of({"w": np.zeros(3, np.int64)}, kh.Cut(row, {"w": 0}))
    total = layout.deselect({"w": np.array([0.5, 0.25])}, row.keys([1, 1]))
    assert total["w"].tolist() == [0, 0.75, 0]
