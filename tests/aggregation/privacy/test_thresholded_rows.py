"""Thresholded rows: what is kept, what is lost, and what may not be told apart."""

from math import erfc, inf, sqrt

import numpy as np
import pytest

from keyhole.aggregation.privacy.noise import (
    AdaFest,
    add_noise,
    add_ring_noise,
    keep_keys,
    normal,
    threshold_rows,
)
from keyhole.crypto.prg import Prg
from keyhole.errors import InputError, ShapeError

KEYS = np.array([2, 3, 7, 40, 99])
COUNTS = np.array([1, 500, 30, 999, 2])


def settings(threshold, count_multiplier=1.0, row_multiplier=1.0, cohort=1000, max_keys=100):
    return AdaFest(cohort, max_keys, count_multiplier, row_multiplier, threshold)


def rows_of(dtype):
    return np.arange(1, 16).reshape(5, 3).astype(dtype)


def dense(rows, num_keys=100):
    whole = np.zeros((num_keys, 3), rows.dtype)
    whole[KEYS] = rows
    return whole


@pytest.mark.parametrize("dtype", [np.float32, np.uint32, np.uint16])
@pytest.mark.parametrize("row_multiplier", [0.0, 3.0])
def test_no_threshold_is_noise_on_all_rows_bit_for_bit(dtype, row_multiplier):
    rows = rows_of(dtype)
    kept = threshold_rows(
        settings(-inf, row_multiplier=row_multiplier), 100, KEYS, COUNTS, rows, 2.0, Prg(bytes(16))
    )
    add = add_noise if dtype is np.float32 else add_ring_noise
    wanted = add(dense(rows), 2.0 * row_multiplier, Prg(bytes(16)))
    np.testing.assert_array_equal(kept.keys, np.arange(100))
    np.testing.assert_array_equal(kept.rows, wanted)


@pytest.mark.parametrize("dtype", [np.float32, np.uint32])
def test_without_noise_the_keys_at_or_above_the_threshold_are_kept_as_they_are(dtype):
    rows = rows_of(dtype)
    quiet = settings(30.0, count_multiplier=0.0, row_multiplier=0.0)
    kept = threshold_rows(quiet, 100, KEYS, COUNTS, rows, 1.0, Prg(bytes(16)))
    np.testing.assert_array_equal(kept.keys, [3, 7, 40])
    np.testing.assert_array_equal(kept.rows, rows[[1, 2, 3]])
    assert kept.rows.dtype == dtype


def test_only_kept_rows_get_noise_and_false_ones_are_noise_alone():
    """Threshold of one standard deviation: a sixth of all empty keys come along."""
    found = settings(10.0, row_multiplier=2.0, cohort=1000)
    keys, counts = np.array([17, 900]), np.array([800, 900])
    rows = np.array([[1e6, 1e6], [-1e6, -1e6]])
    kept = threshold_rows(found, 10_000, keys, counts, rows, 1.5, Prg(bytes(16)))
    assert set(keys) <= set(kept.keys)
    assert 1300 < len(kept.keys) < 1900
    is_false = ~np.isin(kept.keys, keys)
    false = kept.rows[is_false]
    assert abs(false.std() - 3.0) < 5 * 3.0 / sqrt(2 * false.size)
    np.testing.assert_allclose(kept.rows[~is_false], rows, atol=20)


