"""Statistics over trials, held to published tables and to SciPy, which comes with JAX."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from keyhole.experiments.statistics import (
    Spread,
    paired_difference,
    spread_of,
    t_quantile,
    t_within,
)

# Two-sided 95 % and 99 % points of Student's t: Fisher and Yates, Statistical Tables, Table III.
PUBLISHED = {
    1: (12.706, 63.657),
    2: (4.303, 9.925),
    3: (3.182, 5.841),
    4: (2.776, 4.604),
    9: (2.262, 3.250),
    10: (2.228, 3.169),
    30: (2.042, 2.750),
    120: (1.980, 2.617),
}


@pytest.mark.parametrize(("degrees", "points"), PUBLISHED.items())
def test_quantiles_are_those_of_the_tables(degrees, points):
    found = (t_quantile(0.95, degrees), t_quantile(0.99, degrees))
    assert found == pytest.approx(points, abs=5e-4)


@given(st.floats(0, 100), st.integers(1, 200))
def test_probabilities_are_those_of_scipy(t, degrees):
    assert t_within(t, degrees) == pytest.approx(1 - 2 * stats.t.sf(t, degrees), abs=1e-12)


@given(st.lists(st.integers(-50, 50), min_size=2, max_size=9))
def test_an_interval_is_that_of_scipy(values):
    spread = spread_of([v / 7 for v in values])
    if spread.deviation == 0:
        assert spread.half_width == 0
        return
    scale = stats.sem([v / 7 for v in values])
    low, high = stats.t.interval(0.95, len(values) - 1, loc=spread.mean, scale=scale)
    assert spread.mean - spread.half_width == pytest.approx(low, abs=1e-9)
    assert spread.mean + spread.half_width == pytest.approx(high, abs=1e-9)


def test_a_paired_test_is_that_of_scipy():
    rng = np.random.default_rng(0)
    first = rng.normal(size=5)
    second = first + rng.normal(0.3, 0.2, size=5)
    found, known = paired_difference(first, second), stats.ttest_rel(second, first)
    assert found.p_value == pytest.approx(known.pvalue, rel=1e-9)
    low, high = known.confidence_interval(0.95)
    assert found.spread.mean - found.spread.half_width == pytest.approx(low)
    assert found.spread.mean + found.spread.half_width == pytest.approx(high)


def test_what_both_arms_share_cancels_out():
    """Trials differ by far more than arms; the arms differ by 1 in each."""
    found = paired_difference([0.0, 100.0, 50.0], [1.0, 101.1, 50.9])
    assert found.spread.mean == pytest.approx(1.0)
    assert found.p_value < 0.01
    assert stats.ttest_ind([0.0, 100.0, 50.0], [1.0, 101.1, 50.9]).pvalue > 0.9


def test_cases_without_a_test():
    assert paired_difference([], []) is None
    assert paired_difference([1.0], [2.0]).p_value is None
    assert paired_difference([1.0, 2.0], [1.0, 2.0]).p_value == 1.0
    assert paired_difference([1.0, 2.0], [2.0, 3.0]).p_value == 0.0
    assert paired_difference([1.0, 2.0], [2.0, math.nan]).p_value is None
    assert Spread(1.0, None, 1).half_width is None
