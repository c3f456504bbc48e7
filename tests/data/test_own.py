"""Data of your own, in memory: what comes out, and one error for each mistake."""

import numpy as np
import pytest

import keyhole as kh
from keyhole.data.federated import Ragged
from keyhole.errors import InputError

ITEM = {"item": "item"}


def make(**changes):
    """Three rows of two clients, ben's between ann's."""
    columns = {"user": ["ann", "ben", "ann"], "item": [7, 3, 8], "label": [1.0, 0.0, 0.5]}
    return kh.data.from_arrays(
        columns | changes, client="user", inputs={"item": "item"}, target="label"
    )


def of_client(data, i, split="train"):
    columns = data.splits[split].client(i)
    return {
        name: [row.tolist() for row in column] if isinstance(column, Ragged) else column.tolist()
        for name, column in columns.items()
    }


def test_rows_are_sorted_by_client_and_keep_their_order():
    data = make()
    assert data.splits["train"].client_ids == ["ann", "ben"]
    assert of_client(data, 0) == {"item": [7, 8], "label": [1.0, 0.5]}
    assert of_client(data, 1) == {"item": [3], "label": [0.0]}
    assert (data.inputs, data.target) == ({"item": "item"}, "label")
    columns = data.splits["train"].columns
    assert (columns["item"].dtype, columns["label"].dtype) == (np.int32, np.float32)


def test_clients_may_be_an_array_of_numbers():
    data = kh.data.from_arrays({"item": [7, 3, 8]}, client=np.array([5, 2, 5]), inputs=ITEM)
    assert data.splits["train"].client_ids == ["5", "2"]
    assert data.splits["train"].counts.tolist() == [2, 1]


def test_the_order_of_columns_and_how_rows_are_given_do_not_matter():
    by_client = kh.data.from_dict(
        {"ann": {"label": [1.0, 0.5], "item": [7, 8]}, "ben": {"item": [3], "label": [0.0]}},
        inputs=ITEM,
        target="label",
    )
    assert by_client.facts == make().facts
    assert of_client(by_client, 0) == of_client(make(), 0)


@pytest.mark.parametrize(
    "changes",
    [
        {"item": [7, 3, 9]},
        {"label": [1.0, 0.0, 0.25]},
        {"user": ["ann", "ben", "ben"]},
        {"user": ["ann", "bob", "ann"]},
        {"label": np.array([1, 0, 0])},
    ],
)
def test_other_content_has_another_digest(changes):
    assert make(**changes).facts["sha256"] != make().facts["sha256"]


def test_other_declarations_have_another_digest():
    columns = {"user": ["ann"], "item": [1], "label": [1.0]}
    digests = {
        kh.data.from_arrays(columns, client="user", **said).facts["sha256"]
        for said in ({}, {"inputs": ITEM}, {"target": "label"}, {"inputs": {"item": "film"}})
    }
    assert len(digests) == 4


def test_texts_are_numbered_by_the_clients_that_use_them():
    """`up` is used by two clients once each; `heat` three times by one; `ali` once by one."""
    films = ["heat", "heat", "heat", "up", "up", "ali"]
    data = kh.data.from_arrays(
        {"film": films}, client=["a", "a", "a", "a", "b", "b"], inputs={"film": "film"}
    )
    assert data.names["film"] == ["up", "ali", "heat"]  # ties by alphabet
    assert data.splits["train"].columns["film"].tolist() == [2, 2, 2, 0, 0, 1]


def test_columns_of_one_key_space_share_their_numbers():
    data = kh.data.from_arrays(
        {"title": [["new", "film"], ["film"]], "text": [["a", "film"], ["a", "a"]]},
        client=["a", "b"],
        inputs={"title": "word", "text": "word"},
    )
    assert data.names["word"] == ["a", "film", "new"]
    assert of_client(data, 0) == {"title": [[2, 1]], "text": [[0, 1]]}


