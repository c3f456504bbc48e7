"""Differential privacy of a run: clipping, noise, and an account that matches the sampler."""

from dataclasses import replace
from math import inf

import numpy as np
import pytest

import keyhole as kh
from keyhole.aggregation import aggregation_named, aggregation_names
from keyhole.aggregation.base import ClientResult, Rounding, SumRequest
from keyhole.aggregation.privacy.mechanism import Privacy, PrivateSum, max_asked
from keyhole.errors import BudgetError, InputError
from keyhole.rounds.clients import Clients
from keyhole.rounds.loop import start_run
from keyhole.rounds.spec import RunParts
from keyhole.sampling import Cohorts, sample_cohort
from keyhole.server.optimizers import SGD
from keyhole.server.state import ServerState

AGGREGATIONS = aggregation_names(lambda about: not about.is_robust)

pytest.importorskip("dp_accounting")

ROW = kh.KeySpace("row", 400)
MODEL = {"w": np.zeros((400, 5), np.float32), "b": np.zeros(7, np.float32)}
LAYOUT = kh.Layout.of(MODEL, kh.Cut(ROW, {"w": 0}))
COHORTS = Cohorts(population=1000, size=6)


def request(scale=1.0, clients=6):
    made = []
    for client in range(clients):
        rng = np.random.default_rng(client)
        keys = ROW.keys(rng.choice(400, 8))
        update = {
            "w": scale * rng.normal(size=(8, 5)).astype(np.float32),
            "b": scale * rng.normal(size=7).astype(np.float32),
        }
        made.append(ClientResult(client, "sent", {"row": keys}, update))
    return SumRequest(LAYOUT, made, "cohort", {"row": 8}, (3, 0, 0))


def dense(updates):
    found = [np.zeros((p.space.num_keys, p.slice_size), np.float64) for p in LAYOUT.parts]
    for whole, update in zip(found, updates, strict=True):
        whole[update.keys] = update.rows
    return found


