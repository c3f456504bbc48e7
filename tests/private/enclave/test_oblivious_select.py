"""The oblivious select equals x[keys], and reads every row for every key."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keyhole.private.enclave.oblivious_select import (
    _scan_tile,
    oblivious_select,
    oblivious_select_plain,
)


def rows_of(num_keys, words):
    return np.random.default_rng(num_keys).integers(0, 2**64, (num_keys, words), dtype=np.uint64)


@settings(max_examples=30)
@given(st.integers(1, 70), st.integers(1, 9), st.data())
def test_selected_rows_are_those_of_the_keys(num_keys, words, data):
    rows = rows_of(num_keys, words)
    keys = np.array(data.draw(st.lists(st.integers(-1, num_keys - 1), max_size=9)), np.int64)
    found, visited = oblivious_select(rows, keys)
    expected = np.where((keys >= 0)[:, None], rows[keys], np.uint64(0))
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(found, oblivious_select_plain(rows, keys))
    np.testing.assert_array_equal(visited, np.full(len(keys), num_keys))


def test_rows_longer_than_a_tile_are_selected():
    rows = rows_of(19, 5000)
    found, visited = oblivious_select(rows, np.array([18, 0, -1, 7]))
    np.testing.assert_array_equal(found[[0, 1, 3]], rows[[18, 0, 7]])
    assert not found[2].any()
    assert visited.tolist() == [19] * 4


@pytest.mark.parametrize("count", [1, 7, 8, 9, 24, 31])
def test_the_scan_reads_every_row_whatever_its_mask(count):
    """With all masks open every key gets the OR of all rows: no row is passed over."""
    rows = rows_of(count, 3)
    out, visited = np.zeros((2, 3), np.uint64), np.zeros(2, np.int64)
    _scan_tile(rows, np.full((2, count), 2**64 - 1, np.uint64), out, visited)
    np.testing.assert_array_equal(out, np.bitwise_or.reduce(rows, axis=0)[None].repeat(2, axis=0))
    assert visited.tolist() == [count] * 2
