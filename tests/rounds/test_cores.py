"""Rounds on one or more cores: the same bytes, in the same order."""

import os
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest

from keyhole.computing import complete
from keyhole.errors import InputError
from keyhole.parts import failed_hook
from keyhole.rounds.clients import ClientJob, Clients
from keyhole.rounds.cores import Cores, use_one_thread
from tests.helpers import LONG, ROOT

RUN = """
import hashlib, sys, threading
from functools import partial
import jax.numpy as jnp
import numpy as np
import keyhole as kh
from keyhole import tree
from keyhole.models.cnn import cnn
from keyhole.models.dense import two_layer
from keyhole.server.optimizers import Adam
from keyhole.server.state import ServerState
from keyhole.models.client_update import ClientUpdate
from keyhole.rounds.clients import Clients
from keyhole.sampling import Cohorts
from keyhole.rounds.cores import Cores, map_on_cores, use_one_thread
from keyhole.models.local_training import LocalSgd
from keyhole.rounds.loop import start_run
from keyhole.rounds.spec import RunParts
from keyhole.rounds.workers import Workers, count_cores

def data(client, *pixels):
    rng = np.random.default_rng(client)
    return {"pixels": rng.random((20 + client, *pixels), np.float32),
            "label": rng.integers(0, 62, 20 + client).astype(np.int32)}

def choose(own, context):
    ((space, m),) = context.max_keys.items()
    return kh.KeySpace(space, KEYS[space]).keys(context.rng.choice(KEYS[space], m, replace=False))

MODELS = {"2nn": (two_layer(), 100, (784,)), "cnn": (cnn(), 8, (28, 28))}
KEYS = {each.name: each.num_keys for model, _, _ in MODELS.values() for each in model.layout.spaces}

def population(name):
    model, _, pixels = MODELS[name]
    update = LocalSgd(model, ClientUpdate(0.1, batch_size=20))
    return Clients(7, lambda client: data(client, *pixels), choose, update)

def backend(together):
    together.wait(600)
    (device,) = jnp.zeros(1).devices()
    return device.client

def train(name, execute):
    model, m, _ = MODELS[name]
    (space,) = model.layout.spaces
    state = ServerState.dense(model.layout, model.init(0), Adam(0.01))
    run = start_run(state, population(name), RunParts(Cohorts(7, 6), {space.name: m}))
    list(run.rounds(2, execute=execute))
    digest = hashlib.sha256()
    for leaf in tree.flatten(run.state.model()).values():
        digest.update(np.ascontiguousarray(leaf))
    print(name, digest.hexdigest())

if __name__ == "__main__":
    use_one_thread()
    for name in sys.argv[2].split(","):
        for cores in map(int, sys.argv[1].split(",")):
            train(name, Cores(cores))
        for count in sys.argv[3:]:
            with Workers(partial(population, name), int(count)) as workers:
                train(name, workers)
    cores = count_cores()
    together = threading.Barrier(cores)
    backends = list(map_on_cores(backend, [together] * cores, cores))
    print(cores, len(set(map(id, backends))))
"""


def run(folder, *args, pin=()):
    (folder / "run.py").write_text(RUN)
    done = subprocess.run(
        [*pin, sys.executable, folder / "run.py", *args],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        timeout=600,
    )
    *trained, backends = done.stdout.splitlines()
    return trained, backends


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """By a process that trains on one core, on two, and in a worker."""
    return run(tmp_path_factory.mktemp("cores"), "1,2", "2nn", "1")


def test_threads_and_processes_train_the_same_bytes(printed):
    """Products of this size are summed in another order where XLA has more threads for them."""
    assert len(printed[0]) == 3
    assert len(set(printed[0])) == 1


def test_every_core_computes_with_a_backend_of_its_own(printed):
    cores, backends = printed[1].split()
    assert cores == backends


@pytest.mark.slow
def test_any_number_of_cores_trains_the_same_bytes(tmp_path):
    found = [run(tmp_path, cores, "2nn,cnn")[0] for cores in ("1", "2", "5")]
    found.append(run(tmp_path, "2", "2nn,cnn", pin=("taskset", "-c", "0"))[0])
    assert found == [found[0]] * 4
    assert run(tmp_path, "2", "2nn,cnn", "2")[0][1::2] == found[0]
    assert len(found[0]) == 2


