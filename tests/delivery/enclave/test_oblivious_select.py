"""The oblivious select equals x[keys], and reads every row for every key."""

import signal
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keyhole.delivery.enclave.program import (
    bucketed_select,
    oblivious_select,
    oblivious_select_plain,
)
from tests.delivery.enclave.forbidden_row import NUM_KEYS, selections
from tests.helpers import ROOT


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


def test_every_row_is_read_whatever_is_selected():
    """Where one row cannot be read, a process that selects others, or nothing, ends by SIGSEGV."""
    program = [sys.executable, "-m", "tests.delivery.enclave.forbidden_row"]
    ended = subprocess.run(
        program, cwd=ROOT, check=False, capture_output=True, text=True, timeout=300
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    lines = [line.split() for line in ended.stdout.splitlines()]
    assert {(int(row), name) for row, name, _ in lines} == {
        (row, name) for row in range(NUM_KEYS) for name in selections(0)
    }
    assert {int(code) for *_, code in lines} == {-signal.SIGSEGV}


@pytest.mark.parametrize("words", [1, 300])
def test_memory_beside_the_output_does_not_grow_with_the_keys(words):
    rows = rows_of(4096 // words + 9, words)
    oblivious_select(rows, np.arange(3))  # what is compiled on first use
    keys = np.arange(6_000) % len(rows)
    tracemalloc.start()
    try:
        found, visited = oblivious_select(rows, keys)
        _, limit = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    np.testing.assert_array_equal(found, rows[keys])
    np.testing.assert_array_equal(visited, np.full(len(keys), len(rows)))
    assert limit < found.nbytes + visited.nbytes + (4 << 20)


@settings(max_examples=20)
@given(st.integers(1, 40), st.integers(1, 11), st.integers(1, 7), st.data())
def test_a_bucket_gives_the_row_of_its_key_alone(num_keys, num_buckets, words, data):
    """Also where the last places of a bucket are empty, and whose key is in another bucket."""
    rows = rows_of(num_keys, words)
    draw = st.lists(st.integers(-1, num_keys - 1), min_size=num_buckets, max_size=num_buckets)
    members = np.array([data.draw(draw) for _ in range(5)], np.int32).T
    keys = np.array(data.draw(draw), np.int64)
    found, visited = bucketed_select(rows, members, keys)
    is_there = (keys >= 0) & (members == keys[:, None]).any(axis=1)
    expected = np.where(is_there[:, None], rows[keys], np.uint64(0))
    np.testing.assert_array_equal(found, expected)
    assert visited.tolist() == [5] * num_buckets
