"""The account of a run: it is that of the sampler, and of what really ran."""

from dataclasses import replace

import numpy as np
import pytest

import keyhole as kh
from keyhole.aggregation import aggregation_named
from keyhole.aggregation.base import Rounding
from keyhole.aggregation.privacy.mechanism import Privacy
from keyhole.errors import BudgetError, InputError
from keyhole.rounds.account import Account, Attendance
from keyhole.rounds.clients import Clients
from keyhole.rounds.loop import Synchronous, resume_run, start_run
from keyhole.rounds.machine import Buffering
from keyhole.rounds.record import RoundRecord
from keyhole.rounds.round import run_round
from keyhole.rounds.spec import RunParts
from keyhole.sampling import UNCOUNTED, Cohorts
from keyhole.server.optimizers import SGD
from keyhole.server.state import ServerState

pytest.importorskip("dp_accounting")

ROW = kh.KeySpace("row", 40)
MODEL = {"w": np.zeros((40, 3), np.float32), "b": np.zeros(2, np.float32)}
LAYOUT = kh.Layout.of(MODEL, kh.Cut(ROW, {"w": 0}))
CYCLIC = Cohorts(20, 4, "cyclic")
CORRELATED = Privacy(clip=1.0, noise=2.0, delta=1e-3, kind="correlated", rounds=20)


def clients(count=20):
    return Clients(
        count,
        data=lambda client: client,
        choose=lambda data, context: ROW.keys(context.rng.choice(40, 8, replace=False)),
        train=lambda model, data, rng: {k: v + 1 for k, v in model.items()},
    )


def state():
    return ServerState.dense(LAYOUT, MODEL, SGD(0.1))


def plan(privacy, cohorts=CYCLIC, **options):
    return RunParts(cohorts, keys_per_client={"row": 8}, seed=1, privacy=privacy, **options)


def account(way, cohorts, **options):
    privacy = Privacy(clip=1.0, noise=2.0, delta=1e-4, **options)
    return Account.of(privacy, cohorts, aggregation_named(way), LAYOUT, {"row": 8})


@pytest.mark.parametrize(
    ("sampling", "relation"), [("fixed", "replace-one"), ("poisson", "add-or-remove")]
)
def test_the_account_is_that_of_the_sampler(sampling, relation):
    made = account("plain", Cohorts(1000, 50, sampling))
    spent = made.describe(2, range(50), 40)
    assert (spent["neighbours"], spent["sampling"], spent["unit"]) == (relation, sampling, "client")
    assert 0 < spent["epsilon"] < 10
    assert spent["rounds"] == 3


def test_correlated_noise_needs_cohorts_that_take_turns():
    cyclic = Cohorts(1000, 6, "cyclic")
    with pytest.raises(InputError, match="do not belong together"):
        account("plain", Cohorts(1000, 6), kind="correlated", rounds=8)
    account("plain", cyclic, kind="correlated", rounds=8).check(0)


@pytest.mark.parametrize("sampling", ["fixed", "poisson"])
@pytest.mark.parametrize("drawn", ["named", "secret"])
def test_over_a_service_nothing_is_gained_by_sampling(sampling, drawn):
    """One round with noise of one clipping norm is one Gaussian: 4.887 at delta 1e-6, by
    Delta(x) = Phi(1/2 - x) - e^x Phi(-1/2 - x) = delta. As sampling of 1 in 830 it would be 0.028,
    for those alone who do not know who was drawn."""
    privacy = Privacy(clip=1.0, noise=1.0, delta=1e-6)
    cohorts = Cohorts(83_000, 100, sampling)
    made = Account.of(privacy, cohorts, aggregation_named("plain"), LAYOUT, {"row": 8}, drawn)
    spent = made.describe(0, range(100), 100)
    assert spent["epsilon"] == pytest.approx(4.887, abs=1e-3)
    assert (spent["sampling"], spent["drawn"]) == ("participation", drawn)
    # Four rounds are one Gaussian with half the noise.
    assert made.describe(3, range(100), 100)["epsilon"] == pytest.approx(10.997, abs=1e-3)
    if drawn == "named":
        assert "epsilon_unseen" not in spent
    elif sampling == "poisson":
        assert spent["epsilon_unseen"] == pytest.approx(0.028, abs=5e-4)
    else:
        # The same for a client replaced, whose sum moves by twice the clip: 3.89.
        assert 0 < spent["epsilon_unseen"] < spent["epsilon"]