def test_a_target_of_texts_is_numbered_too():
    data = kh.data.from_arrays(
        {"label": ["dog", "cat", "cat"]}, client=["a", "b", "c"], target="label"
    )
    assert data.names == {"label": ["cat", "dog"]}
    assert data.splits["train"].columns["label"].tolist() == [1, 0, 0]


def test_lists_of_one_length_are_a_matrix_and_others_are_ragged():
    rows = {"a": {"words": [[1, 2], [3, 4]]}, "b": {"words": [[5, 6]]}}
    same = kh.data.from_dict(rows, inputs={"words": "word"})
    assert same.splits["train"].columns["words"].tolist() == [[1, 2], [3, 4], [5, 6]]
    rows["b"] = {"words": [[5], []]}
    ragged = kh.data.from_dict(rows, inputs={"words": "word"})
    assert of_client(ragged, 0) == {"words": [[1, 2], [3, 4]]}
    assert of_client(ragged, 1) == {"words": [[5], []]}
    given = kh.data.from_arrays(
        {"words": Ragged.of([[5], [1, 2]])}, client=["b", "a"], inputs={"words": "word"}
    )
    assert of_client(given, 1) == {"words": [[1, 2]]}


def test_images_and_dates_are_kept():
    when = np.array(["2020-01-02", "2020-01-01"], "datetime64[D]")
    data = kh.data.from_arrays({"image": np.ones((2, 3, 3)), "when": when}, client=["a", "b"])
    assert data.splits["train"].columns["image"].shape == (2, 3, 3)
    assert np.diff(data.splits["train"].columns["when"]).tolist() == [-86_400_000_000]


def test_large_keys_given_as_floats_are_not_rounded():
    data = kh.data.from_arrays({"item": np.array([2.0**24 + 1])}, client=["a"], inputs=ITEM)
    assert data.splits["train"].columns["item"].tolist() == [2**24 + 1]


