"""Evaluation by devices: means over their own examples, added up as updates are."""

import json
import time
from contextlib import ExitStack
from functools import partial
from math import nan

import numpy as np
import pytest

from keyhole.aggregation.plain import PLAIN
from keyhole.aggregation.privacy.mechanism import Privacy
from keyhole.errors import InputError
from keyhole.logs import writing_logs
from keyhole.rounds.best import BestModel, Goal, load_best
from keyhole.rounds.clients import Clients
from keyhole.rounds.loop import Evaluation, start_run
from keyhole.sampling import UNCOUNTED, Cohorts
from keyhole.service.evaluating import DeviceEvaluation
from keyhole.service.inbox import SpoolInbox
from keyhole.service.lobby import Lobby, WaitingRoom
from keyhole.service.served import Served
from keyhole.wire.settings import Evaluates, evaluates_of
from tests.helpers import LONG
from tests.service import living_devices
from tests.service.small_service import small_service
from tests.service.sums import private_run
from tests.service.sums.aggregators import aggregators

NAMES = ["mean_of_x", "never_known"]
PEOPLE = private_run.POPULATION


def measure(model, examples):
    """Client c has c + 1 examples of value c: what it measures tells who it is, in this test."""
    return {"mean_of_x": float(examples["x"].mean()), "never_known": nan}


def make_clients(holds_out=False):
    def own(client):
        return {"x": np.full(client + 1, client, np.float32)}

    held = own if holds_out else None
    return Clients(PEOPLE, own, private_run.choose, private_run.train, measure=measure, held=held)


def at_trainer():
    return Clients(UNCOUNTED, lambda client: 1 / 0, private_run.choose, private_run.train)


def expected_of(cohort):
    numbers = [int(name.rpartition("-")[2]) for name in cohort]
    return sum(n * (n + 1) for n in numbers) / sum(n + 1 for n in numbers)


@pytest.mark.parametrize("way", ["in the clear", "in shares"])
def test_a_cohort_of_its_own_measures_the_model(tmp_path, way, monkeypatch):
    cohorts = Cohorts(UNCOUNTED, 3, "check-in")
    plan = private_run.make_plan(cohorts=cohorts)
    rounds = tmp_path / "rounds"
    with ExitStack() as stack:
        note = WaitingRoom(rounds).note
        service = stack.enter_context(small_service(rounds, note=note))
        pair = stack.enter_context(aggregators(tmp_path / "sums"))
        lobby = Lobby(WaitingRoom(rounds))
        if way == "in shares":
            kind = private_run.served(service, pair, named=False)
            people = private_run.devices(service, pair, population=make_clients)
        else:
            plan = private_run.make_plan(cohorts=cohorts, aggregate=PLAIN)
            kind = Served(service.publisher, SpoolInbox(service.spool), poll=0.01, seconds=120.0)
            monkeypatch.setattr(living_devices.toy, "make_clients", partial(make_clients, True))
            people = living_devices.devices(service, range(PEOPLE), rehearsed=None)
        kind.lobby = lobby
        stack.enter_context(people)
        run = start_run(private_run.make_state(), at_trainer(), plan, tmp_path / "run", kind)
        stack.callback(run.close)
        measured = DeviceEvaluation(kind, run.clients, run.parts, NAMES, 4)
        (record, last) = run.rounds(2, evaluation=Evaluation(measured, every=2))
        before = private_run.model_bytes(run.state)
        again = measured(
            run.state
        )  # as a trainer does that was killed: the same devices, counted once
    lines = (tmp_path / "run" / "evaluations.jsonl").read_text().splitlines()
    (cohort,) = [json.loads(line)["devices"] for line in lines]
    assert len(cohort) == 4
    assert record.metrics == {}
    assert last.metrics == pytest.approx(
        {"mean_of_x": expected_of(cohort), "held_out_share": float(way == "in the clear")},
        abs=1e-3,
    )
    assert again == last.metrics
    assert (run.state.steps, private_run.model_bytes(run.state)) == (2, before)