def test_cohorts_that_take_turns_count_a_client_once_in_a_turn():
    privacy = Privacy(clip=1.0, noise=1.0, delta=1e-6)
    turns = Cohorts(1000, 100, "cyclic")
    made = Account.of(privacy, turns, aggregation_named("plain"), LAYOUT, {"row": 8}, "secret")
    found = [made.describe(t, range(100), 100) for t in (0, 9, 10)]
    assert [spent["participations"] for spent in found] == [1, 1, 2]
    assert [round(spent["epsilon"], 2) for spent in found] == [4.89, 4.89, 7.29]


def test_devices_that_check_in_count_in_each_round_that_they_may_have_been_in():
    """Nothing is gained by their drawing, whoever looks: they are no sample of a population."""
    privacy = Privacy(clip=1.0, noise=1.0, delta=1e-6)

    def spent(rounds, **changes):
        cohorts = Cohorts(UNCOUNTED, 100, "check-in", **changes)
        sums = aggregation_named("plain"), LAYOUT, {"row": 8}, "secret"
        return Account.of(privacy, cohorts, *sums).describe(rounds - 1, range(100), 100)

    assert spent(1)["epsilon"] == pytest.approx(4.887, abs=1e-3)
    assert spent(4)["epsilon"] == pytest.approx(10.997, abs=1e-3)
    assert spent(4, rest=3)["epsilon"] == pytest.approx(4.887, abs=1e-3)
    assert spent(5, rest=3)["participations"] == 2
    assert "epsilon_unseen" not in spent(4)


def test_a_device_that_did_not_rest_ends_the_run_before_its_round_is_applied():
    cohorts = Cohorts(UNCOUNTED, 4, "check-in", rest=1)
    privacy = Privacy(clip=1.0, noise=2.0, delta=1e-3)
    attendance = Attendance(privacy, cohorts)
    told = {"step": 1, "privacy": {"epsilon": 1.0}}
    far = 3 << 20  # the roll of a run may be long
    attendance.admit(RoundRecord(0, clients=[0, far], **told))
    attendance.admit(RoundRecord(1, clients=[1, 2], **told))
    attendance.admit(RoundRecord(2, clients=[0, far], **told))
    with pytest.raises(InputError, match="1 of 2 clients back too soon"):
        attendance.admit(RoundRecord(3, clients=[5, far], **told))


def test_rounds_that_do_not_take_turns_are_not_applied():
    """The account of cyclic cohorts without correlated noise rests on their turns, too."""
    privacy = Privacy(clip=1.0, noise=2.0, delta=1e-3)
    run = start_run(state(), clients(16), plan(privacy, Cohorts(16, 4, "cyclic")), kind=Skips())
    rounds = run.rounds(5)
    next(rounds), next(rounds)
    with pytest.raises(InputError, match="4 of 4 clients back too soon"):
        next(rounds)


def test_a_round_of_another_size_is_refused():
    made = account("plain", Cohorts(1000, 50))
    for asked, arrived in ((range(51), 50), (range(49), 49), ([1] * 50, 50), (range(50), 51)):
        with pytest.raises(InputError, match="not the one accounted for"):
            made.describe(0, asked, arrived)
    assert account("plain", Cohorts(1000, 50, "poisson")).describe(0, range(61), 61)["epsilon"] > 0