def jobs(count):
    return [ClientJob(client, (0, client), None, np.float32(client)) for client in range(count)]


def clients(train):
    return Clients(20, np.ones, None, train)


def updates(population, asked):
    return [report.update for report in Cores(2)(population, asked)]


def test_updates_come_in_the_order_of_the_jobs():
    assert updates(clients(lambda slices, data, rng: slices - data.sum()), jobs(20)) == [0.0] * 20
    assert updates(clients(lambda slices, data, rng: slices), jobs(20)) == list(range(20))


def test_clients_train_at_the_same_time():
    both = threading.Barrier(2, timeout=LONG)

    def train(slices, data, rng):
        both.wait()
        return slices

    assert updates(clients(train), jobs(2)) == [0, 1]


class InSteps:
    """A train function in steps, which notes the threads of its Python and its computations."""

    def __init__(self, compute=lambda slices: slices):
        self.compute, self.python, self.computed = compute, [], []

    def __call__(self, slices, data, rng):
        return complete(self.train_in_steps(slices, data, rng))

    def train_in_steps(self, slices, data, rng):
        self.python.append(threading.get_ident())
        found = yield lambda: self.noted(slices)
        self.python.append(threading.get_ident())
        return found

    def noted(self, slices):
        self.computed.append(threading.get_ident())
        return self.compute(slices)


def test_long_computations_run_at_the_same_time_and_python_in_one_thread():
    both = threading.Barrier(2, timeout=LONG)

    def compute(slices):
        both.wait()
        return slices

    train = InSteps(compute)
    assert updates(clients(train), jobs(2)) == [0, 1]
    assert len(set(train.computed)) == 2
    assert set(train.python) == {threading.get_ident()}


def test_short_computations_stay_in_one_thread_once_they_are_known():
    train, cores = InSteps(), Cores(2)
    for _ in range(3):
        assert [report.update for report in cores(clients(train), jobs(20))] == list(range(20))
    assert set(train.computed[-20:]) == {threading.get_ident()}


def test_one_core_computes_where_its_reports_are_taken():
    train = InSteps(lambda slices: time.sleep(0.002) or slices)
    list(Cores(1)(clients(train), jobs(3)))
    assert set(train.computed) == {threading.get_ident()}


def test_reports_before_the_client_that_failed_come_first():
    def compute(slices):
        if slices == 3:
            raise ValueError("broken")
        return slices

    reports, brought = Cores(2)(clients(InSteps(compute)), jobs(20)), []
    with pytest.raises(ValueError, match="broken") as caught:
        brought.extend(report.update for report in reports)
    assert brought == [0, 1, 2]
    assert failed_hook(caught.value) == "train of client 3 in round 0 has failed"


@pytest.mark.parametrize("train", [lambda slices, data, rng: slices, InSteps()])
def test_few_sub_models_are_held_at_a_time(train):
    taken = []

    class Counted(list):
        def __getitem__(self, at):
            taken.append(at)
            return super().__getitem__(at)

    reports = Cores(2)(clients(train), Counted(jobs(20)))
    ahead = [len(taken) - brought for brought, _ in enumerate(reports)]
    assert max(ahead) <= 2 * 2
    assert sorted(taken) == list(range(20))
    assert len(ahead) == 20


def test_no_jobs_have_no_updates():
    assert list(Cores(1)(clients(None), [])) == []


def test_the_error_of_a_client_is_raised():
    def train(slices, data, rng):
        raise InputError("broken: got 1; expected 2; mend it")

    for count in (1, *[20] * 20):  # those that have not started are not waited for
        with pytest.raises(InputError, match="broken"):
            list(Cores(2)(clients(train), jobs(count)))


def test_a_jax_that_has_started_otherwise_is_told_of(monkeypatch):
    jax.numpy.zeros(1).block_until_ready()
    monkeypatch.setenv("NPROC", "1")
    use_one_thread()
    monkeypatch.setenv("NPROC", "2")
    with pytest.raises(InputError, match="too late to let JAX compute with one thread"):
        use_one_thread()


def test_no_core_is_an_error():
    with pytest.raises(InputError, match="got 0; expected 1 or more"):
        Cores(0)
