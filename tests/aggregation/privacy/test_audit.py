"""The audit: below epsilon for mechanisms that keep it, above for those that do not."""

from functools import cache

import numpy as np
import pytest

from keyhole.aggregation.privacy.accountant import Mechanism, epsilon_of
from keyhole.aggregation.privacy.audit import audit, epsilon_from_scores, upper_rate
from keyhole.aggregation.privacy.correlated import Strategy, add_correlated_noise
from keyhole.aggregation.privacy.noise import (
    AdaFest,
    add_noise,
    add_ring_noise,
    normal,
    threshold_rows,
)
from keyhole.crypto.prg import Prg
from keyhole.errors import InputError
from keyhole.server.inputs import clip

pytest.importorskip("dp_accounting")

DELTA, SIZE = 1e-5, 20
OTHERS = [np.full(SIZE, value) for value in (0.1, -0.2, 0.3)]
CANARY = np.full(SIZE, 100.0)  # far beyond the norm it is clipped to


def noisy_sum(noise):
    """Everyone takes part: clipped to 1, noise of the multiplier."""

    def mechanism(updates, prg):
        return add_noise(np.sum([clip(u, 1.0) for u in updates], axis=0), noise, prg)

    return mechanism


def in_ring(noise, scale=2.0**16):
    def mechanism(updates, prg):
        clipped = [np.rint(scale * clip(u, 1.0)).astype(np.int64) for u in updates]
        total = np.sum(clipped, axis=0).astype(np.uint32)
        return add_ring_noise(total, noise * scale, prg).view(np.int32) / scale

    return mechanism


def correlated(noise):
    """Four rounds, everyone in the first and the third; the prefix sums are what is seen."""
    strategy = Strategy(4, 2)

    def mechanism(updates, prg):
        secret = prg.bytes(16)
        total = np.sum([clip(u, 1.0) for u in updates], axis=0)
        rounds = [
            add_correlated_noise(total * (t % 2 == 0), strategy, t, noise, secret) for t in range(4)
        ]
        # The attacker undoes the mixing: the best view there is of rounds 0 to 3.
        weights = np.convolve(strategy.coefficients, [1, 0, 1, 0])[:4]
        mixed = [strategy.coefficients[: t + 1][::-1] @ rounds[: t + 1] for t in range(4)]
        return weights @ mixed

    return mechanism


def promise(noise):
    return epsilon_of(Mechanism("separated", 1000, 4, noise, "add-or-remove", "", 4), 1, DELTA)


def found(mechanism, runs=600):
    return audit(mechanism, OTHERS, CANARY, DELTA, Prg(b"audit           "), runs)


@cache
def found_with_noise(make):
    """One audit for two questions."""
    return found(make(0.5))


@pytest.mark.parametrize(
    "make", [noisy_sum, in_ring, pytest.param(correlated, marks=pytest.mark.slow)]
)
def test_an_honest_mechanism_stays_below_its_epsilon_and_is_not_far_from_it(make):
    result = found_with_noise(make)
    assert 2.0 < result.epsilon < promise(0.5)
    assert result.runs == 300


@pytest.mark.parametrize("make", [noisy_sum, in_ring, correlated])
def test_a_mechanism_with_a_quarter_of_its_noise_is_caught(make):
    """It promises what 2.0 would keep."""
    assert found_with_noise(make).epsilon > promise(2.0)