def test_no_noise_is_no_bound_and_can_be_written_as_json():
    privacy = Privacy(clip=1.0, noise=0.0, delta=1e-4)
    made = Account.of(privacy, Cohorts(1000, 50), aggregation_named("plain"), LAYOUT, {"row": 8})
    assert made.describe(0, range(50), 50)["epsilon"] is None


# What sums tell by not being opened


def test_small_poisson_cohorts_pay_for_sums_that_are_withheld():
    """Of 6 expected, 1 in 1000 cohorts is one short of two clients; of 60, none to speak of."""
    assert account("plain", Cohorts(1000, 6, "poisson")).failure == 0
    for way in ("secure-dense", "secure-sparse"):
        assert account(way, Cohorts(1000, 6, "poisson")).failure == pytest.approx(
            0.006 * 999 * 0.006 * 0.994**998
        )
        assert account(way, Cohorts(1000, 60, "poisson")).failure < 1e-25
        assert account(way, Cohorts(1000, 6)).failure == 0
    minimum = account("plain", Cohorts(1000, 6, "poisson", min_updates=2))
    assert minimum.failure == account("secure-dense", Cohorts(1000, 6, "poisson")).failure


def test_sketches_pay_for_not_decoding():
    """5 in 10,000 where keys are few, for a part that is cut and one that is not, twice: with the
    client and without it, if it is in the cohort."""
    assert account("secure-sketch", Cohorts(1000, 50)).failure == pytest.approx(2 * 0.05 * 1e-3)
    turns = account("secure-sketch", Cohorts(1000, 50, "cyclic"), kind="correlated", rounds=40)
    assert turns.failure == pytest.approx(2 * 2 / 40 * 1e-3)  # two parts in forty rounds


@pytest.mark.parametrize("sampling", ["poisson", "cyclic"])
def test_over_selection_has_no_account_where_a_client_is_added_or_removed(sampling):
    """Whoever comes in time keeps another one out: the sum moves by twice the clip."""
    kind = {"kind": "correlated", "rounds": 8} if sampling == "cyclic" else {}
    with pytest.raises(InputError, match="takes the place of another"):
        account("plain", Cohorts(1000, 50, sampling, over_selection=1.2), **kind)
    account("plain", Cohorts(1000, 50, over_selection=1.2))


def test_poisson_cohorts_that_lose_clients_have_no_account_with_one_server():
    lossy = Cohorts(1000, 50, "poisson", lost_after=0.1)
    with pytest.raises(InputError, match="who dropped out"):
        account("secure-dense", lossy)
    assert account("secure-sparse", lossy).failure < 1e-15
    account("secure-dense", replace(lossy, sampling="fixed"))


# Before the first round


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"privacy": Privacy(1.0, 1.0), "over": "choosers"}, "divisor"),
        ({"privacy": Privacy(1.0, 1.0, 1e-3, kind="thresholded")}, "too small for thresholded"),
        ({"aggregate": aggregation_named("secure-dense", Rounding(bits=16))}, "too small for sums"),
        ({"privacy": Privacy(1.0, 1.0, 1e-3), "buffering": Buffering(2, 4)}, "asynchronous"),
        ({"aggregate": aggregation_named("secure-dense"), "buffering": Buffering(2, 4)}, "clear"),
    ],
)
def test_what_no_round_could_add_up_is_refused_before_one_is_made(options, said):
    cohorts = Cohorts(600, 600) if said == "too small for sums" else Cohorts(600, 4)
    with pytest.raises(InputError, match=said):
        start_run(state(), clients(600), plan(options.pop("privacy", None), cohorts, **options))


def test_a_ring_too_coarse_for_the_clip_is_refused_before_the_first_round():
    big = {"w": np.zeros((40, 3), np.float32), "b": np.zeros(9**5, np.float32)}
    layout = kh.Layout.of(big, kh.Cut(ROW, {"w": 0}))
    coarse = aggregation_named("secure-dense", Rounding(bits=16))
    with pytest.raises(InputError, match="too coarse for differential privacy"):
        plan(Privacy(1.0, 1.0, 1e-4), Cohorts(999, 200), aggregate=coarse).check(layout)


