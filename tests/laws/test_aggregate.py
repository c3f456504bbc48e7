"""Laws that every aggregate obeys, and the few that are one's own."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import keyhole as kh
from tests.helpers import (
    AGGREGATES,
    AVERAGES,
    assert_trees_close,
    assert_trees_equal,
    whole_numbers,
)

VALUES = st.lists(
    st.fixed_dictionaries({"w": whole_numbers((2, 3)), "b": whole_numbers(())}),
    min_size=1,
    max_size=7,
)


@pytest.mark.parametrize("how", AGGREGATES)
@given(values=VALUES, data=st.data())
def test_dropouts_leave_the_aggregate_over_who_remains(how, values, data):
    gone = data.draw(st.sets(st.integers(0, len(values) - 1), max_size=len(values) - 1))
    rest = [value for client, value in enumerate(values) if client not in gone]
    found = AGGREGATES[how](kh.at_clients(values).drop(gone)).value
    assert_trees_equal(found, AGGREGATES[how](kh.at_clients(rest)).value)


@pytest.mark.parametrize("how", AGGREGATES)
@given(values=VALUES, random=st.randoms())
def test_the_order_of_clients_does_not_matter(how, values, random):
    shuffled = random.sample(values, len(values))
    assert_trees_close(
        AGGREGATES[how](kh.at_clients(shuffled)).value, AGGREGATES[how](kh.at_clients(values)).value
    )


@pytest.mark.parametrize("how", AVERAGES)
@given(value=whole_numbers((2, 3)), clients=st.integers(1, 6))
def test_an_average_of_equal_values_is_that_value(how, value, clients):
    found = AGGREGATES[how](kh.at_clients([{"w": value}] * clients)).value
    assert_trees_close(found, {"w": value})


@pytest.mark.parametrize("how", AGGREGATES)
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_floats_keep_their_type(how, dtype):
    values = kh.at_clients([np.ones(3, dtype), np.zeros(3, dtype)])
    assert AGGREGATES[how](values).value.dtype == dtype


@given(values=VALUES)
def test_trimming_nothing_is_the_mean_over_sorted_values(values):
    values = kh.at_clients(values)
    assert_trees_close(
        kh.aggregate_trimmed_mean(values, trim=0.0).value, kh.aggregate_mean(values).value
    )


@given(values=VALUES)
def test_equal_weights_are_no_weights(values):
    values = kh.at_clients(values)
    weights = kh.map_clients(lambda _: 3, values)
    assert_trees_close(
        kh.aggregate_weighted_mean(values, weights).value, kh.aggregate_mean(values).value
    )


@given(values=VALUES, data=st.data())
def test_whole_weights_count_a_client_that_often(values, data):
    weights = [data.draw(st.integers(0, 3)) for _ in values]
    if not sum(weights):
        weights[0] = 1
    repeated = [v for v, w in zip(values, weights, strict=True) for _ in range(w)]
    assert_trees_close(
        kh.aggregate_weighted_mean(kh.at_clients(values), kh.at_clients(weights)).value,
        kh.aggregate_mean(kh.at_clients(repeated)).value,
    )


def test_a_minority_of_wild_clients_does_not_move_the_robust_aggregates_far():
    values = kh.at_clients([np.full(4, v) for v in (1.0, 1.1, 0.9, 1.0, 1e9)])
    assert abs(kh.aggregate_median(values).value - 1).max() < 0.2
    assert abs(kh.aggregate_trimmed_mean(values, trim=0.2).value - 1).max() < 0.2
    assert abs(kh.aggregate_mean(values).value - 1).max() > 1e8


def test_sums_are_made_from_the_first_client_to_the_last():
    """1e8 swallows a 1 in float32, so the order shows: (1e8 + 1) - 1e8 = 0, (1e8 - 1e8) + 1 = 1."""
    big, one = np.float32(1e8), np.float32(1)
    assert kh.aggregate_sum(kh.at_clients([big, one, -big])).value == 0
    assert kh.aggregate_sum(kh.at_clients([big, -big, one])).value == 1
