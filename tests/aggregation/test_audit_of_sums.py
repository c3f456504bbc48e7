"""An audit of what training really does: canaries in private sums, against the promise of their
account."""

from dataclasses import replace
from math import inf, sqrt

import numpy as np
import pytest

import keyhole as kh
from keyhole.aggregation import aggregation_named
from keyhole.aggregation.base import ClientResult, Rounding, SumRequest
from keyhole.aggregation.privacy.audit import epsilon_from_scores
from keyhole.aggregation.privacy.mechanism import Privacy, PrivateSum
from keyhole.rounds.account import Account
from keyhole.sampling import Cohorts

pytest.importorskip("dp_accounting")

ROW, DELTA, CLIP = kh.KeySpace("row", 12), 1e-3, 0.5
MODEL = {"w": np.zeros((12, 2), np.float32), "b": np.zeros(3, np.float32)}
LAYOUT = kh.Layout.of(MODEL, kh.Cut(ROW, {"w": 0}))
COHORTS = {"cyclic": Cohorts(200, 100, "cyclic"), "poisson": Cohorts(100, 100, "poisson")}


def result(client, scale, keys):
    update = {"w": np.full((4, 2), scale, np.float32), "b": np.full(3, scale, np.float32)}
    return ClientResult(client, "sent", {"row": ROW.keys(keys)}, update)


OTHERS = [result(0, 0.1, [0, 1, 2, 3]), result(1, -0.2, [2, 3, 4, 5])]
CANARY = result(2, 70.0, [5, 5, 6, 7])  # far beyond the clip, with a key twice


def direction_of(part):
    """Where the canary's update points in a part."""
    whole = np.zeros((part.space.num_keys, part.slice_size))
    np.add.at(whole, part.keys_of(CANARY.keys).array, 1.0)
    return whole


def scores_of(private, world, seed, runs, by):
    """How much of the canary is in a release: along its direction, or which of its keys are
    there."""
    found = np.empty(runs)
    directions = [direction_of(part) for part in LAYOUT.parts]
    for run in range(runs):
        request = SumRequest(LAYOUT, world, "cohort", {"row": 4}, (seed + run, 0, 0))
        released = private.add(request).rows
        assert released is not None
        if by == "keys":
            found[run] = max(np.isin(update.keys, [6, 7]).sum() for update in released)
            continue
        found[run] = sum(
            float(np.sum(whole[update.keys] * update.rows))
            for whole, update in zip(directions, released, strict=True)
        )
    return found


def audited(private, runs, by="rows"):
    present = scores_of(private, [*OTHERS, CANARY], 0, runs, by)
    absent = scores_of(private, OTHERS, 10**6, runs, by)
    return epsilon_from_scores(present, absent, DELTA).epsilon


def private_sum(way, kind, noise, bits=32, threshold=-inf):
    sampling = "cyclic" if kind == "correlated" else "poisson"
    rounds = 1 if kind == "correlated" else 0
    privacy = Privacy(CLIP, noise, DELTA, kind=kind, rounds=rounds, threshold=threshold)
    inner = aggregation_named(way, Rounding(bits=bits))
    return PrivateSum(inner, privacy, COHORTS[sampling])


def promised(private):
    """Everybody is in the cohort: nothing is gained by sampling."""
    made = Account(private.privacy, private.cohorts)
    return made.describe(0, range(private.cohorts.asked), 3)["epsilon"]


SLOW = [
    ("plain", "correlated", 32),
    ("secure-dense", "all-rows", 32),
    ("secure-dense", "all-rows", 16),
    ("secure-sparse", "all-rows", 16),
    ("secure-sparse", "thresholded", 32),
]


@pytest.mark.parametrize(
    ("way", "kind", "bits"),
    [
        ("plain", "all-rows", 32),
        pytest.param("plain", "thresholded", 32, marks=pytest.mark.slow),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW),
    ],
)
def test_a_canary_in_a_private_sum_is_seen_no_better_than_promised(way, kind, bits):
    """And the audit can see: with a quarter of the noise it finds more than the promise allows.
    (Both of two servers add noise: from outside there is more of it than was promised for.)"""
    honest = private_sum(way, kind, 2.0, bits)
    runs = 300
    assert audited(honest, runs) < promised(honest)
    both = sqrt(2) if (way, kind) == ("secure-sparse", "all-rows") else 1.0
    assert audited(private_sum(way, kind, 0.5 / both, bits), runs) > promised(honest)


@pytest.mark.slow
def test_keys_that_are_kept_betray_no_canary_either():
    """Without noise on counts, a threshold below 1 shows whoever has a key of his own."""
    honest = private_sum("plain", "thresholded", 2.0, threshold=0.5)
    assert audited(honest, 300, by="keys") < promised(honest)
    careless = private_sum("plain", "thresholded", 0.01, threshold=0.5)
    assert audited(careless, 100, by="keys") > promised(honest)


def test_a_clip_four_times_as_wide_as_accounted_for_is_caught():
    """With the same noise on the sum."""
    private = private_sum("plain", "all-rows", 2.0)
    loose = replace(private.privacy, clip=4 * CLIP, noise=0.5)
    assert audited(replace(private, privacy=loose), 200) > promised(private)