@pytest.mark.parametrize("deviations", [-1.0, 0.0, 1.0, 2.5])
def test_empty_keys_are_kept_at_the_rate_of_noise_alone(deviations):
    """As often as noise on a zero count passes: norm.sf(tau / sd), drawn either way."""
    found = settings(10 * deviations)
    rate = 0.5 * erfc(deviations / sqrt(2))
    assert found.false_share == pytest.approx(rate)
    count = 200_000
    limit = 5 * sqrt(rate * (1 - rate) / count)
    nobody = np.empty(0, np.int64)
    drawn = keep_keys(found, count, nobody, nobody, Prg(b"drawn           "))
    assert abs(len(drawn) / count - rate) < limit
    zeros = np.zeros(count, np.int64)
    noisy = keep_keys(found, count, np.arange(count), zeros, Prg(b"noisy           "))
    assert abs(len(noisy) / count - rate) < limit
    # Evenly over the keys, not more often behind others: ten tenths of them.
    tenths = np.bincount(drawn * 10 // count, minlength=10)
    assert np.abs(tenths - tenths.mean()).max() < 6 * sqrt(tenths.mean())
    assert abs(np.mean(np.diff(drawn) == 1) - rate) < 8 * sqrt(rate / max(1, len(drawn)))


def test_drawn_keys_are_all_those_that_nobody_asked_for():
    """With a share of 1 each of them comes once, none of the others, whatever lies around."""
    keys = np.array([0, 1, 5, 9])
    found = settings(-1e9, count_multiplier=1e-9)
    counts = np.full(4, -(10**10))  # far below: none of those asked for is kept
    np.testing.assert_array_equal(
        keep_keys(found, 10, keys, counts, Prg(bytes(16))), [2, 3, 4, 6, 7, 8]
    )


def test_counts_get_noise_of_their_sensitivity():
    """Flips at the threshold: a count at tau is kept half of the time, one sd above 84 %."""
    found = settings(500.0, count_multiplier=2.0, max_keys=64)
    assert found.count_sd == 16
    for above, rate in ((0, 0.5), (16, 0.8413), (-32, 0.0228)):
        counts = np.full(20_000, 500 + above)
        kept = keep_keys(found, 20_000, np.arange(20_000), counts, Prg(b"flips           "))
        assert abs(len(kept) / 20_000 - rate) < 5 * sqrt(rate * (1 - rate) / 20_000)


def test_the_noise_of_counts_is_not_that_of_rows():
    """They are drawn one after the other from one stream: never the same numbers."""
    keys = np.arange(1000)
    found = settings(0.0, count_multiplier=3.0, cohort=1000)
    kept = threshold_rows(
        found, 1000, keys, np.full(1000, 900), np.zeros((1000, 1)), 1.0, Prg(bytes(16))
    )
    of_counts = normal(Prg(bytes(16)), 1000)
    assert len(kept.keys) == 1000
    assert abs(np.corrcoef(kept.rows[:, 0], of_counts)[0, 1]) < 0.2


def test_one_multiplier_stands_for_both_releases():
    counts, rows = AdaFest.split(0.8)
    assert counts == 4 * rows
    assert rows / 0.8 == pytest.approx(1.031, abs=1e-3)
    both = settings(100.0, counts, rows)
    assert both.noise_multiplier == pytest.approx(0.8)
    assert settings(-inf, 0.0, rows).noise_multiplier == rows
    assert settings(5.0, 0.0, rows).noise_multiplier == 0
    assert settings(5.0, 1.0, 0.0).noise_multiplier == 0


def test_a_cohort_too_small_is_refused_with_the_numbers():
    """50 clients with 1000 keys: noise of 32 or more on counts of up to 50."""
    with pytest.raises(InputError, match=r"50 clients against noise of 31\.6.*more than 95"):
        AdaFest(50, 1000, 1.0, 1.0, 30.0)
    AdaFest(96, 1000, 1.0, 1.0, 30.0)
    AdaFest(50, 1000, 1.0, 1.0, -inf)
    AdaFest(50, 1000, 0.0, 0.0, 3.0)


@pytest.mark.parametrize(
    "change", [(-1.0, 1.0, 3.0), (1.0, inf, 3.0), (np.nan, 1.0, 3.0), (1.0, 1.0, np.nan)]
)
def test_noise_that_cannot_be_is_refused(change):
    with pytest.raises(InputError):
        AdaFest(1000, 10, *change)
    with pytest.raises(InputError):
        AdaFest(1000, 0, 1.0, 1.0, 3.0)


@pytest.mark.parametrize(
    ("keys", "counts", "rows"),
    [
        ([1, 1], [1, 1], 2),
        ([2, 1], [1, 1], 2),
        ([-1, 1], [1, 1], 2),
        ([1, 100], [1, 1], 2),
        ([1, 2], [1], 2),
        ([1, 2], [1, 1], 3),
    ],
)
def test_what_does_not_belong_together_is_refused_without_naming_a_key(keys, counts, rows):
    with pytest.raises(ShapeError, match="do not belong together"):
        threshold_rows(
            settings(0.0), 100, np.array(keys), np.array(counts), np.zeros((rows, 2)), 1.0,
            Prg(bytes(16)),
        )  # fmt: skip
