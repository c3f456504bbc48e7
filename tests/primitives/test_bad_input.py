"""Bad input gets one clear error: what is wrong, the value, what is allowed, what to do."""

import numpy as np
import pytest

import keyhole as kh
from keyhole.errors import (
    CohortError,
    CutError,
    InputError,
    KeySpaceError,
    NotFiniteError,
    ShapeError,
)

ROW = kh.KeySpace("row", 5)
LAYOUT = kh.Layout.of({"w": np.zeros((5, 2))}, kh.Cut(ROW, {"w": 0}))


def model(**shapes):
    return {path: np.zeros(shape) for path, shape in shapes.items()}


def update_of(*values):
    return kh.at_clients([{"w": np.array([value])} for value in values])


BAD_INPUT = {
    "key -1": (KeySpaceError, "got -1; expected 0..4", lambda: ROW.keys([0, -1])),
    "key = num_keys": (KeySpaceError, "got 5; expected 0..4", lambda: ROW.keys([5, 0])),
    "key beyond int64": (KeySpaceError, f"got {2**64}; expected 0..4", lambda: ROW.keys([2**64])),
    "key beyond int63": (KeySpaceError, f"got {2**63}", lambda: ROW.keys(np.array([2**63], "u8"))),
    "float keys": (KeySpaceError, "got dtype float64", lambda: ROW.keys([1.0])),
    "boolean keys": (KeySpaceError, "got dtype bool", lambda: ROW.keys([True, False])),
    "text keys": (KeySpaceError, "not integers", lambda: ROW.keys(["1"])),
    "a single key": (KeySpaceError, r"got shape \(\)", lambda: ROW.keys(3)),
    "a matrix of keys": (KeySpaceError, r"got shape \(1, 2\)", lambda: ROW.keys([[1, 2]])),
    "no keys at all": (KeySpaceError, "got 0; expected", lambda: kh.KeySpace("row", 0)),
    "half a key": (KeySpaceError, "got 1.5; expected", lambda: kh.KeySpace("row", 1.5)),
    "unchecked keys": (
        KeySpaceError,
        "got list; expected Keys",
        lambda: kh.select(kh.at_server([1]), kh.at_clients([[0]]), lambda x, k: x[k]),
    ),
    "keys of another space": (
        KeySpaceError,
        "got 'column' of 5; expected 'row' of 5",
        lambda: LAYOUT.select(model(w=(5, 2)), kh.KeySpace("column", 5).keys([1])),
    ),
    "keys of one space missing": (
        KeySpaceError,
        "got none; expected 'row' of 5",
        lambda: LAYOUT.select(model(w=(5, 2)), ()),
    ),
    "sizes without their key space": (
        KeySpaceError,
        "got column; expected row",
        lambda: LAYOUT.client_size(column=3),
    ),
    "joining unequal lengths": (
        KeySpaceError,
        "got 1, 2; expected equal lengths",
        lambda: kh.Product((ROW, ROW)).join(ROW.keys([1]), ROW.keys([1, 2])),
    ),
    "joining too few": (
        KeySpaceError,
        "got 1 sequences; expected 2",
        lambda: kh.Product((ROW, ROW)).join(ROW.keys([1])),
    ),
    "splitting foreign keys": (
        KeySpaceError,
        "got 'row' of 5; expected 'row\\*row' of 25",
        lambda: kh.Product((ROW, ROW)).split(ROW.keys([1])),
    ),
    "a sequence of another length": (
        KeySpaceError,
        "got 1; expected 2",
        lambda: kh.Sequences(ROW, 2).join(ROW.keys([1])),
    ),
    "empty buckets": (KeySpaceError, "got 0; expected 1..5", lambda: kh.Buckets(ROW, 0)),
    "buckets beyond the space": (KeySpaceError, "got 6", lambda: kh.Buckets(ROW, 6)),
    "NaN in an update": (
        NotFiniteError,
        "got 1 of 2 clients",
        lambda: kh.deselect_mean(
            update_of([1.0, 2.0], [np.nan, 0.0]), ROW.place([[0], [1]]), LAYOUT.deselect
        ),
    ),
    "infinity in an update": (
        NotFiniteError,
        "got 1 of 1 clients",
        lambda: kh.deselect_mean(update_of([np.inf, 2.0]), ROW.place([[0]]), LAYOUT.deselect),
    ),
    "an update of another shape": (
        ShapeError,
        r"'w' does not fit the cuts: got \(1, 3\); expected \(1, 2\)",
        lambda: kh.deselect_mean(update_of([1.0, 2.0, 3.0]), ROW.place([[0]]), LAYOUT.deselect),
    ),
    "an update with more slices than keys": (
        ShapeError,
        r"got \(1, 2\); expected \(2, 2\)",
        lambda: LAYOUT.deselect({"w": np.zeros((1, 2))}, ROW.keys([0, 1])),
    ),
    "a model of another shape": (
        ShapeError,
        r"got \(4, 2\); expected \(5, 2\)",
        lambda: LAYOUT.select(model(w=(4, 2)), ROW.keys([0])),
    ),
    "a model without a parameter": (
        ShapeError,
        "got no such parameter",
        lambda: LAYOUT.select({}, ROW.keys([0])),
    ),
    "a model with one more": (
        ShapeError,
        "'b' does not fit the cuts",
        lambda: LAYOUT.select(model(w=(5, 2), b=(2,)), ROW.keys([0])),
    ),
    "slices of another length": (
        ShapeError,
        "got 3 bytes; expected 16",
        lambda: LAYOUT.parts[0].unpack(b"abc"),
    ),
    "arrays of different shapes": (
        ShapeError,
        r"got \(2,\), \(3,\); expected one shape",
        lambda: kh.aggregate_sum(kh.at_clients([np.zeros(2), np.zeros(3)])),
    ),
    "trees that differ": (
        ShapeError,
        "trees differ in structure",
        lambda: kh.aggregate_sum(kh.at_clients([{"a": 1}, {"b": 1}])),
    ),
    "a tree with an ambiguous path": (
        ShapeError,
        "got 'a/b'",
        lambda: kh.Layout.of({"a": {"b": np.zeros(1)}, "a/b": np.zeros(1)}),
    ),
    "two cuts claiming one axis": (
        CutError,
        "axis 0 of 'w' is claimed twice: got key spaces 'row' and 'line'",
        lambda: kh.Layout.of(
            model(w=(5, 2)), kh.Cut(ROW, {"w": 0}), kh.Cut(kh.KeySpace("line", 5), {"w": -2})
        ),
    ),
    "two cuts of one key space": (
        CutError,
        "got row, row; expected one cut per key space",
        lambda: kh.Layout.of(model(w=(5, 5)), kh.Cut(ROW, {"w": 0}), kh.Cut(ROW, {"w": 1})),
    ),
    "unknown parameter": (
        CutError,
        "got 'v'; expected 'w'",
        lambda: kh.Layout.of(model(w=(5, 2)), kh.Cut(ROW, {"v": 0})),
    ),
    "unknown axis": (
        CutError,
        "got 2; expected 0..1",
        lambda: kh.Layout.of(model(w=(5, 2)), kh.Cut(ROW, {"w": 2})),
    ),
    "an axis of a scalar": (
        CutError,
        "got 0; expected none: it is a scalar",
        lambda: kh.Layout.of(model(w=()), kh.Cut(ROW, {"w": 0})),
    ),
    "an axis of another length": (
        CutError,
        "got 2; expected 5",
        lambda: kh.Layout.of(model(w=(5, 2)), kh.Cut(ROW, {"w": 1})),
    ),
    "empty cohort": (
        CohortError,
        "nobody is left",
        lambda: kh.aggregate_mean(kh.at_clients([])),
    ),
    "a cohort that lost everyone": (
        CohortError,
        "got ClientValue\\(0 of 1 clients present\\)",
        lambda: kh.deselect_mean(
            update_of([1.0, 2.0]).drop([0]), ROW.place([[0]]), LAYOUT.deselect
        ),
    ),
    "different cohorts": (
        CohortError,
        "cohorts of 1 and 2 clients",
        lambda: kh.deselect_mean(update_of([1.0, 2.0]), ROW.place([[0], [1]]), LAYOUT.deselect),
    ),
    "dropping a stranger": (CohortError, "1 unknown", lambda: ROW.place([[0]]).drop([7])),
    "a negative weight": (
        InputError,
        "got -1; expected 0 or more",
        lambda: kh.aggregate_weighted_mean(kh.at_clients([1.0]), kh.at_clients([-1])),
    ),
    "a weight that is not a number": (
        InputError,
        "got nan; expected 0 or more",
        lambda: kh.aggregate_weighted_mean(kh.at_clients([1.0]), kh.at_clients([np.nan])),
    ),
    "weights of zero": (
        InputError,
        "got 0.0; expected a positive sum",
        lambda: kh.aggregate_weighted_mean(kh.at_clients([1.0]), kh.at_clients([0])),
    ),
    "trimming half": (
        InputError,
        "got 0.5; expected 0 <= trim < 0.5",
        lambda: kh.aggregate_trimmed_mean(kh.at_clients([1.0]), trim=0.5),
    ),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_refused_with_four_facts(case):
    kind, message, act = BAD_INPUT[case]
    with pytest.raises(kind, match=message) as raised:
        act()
    error = raised.value
    assert all((error.wrong, error.got, error.allowed, error.fix))
    assert str(error) == f"{error.wrong}: got {error.got}; expected {error.allowed}; {error.fix}"
