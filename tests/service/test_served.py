"""Training over the service: the bytes of a run in process, and what happens when things stop."""

import shutil
import threading
from math import inf

import numpy as np
import pytest

from keyhole.delivery.clear import Pregenerated
from keyhole.delivery.records import Coding
from keyhole.device.take_part import PopulationClient, fetch_at_home, take_part
from keyhole.rounds.loop import resume_run, start_run
from keyhole.sampling import Cohorts, sample_cohort
from keyhole.server.optimizers import SGD, Adam
from keyhole.service.inbox import SpoolInbox
from keyhole.service.publishing import Publisher
from keyhole.service.served import Served
from keyhole.wire.assignment import device_name
from tests.rounds import toy
from tests.service.killed_trainer import die_at_every_moment
from tests.service.living_devices import devices
from tests.service.small_service import small_service

ROUNDS = 4


def served(service, **options):
    return Served(service.publisher, SpoolInbox(service.spool), poll=0.005, **options)


def in_process(plan, optimizer):
    run = start_run(toy.make_state(optimizer), toy.make_clients(), plan)
    return run, list(run.rounds(ROUNDS))


@pytest.mark.parametrize(
    ("kind", "optimizer"),
    [
        ("plain", SGD(1.0)),
        ("uint8", Adam(0.1)),
        pytest.param("plain", Adam(0.1), marks=pytest.mark.slow),
        pytest.param("uint8", SGD(1.0), marks=pytest.mark.slow),
    ],
    ids=["plain-SGD", "uint8-Adam", "plain-Adam", "uint8-SGD"],
)
def test_a_run_over_the_service_equals_the_run_in_process(tmp_path, optimizer, kind):
    coding = Coding(kind)
    plan = toy.make_plan(delivery=Pregenerated(coding))
    with small_service(tmp_path) as service, devices(service):
        run = start_run(
            toy.make_state(optimizer),
            toy.make_clients(),
            plan,
            kind=served(service, coding=coding),
        )
        records = list(run.rounds(ROUNDS))
    expected, expected_records = in_process(plan, optimizer)
    assert toy.model_bytes(run.state) == toy.model_bytes(expected.state)
    assert records == expected_records


def test_a_round_closes_without_the_devices_that_stay_away(tmp_path):
    plan = toy.make_plan()
    asked = sample_cohort(plan.cohorts, plan.seed, plan.trial, 0)
    there = asked[:3]
    with small_service(tmp_path) as service, devices(service, there):
        kind = served(service, seconds=1.0)
        run = start_run(toy.make_state(), toy.make_clients(), plan, kind=kind)
        (record,) = run.rounds(1)
    assert record.lost_before == list(asked[3:])
    assert len(record.staleness) == 3
    assert run.state.steps == 1


def test_a_round_to_which_nobody_comes_is_skipped(tmp_path):
    with small_service(tmp_path) as service:
        run = start_run(
            toy.make_state(),
            toy.make_clients(),
            toy.make_plan(),
            kind=served(service, seconds=0.01),
        )
        (record,) = run.rounds(1)
    assert record.is_skipped
    assert run.state.steps == 0


def test_a_round_closes_with_the_first_that_answer(tmp_path):
    """Over-selection: seven are asked, five are waited for."""
    plan = toy.make_plan(cohorts=Cohorts(len(toy.EXAMPLES), 5, over_selection=1.4))
    asked = sample_cohort(plan.cohorts, plan.seed, plan.trial, 0)
    assert len(asked) == 7
    with small_service(tmp_path) as service, devices(service, asked[2:]):
        run = start_run(toy.make_state(), toy.make_clients(), plan, kind=served(service))
        (record,) = run.rounds(1)
    assert (record.closed, record.late, record.lost_before) == ("goal", list(asked[:2]), [])
    assert len(record.staleness) == 5


def test_a_trainer_that_is_killed_at_any_moment_goes_on_with_the_same_updates(tmp_path):
    directory, path = tmp_path / "rounds", tmp_path / "run"
    with small_service(directory) as service, devices(service, pause=0.2):
        service.publisher.close()  # the trainer is the one that publishes
        printed = die_at_every_moment(directory, path, ROUNDS)
    expected, _ = in_process(toy.make_plan(delivery=Pregenerated()), SGD(1.0))
    assert printed == toy.model_bytes(expected.state).hex()


def test_a_stop_while_waiting_loses_nothing(tmp_path):
    plan, stop = toy.make_plan(), threading.Event()
    asked = sample_cohort(plan.cohorts, plan.seed, plan.trial, 0)
    with small_service(tmp_path / "rounds") as service:

        def stop_after_two(waiting):
            if waiting.here == 2:
                stop.set()

        kind = served(service, stop=stop, on_arrival=stop_after_two)
        run = start_run(toy.make_state(), toy.make_clients(), plan, tmp_path / "run", kind)
        with devices(service, asked[:2]), pytest.raises(KeyboardInterrupt):
            next(run.rounds(ROUNDS))
        run.close()
        with devices(service):
            run = resume_run(
                toy.make_state(), toy.make_clients(), plan, tmp_path / "run", served(service)
            )
            list(run.rounds(ROUNDS))
        run.close()
    expected, _ = in_process(toy.make_plan(delivery=Pregenerated()), SGD(1.0))
    assert toy.model_bytes(run.state) == toy.model_bytes(expected.state)


def test_updates_of_rounds_that_are_done_are_removed(tmp_path):
    with small_service(tmp_path) as service, devices(service):
        run = start_run(toy.make_state(), toy.make_clients(), toy.make_plan(), kind=served(service))
        list(run.rounds(3))
        assert len(service.spool.rounds()) == 1


def test_a_run_that_starts_anew_meets_its_old_rounds_as_new_ones(tmp_path):
    """Equal runs have equal rounds: the spool must not take them for those it has closed."""
    models = []
    with small_service(tmp_path) as service:
        for _ in range(2):
            with devices(service):
                kind = served(service)
                run = start_run(toy.make_state(), toy.make_clients(), toy.make_plan(), kind=kind)
                list(run.rounds(2))
            models.append(toy.model_bytes(run.state))
            service.publisher.close()
            (tmp_path / "current.json").unlink()
            shutil.rmtree(tmp_path / "rounds")
            service.publisher = Publisher(tmp_path)
        service.publisher.close()
    assert models[0] == models[1]


def test_devices_that_select_at_home_make_the_same_model(tmp_path):
    plan = toy.make_plan(cohorts=Cohorts(len(toy.EXAMPLES), 2))
    asked = sample_cohort(plan.cohorts, plan.seed, plan.trial, 0)
    with small_service(tmp_path) as service:
        run = start_run(
            toy.make_state(), toy.make_clients(), plan, kind=served(service, seconds=inf)
        )
        training = threading.Thread(target=lambda: list(run.rounds(1)))
        training.start()
        for client in asked:
            one = PopulationClient(client, lambda settings: toy.make_clients())
            with service.device(name=device_name(client)) as device:
                while not hasattr(take_part(device, one.participant(fetch_at_home)), "round"):
                    pass
        training.join()
    expected = start_run(toy.make_state(), toy.make_clients(), plan)
    list(expected.rounds(1))
    np.testing.assert_array_equal(run.state.model()["x"], expected.state.model()["x"])
