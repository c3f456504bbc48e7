"""A cohort on one or more CPU devices: the same bytes, in the same order."""

import subprocess
import sys

import jax
import numpy as np
import pytest

from keyhole.errors import InputError
from keyhole.training import generator
from keyhole.training.devices import run_cohort, use_cpu_devices
from tests.helpers import ROOT

COHORT = """
import hashlib, sys
import jax, numpy as np
from keyhole import tree
from keyhole.models.cnn import cnn
from keyhole.training import generator
from keyhole.training.client_update import ClientUpdate
from keyhole.training.devices import run_cohort, use_cpu_devices
from keyhole.training.local_sgd import LocalSgd

use_cpu_devices(int(sys.argv[1]))
model = cnn(side=8, filters=(4, 8), hidden=16, classes=5)
train = LocalSgd(model, ClientUpdate(0.1, batch_size=4))
clients = []
for i in range(7):
    rng = np.random.default_rng(i)
    data = {"pixels": rng.random((9 + i, 8, 8), np.float32),
            "label": rng.integers(0, 5, 9 + i).astype(np.int32)}
    clients.append((model.init(0), data, generator(0, 0, i)))
updates = run_cohort(train, clients)
digest = hashlib.sha256()
for update in updates:
    for leaf in tree.flatten(update).values():
        digest.update(np.ascontiguousarray(leaf))
print(len(jax.devices()), digest.hexdigest())
"""


def test_one_and_two_devices_give_the_same_bytes():
    digests = set()
    for count in (1, 2):
        done = subprocess.run(
            [sys.executable, "-c", COHORT, str(count)],
            capture_output=True,
            text=True,
            check=True,
            cwd=ROOT,
            timeout=120,
        )
        devices, digest = done.stdout.split()
        assert int(devices) == count
        digests.add(digest)
    assert len(digests) == 1


def test_updates_come_in_the_order_of_the_clients():
    def update(slices, data, rng):
        return slices - data["x"].sum()

    clients = [(np.float32(i), {"x": np.ones(i)}, generator(0, i)) for i in range(20)]
    two = [*jax.local_devices(), *jax.local_devices()]
    assert run_cohort(update, clients, two) == [0.0] * 20
    assert run_cohort(lambda slices, data, rng: slices, clients, two) == list(range(20))


def test_an_empty_cohort_has_no_updates():
    assert run_cohort(lambda *client: client, []) == []


def test_the_error_of_a_client_is_raised():
    def update(slices, data, rng):
        raise InputError("broken", got=1, allowed=2, fix="mend it")

    with pytest.raises(InputError, match="broken"):
        run_cohort(update, [(None, {}, generator(0))])


def test_changing_the_number_of_devices_too_late_is_an_error():
    started = len(jax.devices())
    use_cpu_devices(started)
    with pytest.raises(InputError, match=f"JAX has started: got 7, allowed is {started}; call"):
        use_cpu_devices(7)


def test_no_device_is_an_error():
    with pytest.raises(InputError, match="got 0, allowed is 1 or more"):
        use_cpu_devices(0)
