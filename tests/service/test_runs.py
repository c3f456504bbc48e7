"""Several runs share one service, each with a name, a folder and URLs of its own."""

import asyncio
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path

import httpx
import numpy as np
import pytest

from keyhole.delivery.clear import Pregenerated
from keyhole.device.device import Assignment, Device
from keyhole.device.take_part import PopulationClient, keep_taking_part
from keyhole.errors import NotAdmittedError, NotFoundError, StorageError
from keyhole.experiments.watch.address import ServiceWatch
from keyhole.experiments.watch.folder import RunFolder
from keyhole.rounds.loop import start_run
from keyhole.service.access import Access, Keyring, new_key
from keyhole.service.app import App
from keyhole.service.guards import Guards
from keyhole.service.inbox import SpoolInbox
from keyhole.service.limits import Limits
from keyhole.service.metrics import Metrics
from keyhole.service.publishing import Publisher
from keyhole.service.reading import RoundsDirectory
from keyhole.service.runs import RunsApp
from keyhole.service.served import Served
from keyhole.service.spool import UpdateSpool
from keyhole.wire.assignment import claims_in, device_name
from keyhole.wire.sockets import Clock
from tests.helpers import LONG
from tests.rounds import toy
from tests.service.living_devices import living
from tests.service.service_process import ServiceProcess, service
from tests.service.small_service import at_service

ROUNDS = 2
SEEDS = {"alpha": 3, "beta": 4}


@dataclass
class Shared:
    """A service that knew of no run when it was started."""

    folder: Path
    ring: Keyring
    running: ServiceProcess

    def device(self, run, name, *, runs=(), **options):
        token = self.ring.issue("device", name, now=time.time(), seconds=3600, runs=runs)
        return Device(
            f"{self.running.url}/runs/{run}".removesuffix("/runs/"), token=token, **options
        )

    def publish(self, run, number=0):
        """A round for everyone."""
        with Publisher(self.folder / run) as publisher:
            return publisher.publish_state(toy.make_state(), number=number, durable=False).id


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shared")
    key = folder.with_name("token.key")
    key.touch(0o600)
    key.write_text(new_key())
    with service(folder, "--token-key", key, "--again", 0.1) as running:
        yield Shared(folder, Keyring.load(key), running)


def plan_of(run):
    return toy.make_plan(seed=SEEDS[run], delivery=Pregenerated())


def train(shared, run):
    """A trainer and the devices of its run; returns the model and the records."""
    stop, directory, plan = threading.Event(), shared.folder / run, plan_of(run)
    asked = {client for t in range(ROUNDS) for client in plan.draw_cohort(t)}

    def live(number):
        own = SEEDS[run], 0
        one = PopulationClient(number, lambda settings: toy.make_clients(), own)
        clock = Clock(sleep=lambda seconds: stop.wait(min(seconds, 0.3)))
        with shared.device(run, device_name(number), stop=stop, clock=clock) as device:
            keep_taking_part(device, one.participant())

    with Publisher(directory) as publisher:
        kind = Served(publisher, SpoolInbox(UpdateSpool(directory / "updates")), named=True)
        made = start_run(toy.make_state(), toy.make_clients(), plan, kind=kind)
        with living(live, asked, stop):
            return made.state, list(made.rounds(ROUNDS))


def test_two_trainers_train_two_runs_of_one_service_at_once(shared):
    """Devices of both have the same names, and each model is what it would be alone."""
    with ThreadPoolExecutor(2) as pool:
        found = dict(zip(SEEDS, pool.map(lambda run: train(shared, run), SEEDS), strict=True))
    for run, (state, records) in found.items():
        alone = start_run(toy.make_state(), toy.make_clients(), plan_of(run))
        assert records == at_service(alone.rounds(ROUNDS))
        assert toy.model_bytes(state) == toy.model_bytes(alone.state)
    told = ServiceWatch(shared.running.metrics).overview()["rounds"]
    assert {each["name"].rpartition("/")[2]: each["number"] for each in told} == dict.fromkeys(
        SEEDS, ROUNDS - 1
    )
    page = httpx.get(shared.running.metrics, timeout=LONG).text
    assert 'keyhole_round_updates{run="beta"} 5.0' in page


def test_one_run_has_one_trainer(shared):
    with Publisher(shared.folder / "taken"), pytest.raises(StorageError, match="a publisher"):
        Publisher(shared.folder / "taken")