def test_a_run_with_devices_keeps_its_best_model_and_ends(tmp_path, monkeypatch):
    """Devices measure the same numbers of every model: the first is the best."""
    plan = private_run.make_plan(cohorts=Cohorts(UNCOUNTED, 3, "check-in"), aggregate=PLAIN)
    monkeypatch.setattr(living_devices.toy, "make_clients", make_clients)
    rounds = tmp_path / "rounds"
    with ExitStack() as stack:
        service = stack.enter_context(small_service(rounds, note=WaitingRoom(rounds).note))
        kind = Served(service.publisher, SpoolInbox(service.spool), poll=0.01, seconds=120.0)
        kind.lobby = Lobby(WaitingRoom(rounds))
        stack.enter_context(living_devices.devices(service, range(PEOPLE), rehearsed=None))
        run = start_run(private_run.make_state(), at_trainer(), plan, tmp_path / "run", kind)
        stack.callback(run.close)
        measured = DeviceEvaluation(kind, run.clients, run.parts, NAMES[:1], PEOPLE)
        run.best = BestModel(Goal("mean_of_x", patience=2), tmp_path / "run")
        made = []
        for record in run.rounds(9, evaluation=Evaluation(measured)):
            made.append(record)
            if len(made) == 1:
                first = private_run.model_bytes(run.state)
        best = load_best(tmp_path / "run", run.state.layout, run.state.optimizer)
    assert len(made) == 3
    assert private_run.model_bytes(best) == first != private_run.model_bytes(run.state)
    assert run.best.goal.why(run.records).startswith("no better mean_of_x in 2 evaluations")


@pytest.mark.parametrize("people", [2, 0])
def test_an_evaluation_goes_on_with_the_devices_that_are_there(
    tmp_path, monkeypatch, people, capsys
):
    """Four are to measure. It hung for ever, and said nothing."""
    plan = private_run.make_plan(cohorts=Cohorts(UNCOUNTED, 2, "check-in"), aggregate=PLAIN)
    monkeypatch.setattr(living_devices.toy, "make_clients", make_clients)
    rounds, looks, taken = tmp_path / "rounds", [], []
    with ExitStack() as stack:
        service = stack.enter_context(small_service(rounds, note=WaitingRoom(rounds).note))
        kind = Served(service.publisher, SpoolInbox(service.spool), poll=0.01, seconds=120.0)
        kind.lobby, kind.on_arrival = Lobby(WaitingRoom(rounds)), looks.append
        run = start_run(private_run.make_state(), at_trainer(), plan, tmp_path / "run", kind)
        stack.callback(run.close)
        pair = living_devices.devices(service, range(2), rehearsed=None, on_round=taken.append)
        with pair, writing_logs("json"):
            list(run.rounds(1))
            if people:
                until = time.monotonic() + LONG
                while len(list(kind.lobby.room.waiting())) < 2 and time.monotonic() < until:
                    time.sleep(0.05)
                metrics = DeviceEvaluation(kind, run.clients, run.parts, NAMES, 4, 5.0)(run.state)
        if not people:
            kind.lobby.room.forget(list(kind.lobby.room.waiting()))
            with writing_logs("json"):
                metrics = DeviceEvaluation(kind, run.clients, run.parts, NAMES, 4, 0.3)(run.state)
    (line,) = [json.loads(each) for each in capsys.readouterr().err.splitlines()]
    first = next(look for look in looks if look.measures)
    assert (first.is_drawn, first.goal) == (False, 4)
    assert 0 < first.seconds <= 5.0
    if people:
        expected = expected_of(["device-0", "device-1"])
        assert metrics["mean_of_x"] == pytest.approx(expected, abs=1e-3)
        assert sorted(each.measures for each in taken) == [False, False, True, True]
        assert line["text"] == "round 0: 2 of 4 devices measure the model: no more came in 5 s"
    else:
        assert metrics == {}
        assert line["text"].endswith("its metrics are missing: no device came in 0 s")
    assert line["level"] == "warning"


def test_what_is_measured_must_break_no_promise(tmp_path):
    privacy = Privacy(clip=1.0, noise=1.0, delta=1e-6)
    plan = private_run.make_plan(privacy=privacy)
    with small_service(tmp_path) as service:
        kind = Served(service.publisher, SpoolInbox(service.spool))
        kind.lobby = Lobby(WaitingRoom(tmp_path))
        with pytest.raises(InputError, match="and privacy"):
            DeviceEvaluation(kind, at_trainer(), plan, NAMES, 4)


def test_examples_beyond_the_max_count_no_more():
    asked = Evaluates(["loss"], max_examples=8)
    few, many = (asked.numbers({"loss": value}, n)["told"] for value, n in [(1.0, 4), (3.0, 800)])
    assert asked.means(few + many) == {"loss": pytest.approx((4 * 1.0 + 8 * 3.0) / 12)}
    assert asked.means(asked.numbers({}, 4)["told"]) == {}


@pytest.mark.parametrize("told", [{"metrics": [], "max_examples": 1}, {"metrics": ["a b"]}, 7])
def test_a_round_that_measures_nonsense_is_refused(told):
    with pytest.raises(InputError, match="what a round measures"):
        evaluates_of({"evaluation": told})