@pytest.mark.parametrize("way", AGGREGATIONS)
def test_no_noise_and_an_infinite_clip_give_the_mean(way):
    inner = aggregation_named(way)
    found = PrivateSum(inner, Privacy(clip=inf, noise=0.0), COHORTS).add(request())
    for one, other in zip(dense(found.rows), dense(inner.add(request()).rows), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("way", AGGREGATIONS)
def test_noise_of_the_stated_size_is_on_every_row(way):
    """Both of two servers add noise, so that it is the square root of two times as much."""
    privacy = Privacy(clip=2.0, noise=3.0)
    inner = aggregation_named(way)
    noisy = PrivateSum(inner, privacy, COHORTS).add(request())
    clean = PrivateSum(inner, replace(privacy, noise=0.0), COHORTS).add(request())
    both = np.sqrt(2) if way == "secure-sparse" else 1.0
    for one, other in zip(dense(noisy.rows), dense(clean.rows), strict=True):
        noise = (one - other) * COHORTS.size
        assert np.all(noise != 0)
        if noise.size > 100:  # 2,000 numbers: their deviation is known to 1.6 %; 5 of these
            assert abs(noise.std() / (privacy.noise * privacy.clip * both) - 1) < 0.08


@pytest.mark.parametrize("way", ["plain", "secure-dense", "secure-sparse"])
def test_one_client_moves_the_sum_by_no_more_than_the_clip(way):
    """All of an update together: what is broadcast and what is selected."""
    privacy = Privacy(clip=0.5, noise=0.0)
    full = request(scale=50.0)
    without = replace(full, results=[*full.results[:-1], replace(full.results[-1], outcome="late")])
    sums = [
        dense(PrivateSum(aggregation_named(way), privacy, COHORTS).add(each).rows)
        for each in (full, without)
    ]
    moved = np.sqrt(sum(np.sum((a - b) ** 2) for a, b in zip(*sums, strict=True))) * COHORTS.size
    assert 0.4 < moved <= 0.5 * (1 + 1e-4)


@pytest.mark.parametrize("way", ["secure-dense", "secure-sketch", "secure-sparse"])
def test_one_client_more_does_not_change_how_others_are_rounded(way):
    """From 7 to 8 clients a ring of 16 bits would halve its scale: everybody else would be clipped
    and rounded otherwise, and a sum of Poisson cohorts move by far more than the clip."""
    rounding = Rounding(bits=16)
    assert rounding.for_clients(7).scale == 2 * rounding.for_clients(8).scale
    private = PrivateSum(
        aggregation_named(way, rounding), Privacy(clip=0.5, noise=0.0), Cohorts(1000, 6, "poisson")
    )
    everyone = request(scale=50.0, clients=8).results

    def sums(*places):
        drawn = [everyone[place] for place in places]
        return dense(private.add(replace(request(), results=drawn)).rows)

    many = zip(sums(*range(8)), sums(*range(7)), strict=True)
    few = zip(sums(0, 1, 7), sums(0, 1), strict=True)
    for (a, b), (c, d) in zip(many, few, strict=True):  # what client 7 adds, among many or few
        np.testing.assert_allclose(a - b, c - d, atol=1e-7)
        assert np.abs(a - b).max() > 0.01


@pytest.mark.parametrize("way", ["secure-dense", "secure-sparse"])
def test_no_update_is_longer_than_the_clip_after_it_was_rounded(way):
    """In a ring of 16 bits for 100 clients, where rounding adds to its length: each client beside
    one that adds nothing."""
    cohorts = Cohorts(1000, 100)
    private = PrivateSum(aggregation_named(way, Rounding(bits=16)), Privacy(0.5, 0.0), cohorts)
    nothing = replace(request(scale=0.0).results[0], client=99)
    for one in request(scale=50.0).results:
        alone = dense(private.add(replace(request(), results=[one, nothing])).rows)
        length = 100 * np.sqrt(sum(np.sum(part**2) for part in alone))
        assert 0.45 < length <= 0.5 * (1 + 1e-6)


def test_rows_that_are_kept_have_the_noise_of_their_share_of_the_budget():
    """z sqrt(1 + 1 / 16) times the clip: the rest of the budget is that of counts."""
    privacy = Privacy(clip=2.0, noise=3.0, kind="thresholded", threshold=-inf)
    private = PrivateSum(aggregation_named("plain"), privacy, COHORTS)
    quiet = replace(private, privacy=replace(privacy, noise=0.0))
    pairs = zip(dense(private.add(request()).rows), dense(quiet.add(request()).rows), strict=True)
    noise = max((a - b for a, b in pairs), key=np.size) * COHORTS.size
    assert abs(noise.std() / (6.0 * np.sqrt(17 / 16)) - 1) < 0.08


def test_the_most_that_are_asked_is_beyond_all_but_one_in_2_to_the_64():
    """Of exact binomial tails."""
    from scipy.stats import binom

    for population, size in ((10**6, 50), (1000, 500), (30, 2)):
        limit = max_asked(Cohorts(population, size, "poisson"))
        assert binom.sf(limit - 1, population, size / population) <= 2.0**-64 or limit == population
        assert max_asked(Cohorts(population, size)) == size


def test_sums_are_divided_by_the_planned_cohort_whoever_arrived():
    privacy = Privacy(clip=inf, noise=0.0)
    few = PrivateSum(aggregation_named("plain"), privacy, COHORTS).add(request(clients=2))
    both = aggregation_named("plain").add(replace(request(clients=2), over="nothing"))
    for one, other in zip(dense(few.rows), dense(both.rows), strict=True):
        np.testing.assert_allclose(one, other / COHORTS.size, rtol=1e-6)


def test_thresholded_rows_are_few_and_noisy():
    cohorts = Cohorts(population=1000, size=200)
    privacy = Privacy(clip=1.0, noise=1.0, kind="thresholded", threshold=60.0)
    made = PrivateSum(aggregation_named("plain"), privacy, cohorts).add(request())
    rows = dict(zip([p.space.name for p in LAYOUT.parts], made.rows, strict=True))
    # Counts are at most 6, and their noise has a deviation of 11.7: 60 is five of them.
    assert len(rows["row"].keys) < 5
    assert len(rows["everyone"].keys) == 1


def test_cyclic_cohorts_rest_as_long_as_they_can():
    cohorts = Cohorts(population=20, size=6, sampling="cyclic")
    drawn = [sample_cohort(cohorts, 0, 0, t) for t in range(6)]
    assert cohorts.separation == 3
    assert len({c for cohort in drawn[:3] for c in cohort}) == 18
    assert drawn[:3] == drawn[3:]


def plan(**options):
    cohorts = options.pop("cohorts", Cohorts(20, 4))
    return RunParts(cohorts, keys_per_client={"row": 8}, seed=1, **options)


def clients():
    return Clients(
        20,
        data=lambda client: client,
        choose=lambda data, context: ROW.keys(context.rng.choice(400, 8, replace=False)),
        train=lambda model, data, rng: {k: v + 1 for k, v in model.items()},
    )


def test_a_run_stops_before_the_round_that_would_spend_too_much():
    privacy = Privacy(clip=1.0, noise=4.0, delta=1e-3, budget=2.0)
    run = start_run(ServerState.dense(LAYOUT, MODEL, SGD(0.1)), clients(), plan(privacy=privacy))
    with pytest.raises(BudgetError):
        list(run.rounds(1000))
    spent = [record.privacy["epsilon"] for record in run.records]
    assert len(spent) >= 1
    assert spent == sorted(spent)
    assert spent[-1] <= 2.0


def test_updates_that_were_added_up_before_are_refused():
    private = PrivateSum(aggregation_named("plain"), Privacy(1.0, 1.0), COHORTS)
    with pytest.raises(InputError, match="before they were clipped"):
        private.add(replace(request(), blocks=()))


@pytest.mark.parametrize("kind", ["all-rows", "correlated"])
def test_the_same_seed_gives_the_same_noise(kind):
    sampling = "cyclic" if kind == "correlated" else "fixed"
    rounds = 3 if kind == "correlated" else 0
    privacy = Privacy(clip=1.0, noise=0.1, delta=1e-3, kind=kind, rounds=rounds)
    made = plan(privacy=privacy, cohorts=Cohorts(20, 4, sampling))
    models = []
    for _ in range(2):
        run = start_run(ServerState.dense(LAYOUT, MODEL, SGD(0.1)), clients(), made)
        list(run.rounds(3))
        models.append(run.state.model()["w"].tobytes())
    assert models[0] == models[1]


def test_a_mean_over_choosers_cannot_be_private():
    with pytest.raises(InputError, match="divisor tells who took part"):
        PrivateSum(aggregation_named("plain"), Privacy(1.0, 1.0), COHORTS).add(
            replace(request(), over="choosers")
        )


@pytest.mark.parametrize("way", ["plain", "dense"])
def test_a_round_that_nobody_joined_releases_noise_as_any_other(way):
    empty = replace(request(), results=[replace(c, outcome="late") for c in request().results])
    privacy = Privacy(clip=1.0, noise=1.0)
    made = PrivateSum(aggregation_named(way), privacy, Cohorts(1000, 6, "poisson")).add(empty)
    assert all(np.all(rows != 0) for rows in dense(made.rows))


@pytest.mark.parametrize("way", [name for name in AGGREGATIONS if name.startswith("secure")])
@pytest.mark.parametrize("count", [0, 1])
def test_a_secure_sum_of_nobody_or_of_one_is_withheld_whoever_asks(way, count):
    """Poisson cohorts can be so small. One client must not be told from none by it."""
    few = replace(request(), results=request().results[:count])
    inner = aggregation_named(way)
    for aggregate in (inner, PrivateSum(inner, Privacy(1.0, 1.0), Cohorts(1000, 6, "poisson"))):
        made = aggregate.add(few)
        assert made.rows is None
        assert "too few" in made.error


def test_a_private_round_of_nobody_makes_a_step_and_counts_as_made():
    lost = Cohorts(20, 4, "poisson", lost_before=1.0)
    privacy = Privacy(clip=1.0, noise=1.0, delta=1e-3)
    state = ServerState.dense(LAYOUT, MODEL, SGD(0.1))
    run = start_run(state, clients(), plan(privacy=privacy, cohorts=lost))
    (record,) = run.rounds(1)
    assert (record.step, record.staleness, record.is_skipped) == (1, [], False)
