"""Updates above the max norm, sent to a service: refused or clipped, counted, and waited for by
nobody."""

import re
import threading

import numpy as np
import pytest

from keyhole.aggregation.plain import PLAIN
from keyhole.aggregation.robust import MEDIAN, NormAlarm, TrimmedMean
from keyhole.errors import KeyholeError
from keyhole.rounds.loop import start_run
from keyhole.rounds.machine import Buffering
from keyhole.sampling import sample_cohort
from keyhole.server.inputs import InputBound
from keyhole.service.spool import UpdateSpool
from keyhole.wire.assignment import device_name
from keyhole.wire.settings import bound_of, bound_settings
from tests.rounds import toy
from tests.service.in_process import Service, send_update, update_of
from tests.service.living_devices import EVERYONE, devices, living, lying
from tests.service.small_service import small_service
from tests.service.test_served import served

LIMIT = 0.05
LIAR = 7


def boosted(device, told, update, keys):
    """A client that sends a million times what it was to send, of which nobody clips anything."""
    return device.send(told, {"x": update["x"] * np.float32(1e6)}, keys)


def boosting(clients, jobs):
    """The same population in process."""
    for job in jobs:
        boost = 1e6 if job.client == LIAR else 1
        yield {"x": job.run(clients).update["x"] * np.float32(boost)}


def run_served(directory, rounds=3, **changes):
    plan, stop, heard = toy.make_plan(max_update_norm=LIMIT, **changes), threading.Event(), []
    with (
        small_service(directory) as service,
        devices(service, [c for c in EVERYONE if c != LIAR]),
        living(lying(service, stop, boosted, heard), [LIAR], stop),
    ):
        run = start_run(toy.make_state(), toy.make_clients(), plan, kind=served(service))
        records = list(run.rounds(rounds))
        page = service.app.metrics.page().decode()
    return run.state, records, page, heard


def rounds_with_liar(plan, rounds):
    return [LIAR in sample_cohort(plan.cohorts, plan.seed, plan.trial, t) for t in range(rounds)]


@pytest.mark.parametrize("above", ["refuse", pytest.param("clip", marks=pytest.mark.slow)])
def test_a_served_run_with_a_liar_is_the_run_in_process(tmp_path, above):
    state, records, page, heard = run_served(tmp_path, rounds=6, above_norm=above)
    plan = toy.make_plan(max_update_norm=LIMIT, above_norm=above)
    run = start_run(toy.make_state(), toy.make_clients(), plan)
    expected = list(run.rounds(6, execute=boosting))
    assert toy.model_bytes(state) == toy.model_bytes(run.state)
    lied = rounds_with_liar(plan, 6)
    assert 0 < sum(lied) < 6
    for record, other in zip(records, expected, strict=True):
        assert (record.above_norm, record.refused) == (other.above_norm, other.refused)
        assert record.input_bound == "checked"
    assert [record.above_norm for record in records] == [int(each) for each in lied]
    (counted,) = re.findall(r"^keyhole_updates_above_norm_total (.*)$", page, re.M)
    assert float(counted) >= sum(lied)  # requests: a device that heard no answer sends again
    assert device_name(LIAR) not in page
    told = [str(error) for error in heard if "above the max norm" in str(error)]
    assert len(told) >= sum(lied) if above == "refuse" else not told  # it may ask again


def test_honest_devices_clip_as_clients_in_process_do(tmp_path):
    plan = toy.make_plan(max_update_norm=LIMIT)
    with small_service(tmp_path) as service, devices(service):
        run = start_run(toy.make_state(), toy.make_clients(), plan, kind=served(service))
        records = list(run.rounds(2))
    free = start_run(toy.make_state(), toy.make_clients(), toy.make_plan())
    list(free.rounds(2))
    expected = start_run(toy.make_state(), toy.make_clients(), plan)
    list(expected.rounds(2))
    assert toy.model_bytes(run.state) == toy.model_bytes(expected.state)
    assert toy.model_bytes(run.state) != toy.model_bytes(free.state), "there was something to clip"
    assert [record.above_norm for record in records] == [0, 0]


@pytest.mark.parametrize("way", [MEDIAN, TrimmedMean(0.3), NormAlarm(PLAIN, 1.01)])
def test_devices_of_a_service_train_with_robust_sums_and_the_alarm(tmp_path, way):
    plan = toy.make_plan(aggregate=way)
    with small_service(tmp_path) as service, devices(service):
        run = start_run(toy.make_state(), toy.make_clients(), plan, kind=served(service))
        records = list(run.rounds(2))
    expected = start_run(toy.make_state(), toy.make_clients(), plan)
    assert [r.outliers for r in records] == [r.outliers for r in expected.rounds(2)]
    assert toy.model_bytes(run.state) == toy.model_bytes(expected.state)
    (seen,) = way.about.seen_by().values()
    assert records[0].seen_in_sum == {"slice server": seen, "server": seen}


def test_an_asynchronous_round_does_not_wait_for_who_was_refused(tmp_path):
    stream = Buffering(len(EVERYONE), 5)
    _, records, _, _ = run_served(tmp_path, rounds=6, buffering=stream)
    assert sum(record.above_norm for record in records) > 0
    assert all(record.refused in ([], [LIAR]) for record in records)


@pytest.fixture
def bounded(tmp_path):
    service = Service(spool=UpdateSpool(tmp_path))
    service.round.manifest.settings.update(bound_settings(InputBound(10.0)))
    return service


def test_a_device_that_was_refused_stays_so_in_this_round(bounded):
    bounded.assert_refused(send_update(bounded, update_of(1e30)), 413, "TooLargeError")
    bounded.assert_refused(send_update(bounded, update_of(1e30)), 413, "TooLargeError")
    bounded.assert_refused(send_update(bounded, update_of(1.0)), 409, "ConflictError")
    spool, round_id = bounded.spool, bounded.round.id
    assert spool.refused(round_id) == ["phone-1"]
    assert spool.refusal(round_id, "phone-1") == "norm"
    assert spool.devices(round_id) == spool.close(round_id) == []
    spool.remove(round_id)
    assert spool.refused(round_id) == []


def test_what_was_stored_counts_whatever_is_sent_behind_it(bounded):
    assert send_update(bounded, update_of(1.0)).status_code == 201
    bounded.assert_refused(send_update(bounded, update_of(1e30)), 413, "TooLargeError")
    assert bounded.spool.refused(bounded.round.id) == []
    assert bounded.spool.devices(bounded.round.id) == ["phone-1"]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_numbers_that_are_none_are_refused_and_not_counted_as_long(bounded, value):
    kind = (413, "TooLargeError") if value == np.inf else (400, "NotFiniteError")
    bounded.assert_refused(send_update(bounded, update_of(value)), *kind)
    expected = "norm" if value == np.inf else "numbers"
    assert bounded.spool.refusal(bounded.round.id, "phone-1") == expected


@pytest.mark.parametrize("limit", [0, -1.0, "1", True, None, float("nan")])
def test_settings_that_bound_nothing_are_refused(limit):
    with pytest.raises(KeyholeError, match="the bound on updates is invalid"):
        bound_of({"max_update_norm": limit})


def test_settings_say_the_bound():
    assert bound_settings(InputBound()) == {}
    assert bound_of({}) == InputBound()
    assert bound_of(bound_settings(InputBound(2.0, "clip"))) == InputBound(2.0, "clip")