def test_a_budget_without_a_single_round_starts_no_run():
    with pytest.raises(BudgetError):
        start_run(state(), clients(), plan(Privacy(1.0, 0.1, 1e-3, budget=1.0), Cohorts(20, 4)))


# What really ran


class Skips:
    """Rounds of another schedule than the plan's: every second cohort is left out."""

    def next(self, t, state, clients, plan, execute):
        made, record = run_round(2 * t, state, clients, plan, execute)
        return made, replace(record, round=t)

    def prepare(self, parts, directory):
        return parts

    def dump(self):
        return b""

    def load(self, data, layout):
        pass


def test_a_client_that_is_back_too_soon_ends_the_run_before_its_round_is_applied():
    """Four cohorts in turns, of which every second one comes: 0, 2, and 0 again two rounds later,
    where it should have been four."""
    run = start_run(state(), clients(16), plan(CORRELATED, Cohorts(16, 4, "cyclic")), kind=Skips())
    rounds = run.rounds(5)
    next(rounds), next(rounds)
    before = run.state.model()["w"].tobytes()
    with pytest.raises(InputError, match="4 of 4 clients back too soon"):
        next(rounds)
    assert run.state.model()["w"].tobytes() == before
    assert (run.state.steps, len(run.records)) == (2, 2)


def test_rounds_in_turns_are_let_in_and_a_resumed_run_remembers_them(tmp_path):
    made = plan(CORRELATED)
    run = start_run(state(), clients(), made, tmp_path / "run")
    assert [record.privacy["rounds"] for record in run.rounds(3)] == [1, 2, 3]
    run.close()
    resumed = resume_run(state(), clients(), made, tmp_path / "run")
    assert [record.privacy["rounds"] for record in resumed.rounds(7)] == [4, 5, 6, 7]
    resumed.close()
    whole = start_run(state(), clients(), made)
    list(whole.rounds(7))
    assert whole.state.model()["w"].tobytes() == resumed.state.model()["w"].tobytes()
    assert whole.records == resumed.records
    again = resume_run(state(), clients(), made, tmp_path / "run")
    again.kind = Skips()
    with pytest.raises(InputError, match="back too soon"):
        list(again.rounds(8))  # cohort 14 % 5 = 4, which had round 4, three ago
    again.close()


def test_without_the_records_of_all_rounds_nobody_knows_who_may_come():
    run = start_run(state(), clients(), plan(CORRELATED))
    records = list(run.rounds(3))
    Attendance(CORRELATED, CYCLIC, records)
    with pytest.raises(InputError, match="nobody knows"):
        Attendance(CORRELATED, CYCLIC, records[1:])
    Attendance(None, CYCLIC, records[1:])


class Careless(Synchronous):
    """Forgets the promise."""

    def next(self, t, state, clients, plan, execute):
        return run_round(t, state, clients, replace(plan, privacy=None), execute)


def test_rounds_that_forget_the_promise_are_not_applied():
    private = plan(Privacy(1.0, 1.0, 1e-3), Cohorts(20, 4))
    run = start_run(state(), clients(), private, kind=Careless())
    with pytest.raises(InputError, match="keep no promise"):
        list(run.rounds(1))
    assert run.state.steps == 0
    assert run.records == []


def test_every_record_says_what_was_spent():
    run = start_run(state(), clients(), plan(Privacy(1.0, 3.0, 1e-3), Cohorts(20, 4, "poisson")))
    spent = [record.privacy for record in run.rounds(3)]
    assert [each["rounds"] for each in spent] == [1, 2, 3]
    assert 0 < spent[0]["epsilon"] < spent[1]["epsilon"] < spent[2]["epsilon"]
    assert {(s["unit"], s["neighbours"]) for s in spent} == {("client", "add-or-remove")}
