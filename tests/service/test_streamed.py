"""Asynchronous rounds over the service: as in process where devices end in the same order."""

import threading
from dataclasses import asdict
from itertools import pairwise

import pytest

from keyhole.delivery.clear import Pregenerated
from keyhole.errors import InputError
from keyhole.rounds.loop import resume_run, start_run
from keyhole.rounds.machine import Buffering
from keyhole.sampling import sample_cohort
from keyhole.service.inbox import SpoolInbox
from keyhole.service.served import Served
from keyhole.wire.assignment import device_name
from tests.helpers import with_slow
from tests.rounds import toy
from tests.service.in_turn import InTurn
from tests.service.killed_trainer import die_at_every_moment
from tests.service.living_devices import EVERYONE, devices
from tests.service.small_service import at_service, small_service

ROUNDS = 8
# Known in process when clients start, here when they end.
COSTS = ("select_calls", "cache_hits", "seen_by")


def slow(rng):
    return rng.exponential()


def at_once(rng):
    return 0.0


def in_few_moments(rng):
    """Many end at the same time."""
    return float(rng.integers(1, 4))


def plan_of(*numbers, **rest):
    return toy.make_plan(delivery=Pregenerated(), buffering=Buffering(*numbers, **rest))


def served(service, *summons, **options):
    inbox = SpoolInbox(service.spool)
    return Served(service.publisher, inbox, *summons, poll=0.002, named=True, **options)


def trained(plan, kind=None, rounds=ROUNDS):
    run = start_run(toy.make_state(), toy.make_clients(), plan, kind=kind)
    return run, list(run.rounds(rounds))


def comparable(records):
    return [{n: v for n, v in asdict(r).items() if n not in COSTS} for r in records]


@pytest.mark.parametrize(
    ("numbers", "duration"),
    [
        ((3, 2), at_once),
        ((5, 5), at_once),
        ((1, 2), slow),
        ((8, 3), slow),
        ((20, 4), slow),
        ((3, 2), in_few_moments),
        ((12, 3), in_few_moments),
    ],
)
def test_bytes_are_those_of_a_run_in_process_in_which_clients_end_in_the_same_order(
    tmp_path, numbers, duration
):
    plan = plan_of(*numbers, duration=duration)
    with small_service(tmp_path) as service:
        run, records = trained(plan, served(service, InTurn(service, plan)))
    expected, expected_records = trained(plan)
    assert comparable(records) == comparable(at_service(expected_records))
    assert toy.model_bytes(run.state) == toy.model_bytes(expected.state)


def test_an_update_is_taken_while_its_round_trails_and_refused_when_it_would_not_count(tmp_path):
    plan = plan_of(10, 2, max_staleness=2, duration=slow)
    with small_service(tmp_path) as service:
        summons = InTurn(service, plan)
        _, records = trained(plan, served(service, summons), rounds=20)
        assert len(service.spool.rounds()) <= 4
    assert max(age for record in records for age in record.staleness) == 2
    assert max(summons.trailing) == 2
    assert any(record.lost_before for record in records)
    assert all(len(record.staleness) == 2 for record in records)


def test_devices_that_check_in_train_while_others_do(tmp_path):
    plan = plan_of(6, 3)
    with small_service(tmp_path) as service, devices(service):
        run, records = trained(plan, served(service), rounds=10)
    assert run.state.steps == 10
    assert all(len(record.staleness) == 3 for record in records)
    assert max(age for record in records for age in record.staleness) > 0
    assert toy.metrics(run.state)["accuracy"] > toy.metrics(toy.make_state())["accuracy"]


def test_a_device_that_stays_away_is_given_up_and_another_begins(tmp_path):
    plan = plan_of(2, 3)
    first = set(sample_cohort(plan.cohorts, plan.seed, plan.trial, 0)[:2])
    with small_service(tmp_path) as service, devices(service, set(EVERYONE) - first):
        _, (record,) = trained(plan, served(service, seconds=1.0), rounds=1)
    assert first <= set(record.lost_before)
    assert (record.closed, len(record.staleness)) == ("goal", 3)


def test_a_round_to_which_nobody_comes_ends_without_a_step(tmp_path):
    with small_service(tmp_path) as service:
        run, (record,) = trained(plan_of(5, 3), served(service, seconds=0.01), rounds=1)
    assert (record.closed, record.is_skipped, run.state.steps) == ("everyone", True, 0)
    assert sorted(record.clients) == list(EVERYONE)


class Watched:
    """A publisher that remembers the cohorts of each round."""

    def __init__(self, publisher):
        self._publisher = publisher
        self.cohorts = {}

    def publish_state(self, state, *, number, cohort, **options):
        self.cohorts[number] = [cohort]
        return self._publisher.publish_state(state, number=number, cohort=cohort, **options)

    def invite(self, cohort):
        self.cohorts[max(self.cohorts)].append(cohort)
        self._publisher.invite(cohort)

    def __getattr__(self, name):
        return getattr(self._publisher, name)


