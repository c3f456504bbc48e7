"""The server's state: what it selects, steps through, and refuses."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import keyhole as kh
from keyhole import tree
from keyhole.errors import InputError, KeySpaceError, NotFiniteError, ShapeError
from keyhole.server.initial import Normal
from keyhole.server.optimizers import SGD, Adagrad, Adam, Momentum, Yogi
from keyhole.server.row_sums import RowUpdate, no_update
from keyhole.server.state import ServerState
from tests.helpers import LAYOUTS, assert_trees_equal, client_keys, model_of, with_slow

OPTIMIZERS = [SGD(0.1), Momentum(0.1), Adagrad(0.1), Adam(0.1), Yogi(0.1)]


def random_updates(layout, rng, share=0.5):
    updates = []
    for part in layout.parts:
        keys = np.flatnonzero(rng.random(part.space.num_keys) < share)
        rows = rng.normal(size=(len(keys), part.slice_size)).astype(np.float32)
        updates.append(RowUpdate(keys, rows))
    return updates


def bag(num_keys=7, width=3, optimizer=None):
    """A table of words and a broadcast bias: parts are (bias, words)."""
    word = kh.KeySpace("word", num_keys)
    like = {"w": np.broadcast_to(np.float32(0), (num_keys, width)), "b": np.zeros(2, np.float32)}
    layout = kh.Layout.of(like, kh.Cut(word, {"w": 0}))
    return ServerState.lazy(layout, optimizer or SGD(0.1), {"w": Normal(0.1)}, seed=5)


@pytest.mark.parametrize("name", LAYOUTS)
@given(data=st.data())
def test_select_is_select_of_the_full_model(name, data):
    layout = LAYOUTS[name]
    model, keys = data.draw(model_of(layout)), data.draw(client_keys(layout))
    state = ServerState.dense(layout, model, SGD(0.1))
    assert_trees_equal(state.select(keys), layout.select(model, keys))
    assert_trees_equal(state.lend(keys), layout.select(model, keys))
    assert_trees_equal(state.model(), model)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: type(o).__name__)
def test_lazy_state_selects_from_the_model_it_stands_for(name, optimizer):
    layout, rng = LAYOUTS[name], np.random.default_rng(0)
    paths = [field.path for part in layout.parts for field in part.fields]
    lazy = ServerState.lazy(layout, optimizer, dict.fromkeys(paths, Normal(0.1)), seed=9)
    dense = ServerState.dense(layout, lazy.model(), optimizer)
    few = [space.keys([space.num_keys - 1, 0]) for space in layout.spaces]
    for _ in range(5):
        updates = random_updates(layout, rng)
        lazy.step(updates)
        dense.step(updates)
        assert_trees_equal(lazy.model(), dense.model())
        assert_trees_equal(lazy.lend(few), dense.select(few))


def test_a_step_of_sgd_subtracts_the_deselected_update():
    layout, rng = LAYOUTS["one parameter cut twice"], np.random.default_rng(1)
    keys = [space.keys(np.arange(space.num_keys - 1)) for space in layout.spaces]
    model = tree.map_leaves(
        lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), _zeros(layout)
    )
    update = layout.select(model, keys)
    state = ServerState.dense(layout, model, SGD(1.0))
    state.step([_row_update(part, update, keys, layout) for part in layout.parts])
    assert_trees_equal(
        state.model(), tree.map_leaves(np.subtract, model, layout.deselect(update, keys))
    )


def _zeros(layout):
    leaves = {f.path: np.zeros(f.shape, f.dtype) for part in layout.parts for f in part.fields}
    return tree.unflatten(layout.structure, leaves)


def _row_update(part, update, keys, layout):
    """One client's update as rows; its keys are ascending here."""
    rows = [
        field.unstack(tree.get(update, field.path)).reshape(-1, int(np.prod(field.slice_shape)))
        for field in part.fields
    ]
    return RowUpdate(
        part.keys_of(layout.keys_by_space(keys)).array, np.ascontiguousarray(np.hstack(rows))
    )


def test_dense_state_copies_the_model():
    layout = LAYOUTS["rows"]
    model = {"w": np.ones((7, 3), np.float32)}
    ServerState.dense(layout, model, SGD(1)).step(random_updates(layout, np.random.default_rng(0)))
    assert np.all(model["w"] == 1)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: type(o).__name__)
def test_whole_tables_are_lent_without_a_copy_unless_rows_have_to_catch_up(optimizer):
    layout, rng = LAYOUTS["rows"], np.random.default_rng(0)
    state = ServerState.dense(layout, {"w": np.ones((7, 3), np.float32)}, optimizer)
    for _ in range(3):
        state.step(random_updates(layout, rng))
    (space,) = layout.spaces
    for keys in (space.all_keys(), space.keys(range(6)), space.keys([*range(5, -1, -1), 6])):
        lent = state.lend(keys)
        assert_trees_equal(lent, state.select(keys))
        is_view = np.shares_memory(lent["w"], state.tables[0].slab.values)
        assert is_view == (keys == space.all_keys() and not optimizer.horizon)
        assert lent["w"].flags.writeable != is_view


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: type(o).__name__)
def test_changed_rows_are_reported(optimizer):
    """Whatever reads differently than before is in the report, momentum included."""
    layout, rng = LAYOUTS["neurons in and out"], np.random.default_rng(2)
    state = ServerState.lazy(layout, optimizer)
    every = [np.arange(part.space.num_keys) for part in layout.parts]
    seen = [[state.rows(i, keys) for i, keys in enumerate(every)]]
    for step in range(1, 300):
        state.step(random_updates(layout, rng, share=0.02 if step < 20 else 0.0))
        seen.append([state.rows(i, keys) for i, keys in enumerate(every)])
    for since in (0, 5, 60, 250, 298, 299):
        for part, changed in enumerate(state.changed_since(since)):
            differ = np.flatnonzero(np.any(seen[since][part] != seen[-1][part], axis=1))
            assert changed is None or set(differ) <= set(changed)
    assert all(len(changed) == 0 for changed in state.changed_since(299))
    if optimizer.horizon == 0:
        assert all(len(changed) == 0 for changed in state.changed_since(25))


