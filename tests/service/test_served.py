"""Training over the service: the bytes of a run in process, and what happens when things stop."""

import shutil
import stat
import threading
from math import inf

import numpy as np
import pytest

from keyhole.aggregation import aggregation_named
from keyhole.aggregation.privacy.mechanism import Privacy
from keyhole.delivery import delivery_named
from keyhole.delivery.clear import Pregenerated
from keyhole.delivery.records import Coding
from keyhole.device.take_part import PopulationClient, fetch_at_home, take_part
from keyhole.errors import InputError
from keyhole.rounds.cohorts import Draws
from keyhole.rounds.loop import resume_run, start_run
from keyhole.rounds.record import RoundRecord
from keyhole.sampling import Cohorts, sample_cohort
from keyhole.server.optimizers import SGD, Adam
from keyhole.service.directory import read_current
from keyhole.service.inbox import SpoolInbox, seen_at_service
from keyhole.service.numbering import Numbering
from keyhole.service.publishing import Publisher
from keyhole.service.served import Served
from keyhole.wire.assignment import device_name
from tests.rounds import toy
from tests.service.killed_trainer import die_at_every_moment
from tests.service.living_devices import devices
from tests.service.small_service import at_service, small_service

ROUNDS = 4


def served(service, **options):
    """Rounds with the cohorts of a run in process, which is then met to the byte."""
    options = {"named": True, **options}
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
    assert records == at_service(expected_records)


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


@pytest.mark.slow
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


def test_cohorts_are_drawn_from_a_secret_that_a_run_keeps(tmp_path):
    """A trainer that is stopped goes on with the same cohorts; the seed does not tell them."""
    plan, asked = toy.make_plan(), []
    with small_service(tmp_path / "rounds") as service:
        for begin, until in ((start_run, 2), (resume_run, 4)):
            kind = served(service, seconds=0.01, named=False)
            kind.goes_on = True
            run = begin(toy.make_state(), toy.make_clients(), plan, tmp_path / "run", kind)
            asked += [tuple(record.clients) for record in run.rounds(until)]
            run.close()
    secret = (tmp_path / "run" / "secret").read_bytes()
    draws = Draws("secret", secret)
    assert asked == [draws.cohort(plan.cohorts, plan.seed, plan.trial, t) for t in range(4)]
    assert asked != [sample_cohort(plan.cohorts, plan.seed, plan.trial, t) for t in range(4)]
    assert stat.S_IMODE((tmp_path / "run" / "secret").stat().st_mode) == 0o600
    told = [file for file in (tmp_path / "run").rglob("*") if file.is_file()]
    told += [file for file in (tmp_path / "rounds").rglob("*") if file.is_file()]
    for file in told:
        is_other = file.name != "secret"
        assert not (is_other and (secret in (data := file.read_bytes()) or hexed(secret) in data))


def hexed(secret):
    return secret.hex().encode()


def test_devices_draw_from_the_nonce_of_a_round(tmp_path):
    """Without a seed of their own, and a new one in every round."""
    plan, nonces = toy.make_plan(cohorts=Cohorts(len(toy.EXAMPLES), 2)), []
    with small_service(tmp_path) as service, devices(service, rehearsed=None):
        kind = served(service, named=False)
        run = start_run(toy.make_state(), toy.make_clients(), plan, kind=kind)
        for _ in run.rounds(2):
            with service.device() as device:
                settings = device.known(device.current().round).manifest.settings
            nonces.append(settings["nonce"])
            assert not {"seed", "trial"} & settings.keys()
    assert run.state.steps == 2
    assert len(set(nonces)) == 2


@pytest.mark.parametrize(
    ("name", "party"),
    [
        ("pregenerated", "slice server"),
        ("pir", "first server"),
        ("relay", "gateway"),
        ("broadcast", "server"),
    ],
)
def test_who_takes_updates_in_sees_them_unless_they_are_shares(name, party):
    fetched = delivery_named(name)
    clear = "each update, its keys and whose they are"
    record = RoundRecord(round=0, step=1, clients=[], seen_in_sum={"server": clear})
    told = seen_at_service(record, toy.make_plan(), fetched)
    assert told.seen_in_sum == {party: clear, "server": clear}
    shares = toy.make_plan(aggregate=aggregation_named("secure-sparse"))
    assert seen_at_service(record, shares, fetched) is record


def test_a_plain_sum_over_a_service_promises_nothing(tmp_path):
    plan = toy.make_plan(privacy=Privacy(clip=1.0, noise=1.0, delta=1e-2))
    with small_service(tmp_path) as service:
        run = start_run(toy.make_state(), toy.make_clients(), plan, kind=served(service))
        with pytest.raises(InputError, match="arrives in the clear: got privacy with plain"):
            next(run.rounds(1))
        assert service.publisher.cohort_of(0) is None  # nothing was published


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
            one = PopulationClient(client, lambda settings: toy.make_clients(), toy.REHEARSED)
            with service.device(name=device_name(client)) as device:
                while not hasattr(take_part(device, one.participant(fetch_at_home)), "round"):
                    pass
        training.join()
    expected = start_run(toy.make_state(), toy.make_clients(), plan)
    list(expected.rounds(1))
    np.testing.assert_array_equal(run.state.model()["x"], expected.state.model()["x"])


def test_a_second_run_counts_on_and_its_devices_are_those_of_the_first(tmp_path):
    """Neither the first run, resumed, nor the second overwrites a round: numbers only rise."""
    numbers, published = [], tmp_path / "rounds"

    def rounds(path, plan, start, until):
        run = start(toy.make_state(), toy.make_clients(), plan, path, served(service))
        numbers.extend(read_current(published).number for _ in run.rounds(until))
        run.close()
        return toy.model_bytes(run.state)

    plan = toy.make_plan()
    with small_service(published) as service, devices(service):
        rounds(tmp_path / "one", plan, start_run, 2)
        second = rounds(tmp_path / "two", plan, start_run, ROUNDS)
        first = rounds(tmp_path / "one", plan, resume_run, ROUNDS)
    expected, _ = in_process(plan, SGD(1.0))
    assert first == second == toy.model_bytes(expected.state)
    assert numbers == list(range(2 * ROUNDS))


def test_a_round_that_another_run_left_open_is_closed_before_the_next(tmp_path):
    with small_service(tmp_path) as service:
        for run in ("one", "one", "two"):
            numbering = Numbering(service.publisher, run)
            assert numbering.of(0) == {"one": 0, "two": 1}[run]
            if run == "one":
                service.publish_state(toy.make_state(), number=0)
        assert read_current(tmp_path).phase == "closed"
        assert (numbering.of(2), numbering.round_of(f"3-{'a' * 64}")) == (3, 2)
