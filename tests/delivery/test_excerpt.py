"""Excerpts: for the keys that they hold, they read as what they were taken from."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import keyhole as kh
from keyhole.delivery.clear import OnDemand
from keyhole.delivery.records import Coding
from keyhole.delivery.sources import Excerpt
from keyhole.errors import KeySpaceError
from keyhole.primitives.layout import select_rows
from keyhole.server.optimizers import SGD
from keyhole.server.state import ServerState
from tests.helpers import asked

ROW, COLUMN = kh.KeySpace("row", 5), kh.KeySpace("column", 4)
MODEL = {
    "product": np.arange(60, dtype=np.float32).reshape(4, 3, 5),
    "row": np.arange(10, dtype=np.float32).reshape(2, 5) * -1,
    "bias": np.array([7, 8, 9], np.float32),
}
LAYOUT = kh.Layout.of(MODEL, kh.Cut(ROW, {"product": 2, "row": 1}), kh.Cut(COLUMN, {"product": 0}))
STATE = ServerState.dense(LAYOUT, MODEL, SGD(1.0))
KEYS = st.tuples(
    st.lists(st.integers(0, 4), max_size=6).map(ROW.keys),
    st.lists(st.integers(0, 3), max_size=5).map(COLUMN.keys),
)


def as_bytes(submodel):
    return {name: (leaf.shape, leaf.strides, leaf.tobytes()) for name, leaf in submodel.items()}


@given(st.lists(KEYS, min_size=1, max_size=4))
def test_sub_models_are_those_of_the_server_whatever_keys_are_repeated_or_missing(keys):
    excerpt = Excerpt.of_everyone(STATE) | Excerpt.of_keys(STATE, keys)
    for z in keys:
        assert as_bytes(select_rows(excerpt, z)) == as_bytes(STATE.select(z))


@pytest.mark.parametrize("kind", ["half", "uint8", "uint4"])
def test_coded_slices_are_those_that_clients_receive(kind):
    chosen = [(ROW.keys([4, 0]), COLUMN.keys([1])), (ROW.keys([0, 3, 3]), COLUMN.keys([2, 1]))]
    delivered = OnDemand(Coding(kind, seed=3)).deliver(STATE, asked(LAYOUT, chosen))
    source = delivered.source
    excerpt = Excerpt.of_everyone(source) | Excerpt.of_keys(source, chosen)
    for client, submodel in delivered.submodels.items():
        assert as_bytes(select_rows(excerpt, chosen[client])) == as_bytes(submodel)


def test_every_row_is_there_once():
    chosen = [(ROW.keys([4, 0, 4]), COLUMN.keys([1])), (ROW.keys([0]), COLUMN.keys([1, 0]))]
    excerpt = Excerpt.of_keys(STATE, chosen)
    rows = {
        LAYOUT.parts[place].space.name: keys.tolist() for place, (keys, _) in excerpt.parts.items()
    }
    assert rows == {"row": [0, 4], "row*column": [0, 1, 17]}


def test_other_keys_are_refused_and_not_taken_for_their_neighbours():
    excerpt = Excerpt.of_everyone(STATE) | Excerpt.of_keys(
        STATE, [(ROW.keys([1, 3]), COLUMN.keys([0]))]
    )
    for missing in ([2], [4], [0]):
        with pytest.raises(KeySpaceError, match="not in the excerpt: got 1 others"):
            select_rows(excerpt, (ROW.keys(missing), COLUMN.keys([0])))
