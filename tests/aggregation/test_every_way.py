"""Every delivery with every aggregation and every kind of noise: without noise, one and the same
model up to the rounding that is stated."""

from itertools import product
from math import inf

import numpy as np
import pytest

import keyhole as kh
from keyhole.aggregation import aggregation_named, aggregation_names
from keyhole.aggregation.base import Rounding
from keyhole.aggregation.privacy.mechanism import Privacy
from keyhole.delivery import delivery_named, delivery_names
from keyhole.rounds.clients import Clients
from keyhole.rounds.loop import start_run
from keyhole.rounds.spec import RunParts
from keyhole.sampling import Cohorts
from keyhole.server.optimizers import SGD
from keyhole.server.state import ServerState

AGGREGATIONS = aggregation_names(lambda about: not about.is_robust)
SIGNED = aggregation_names(lambda about: about.can_sign)

pytest.importorskip("dp_accounting")

ROW, MAX, ROUNDS, COHORT = kh.KeySpace("row", 30), 5, 2, 4
KINDS = ("none", "all-rows", "thresholded", "correlated")
MODEL = {"w": np.ones((30, 3), np.float32), "b": np.zeros(4, np.float32)}
LAYOUT = kh.Layout.of(MODEL, kh.Cut(ROW, {"w": 0}))


def combinations():
    """All of them. A quarter is fast, in which each delivery meets each aggregation; an enclave
    seals and attests for more than a second a round."""
    for (i, delivery), (j, way), (k, kind) in product(
        enumerate(delivery_names()), enumerate(AGGREGATIONS), enumerate(KINDS)
    ):
        is_fast = (i + j + k) % len(KINDS) == 0 and delivery != "enclave"
        yield pytest.param(delivery, way, kind, marks=[] if is_fast else pytest.mark.slow)


COMBINATIONS = list(combinations())


def clients():
    def train(model, data, rng):
        return {k: v - rng.normal(size=v.shape).astype(np.float32) for k, v in model.items()}

    return Clients(
        12,
        data=lambda client: client,
        choose=lambda data, context: ROW.keys(context.rng.choice(30, MAX, replace=False)),
        train=train,
    )


def trained(delivery, aggregate, kind, noise=0.0, clip=inf):
    sampling = "cyclic" if kind == "correlated" else "fixed"
    rounds = ROUNDS if kind == "correlated" else 0
    privacy = None
    if kind != "none":
        privacy = Privacy(clip, noise, 0.05, kind=kind, rounds=rounds, threshold=-inf)
    plan = RunParts(
        Cohorts(12, COHORT, sampling),
        keys_per_client={"row": MAX},
        seed=2,
        delivery=delivery_named(delivery).for_run({"row": MAX}, allow_simulation=True),
        aggregate=aggregate,
        privacy=privacy,
    )
    run = start_run(ServerState.dense(LAYOUT, MODEL, SGD(1.0)), clients(), plan)
    records = list(run.rounds(ROUNDS))
    assert [record.not_opened for record in records] == [None] * ROUNDS
    assert all(len(record.staleness) == COHORT for record in records)
    return run.state.model(), records


@pytest.fixture(scope="module")
def plain():
    """The plain model under each sampler; cyclic cohorts take correlated noise, of none."""
    return {
        kind: trained("on-demand", aggregation_named("plain"), kind)[0]
        for kind in ("none", "correlated")
    }


@pytest.mark.parametrize(("delivery", "way", "kind"), COMBINATIONS)
def test_without_noise_every_combination_trains_the_plain_model(delivery, way, kind, plain):
    """Off by one step a client and a round at the most, over the cohort, and the last bits of a
    float."""
    model, records = trained(delivery, aggregation_named(way), kind)
    step = Rounding().for_clients(COHORT).rounding if way.startswith("secure") else 0.0
    expected = plain["correlated" if kind == "correlated" else "none"]
    for name, leaf in model.items():
        np.testing.assert_allclose(leaf, expected[name], rtol=1e-6, atol=ROUNDS * step + 1e-6)
        assert np.abs(leaf - MODEL[name]).max() > 0.1, "it was trained"
    assert all(bool(record.privacy) == (kind != "none") for record in records)


@pytest.mark.parametrize("kind", KINDS[1:])
@pytest.mark.parametrize("way", AGGREGATIONS)
def test_with_noise_every_row_moves_by_more_than_updates_do(way, kind):
    """Noise of 50 clips a sum: so large that no row is left where it was."""
    noisy, records = trained("broadcast", aggregation_named(way), kind, noise=50.0, clip=1.0)
    quiet, _ = trained("broadcast", aggregation_named(way), kind, noise=0.0, clip=1.0)
    for name, leaf in noisy.items():
        assert np.all(leaf != quiet[name])
        assert np.abs(leaf - quiet[name]).max() > 5.0
    assert all(record.privacy["epsilon"] is not None for record in records)


@pytest.mark.parametrize("bits", [16, 32])
@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("way", [way for way in AGGREGATIONS if way.startswith("secure")])
def test_both_rings_signed_or_not_train_the_plain_model(way, signed, bits, plain):
    if signed and way not in SIGNED:
        pytest.skip("two servers sign nothing")
    rounding = Rounding(clip=4.0, bits=bits)
    model, records = trained("on-demand", aggregation_named(way, rounding, signed=signed), "none")
    step = rounding.for_clients(COHORT).rounding
    off = max(np.abs(leaf - plain["none"][name]).max() for name, leaf in model.items())
    assert off <= ROUNDS * step + 1e-6
    if bits == 16:
        assert off > 100 * Rounding(clip=4.0).for_clients(COHORT).rounding, "coarse, as it says"
    unsigned, others = trained("on-demand", aggregation_named(way, rounding), "none")
    for name, leaf in model.items():
        np.testing.assert_array_equal(leaf, unsigned[name])
    if signed:  # a signature of 64 bytes from each, and those of all others
        assert min(records[0].bytes_up) >= max(others[0].bytes_up) + 64
