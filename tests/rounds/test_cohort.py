"""Cohorts: drawn without replacement or by Poisson, a function of seed, trial and round alone."""

import numpy as np
import pytest

from keyhole.errors import InputError
from keyhole.sampling import Cohorts, Stream, sample_cohort, sample_dropouts


def test_a_cohort_has_its_size_and_nobody_twice():
    for t in range(50):
        cohort = sample_cohort(Cohorts(100, 30), seed=1, trial=0, t=t)
        assert len(set(cohort)) == 30


def test_the_same_place_draws_the_same_clients_and_others_draw_others():
    cohorts = Cohorts(1000, 10)
    assert sample_cohort(cohorts, 1, 0, 5) == sample_cohort(cohorts, 1, 0, 5)
    places = {sample_cohort(cohorts, *p) for p in [(1, 0, 5), (2, 0, 5), (1, 1, 5), (1, 0, 6)]}
    assert len(places) == 4


def test_over_selection_asks_more():
    assert len(sample_cohort(Cohorts(100, 10, over_selection=1.3), 0, 0, 0)) == 13


def test_everyone_is_drawn_equally_often():
    """Chi-square over 20 clients and 2,000 cohorts of 5: each expected 500 times."""
    counts = np.zeros(20)
    for t in range(2000):
        counts[list(sample_cohort(Cohorts(20, 5), 7, 0, t))] += 1
    assert ((counts - 500) ** 2 / 500).sum() < 43.8  # 99.9 % of chi-square with 19 degrees


def test_poisson_cohorts_vary_around_their_size():
    sizes = [len(sample_cohort(Cohorts(200, 50, "poisson"), 0, 0, t)) for t in range(400)]
    assert abs(np.mean(sizes) - 50) < 2
    assert abs(np.var(sizes) - 50 * 0.75) < 12


def test_dropouts_have_their_probability_and_do_not_depend_on_the_others():
    clients = list(range(2000))
    lost = sample_dropouts(clients, 0.3, 0, 0, Stream.LOST_BEFORE, 4)
    assert abs(len(lost) - 600) < 100
    assert sample_dropouts(clients[:50], 0.3, 0, 0, Stream.LOST_BEFORE, 4) == [
        c for c in lost if c < 50
    ]
    assert sample_dropouts(clients, 0.0, 0, 0, Stream.LOST_BEFORE, 4) == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": 0}, "0 clients asked; expected 1..10"),
        ({"size": 11}, "11 clients asked; expected 1..10"),
        ({"size": 9, "over_selection": 1.3}, "12 clients asked; expected 1..10"),
        ({"size": 5, "over_selection": 0.9}, "1 or more"),
        ({"size": 5, "lost_before": 1.5}, "got 1.5; expected 0..1"),
        ({"size": 5, "lost_after": -0.1}, "got -0.1; expected 0..1"),
        ({"size": 5, "sampling": "all"}, "fixed, poisson, cyclic, check-in"),
        ({"size": 2.5}, "got 2.5; expected a whole number"),
        ({"size": 5, "over_selection": float("nan")}, "1 or more"),
    ],
)
def test_a_cohort_that_cannot_be_is_refused(settings, message):
    with pytest.raises(InputError, match=message):
        Cohorts(10, **settings)
