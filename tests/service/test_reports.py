"""Reports of devices: weights and metrics travel with updates, states stay on devices."""

import threading
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

import keyhole as kh
from keyhole.aggregation.base import ClientResult
from keyhole.device.take_part import PopulationClient, keep_taking_part
from keyhole.errors import InputError, RequestError
from keyhole.rounds.adding import agreed
from keyhole.rounds.loop import start_run
from keyhole.sampling import Cohorts
from keyhole.server.inputs import InputBound
from keyhole.wire.assignment import device_name
from keyhole.wire.messages import encode_report, split_report
from keyhole.wire.settings import bound_of, bound_settings
from keyhole.wire.sockets import Clock
from tests.rounds import toy
from tests.rounds.test_reports import counting
from tests.service.living_devices import EVERYONE, living
from tests.service.small_service import small_service
from tests.service.test_served import served

WEIGHTED = InputBound(max_weight=8.0)


def train(submodel, examples, rng, context):
    """Reports everything, and moves by how often the client took part."""
    state = counting(examples, context)
    times = np.float32(len(state["rounds"]))
    update = {"x": toy.train(submodel, examples, rng)["x"] * times}
    return kh.Report(update, len(examples), {"loss": context.client / 10}, state)


def make_clients():
    return replace(toy.make_clients(), train=train)


@contextmanager
def devices(service, folder):
    """Devices, each of which begins anew in every round, with nothing but its folder."""
    stop = threading.Event()

    def live(client):
        clock = Clock(sleep=lambda seconds: stop.wait(min(seconds, 0.01)))
        while not stop.is_set():
            one = PopulationClient(
                client, lambda _: make_clients(), toy.REHEARSED, folder / str(client)
            )
            name = device_name(client)
            with service.device(name=name, stop=stop, clock=clock) as device:
                keep_taking_part(device, one.participant(), rounds=1)

    with living(live, EVERYONE, stop):
        yield


def test_a_run_of_devices_that_report_equals_the_run_in_process(tmp_path):
    plan = toy.make_plan(over="examples", max_weight=6.0, cohorts=Cohorts(20, 10))
    with small_service(tmp_path / "service") as service, devices(service, tmp_path / "devices"):
        run = start_run(toy.make_state(), make_clients(), plan, kind=served(service))
        records = list(run.rounds(3))
        stored = b"".join(p.read_bytes() for p in (tmp_path / "service").rglob("*") if p.is_file())
    expected = start_run(toy.make_state(), make_clients(), plan)
    for found, known in zip(records, expected.rounds(3), strict=True):
        assert found.client_metrics == known.client_metrics
        assert found.total_weight == known.total_weight
    assert toy.model_bytes(run.state) == toy.model_bytes(expected.state)
    assert b"KHS1" not in stored  # a state never travels
    files = [path for path in (tmp_path / "devices").rglob("*-*") if path.is_file()]
    assert len(files) == len({client for record in records for client in record.clients})


REPORT = kh.Report(None, 0.5, {"loss": 1.5, "bad": np.inf})


def test_a_report_precedes_the_update_and_comes_back():
    told, rest = split_report(encode_report(REPORT) + b"update", WEIGHTED)
    assert (told.weight, told.metrics["loss"], rest) == (0.5, 1.5, b"update")
    assert np.isnan(told.metrics["bad"])
    assert encode_report(kh.Report(None, state={"a": np.ones(1)})) == b""
    assert split_report(b"update", InputBound()) == (None, b"update")


@pytest.mark.parametrize("weight", [None, -1.0, 1.5])
def test_a_weight_that_the_round_does_not_allow_is_refused(weight):
    body = encode_report(replace(REPORT, weight=weight))
    with pytest.raises(RequestError, match="its weight"):
        split_report(body, WEIGHTED)
    with pytest.raises(RequestError, match="its weight"):
        split_report(encode_report(REPORT), InputBound())


def test_a_report_that_is_damaged_is_refused_at_every_byte():
    body = encode_report(REPORT)
    for place in range(4, len(body)):
        flipped = bytearray(body)
        flipped[place] ^= 1
        for wrong in (bytes(flipped), body[:place]):
            with pytest.raises(RequestError):
                split_report(wrong, WEIGHTED)


def test_metrics_that_are_too_many_are_not_sent():
    with pytest.raises(InputError, match="too many to be sent"):
        encode_report(kh.Report(None, metrics={f"metric {i}": 1.0 for i in range(400)}))


@pytest.mark.parametrize("weight", [None, 8.0, np.inf])
def test_a_manifest_says_how_updates_are_weighted(weight):
    bound = InputBound(max_norm=2.0, max_weight=weight)
    assert bound_of(bound_settings(bound)) == bound
    with pytest.raises(InputError, match="max weight"):
        bound_of({"max_weight": "much"})


def test_a_device_with_other_metrics_ends_no_run():
    names = [{"loss": 1.0}, {"loss": 2.0}, {"evil": 3.0}]
    results = [
        ClientResult(c, "sent", {}, None, report=kh.Report(None, None, told))
        for c, told in enumerate(names)
    ]
    assert [sorted(one.report.metrics) for one in agreed(results)] == [["loss"]] * 3
    assert np.isnan(agreed(results)[2].report.metrics["loss"])
