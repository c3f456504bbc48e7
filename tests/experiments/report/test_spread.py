"""Mean and deviation, against numbers worked out by hand."""

import math

import pytest

from keyhole.experiments.report.spread import Spread, mean_curve, spread_of


def test_the_deviation_is_the_sample_standard_deviation():
    """0.70, 0.74, 0.81: mean 0.75, squares 0.0025 + 0.0001 + 0.0036 = 0.0062, over 2 = 0.0031."""
    spread = spread_of([0.70, 0.74, 0.81])
    assert spread.mean == pytest.approx(0.75)
    assert spread.deviation == pytest.approx(math.sqrt(0.0031))
    assert spread.trials == 3


def test_one_trial_has_no_deviation():
    assert spread_of([0.3]) == Spread(0.3, None, 1)


def test_no_trial_has_no_spread():
    assert spread_of([]) is None


def test_a_trial_that_diverged_is_not_left_out():
    spread = spread_of([0.5, math.nan, 0.6])
    assert math.isnan(spread.mean)
    assert spread.trials == 3


def test_a_curve_is_over_the_rounds_that_all_trials_have():
    curve = mean_curve([{10: 0.1, 20: 0.4, 30: 0.9}, {10: 0.3, 20: 0.2}])
    assert curve.rounds == (10, 20)
    assert curve.mean == pytest.approx((0.2, 0.3))
    assert curve.deviation == pytest.approx((math.sqrt(0.02), math.sqrt(0.02)))
    assert [spread.trials for spread in curve.spreads] == [2, 2]


def test_a_curve_of_one_trial_has_no_shade():
    assert mean_curve([{1: 0.5}]).deviation == (0.0,)


def test_a_curve_of_no_trial_is_empty():
    assert mean_curve([]).rounds == ()
