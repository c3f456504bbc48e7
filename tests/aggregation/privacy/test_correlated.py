"""Correlated noise: its matrix, its sensitivity by brute force, and who may take part when."""

from itertools import combinations
from math import comb, sqrt

import numpy as np
import pytest

from keyhole.aggregation.privacy.correlated import (
    Strategy,
    add_correlated_noise,
    inverse_of,
    square_root,
)
from keyhole.aggregation.privacy.noise import LARGEST
from keyhole.errors import InputError, ShapeError
from keyhole.rounds.account import Participation

SECRET = b"secret of a run!"
KINDS = [("full", 0), ("banded", 3), ("banded", 8), ("banded-inverse", 3), ("banded-inverse", 1)]


def toeplitz(column):
    size = len(column)
    return np.array([[column[i - j] if i >= j else 0.0 for j in range(size)] for i in range(size)])


def test_the_square_root_is_the_binomial_series_and_squares_to_prefix_sums():
    """Of 1 / sqrt(1 - x): comb(2k, k) / 4^k."""
    r = square_root(60)
    np.testing.assert_allclose(r, [comb(2 * k, k) / 4**k for k in range(60)], rtol=1e-12)
    np.testing.assert_allclose(toeplitz(r) @ toeplitz(r), np.tri(60), atol=1e-12)


@pytest.mark.parametrize(("kind", "bands"), KINDS)
def test_a_strategy_and_its_inverse_belong_together(kind, bands):
    strategy = Strategy(30, 5, kind, bands)
    product = toeplitz(strategy.coefficients) @ toeplitz(strategy.inverse)
    np.testing.assert_allclose(product, np.eye(30), atol=1e-10)
    banded = strategy.coefficients if kind == "banded" else strategy.inverse
    assert np.count_nonzero(banded) == (bands or 30)
    np.testing.assert_allclose(inverse_of(inverse_of(banded)), banded, atol=1e-10)


@pytest.mark.parametrize("separation", [1, 2, 3, 5, 11])
@pytest.mark.parametrize(("kind", "bands"), KINDS)
def test_no_way_to_take_part_exceeds_the_sensitivity(kind, bands, separation):
    """All sets of rounds that keep the separation, each with the same update: for columns without
    negative entries no other updates do worse. The bound is met."""
    rounds = 11
    strategy = Strategy(rounds, separation, kind, bands)
    assert (strategy.coefficients >= 0).all()
    assert (np.diff(strategy.coefficients) <= 1e-15).all()
    matrix, worst = toeplitz(strategy.coefficients), 0.0
    for count in range(1, strategy.participations + 1):
        for chosen in combinations(range(rounds), count):
            if count == 1 or np.diff(chosen).min() >= separation:
                worst = max(worst, float(np.linalg.norm(matrix[:, list(chosen)].sum(axis=1))))
    assert strategy.sensitivity == pytest.approx(worst, rel=1e-12)
    if kind == "banded" and bands <= separation and rounds % separation == 0:
        one = np.linalg.norm(strategy.coefficients)
        assert worst == pytest.approx(sqrt(rounds / separation) * one)


@pytest.mark.parametrize(
    ("separation", "kind", "bands", "gain"),
    [
        (1500, "full", 0, 8.5),
        (300, "full", 0, 6.65),
        (100, "full", 0, 4.6),
        (300, "banded", 32, 4.16),
        (100, "banded", 100, 6.18),
        (300, "banded-inverse", 32, 5.82),
        (300, "banded-inverse", 100, 7.53),
        (100, "banded-inverse", 32, 5.62),
    ],
)
def test_prefix_sums_have_less_noise_by_the_measured_factor(separation, kind, bands, gain):
    assert Strategy(1500, separation, kind, bands).gain == pytest.approx(gain, rel=7e-3)


def test_a_single_band_is_independent_noise():
    strategy = Strategy(40, 10, "banded", 1)
    assert strategy.gain == pytest.approx(1.0)
    assert strategy.sensitivity == pytest.approx(2.0)
    rows = [add_correlated_noise(np.zeros(4000), strategy, t, 1.0, SECRET) for t in range(5)]
    assert np.abs(np.corrcoef(rows) - np.eye(5)).max() < 5 / sqrt(4000)


@pytest.mark.parametrize(("kind", "bands"), KINDS)
def test_noise_has_the_covariance_of_the_inverse_and_is_small_in_prefix_sums(kind, bands):
    strategy = Strategy(12, 4, kind, bands)
    noise = [add_correlated_noise(np.zeros(20_000), strategy, t, 0.5, SECRET) for t in range(12)]
    inverse = 0.5 * strategy.sensitivity * toeplitz(strategy.inverse)
    wanted = inverse @ inverse.T
    scale = np.sqrt(np.outer(np.diag(wanted), np.diag(wanted)))
    assert (np.abs(np.cov(noise) - wanted) < 6 * scale / sqrt(10_000)).all()
    prefix = np.cumsum(noise, axis=0)
    independent = 0.5 * sqrt(strategy.participations * 13 / 2)
    assert np.sqrt(np.mean(prefix**2)) == pytest.approx(independent / strategy.gain, rel=0.03)


