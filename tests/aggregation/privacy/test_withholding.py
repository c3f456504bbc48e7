"""Sums that are withheld: how often one client decides it, and what that takes off delta."""

from dataclasses import replace
from itertools import product
from math import inf

import numpy as np
import pytest

from keyhole.aggregation.privacy.accountant import Mechanism, epsilon_of
from keyhole.errors import InputError
from keyhole.rounds.account import odds_of_deciding

pytest.importorskip("dp_accounting")


@pytest.mark.parametrize("minimum", [0, 1, 2, 3, 5, 6])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 1.0])
def test_the_odds_are_those_of_counting_all_cohorts(minimum, share):
    """Five clients: client 0 is in, and with it, but not without it, there are enough."""
    odds = 0.0
    for drawn in product([0, 1], repeat=5):
        decides = drawn[0] and sum(drawn) >= minimum > sum(drawn[1:])
        odds += decides * np.prod([share if one else 1 - share for one in drawn])
    assert odds_of_deciding(5, share, minimum) == pytest.approx(odds, abs=1e-15)


def test_what_a_withheld_sum_tells_is_taken_off_delta():
    plain = Mechanism("poisson", 1000, 50, 1.0, "add-or-remove", "rdp")
    telling = replace(plain, failure=1e-6)
    assert epsilon_of(telling, 4, 1e-5) == epsilon_of(plain, 4, 1e-5 - 4e-6)
    assert epsilon_of(telling, 11, 1e-5) == inf
    planned = Mechanism("separated", 1000, 50, 1.0, "add-or-remove", "", 8, failure=1e-6)
    assert epsilon_of(planned, 1, 1e-5) == epsilon_of(replace(planned, failure=0.0), 1, 2e-6)


def test_the_promise_holds_exactly_where_a_sum_of_one_is_withheld():
    """Three clients drawn with probability 1/2, one number of 1 each, no sum of fewer than two: the
    true divergence by integration and the withheld case is within delta; without the charge the
    promise would be broken."""
    share, noise, delta, grid = 0.5, 2.0, 0.3, np.linspace(-20, 24, 44_001)
    step = grid[1] - grid[0]

    def released(clients):
        density, withheld = np.zeros_like(grid), 0.0
        for drawn in product([0, 1], repeat=clients):
            odds = share ** sum(drawn) * (1 - share) ** (clients - sum(drawn))
            if sum(drawn) < 2:
                withheld += odds
                continue
            bell = np.exp(-((grid - sum(drawn)) ** 2) / 2 / noise**2)
            density += odds * bell / noise / np.sqrt(2 * np.pi)
        return np.append(density * step, withheld)

    with_it, without = released(3), released(2)
    mechanism = Mechanism("poisson", 3, 2, noise, "add-or-remove")
    mechanism = replace(mechanism, population=4)  # the share of 1/2
    charged = replace(mechanism, failure=odds_of_deciding(3, share, 2))

    def divergence(epsilon):
        pairs = ((with_it, without), (without, with_it))
        return max(np.maximum(p - np.exp(epsilon) * q, 0).sum() for p, q in pairs)

    assert divergence(epsilon_of(charged, 1, delta)) <= delta
    small = 0.05
    assert divergence(epsilon_of(mechanism, 1, small)) > small
    assert epsilon_of(charged, 1, small) == inf


def test_a_probability_that_cannot_be_is_refused():
    for bad in (-1e-9, 1.1, float("nan")):
        with pytest.raises(InputError):
            Mechanism("poisson", 1000, 50, 1.0, "add-or-remove", failure=bad)
