"""Ragged rows, clients and texts: what a plain list would say."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyhole.data.columns import Texts, encode_texts
from keyhole.data.federated import FederatedData, Ragged, draw_pool, hold_out
from keyhole.errors import InputError

ROWS = st.lists(st.lists(st.integers(0, 99), max_size=5), max_size=8)


def lists(rows):
    return [rows[i].tolist() for i in range(len(rows))]


@given(ROWS, st.data())
def test_ragged_rows_behave_like_a_list_of_lists(rows, data):
    ragged = Ragged.of(rows)
    assert lists(ragged) == rows
    assert ragged.lengths.tolist() == [len(row) for row in rows]
    start, stop = sorted(data.draw(st.tuples(st.integers(0, 9), st.integers(0, 9))))
    part = ragged[start:stop]
    assert lists(part) == rows[start:stop]
    assert part.flat.tolist() == [value for row in rows[start:stop] for value in row]
    assert part.row_numbers.tolist() == [
        number for number, row in enumerate(rows[start:stop]) for _ in row
    ]
    if rows:
        at = data.draw(st.lists(st.integers(0, len(rows) - 1)))
        assert lists(ragged[np.array(at, np.int64)]) == [rows[i] for i in at]
        assert ragged[-1].tolist() == rows[-1]


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]))))
def test_texts_behave_like_a_list(texts):
    found = Texts(encode_texts(texts))
    assert list(found) == texts
    assert found[1:3] == texts[1:3]
    assert [found[-1]] == texts[-1:] if texts else not found


def test_rows_of_a_part_are_gathered_from_that_part():
    part = Ragged.of([[1], [2, 3], [], [4]])[1:]
    assert lists(part[np.array([2, 0])]) == [[4], [2, 3]]


def three_clients():
    columns = {"label": np.arange(6), "words": Ragged.of([[i] * i for i in range(6)])}
    return FederatedData.of(["a", "b", "c"], [3, 1, 2], columns)


def test_a_client_is_a_slice_of_each_column():
    data = three_clients().subset([2, 0])
    assert data.client(0)["label"].tolist() == [4, 5]
    assert lists(data.client(1)["words"]) == [[], [1], [2, 2]]
    assert data.with_min_examples(3).client_ids == ["a"]


def test_a_pool_is_drawn_from_the_clients_of_a_subset_alone():
    pool = draw_pool(three_clients().subset([2, 1]), 10, np.random.default_rng(0))
    assert pool["label"].tolist() == [4, 5, 3]
    assert lists(pool["words"]) == [[4] * 4, [5] * 5, [3] * 3]
    assert len(draw_pool(three_clients(), 2, np.random.default_rng(0))["label"]) == 2


def test_held_out_clients_are_the_others():
    kept, held_out = hold_out(three_clients(), 0.4, np.random.default_rng(1))
    assert sorted([*kept.client_ids, *held_out.client_ids]) == ["a", "b", "c"]
    with pytest.raises(InputError, match="nobody"):
        hold_out(three_clients(), 0, np.random.default_rng(1))