def test_a_sum_that_forgets_to_clip_is_caught():
    def careless(updates, prg):
        return add_noise(np.sum(updates, axis=0), 2.0, prg)

    result = found(careless)
    assert result.epsilon > promise(2.0)
    assert (result.missed, result.false_alarms) == (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("is_honest", [True, False])
def test_poisson_rounds_are_audited_as_a_whole(is_honest):
    """10 rounds, each client in a round with probability 0.1. The dishonest one takes everyone, and
    breaks the promise that sampling made possible."""
    epsilon = epsilon_of(Mechanism("poisson", 10, 1, 1.5, "add-or-remove"), 10, DELTA)

    def rounds(updates, prg):
        total, clipped = np.zeros(SIZE), [clip(u, 1.0) for u in updates]
        for _ in range(10):
            drawn = prg.words(len(updates)) < np.uint64(2**64 // 10)
            is_in = drawn if is_honest else np.ones(len(updates))
            total += add_noise(np.array(is_in, float) @ clipped, 1.5, prg)
        return total

    assert (found(rounds, runs=1500).epsilon < epsilon) == is_honest


def test_keys_that_nobody_asked_for_protect_those_that_one_client_did():
    """One client more at 16 keys: seen well if keys are kept only where somebody asked, and not
    beyond epsilon if noise chooses them."""
    keys, quiet = np.arange(16), AdaFest(1000, 16, 0.0, 0.0, 1.0)
    noisy = AdaFest(1000, 16, 1.6, 1.6, 0.5)

    def mechanism(settings):
        def run(updates, prg):
            counts = np.full(16, len(updates), np.int64)
            kept = threshold_rows(settings, 64, keys, counts, np.zeros((16, 1)), 1.0, prg)
            return np.isin(keys, kept.keys).astype(float)

        return run

    canary, prg = np.ones(16), Prg(b"keys            ")
    assert audit(mechanism(quiet), [], canary, DELTA, prg, 500).epsilon > promise(1.6)
    assert audit(mechanism(noisy), [], canary, DELTA, prg, 500).epsilon < promise(1.6)


def test_no_difference_gives_no_epsilon():
    prg = Prg(b"nothing         ")
    for _ in range(20):
        result = epsilon_from_scores(normal(prg, 400), normal(prg, 400), DELTA)
        assert result.epsilon < 0.35
    ties = epsilon_from_scores(np.zeros(100), np.zeros(100), DELTA)
    assert ties.epsilon == 0


def test_the_bound_holds_with_its_confidence():
    """Randomised answers with epsilon ln 3: at 95 %, at most 5 % of 400 audits may exceed it; 36
    are at 1e-3 for exactly 5 %."""
    prg, above = Prg(b"confidence      "), 0
    for _ in range(400):
        present = (prg.words(200) < np.uint64(3 * 2**62)).astype(float)
        absent = (prg.words(200) < np.uint64(2**62)).astype(float)
        above += epsilon_from_scores(present, absent, 0.0).epsilon > np.log(3)
    assert above <= 36


@pytest.mark.parametrize(("hits", "runs", "error"), [(0, 50, 0.05), (3, 50, 0.025), (49, 50, 0.01)])
def test_rates_are_bounded_as_clopper_and_pearson_do(hits, runs, error):
    from scipy.stats import beta

    assert upper_rate(hits, runs, error) == pytest.approx(
        beta.ppf(1 - error, hits + 1, runs - hits)
    )
    assert upper_rate(runs, runs, error) == 1


@pytest.mark.parametrize(
    ("runs", "delta", "confidence"), [(19, DELTA, 0.95), (100, 1.0, 0.95), (100, DELTA, 1.0)]
)
def test_an_audit_that_can_show_nothing_is_refused(runs, delta, confidence):
    with pytest.raises(InputError, match="can show nothing"):
        epsilon_from_scores(np.zeros(runs), np.zeros(runs), delta, confidence)


# The limit case


def test_without_noise_and_without_clipping_the_mean_is_the_plain_one():
    updates = [np.linspace(-k, k, 30).reshape(5, 6).astype(np.float32) for k in range(1, 9)]
    total = np.sum([clip(u, np.inf) for u in updates], axis=0, dtype=np.float32)
    mean = add_noise(total, 0.0, Prg(bytes(16))) / np.float32(len(updates))
    np.testing.assert_array_equal(mean, np.sum(updates, axis=0, dtype=np.float32) / np.float32(8))
