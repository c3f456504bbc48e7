"""Client-placed values cannot be read at the server, and know who is still there."""

import copy
import operator
import pickle
import re

import numpy as np
import pytest

import keyhole as kh
from keyhole.errors import CohortError, PlacementError
from tests.helpers import ROOT, read

WAYS_TO_READ = {
    "value": lambda v: v.value,
    "index": lambda v: v[0],
    "loop": list,
    "length": len,
    "membership": lambda v: 3 in v,
    "array": np.asarray,
    "numpy function": np.mean,
    "number": float,
    "whole number": int,
    "truth": bool,
    "comparison": lambda v: v == v,
    "order": lambda v: v < 3,
    "sum": lambda v: v + 1,
    "scaling": lambda v: 2 * v,
    "numpy scaling": lambda v: np.float32(2) * v,
    "negation": operator.neg,
    "pickling": pickle.dumps,
    "copying": copy.deepcopy,
}


@pytest.mark.parametrize("way", WAYS_TO_READ)
def test_the_server_cannot_read_a_client_placed_value(way):
    secret = kh.at_clients([31.0, 14.0])
    with pytest.raises(PlacementError, match="cannot be read at the server") as raised:
        WAYS_TO_READ[way](secret)
    assert "aggregate it first" in raised.value.fix
    assert "31" not in str(raised.value)


def test_printing_shows_who_is_there_and_nothing_else():
    assert (
        repr(kh.at_clients({"a": 31.0, "b": 2.0}).drop("a"))
        == "ClientValue(1 of 2 clients present)"
    )
    assert "7" not in repr(kh.KeySpace("row", 9).keys([7]))


def test_a_client_placed_value_knows_who_is_still_there():
    value = kh.at_clients({"a": 1, "b": 2, "c": 3}).drop(["b"]).drop(["c"])
    assert (value.cohort, value.present, value.lost) == (("a", "b", "c"), ("a",), ("b", "c"))


def test_dropping_someone_twice_changes_nothing():
    once = kh.at_clients([1, 2]).drop([0])
    assert once.drop([0]).lost == (0,)


def test_mapping_meets_only_clients_that_hold_every_argument():
    a, b = kh.at_clients([1, 2, 3]).drop([0]), kh.at_clients([10, 20, 30]).drop([2])
    assert read(kh.map_clients(operator.add, a, b)) == {1: 22}


def test_mapping_keeps_the_order_of_the_cohort():
    value = kh.at_clients({"z": 1, "a": 2})
    assert kh.map_clients(str, value).present == ("z", "a")


def test_mapping_a_server_value_asks_for_a_broadcast():
    with pytest.raises(PlacementError, match="broadcast a server-placed value first"):
        kh.map_clients(abs, kh.at_server(3))


def test_values_of_different_cohorts_do_not_mix():
    with pytest.raises(CohortError, match="one cohort"):
        kh.map_clients(operator.add, kh.at_clients({"a": 1}), kh.at_clients({"b": 1}))


def test_broadcast_reaches_those_who_are_still_there():
    received = kh.broadcast(kh.at_server("x"), to=kh.at_clients([1, 2, 3]).drop([1]))
    assert read(received) == {0: "x", 2: "x"}
    assert received.lost == (1,)


def test_only_those_named_here_use_the_door_out_of_a_client_placement():
    users = {"primitives/deselect.py"}
    found = {
        path.relative_to(ROOT / "src/keyhole").as_posix()
        for path in (ROOT / "src/keyhole").rglob("*.py")
        if "contributions(" in path.read_text() and path.name != "placement.py"
    }
    assert found == users


def test_nothing_but_placement_touches_what_clients_hold():
    for path in (ROOT / "src/keyhole").rglob("*.py"):
        if path.name != "placement.py":
            assert not re.search(r"(?<!self)\._held\b", path.read_text()), path