def test_rows_that_stopped_moving_are_not_reported():
    state = bag(optimizer=Momentum(0.1, 0.5))
    parts = state.layout.parts
    state.step([no_update(parts[0]), RowUpdate(np.array([3]), np.ones((1, 3), np.float32))])
    for _ in range(40):
        state.step([no_update(part) for part in parts])
    assert [list(keys) for keys in state.changed_since(20)] == [[], [3]]
    assert [list(keys) for keys in state.changed_since(35)] == [[], []]


def test_only_past_steps_can_be_asked_for():
    with pytest.raises(InputError, match=r"no such step: got 1; expected 0\.\.0"):
        bag().changed_since(1)


def test_the_full_model_of_a_billion_lazy_rows_is_refused():
    with pytest.raises(ShapeError, match="too large to build: got 3000000002 numbers"):
        bag(10**9).model()


def test_other_dtypes_are_refused():
    layout = kh.Layout.of({"w": np.zeros((3, 2))}, kh.Cut(kh.KeySpace("row", 3), {"w": 0}))
    with pytest.raises(ShapeError, match="'w' cannot be trained: got float64"):
        ServerState.lazy(layout, SGD(1))
    with pytest.raises(ShapeError, match="'w' cannot be trained: got float64"):
        ServerState.dense(LAYOUTS["rows"], {"w": np.zeros((7, 3))}, SGD(1))


def test_unknown_parameters_to_initialize_are_refused():
    with pytest.raises(InputError, match="'v'; expected 'w'"):
        ServerState.lazy(LAYOUTS["rows"], SGD(1), {"v": Normal(1)})


ROWS = np.ones((2, 3), np.float32)
BAD = {
    "unsorted": (([4, 2], ROWS), KeySpaceError, "1 of 2 out of order"),
    "repeated": (([2, 2], ROWS), KeySpaceError, "1 of 2 out of order"),
    "beyond the last key": (([2, 7], ROWS), KeySpaceError, r"1 such keys of 2; expected 0\.\.6"),
    "negative": (([-1, 2], ROWS), KeySpaceError, "1 such keys of 2"),
    "floats as keys": (([0.0, 1.0], ROWS), KeySpaceError, "not int64: got float64"),
    "too wide": (([1, 2], np.ones((2, 4), np.float32)), ShapeError, r"shape \(2, 4\)"),
    "too few rows": (([1, 2, 3], ROWS), ShapeError, r"shape \(3, 3\)"),
    "float64": (([1, 2], np.ones((2, 3))), ShapeError, "float64"),
    "not contiguous": (([1, 2], np.ones((3, 2), np.float32).T), ShapeError, "not C-contiguous"),
    "NaN": (([1, 2], ROWS * np.float32("nan")), NotFiniteError, "2 of 2 rows"),
    "infinity": (([1, 2], ROWS * np.array([[1], [np.inf]], np.float32)), NotFiniteError, "1 of 2"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_refused_step_changes_nothing(name):
    (keys, rows), error, message = BAD[name]
    state = bag()
    before = state.model()
    good = RowUpdate(np.array([0]), np.ones((1, 2), np.float32))
    with pytest.raises(error, match=message):
        state.step([good, RowUpdate(np.array(keys), rows)])
    assert state.steps == 0
    assert_trees_equal(state.model(), before)


def test_updates_of_another_layout_are_refused():
    with pytest.raises(ShapeError, match="one update for each part: got 1 updates; expected 2"):
        bag().step([RowUpdate(np.array([0]), np.ones((1, 3), np.float32))])


def test_an_update_prints_no_keys():
    assert repr(RowUpdate(np.array([123456]), ROWS[:1])) == "RowUpdate(1 rows)"


@pytest.mark.parametrize("num_keys", with_slow([30_000, 10**9], fast=[10**9]))
@pytest.mark.parametrize("optimizer", with_slow(OPTIMIZERS, fast=[SGD(0.1), Adam(0.1)]), ids=str)
def test_any_number_of_threads_gives_the_same_bytes(optimizer, num_keys):
    layout = bag(num_keys, 100).layout
    states = [
        ServerState.lazy(layout, optimizer, {"w": Normal(0.1)}, threads=threads)
        for threads in (1, 2, 5)
    ]
    rng = np.random.default_rng(0)
    for _ in range(3):
        keys = np.unique(rng.integers(0, num_keys, 30_000))
        rows = rng.normal(size=(len(keys), 100)).astype(np.float32)
        for state in states:
            state.step([no_update(layout.parts[0]), RowUpdate(keys, rows)])
    keys = rng.integers(0, num_keys, 30_000)
    first, *others = [state.rows(1, keys).tobytes() for state in states]
    assert all(other == first for other in others)
