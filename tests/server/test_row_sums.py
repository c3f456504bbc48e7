"""Sums of clients that hold the same keys: the bytes of the sum that sorts keys."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import keyhole as kh
from keyhole import tree
from keyhole.errors import NotFiniteError
from keyhole.primitives.keyspace import are_same_rising
from keyhole.server.row_sums import BLOCK, sum_block, sum_updates
from keyhole.server.rows import sum_rows
from tests.helpers import LAYOUTS, client_keys, model_of

SPACE = kh.KeySpace("row", 9)
LAYOUT = kh.Layout.of(
    {"a": np.zeros((9, 3), np.float32), "b": np.zeros((2, 9), np.float32)},
    kh.Cut(SPACE, {"a": 0, "b": 1}),
)


def updates_of(keys, count, seed=0):
    rng = np.random.default_rng(seed)
    sizes = [(len(keys), 3), (2, len(keys))]
    made = [[rng.normal(size=s).astype(np.float32) for s in sizes] for _ in range(count)]
    for update in made:
        update[0][0, 0] = -0.0  # which a sum that begins with zero makes 0.0
    return [dict(zip("ab", update, strict=True)) for update in made]


@pytest.mark.parametrize("chosen", [range(9), [1, 4, 8]], ids=["all", "some"])
def test_clients_with_the_same_keys_have_the_sum_of_rows_that_are_sorted(chosen):
    keys = SPACE.keys(list(chosen))
    updates = updates_of(keys, 5)
    (part,) = LAYOUT.parts
    rows = np.concatenate([part.to_rows(update) for update in updates])
    distinct, sums = sum_rows(np.tile(keys.array, 5), rows)
    (found,) = sum_updates(LAYOUT, updates, [{"row": keys}] * 5, "nothing")
    assert found.keys.tobytes() == distinct.tobytes()
    assert found.rows.tobytes() == sums.tobytes()
    assert not np.signbit(found.rows[0, 0])


def test_a_block_may_be_added_up_in_pieces():
    keys = {"row": SPACE.all_keys()}
    updates = updates_of(keys["row"], 7)
    whole = sum_block(LAYOUT, updates, [keys] * 7)
    first = sum_block(LAYOUT, updates[:3], [keys] * 3)
    (a,), (b,) = whole.parts, sum_block(LAYOUT, updates[3:], [keys] * 4, first).parts
    assert (a.keys.tobytes(), a.rows.tobytes()) == (b.keys.tobytes(), b.rows.tobytes())
    others = {"row": SPACE.keys([2, 0])}
    (mixed,) = sum_block(LAYOUT, updates_of(others["row"], 1), [others], first).parts
    assert mixed.keys.tolist() == list(range(9))


@pytest.mark.parametrize("name", LAYOUTS)
@given(data=st.data())
def test_leaves_add_up_as_their_rows_do(name, data):
    """Of any layout, of keys in any order and repeated, of leaves that lie in any way."""
    layout = LAYOUTS[name]
    chosen = [layout.keys_by_space(data.draw(client_keys(layout))) for _ in range(3)]
    counts = [{space: len(z) for space, z in keys.items()} for keys in chosen]
    updates = [data.draw(model_of(layout, each)) for each in counts]
    ways = as_it_is, frozen, turned
    brought = [tree.map_leaves(lay, u) for lay, u in zip(ways, updates, strict=True)]
    summed = sum_updates(layout, brought, chosen, "nothing")
    for part, found in zip(layout.parts, summed, strict=True):
        rows = [part.to_rows(tree.flatten(u)) for u in updates]
        keys = np.concatenate([part.keys_of(each).array for each in chosen])
        distinct, sums = sum_rows(keys, np.ascontiguousarray(np.concatenate(rows), np.float32))
        assert (found.keys.tobytes(), found.rows.tobytes()) == (distinct.tobytes(), sums.tobytes())


def as_it_is(leaf):
    return leaf


def frozen(leaf):
    leaf = leaf.copy()
    leaf.setflags(write=False)
    return leaf


def turned(leaf):
    """Fortran order, where there is another than C."""
    return np.asfortranarray(leaf)


def test_more_clients_than_a_block_has_are_added_up():
    keys = {"row": SPACE.all_keys()}
    updates = updates_of(keys["row"], BLOCK + 3)
    (found,) = sum_updates(LAYOUT, updates, [keys] * len(updates), "cohort")
    (part,) = LAYOUT.parts
    expected = np.mean([part.to_rows(update) for update in updates], axis=0)
    np.testing.assert_allclose(found.rows, expected, atol=1e-5)


def test_numbers_that_are_not_finite_are_refused_with_how_many_clients():
    keys = {"row": SPACE.all_keys()}
    updates = updates_of(keys["row"], 3)
    updates[1]["b"][0, 2] = np.nan
    with pytest.raises(NotFiniteError, match="got 1 of 3 clients"):
        sum_updates(LAYOUT, updates, [keys] * 3, "nothing")


@pytest.mark.parametrize("keys", [[[1, 2], [1, 3]], [[1, 1], [1, 1]], [[2, 1]], [[1], [1, 2]]])
def test_keys_that_differ_repeat_or_fall_are_not_alike(keys):
    assert not are_same_rising([np.array(z) for z in keys])
