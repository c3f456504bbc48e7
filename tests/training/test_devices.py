"""Rounds on one or more CPU devices: the same bytes, in the same order."""

import subprocess
import sys

import jax
import numpy as np
import pytest

from keyhole.errors import InputError
from keyhole.training.clients import Clients
from keyhole.training.devices import on_devices, use_cpu_devices
from keyhole.training.jobs import Job
from tests.helpers import ROOT

RUN = """
import hashlib, sys
import jax, numpy as np
from keyhole import tree
from keyhole.models.cnn import cnn
from keyhole.server.optimizers import Adam
from keyhole.server.state import ServerState
from keyhole.training.client_update import ClientUpdate
from keyhole.training.clients import Clients
from keyhole.training.cohort import Cohorts
from keyhole.training.devices import on_devices, use_cpu_devices
from keyhole.training.local_sgd import LocalSgd
from keyhole.training.loop import start_run
from keyhole.training.plan import Plan

use_cpu_devices(int(sys.argv[1]))
model = cnn(side=8, filters=(4, 8), hidden=16, classes=5)
(space,) = model.layout.spaces

def data(client):
    rng = np.random.default_rng(client)
    return {"pixels": rng.random((9 + client, 8, 8), np.float32),
            "label": rng.integers(0, 5, 9 + client).astype(np.int32)}

def choose(own, most, rng):
    return space.keys(rng.choice(space.num_keys, most[space.name], replace=False))

clients = Clients(7, data, choose, LocalSgd(model, ClientUpdate(0.1, batch_size=4)))
plan = Plan(Cohorts(7, 6), {space.name: 4})
run = start_run(ServerState.dense(model.layout, model.init(0), Adam(0.01)), clients, plan)
list(run.rounds(2, execute=on_devices))
digest = hashlib.sha256()
for leaf in tree.flatten(run.state.model()).values():
    digest.update(np.ascontiguousarray(leaf))
print(len(jax.devices()), digest.hexdigest())
"""


def test_one_two_and_five_devices_train_the_same_bytes():
    """A run of the paper's CNN, small, with random keys."""
    digests = set()
    for count in (1, 2, 5):
        done = subprocess.run(
            [sys.executable, "-c", RUN, str(count)],
            capture_output=True,
            text=True,
            check=True,
            cwd=ROOT,
            timeout=200,
        )
        devices, digest = done.stdout.split()
        assert int(devices) == count
        digests.add(digest)
    assert len(digests) == 1


def jobs(count):
    return [Job(client, (0, client), None, np.float32(client)) for client in range(count)]


def clients(train):
    return Clients(20, np.ones, None, train)


def test_updates_come_in_the_order_of_the_jobs():
    two = [*jax.local_devices(), *jax.local_devices()]
    found = on_devices(clients(lambda slices, data, rng: slices - data.sum()), jobs(20), two)
    assert found == [0.0] * 20
    found = on_devices(clients(lambda slices, data, rng: slices), jobs(20), two)
    assert found == list(range(20))


def test_no_jobs_have_no_updates():
    assert on_devices(clients(None), []) == []


def test_the_error_of_a_client_is_raised():
    def train(slices, data, rng):
        raise InputError("broken", got=1, allowed=2, fix="mend it")

    with pytest.raises(InputError, match="broken"):
        on_devices(clients(train), jobs(1))


def test_changing_the_number_of_devices_too_late_is_an_error():
    started = len(jax.devices())
    use_cpu_devices(started)
    with pytest.raises(InputError, match=f"JAX has started: got 7, allowed is {started}; call"):
        use_cpu_devices(7)


def test_no_device_is_an_error():
    with pytest.raises(InputError, match="got 0, allowed is 1 or more"):
        use_cpu_devices(0)