def test_a_token_is_good_for_its_runs_alone(shared):
    for run in ("gamma", "delta", ""):
        shared.publish(run)
    with shared.device("gamma", "ann", runs=["gamma"]) as ann:
        told = ann.check_in()
    assert isinstance(told, Assignment)
    assert claims_in(told.token)["runs"] == ["gamma"]
    for run in ("delta", ""):
        with shared.device(run, "ann", runs=["gamma"]) as device:
            with pytest.raises(NotAdmittedError, match="expected one of gamma"):
                device.check_in()
            keys = {"feature": [1]}
            with pytest.raises(NotAdmittedError, match="not for this run"):
                device.send(told, {"x": np.zeros(1, np.float32)}, keys)
    with shared.device("", "ann") as device:  # says nothing of runs, and is good for all
        assert "runs" not in claims_in(device.check_in().token)
    with shared.device("delta", "ann") as device:
        assert claims_in(device.check_in().token)["runs"] == ["delta"]


@pytest.mark.parametrize("name", ["nobody", "..", "%2e%2e", "rounds", ".hidden", "", "a/b"])
def test_what_is_no_run_is_not_found(shared, name):
    (shared.folder / ".hidden" / "rounds").mkdir(parents=True, exist_ok=True)
    connection = HTTPConnection("127.0.0.1", shared.running.port, timeout=LONG)
    connection.request("GET", f"/runs/{name}/v1/rounds/current")  # as it stands
    answer = connection.getresponse()
    assert answer.status == 404
    assert json.loads(answer.read())["error"]["kind"] == NotFoundError.__name__
    connection.close()


def test_a_run_is_ready_once_it_has_a_round(shared):
    (shared.folder / "empty" / "rounds").mkdir(parents=True)
    shared.publish("epsilon", 7)
    status = {
        run: httpx.get(f"{shared.running.url}/runs/{run}/readyz", timeout=LONG).status_code
        for run in ("empty", "epsilon")
    }
    assert status == {"empty": 503, "epsilon": 200}
    current = httpx.get(f"{shared.running.url}/runs/epsilon/v1/rounds/current", timeout=LONG)
    assert json.loads(current.content)["number"] == 7
    assert httpx.get(f"{shared.running.url}/readyz", timeout=LONG).status_code == 200


def apps_of(folder, access=None, limits=None):
    """The service of a folder in this process; returns what asks it."""
    guards = Guards(access or Access(), limits or Limits(), Metrics(), time.time)

    def make(run):
        return App(RoundsDirectory(folder / run), guards=guards.of_run(run))

    app = RunsApp(make(""), folder, make)

    async def ask(path, token):
        headers = {"authorization": f"Bearer {token}"}
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return await client.get(path, headers=headers)

    return lambda path, token="": asyncio.run(ask(path, token))


def publish_into(folder):
    with Publisher(folder) as publisher:
        return publisher.publish_state(toy.make_state(), number=0, durable=False).id


@pytest.mark.parametrize("damaged", ["current.json", "rounds/{id}/manifest.json"])
def test_a_service_is_ready_beside_a_damaged_run(tmp_path, damaged):
    alpha, beta = (publish_into(tmp_path / run) for run in ("alpha", "beta"))
    (tmp_path / "alpha" / damaged.format(id=alpha)).write_text("{")
    ask = apps_of(tmp_path)
    answer = ask("/readyz")
    assert (answer.status_code, answer.json()) == (200, {"round": beta})
    assert ask("/runs/alpha/readyz").status_code >= 500
    (tmp_path / "beta" / damaged.format(id=beta)).write_text("{")
    answer = apps_of(tmp_path)("/readyz")  # none is left
    assert (answer.status_code, answer.json()["error"]["kind"]) == (503, "BusyError")


def test_a_folder_that_cannot_be_listed_is_an_error_of_the_one_shape(tmp_path):
    folder = tmp_path / "gone"
    answer = apps_of(folder)("/readyz")
    assert answer.json()["error"]["kind"] == StorageError.__name__


def test_devices_of_two_runs_with_one_name_are_counted_apart(tmp_path):
    ring, now = Keyring((b"k" * 32,)), time.time()
    tokens = {
        run: ring.issue("device", "device-0", now=now, seconds=3600, runs=[run])
        for run in ("alpha", "beta")
    }
    for run in tokens:
        publish_into(tmp_path / run)
    access = Access(ring, reads_need_token=True)
    ask = apps_of(tmp_path, access, Limits(rate=1e-4, burst=2e4))
    statuses = [
        ask(f"/runs/{run}/v1/rounds/current", tokens[run]).status_code
        for run in ("alpha", "alpha", "alpha", "beta")
    ]
    assert statuses == [200, 200, 429, 200]


def test_who_looks_at_the_folder_sees_all_runs(tmp_path):
    for number, run in enumerate(("", "films", "tags")):
        with Publisher(tmp_path / run) as publisher:
            publisher.publish_state(toy.make_state(), number=number, durable=False)
    told = RunFolder(tmp_path).overview()["rounds"]
    assert {each["name"]: each["number"] for each in told} == {
        tmp_path.name: 0,
        "films": 1,
        "tags": 2,
    }
