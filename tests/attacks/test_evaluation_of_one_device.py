"""Attack: one device measures the model, and says that it did so with more examples than it may.

A mean that is weighted by examples is then what this one device says, whatever the others measure.
A weight below zero moves it further still, and one near zero in all leaves a mean of any size. The
planted hole is a service that takes whatever is finite.
"""

import threading
from contextlib import closing

import numpy as np
import pytest

from keyhole.device.device import Device
from keyhole.device.take_part import Participant, keep_taking_part
from keyhole.errors import NotFiniteError
from keyhole.rounds.clients import Clients
from keyhole.rounds.loop import start_run
from keyhole.sampling import UNCOUNTED, Cohorts
from keyhole.server.inputs import InputBound
from keyhole.service.evaluating import DeviceEvaluation
from keyhole.service.inbox import SpoolInbox
from keyhole.service.lobby import Lobby, WaitingRoom
from keyhole.service.served import Served
from keyhole.wire.settings import Evaluates
from keyhole.wire.sockets import Clock
from tests.rounds import toy
from tests.service.living_devices import living
from tests.service.small_service import small_service

NAMES = ["accuracy", "loss"]
HONEST = {"accuracy": 0.5, "loss": 2.0}
EVIL = 0.0  # the accuracy that the liar wants to be the mean
WAYS = {
    "a thousand examples for each": [1000.0, 1000 * EVIL, 1000.0, 0.0, 0.0],
    "examples for one metric alone": [0.125, EVIL, 1.0, 0.25, 0.125],
    "examples below zero": [-0.75, -0.75, -0.75, 0.0, 0.0],
    "a product without examples": [0.125, -1.0, 0.0, 0.25, 0.125],
}


@pytest.mark.parametrize("told", WAYS.values(), ids=WAYS)
def test_a_weight_that_no_device_has_is_refused(told):
    bound = InputBound(allows=Evaluates(NAMES, 8).allows)
    taken = bound.take({"told": np.array(told, np.float32)}, {})
    assert taken.update is None
    assert isinstance(bound.refusal(taken), NotFiniteError)


@pytest.mark.parametrize("examples", [0, 1, 7, 8, 10**6])
@pytest.mark.parametrize("measured", [HONEST, {"loss": np.nan}, {}, {"accuracy": -1e30}])
def test_what_honest_devices_send_is_taken(measured, examples):
    asked = Evaluates(NAMES, 8)
    sent = asked.numbers(measured, examples)
    assert InputBound(allows=asked.allows).take(sent, {}).update is sent


def measured_by(folder, lie):
    """The means of three honest devices and a liar at a real service, and who was refused."""
    rounds, stop, refused = folder / "rounds", threading.Event(), []
    with small_service(rounds, note=WaitingRoom(rounds).note) as service:

        def live(name):
            def measure(known, fetched, asked):
                lies = {"told": np.array([*lie, 0.0, 0.0], np.float32)}  # and held_out_share
                return lies if name == "liar" else asked.numbers(HONEST, 4)

            def send(device, told, update, keys):
                try:
                    return Device.send(device, told, update, keys)
                except NotFiniteError:
                    refused.append(name)
                    return 0

            one = Participant(
                lambda known: {"feature": [1]}, lambda *_: 1 / 0, send=send, measure=measure
            )
            clock = Clock(sleep=lambda seconds: stop.wait(min(seconds, 0.01)))
            with service.device(name=name, stop=stop, clock=clock) as device:
                keep_taking_part(device, one)

        kind = Served(service.publisher, SpoolInbox(service.spool), poll=0.01, seconds=60.0)
        kind.lobby = Lobby(WaitingRoom(rounds))
        plan = toy.make_plan(cohorts=Cohorts(UNCOUNTED, 3, "check-in"))
        people = Clients(UNCOUNTED, lambda client: 1 / 0, toy.choose, toy.train)
        run = start_run(toy.make_state(), people, plan, folder / "run", kind)
        with closing(run):
            kind.numbering.of(0)  # what follows is this run's
            service.publish_state(run.state)
            service.publisher.close_round()  # one that was made
            with living(live, ["ann", "ben", "cem", "liar"], stop):
                found = DeviceEvaluation(kind, run.clients, run.parts, NAMES, 4)(run.state)
    return found, refused


def test_the_mean_is_that_of_the_others(tmp_path):
    found, refused = measured_by(tmp_path, WAYS["a thousand examples for each"])
    assert found == pytest.approx({**HONEST, "held_out_share": 0.0})
    assert refused == ["liar"]


def test_where_any_number_is_taken_the_attack_succeeds(tmp_path, monkeypatch):
    monkeypatch.setattr(Evaluates, "allows", lambda *_: True)
    found, refused = measured_by(tmp_path, WAYS["a thousand examples for each"])
    assert found["accuracy"] == pytest.approx(EVIL, abs=1e-2)
    assert refused == []
