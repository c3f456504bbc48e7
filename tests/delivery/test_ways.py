"""Deliveries: the same bytes, different costs and different things seen."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import keyhole as kh
from keyhole.delivery.base import KEYS_AND_WHOSE, NOTHING
from keyhole.delivery.clear import Broadcast, OnDemand, Pregenerated
from keyhole.server.optimizers import SGD
from keyhole.server.state import ServerState
from tests.helpers import LAYOUTS, asked, assert_trees_equal, client_keys, grid, model_of

WAYS = {"broadcast": Broadcast(), "on demand": OnDemand(), "pregenerated": Pregenerated()}
ROW = kh.KeySpace("row", 100)
MODEL = {"w": np.ones((100, 3), np.float32), "b": np.zeros(2, np.float32)}
KEYS = [[5, 7, 5], [7], []]


@grid("way, name", WAYS, LAYOUTS)
@given(data=st.data())
def test_every_way_delivers_what_select_means(way, name, data):
    layout = LAYOUTS[name]
    x = data.draw(model_of(layout))
    keys = [data.draw(client_keys(layout)) for _ in range(2)]
    state = ServerState.dense(layout, x, SGD(1.0))
    received = WAYS[way].deliver(state, asked(layout, keys)).submodels
    for client, z in enumerate(keys):
        assert_trees_equal(received[client], layout.select(x, z))


def cost_of(way):
    layout = kh.Layout.of(MODEL, kh.Cut(ROW, {"w": 0}))
    state = ServerState.dense(layout, MODEL, SGD(1.0))
    return WAYS[way].deliver(state, asked(layout, map(ROW.keys, KEYS))).cost


def test_broadcast_sends_everything_and_nobody_learns_a_key():
    cost = cost_of("broadcast")
    assert dict(cost.bytes_down) == dict.fromkeys(range(3), 4 * (300 + 2))
    assert dict(cost.bytes_up) == dict.fromkeys(range(3), 0)
    assert cost.leaks == {"server": NOTHING}


def test_on_demand_computes_each_distinct_slice_once():
    cost = cost_of("on demand")
    assert dict(cost.bytes_down) == {0: 4 * (9 + 2), 1: 4 * (3 + 2), 2: 4 * 2}
    assert dict(cost.bytes_up) == {0: 24, 1: 8, 2: 0}
    assert (cost.select_calls, cost.cache_hits, cost.distinct_slices) == (2, 2, 2)


def test_pregenerated_computes_every_slice():
    cost = cost_of("pregenerated")
    assert (cost.select_calls, cost.cache_hits, cost.distinct_slices) == (100, 4, 2)
    # Beside what is sent on demand, proofs. 7 has a sibling on each of the 7 levels below the root,
    # and 5 and 7 meet two levels up: 4 and 6, then one on each of 5 levels.
    assert dict(cost.bytes_down) == {0: 4 * (9 + 2) + 7 * 32, 1: 4 * (3 + 2) + 7 * 32, 2: 4 * 2}
    assert cost.leaks == {"slice server": KEYS_AND_WHOSE, "mirrors and CDNs": KEYS_AND_WHOSE}


def test_clients_that_are_gone_receive_nothing():
    layout = kh.Layout.of(MODEL, kh.Cut(ROW, {"w": 0}))
    state = ServerState.dense(layout, MODEL, SGD(1.0))
    left = {client: z for client, z in asked(layout, map(ROW.keys, KEYS)).items() if client}
    delivered = OnDemand().deliver(state, left)
    assert set(delivered.cost.bytes_down) == {1, 2}
    assert set(delivered.submodels) == {1, 2}


@pytest.mark.parametrize(("way", "calls", "hits"), [("on demand", 8, 4), ("pregenerated", 200, 12)])
def test_a_parameter_cut_twice_has_a_slice_for_each_pair_of_keys(way, calls, hits):
    """3 x 2 keys of one client, the same and 2 new ones of another: 12 asked for, 8 distinct."""
    a, b = kh.KeySpace("a", 10), kh.KeySpace("b", 20)
    model = {"w": np.zeros((10, 20), np.float32)}
    layout = kh.Layout.of(model, kh.Cut(a, {"w": 0}), kh.Cut(b, {"w": 1}))
    state = ServerState.dense(layout, model, SGD(1.0))
    keys = [(a.keys([1, 2, 3]), b.keys([4, 5])), (a.keys([1, 2]), b.keys([4, 5, 6]))]
    cost = WAYS[way].deliver(state, asked(layout, keys)).cost
    assert (cost.select_calls, cost.cache_hits, cost.distinct_slices) == (calls, hits, 8)