NAN = float("nan")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"user": ["ann", None, "ann"]}, "column 'user' has no client id in row 1: got None"),
        ({"user": ["ann", "", "ann"]}, "column 'user' has no client id in row 1: got ''"),
        ({"user": np.array([1.0, 2.0, NAN])}, "column 'user' has no client id in row 2: got nan"),
        ({"user": ["ann", "ben", 3]}, "an id of another kind in row 2: got 3"),
        ({"user": [0.5, 1, 2]}, "an id of another kind in row 0: got 0.5"),
        ({"item": [7, -3, 8]}, "column 'item' names no key in row 1 of client 'ben': got -3"),
        ({"item": [7, 3, 8.5]}, "column 'item' names no key in row 2 of client 'ann': got 8.5"),
        ({"item": [7, 3, NAN]}, "column 'item' names no key in row 2 of client 'ann': got nan"),
        ({"item": [7, np.inf, 1]}, "column 'item' names no key in row 1 of client 'ben': got inf"),
        ({"item": [7, None, 8]}, "column 'item' names no key in row 1 of client 'ben': got nan"),
        ({"item": [True, False, True]}, "column 'item' names no key in row 0"),
        ({"item": [[1], [2, -2], []]}, "column 'item' names no key in row 1 of client 'ben'"),
        ({"item": ["a", "b", None]}, "column 'item' has no value in row 2 of client 'ann'"),
        ({"item": [["a"], None, []]}, "column 'item' has no value in row 1 of client 'ben'"),
        ({"item": ["a", 3, "b"]}, "got a int in row 1 of client 'ben'"),
        ({"item": [[1], ["b"], [2]]}, "lists of texts and lists of numbers"),
        ({"item": [1, 2]}, "different length: got {'item': 2, 'label': 3, 'user': 3}"),
        ({"label": [1.0, NAN, 0.0]}, "target 'label' has no value in row 1 of client 'ben'"),
        ({"note": ["a", "b", "c"]}, "column 'note' holds texts and is no input: got 'a'"),
        ({"note": [{}, {}, {}]}, "got a dict in row 0 of client 'ann'"),
        ({"note": np.ones(3, complex)}, "column 'note' cannot be read: got complex128"),
        ({"user": []}, "column 'user' names no clients"),
    ],
)
def test_a_mistake_is_named(changes, said):
    with pytest.raises(InputError) as raised:
        make(**changes)
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("clients", "said"),
    [
        ({"a": {"item": [1]}, "b": {"item": [2, -1]}}, "in row 1 of client 'b': got -1"),
        ({"a": {"item": [1]}, "b": {"item": []}}, "client 'b' has no examples"),
        ({"a": {"item": [1]}, "b": {"item": [1], "x": [1]}}, "client 'b' has other columns"),
        ({"a": {"item": [1], "x": [1, 2]}}, "columns of client 'a' are of different length"),
        ({"a": {"itm": [1]}}, "did you mean itm?"),
        ({None: {"item": [1]}}, "clients has no client id in row 0"),
        ({1: {"item": [1]}, "1": {"item": [1]}}, "an id of another kind"),
        ({"a": {"item": [1]}, "b": {"item": ["x"]}}, "got texts and numbers"),
        ({}, "clients names no clients"),
    ],
)
def test_a_mistake_of_one_client_is_named(clients, said):
    with pytest.raises(InputError) as raised:
        kh.data.from_dict(clients, inputs=ITEM)
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (
            {"client": "usr"},
            "client names a column that is not there: got 'usr'.*did you mean user",
        ),
        ({"inputs": {"itm": "item"}}, "inputs name a column .*did you mean item"),
        ({"target": "lable"}, "target names a column .*did you mean label"),
        ({"inputs": {"user": "user"}}, "inputs name a column that is not there: got 'user'"),
    ],
)
def test_a_declaration_of_no_column_is_named(said, expected):
    columns = {"user": ["ann"], "item": [1], "label": [1.0]}
    with pytest.raises(InputError, match=expected):
        kh.data.from_arrays(columns, **{"client": "user"} | said)


def test_texts_and_numbers_do_not_share_a_key_space():
    with pytest.raises(InputError, match="key space 'word' are of two kinds: got numbers in 'n'"):
        kh.data.from_arrays({"n": [1], "t": ["a"]}, client=["x"], inputs={"n": "word", "t": "word"})


def _task(label):
    from keyhole.models.dense import masked_mean

    def loss(params, batch, mask):
        return masked_mean((params["score"][batch["item"]] - batch["label"]) ** 2, mask)

    columns = {"item": np.arange(20) % 9, "label": np.full(20, label)}
    data = kh.data.from_arrays(columns, client=np.arange(20) // 2, inputs=ITEM, target="label")
    model = kh.Model(
        init=lambda seed: {"score": np.zeros(9, np.float32)},
        loss=loss,
        predict=lambda params, batch: params["score"][batch["item"]],
        cuts=(kh.Cut(kh.KeySpace("item", 9), {"score": 0}),),
    )
    return kh.Task(model, data.hold_out(0.2))


def test_a_run_is_not_resumed_on_other_data(tmp_path):
    settings = {"rounds": 1, "m": 2, "cohort": 3, "progress": False, "out": tmp_path / "run"}
    assert kh.train(_task(1.0), **settings).rounds == 1
    with pytest.raises(InputError, match="holds a run with another"):
        kh.train(_task(2.0), **settings)


@pytest.mark.parametrize("value", [NAN, float("inf"), -float("inf")])
def test_a_target_that_is_not_finite_names_its_row_and_client(value):
    with pytest.raises(InputError, match=f"no value in row 1 of client 'ben': got {value}"):
        make(label=[1.0, value, 0.5])


def test_data_say_what_they_hold_in_a_line():
    assert repr(make()) == (
        "<data set own: train 2 clients with 3 examples; columns item, label; keys item -> item>"
    )