def watched_run(tmp_path, plan, rounds=ROUNDS):
    with small_service(tmp_path) as service:
        publisher = Watched(service.publisher)
        kind = Served(
            publisher, SpoolInbox(service.spool), InTurn(service, plan), poll=0.0, named=True
        )
        return publisher.cohorts, trained(plan, kind, rounds)[1]


def test_nothing_is_published_for_a_step_whose_updates_are_there(tmp_path):
    """Four end at once: two make the first step, the others the second."""
    cohorts, records = watched_run(tmp_path, plan_of(4, 2, duration=at_once), rounds=4)
    assert [record.staleness for record in records] == [[0, 0], [1, 1]] * 2
    assert list(cohorts) == [0, 2]


def test_a_device_that_was_let_into_a_round_is_not_turned_out(tmp_path):
    """It may have checked in after its last update was sent, and before that was seen."""
    cohorts, records = watched_run(tmp_path, plan_of(6, 3, duration=slow))
    assert any(len(each) > 1 for each in cohorts.values())
    for each in cohorts.values():
        for before, after in pairwise(each):
            assert after[: len(before)] == before
    assert any(set(r.clients) & {int(n[7:]) for n in cohorts[r.round][-1]} for r in records)


def test_a_trainer_that_is_killed_at_any_moment_goes_on(tmp_path):
    """One client at work at a time, so that the bytes do not depend on who is faster."""
    directory, path = tmp_path / "rounds", tmp_path / "run"
    with small_service(directory) as service, devices(service, pause=0.2):
        service.publisher.close()  # the trainer is the one that publishes
        printed = die_at_every_moment(directory, path, ROUNDS, "--asynchronous")
    expected, _ = trained(plan_of(1, 2))
    assert printed == toy.model_bytes(expected.state).hex()


def test_those_at_work_when_a_run_was_stopped_are_called_again_and_count_once(tmp_path):
    plan = plan_of(6, 2, duration=slow)
    with small_service(tmp_path / "rounds") as service:
        kind = served(service, InTurn(service, plan))
        run = start_run(toy.make_state(), toy.make_clients(), plan, tmp_path / "run", kind)
        list(run.rounds(3))
        run.close()
        called = []

        class Anew(InTurn):
            def call(self, round_id, t, asked, seconds, *, may_miss):
                called.append((t, asked))
                super().call(round_id, t, asked, seconds, may_miss=may_miss)

        again = served(service, Anew(service, plan))
        run = resume_run(toy.make_state(), toy.make_clients(), plan, tmp_path / "run", again)
        records = list(run.rounds(ROUNDS))
        run.close()
    assert next((t, len(asked)) for t, asked in called) == (3, 6)
    assert all(len(record.staleness) == 2 for record in records)
    assert all(len(set(record.clients)) == len(record.clients) for record in records)


@pytest.mark.parametrize(
    "is_resumed", with_slow([True, False], fast=[True]), ids=["from disk", "in memory"]
)
def test_a_stop_while_waiting_loses_nothing(tmp_path, is_resumed):
    plan, stop = plan_of(1, 2), threading.Event()
    with small_service(tmp_path / "rounds") as service, devices(service):
        seen = []

        def stop_once(waiting):
            if waiting.here == 1 and not seen:
                seen.append(waiting.here)
                stop.set()

        kind = served(service, stop=stop, on_arrival=stop_once)
        run = start_run(toy.make_state(), toy.make_clients(), plan, tmp_path / "run", kind)
        with pytest.raises(KeyboardInterrupt):
            list(run.rounds(ROUNDS))
        if is_resumed:
            run.close()
            again = tmp_path / "run", served(service)
            run = resume_run(toy.make_state(), toy.make_clients(), plan, *again)
        stop.clear()
        list(run.rounds(ROUNDS))
        run.close()
    expected, _ = trained(plan)
    assert toy.model_bytes(run.state) == toy.model_bytes(expected.state)


def test_nobody_begins_in_a_round_that_has_made_its_step(tmp_path):
    plan = plan_of(4, 2, duration=slow)
    with small_service(tmp_path) as service:
        trained(plan, served(service, InTurn(service, plan)), rounds=1)
        with service.device(name=device_name(0)) as device:
            now = device.current()
            assert now.phase == "closed"
            assert now.takes(now.round)  # two are at work


def test_updates_that_go_elsewhere_cannot_be_weighed_by_age(tmp_path):
    with small_service(tmp_path) as service:
        kind = Served(service.publisher, object())
        with pytest.raises(InputError, match="added up in the clear"):
            trained(plan_of(2, 2), kind)