def test_the_independent_noise_behind_it_can_be_drawn_again():
    """Undoing C gives the same independent noise in every round: nothing was stored."""
    strategy = Strategy(10, 10)
    noise = np.array(
        [add_correlated_noise(np.zeros(3000), strategy, t, 1.0, SECRET) for t in range(10)]
    )
    independent = toeplitz(strategy.coefficients) @ noise / strategy.sensitivity
    assert np.abs(np.corrcoef(independent) - np.eye(10)).max() < 5 / sqrt(3000)
    assert np.abs(independent.std(axis=1) - 1).max() < 5 / sqrt(6000)
    again = add_correlated_noise(np.zeros(3000), strategy, 9, 1.0, SECRET)
    np.testing.assert_array_equal(again, noise[9])
    other = add_correlated_noise(np.zeros(3000), strategy, 9, 1.0, b"of another run!!")
    assert abs(np.corrcoef(again, other)[0, 1]) < 5 / sqrt(3000)


@pytest.mark.parametrize(("dtype", "sd"), [(np.uint16, 100.0), (np.uint32, 2.0**22)])
def test_in_a_ring_it_is_the_same_noise_rounded(dtype, sd):
    strategy = Strategy(8, 4)
    sums = np.arange(20_000, dtype=dtype).reshape(100, 200) - dtype(7)
    signed = np.dtype(dtype.__name__[1:])
    for t in (0, 5):
        noisy = add_correlated_noise(sums, strategy, t, sd, SECRET)
        real = add_correlated_noise(np.zeros(sums.shape), strategy, t, sd, SECRET)
        np.testing.assert_array_equal((noisy - sums).view(signed), np.rint(real))
        assert np.abs(real).max() < LARGEST * sd * strategy.reach


@pytest.mark.parametrize("dtype", [np.float32, np.uint32])
def test_no_noise_leaves_a_sum_as_it_is(dtype):
    sums = np.arange(10, dtype=dtype)
    noisy = add_correlated_noise(sums, Strategy(3, 3), 2, 0.0, SECRET)
    np.testing.assert_array_equal(noisy, sums)


@pytest.mark.parametrize("t", [-1, 3])
def test_a_round_that_was_not_planned_gets_no_noise_and_no_release(t):
    with pytest.raises(InputError, match="0 to 2"):
        add_correlated_noise(np.zeros(3), Strategy(3, 3), t, 1.0, SECRET)


def test_bad_noise_and_bad_numbers_are_refused():
    for sd in (-1.0, np.nan, np.inf):
        with pytest.raises(InputError, match="standard deviation"):
            add_correlated_noise(np.zeros(3), Strategy(3, 3), 0, sd, SECRET)
    with pytest.raises(ShapeError):
        add_correlated_noise(np.zeros(3, np.int32), Strategy(3, 3), 0, 1.0, SECRET)


@pytest.mark.parametrize(
    "bad",
    [(0, 1), (5, 0), (5, 6), (5, 5, "banded", 0), (5, 5, "banded", 6), (5, 5, "full", 2),
     (5, 5, "tree", 2)],
)  # fmt: skip
def test_a_strategy_that_cannot_be_is_refused(bad):
    with pytest.raises(InputError, match="strategy"):
        Strategy(*bad)


# Who takes part


def test_nobody_comes_back_before_the_separation_is_over():
    took_part = Participation(6, 3)
    took_part.record(np.array([1, 4]), 0)
    with pytest.raises(InputError, match="2 of 3 clients back too soon") as caught:
        took_part.record(np.array([4, 0, 1]), 2)
    assert "4" not in str(caught.value)
    # Nothing was noted: client 0 may still come.
    took_part.record(np.array([0]), 2)
    took_part.record(np.array([1, 4]), 3)
    with pytest.raises(InputError, match="1 of 1 clients back too soon"):
        took_part.record(np.array([4]), 5)


@pytest.mark.parametrize("clients", [[0, 0], [-1], [6]])
def test_clients_that_are_unknown_or_named_twice_are_refused(clients):
    with pytest.raises(InputError, match="unknown or named twice"):
        Participation(6, 3).record(np.array(clients), 0)


def test_cohorts_that_are_let_in_keep_to_the_sensitivity():
    """20 rounds of cohorts drawn at random, of which those are left out that may not come: nobody
    takes part more often than the strategy counts on, and somebody as often."""
    strategy, took_part = Strategy(20, 6), Participation(8, 6)
    times, rng = np.zeros(8, int), np.random.default_rng(0)
    for t in range(20):
        for client in rng.permutation(8)[:7]:
            try:
                took_part.record(np.array([client]), t)
            except InputError:
                continue
            times[client] += 1
    assert times.max() == strategy.participations == 4


def test_a_separation_of_nobody_or_of_no_rounds_is_refused():
    for bad in ((0, 1), (1, 0)):
        with pytest.raises(InputError, match="separation"):
            Participation(*bad)
