"""Examples that are set aside: by client, by time, within clients."""

import numpy as np
import pytest

import keyhole as kh
from keyhole.data.federated import Ragged
from keyhole.errors import InputError


def make(counts=(4, 1, 10), **columns):
    total = sum(counts)
    people = np.repeat([f"u{i}" for i in range(len(counts))], counts)
    usual = {"item": np.arange(total), "words": Ragged.of([[i] * (i % 3) for i in range(total)])}
    return kh.data.from_arrays(usual | columns, client=people, inputs={"item": "item"})


def rows(data, split):
    """Client -> its items, after a look that all columns are of the same rows."""
    found = {}
    part = data.splits[split]
    for i, person in enumerate(part.client_ids):
        columns = part.client(i)
        assert [w.tolist() for w in columns["words"]] == [[x] * (x % 3) for x in columns["item"]]
        found[person] = columns["item"].tolist()
    return found


def test_clients_are_on_one_side_with_all_they_have():
    data = make([2] * 20).hold_out(0.1)
    assert (len(data.splits["train"]), len(data.splits["test"])) == (18, 2)
    everyone = rows(data, "train") | rows(data, "test")
    assert everyone == {f"u{i}": [2 * i, 2 * i + 1] for i in range(20)}
    again, other = make([2] * 20).hold_out(0.1), make([2] * 20).hold_out(0.1, seed=1)
    assert rows(again, "test") == rows(data, "test") != rows(other, "test")


def test_a_cut_in_time_puts_the_latest_examples_aside_whoever_has_them():
    """Of fifteen times 0, 1 and 2, five each, a fifth is three: all five of time 2."""
    data = make(time=np.arange(15) % 3).hold_out(0.2, by="time", column="time")
    assert rows(data, "test") == {"u0": [2], "u2": [5, 8, 11, 14]}
    assert rows(data, "train") == {"u0": [0, 1, 3], "u1": [4], "u2": [6, 7, 9, 10, 12, 13]}


def test_within_a_client_its_latest_examples_are_aside():
    """Of 4 a quarter is 1; of 10 it is 2; one example alone stays."""
    data = make(time=-np.arange(15)).hold_out(0.25, by="within", column="time")
    assert rows(data, "test") == {"u0": [0], "u2": [5, 6]}
    assert rows(data, "train")["u1"] == [4]


def test_within_a_client_without_times_they_are_drawn():
    data = make().hold_out(0.5, by="within")
    assert {who: len(items) for who, items in rows(data, "test").items()} == {"u0": 2, "u2": 5}
    assert rows(make().hold_out(0.5, by="within", seed=3), "test") != rows(data, "test")
    both = rows(data, "train")["u2"] + rows(data, "test")["u2"]
    assert sorted(both) == list(range(5, 15))


def test_a_second_split_is_taken_from_what_is_left():
    data = make([1] * 10).hold_out(0.2).hold_out(0.25, into="validation")
    assert {name: len(part) for name, part in data.splits.items()} == {
        "train": 6,
        "test": 2,
        "validation": 2,
    }
    everyone = [who for part in data.splits.values() for who in part.client_ids]
    assert sorted(everyone) == sorted(f"u{i}" for i in range(10))


def test_facts_tell_how_data_were_split():
    told = {
        str(sorted(data.facts.items()))
        for data in (
            make(time=np.arange(15)),
            make(time=np.arange(15)).hold_out(0.4),
            make(time=np.arange(15)).hold_out(0.5),
            make(time=np.arange(15)).hold_out(0.4, seed=1),
            make(time=np.arange(15)).hold_out(0.4, by="within"),
            make(time=np.arange(15)).hold_out(0.4, by="within", column="time"),
        )
    }
    assert len(told) == 6


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"share": 0}, "got a share of 0"),
        ({"share": 1.0}, "expected a share between 0 and 1"),
        ({"into": "train"}, "none of train"),
        ({"by": "clients"}, "got by='clients'; expected client, time or within"),
        ({"by": "time"}, "no column of times: got None"),
        ({"by": "time", "column": "tim"}, "no column of times: got 'tim'"),
        ({"by": "time", "column": "words"}, "no column of times: got 'words'"),
        ({"by": "time", "column": "same"}, "leave nothing on one side: got 15 of 15"),
        ({"by": "time", "column": "fine"}, "no exact times: got float32"),
        ({"share": 0.01}, "leave nobody on one side"),
    ],
)
def test_a_split_that_cannot_be_made_is_named(changes, said):
    data = make(same=np.ones(15), fine=1.6e9 + np.arange(15))
    with pytest.raises(InputError) as raised:
        data.hold_out(**{"share": 0.2} | changes)
    assert said in str(raised.value)
