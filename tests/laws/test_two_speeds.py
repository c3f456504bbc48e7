"""Laws: the fast paths of `server/` equal the plain definitions of `primitives/`."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import keyhole as kh
from keyhole import tree
from keyhole.errors import CohortError, KeySpaceError, NotFiniteError, ShapeError
from keyhole.server.optimizers import SGD
from keyhole.server.state import ServerState
from tests.helpers import LAYOUTS, assert_trees_equal, client_keys, counts_of, grid, model_of
from tests.laws.algorithms import deselect_submodels

DESELECTS = {
    "sum": (partial(deselect_submodels, over="nothing"), kh.deselect_sum),
    "mean": (deselect_submodels, kh.deselect_mean),
    "per key": (partial(deselect_submodels, over="choosers"), kh.deselect_mean_per_key),
}


@grid("how, name", DESELECTS, LAYOUTS)
@given(data=st.data())
def test_fast_deselect_is_deselect(how, name, data):
    layout = LAYOUTS[name]
    fast, plain = DESELECTS[how]
    zs = [data.draw(client_keys(layout)) for _ in range(3)]
    updates = kh.at_clients([data.draw(model_of(layout, counts_of(z))) for z in zs])
    keys, gone = kh.at_clients(zs), data.draw(st.sets(st.integers(0, 2), max_size=2))
    assert_trees_equal(
        fast(layout, updates.drop(gone), keys).value,
        plain(updates.drop(gone), keys, layout.deselect).value,
    )


@pytest.mark.parametrize("how", DESELECTS)
def test_fast_deselect_has_the_bytes_of_deselect_where_no_client_repeats_a_key(how):
    """On real numbers: additions are made in the same order, so even the last bit agrees."""
    layout = LAYOUTS["two key spaces"]
    fast, plain = DESELECTS[how]
    rng = np.random.default_rng(4)
    zs = [
        tuple(s.keys(rng.choice(s.num_keys, size=4, replace=False)) for s in layout.spaces)
        for _ in range(5)
    ]
    like = [layout.select(_zeros(layout), z) for z in zs]
    updates = kh.at_clients(
        [
            tree.map_leaves(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), u)
            for u in like
        ]
    )
    keys = kh.at_clients(zs)
    assert_trees_equal(
        fast(layout, updates, keys).value, plain(updates, keys, layout.deselect).value
    )


def _zeros(layout):
    leaves = {f.path: np.zeros(f.shape, f.dtype) for part in layout.parts for f in part.fields}
    return tree.unflatten(layout.structure, leaves)


def test_a_client_cannot_write_into_the_server_s_model():
    layout = LAYOUTS["rows with a broadcast bias"]
    state = ServerState.dense(layout, _zeros(layout), SGD(1.0))
    first, second = (state.select(layout.spaces[0].keys([1])) for _ in range(2))
    for leaf in tree.flatten(first).values():
        if leaf.flags.writeable:
            leaf[...] = 1
    assert not any(leaf.any() for leaf in tree.flatten(second).values())
    assert not any(leaf.any() for leaf in tree.flatten(state.model()).values())


def rows_case(values=((1.0, 2.0, 3.0),), keys=(4,)):
    layout = LAYOUTS["rows"]
    updates = kh.at_clients([{"w": np.array(values, np.float32)}])
    return layout, updates, layout.spaces[0].place([list(keys)])


@pytest.mark.parametrize("deselect", [fast for fast, _ in DESELECTS.values()])
def test_fast_deselect_refuses_what_deselect_refuses(deselect):
    layout, updates, keys = rows_case()
    with pytest.raises(CohortError, match="nobody is left"):
        deselect(layout, updates.drop([0]), keys)
    with pytest.raises(ShapeError, match="does not fit the cuts"):
        deselect(layout, updates, layout.spaces[0].place([[1, 2]]))
    with pytest.raises(KeySpaceError, match="do not match the cuts"):
        deselect(layout, updates, kh.KeySpace("column", 7).place([[1]]))
    with pytest.raises(NotFiniteError, match="1 of 1 clients"):
        deselect(*rows_case(values=((1.0, np.nan, 3.0),)))
