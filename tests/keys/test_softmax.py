"""Sampled softmax: random words stand for all that were not chosen."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyhole.keys.choice import KeyContext, KeyCounts
from keyhole.keys.structured import always, random_top, sampled_correction, top, with_negatives
from keyhole.primitives.keyspace import KeySpace
from tests.helpers import SEEDS
from tests.keys.test_choices import COUNTS, NUMBERS, rng, within


@given(counts=COUNTS, m=NUMBERS, share=st.floats(0, 0.99), seed=SEEDS, data=st.data())
def test_the_correction_knows_what_was_drawn(counts, m, share, seed, data):
    n = counts.space.num_keys
    first = data.draw(st.lists(st.integers(0, n - 1), unique=True, max_size=4))
    choice = always(first, random_top)
    keys = with_negatives(choice, share)(within(counts, m, seed))
    chosen = len(choice(within(counts, m - round(share * m), seed)))
    own, correction = sampled_correction(counts.space.keys(keys), counts, share, first)
    drawn = len(keys) - chosen
    stands_for = (n - chosen) / drawn if drawn else 1.0
    assert np.exp(correction) == pytest.approx(stands_for)
    if stands_for != 1.0:
        assert own == chosen


def draw_partitions(draws, sampled=20):
    """Corrected and plain partition functions of a client with 10 of 200 words, over many draws."""
    word, generator = KeySpace("word", 200), rng(11)
    powers = np.exp(generator.normal(size=200))
    counts = KeyCounts.of(word, np.arange(10))
    share = sampled / (10 + sampled)
    corrected, plain = np.empty(draws), np.empty(draws)
    for i in range(draws):
        keys = with_negatives(top, share)(KeyContext(counts, 10 + sampled, generator))
        own, correction = sampled_correction(word.keys(keys), counts, share)
        weights = np.where(np.arange(len(keys)) < own, 1.0, np.exp(correction))
        corrected[i], plain[i] = powers[keys] @ weights, powers[keys].sum()
    return powers, corrected, plain


def test_the_partition_function_is_right_on_average():
    """Of s values drawn from N without replacement, the scaled sum has the variance
    N^2 / s (1 - s / N) S^2, with S^2 that of the N values: five standard errors of the mean."""
    draws, s, N = 2000, 20, 190
    powers, corrected, plain = draw_partitions(draws, s)
    variance = N**2 / s * (1 - s / N) * np.var(powers[10:], ddof=1)
    tolerance = 5 * (variance / draws) ** 0.5
    assert abs(corrected.mean() - powers.sum()) < tolerance
    assert powers.sum() - plain.mean() > 10 * tolerance


def test_its_logarithm_is_too_small_by_half_the_relative_variance():
    """Jensen, to second order: log Z - E log Z' is about Var(Z') / 2 Z^2, and falls as 1 / s."""
    for s in (20, 80):
        powers, corrected, _ = draw_partitions(4000, s)
        gap = np.log(powers.sum()) - np.log(corrected).mean()
        expected = corrected.var() / (2 * powers.sum() ** 2)
        error = np.log(corrected).std() / 4000**0.5
        assert abs(gap - expected) < 5 * error + 0.2 * expected


def test_all_words_need_no_correction():
    word = KeySpace("word", 6)
    counts = KeyCounts.of(word, np.array([1, 4]))
    keys = with_negatives(top, 0.9)(within(counts, 60))
    assert sampled_correction(word.keys(keys), counts, 0.9) == (6, 0.0)
    keys = with_negatives(top, 0.0)(within(counts, 4))
    assert sampled_correction(word.keys(keys), counts, 0.0) == (2, 0.0)
