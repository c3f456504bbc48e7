"""A slice service and five devices, each a process of its own, train one model over loopback.

    python examples/serve_and_train.py

The trainer publishes a round; devices check in with their tokens, fetch the slices of the features
they hold, train, and send an update; the trainer adds up. In the end the model is the one of the
same run in a single process, byte for byte.
"""

import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from threading import Thread

import numpy as np

import keyhole as kh
from keyhole.device.device import Device
from keyhole.device.take_part import PopulationClient, keep_taking_part
from keyhole.rounds.clients import Clients
from keyhole.rounds.loop import start_run
from keyhole.rounds.spec import RunParts
from keyhole.sampling import Cohorts
from keyhole.server.optimizers import SGD
from keyhole.server.state import ServerState
from keyhole.service.access import Keyring, new_key
from keyhole.service.inbox import SpoolInbox
from keyhole.service.publishing import Publisher
from keyhole.service.served import Served
from keyhole.service.spool import UpdateSpool
from keyhole.wire.assignment import device_name

DEVICES, ROUNDS, FEATURES, OUTPUTS = 5, 4, 10_000, 16
FEATURE = kh.KeySpace("feature", FEATURES)
MODEL = {"kernel": np.zeros((FEATURES, OUTPUTS), np.float32), "bias": np.zeros(OUTPUTS, np.float32)}
LAYOUT = kh.Layout.of(MODEL, kh.Cut(FEATURE, {"kernel": 0}))
PLAN = RunParts(Cohorts(DEVICES, DEVICES), keys_per_client={"feature": 60}, seed=7)


def make_data(client):
    """Thirty examples of one device: two features each, and what to predict."""
    rng = np.random.default_rng([7, client])
    own = rng.choice(FEATURES, size=40, replace=False)
    return own[rng.integers(40, size=(30, 2))], rng.normal(size=(30, OUTPUTS)).astype(np.float32)


def choose(data, context):
    """The features that a device has examples of."""
    return FEATURE.keys(np.unique(data[0])[: context.max_keys["feature"]])


def localize(data, keys):
    """Features as places among the device's own keys."""
    return np.searchsorted(keys["feature"].array, data[0]), data[1]


def train(model, data, rng):
    """One pass of least squares by SGD; the update is start minus end."""
    kernel, bias = model["kernel"].copy(), model["bias"].copy()
    for features, target in zip(*data, strict=True):
        error = kernel[features].sum(0) + bias - target
        kernel[features] -= 0.1 * error
        bias -= 0.1 * error
    return {"kernel": model["kernel"] - kernel, "bias": model["bias"] - bias}


def population(_=None):
    return Clients(DEVICES, make_data, choose, train, localize)


def new_state():
    return ServerState.dense(LAYOUT, MODEL, SGD(lr=1.0))


def be_a_device(url, client):
    """The life of one device: it takes part until it has seen every round."""
    participant = PopulationClient(client, population, (PLAN.seed, 0)).participant()  # a rehearsal
    with Device(url, token=os.environ["TOKEN"]) as device:
        keep_taking_part(device, participant, rounds=ROUNDS)


def start_service(directory, key_file):
    """Starts `keyhole serve` and returns the process and its address."""
    command = "import sys; from keyhole.cli.main import main; main(sys.argv[1:])"
    flags = ["serve", directory, "--port", "0", "--token-key", key_file, "--again", "0.2"]
    process = subprocess.Popen(
        [sys.executable, "-c", command, *map(str, flags)], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    line = process.stderr.readline()
    if not line.startswith("serving "):
        process.kill()
        process.communicate()
        sys.exit(f"the service did not start: {line.strip()}")
    Thread(target=process.communicate).start()  # a pipe that nobody reads would be full some day
    return process, line.split()[-1]


def train_over_the_service(directory):
    """Returns the state after all rounds, made by devices."""
    rounds, key_file = directory / "rounds", directory / "operator.key"
    key = new_key()
    key_file.touch(mode=0o600)
    key_file.write_text(key + "\n")
    keyring = Keyring((bytes.fromhex(key),))
    with ExitStack() as stack:
        publisher = stack.enter_context(Publisher(rounds))
        service, url = start_service(rounds, key_file)
        stack.callback(service.wait)
        stack.callback(service.terminate)
        print(f"service at {url}")
        for client in range(DEVICES):
            token = keyring.issue("device", device_name(client), now=time.time(), seconds=600)
            device = subprocess.Popen(
                [sys.executable, __file__, url, str(client)], env={**os.environ, "TOKEN": token}
            )
            stack.callback(device.wait)
            stack.callback(device.terminate)
        inbox = SpoolInbox(UpdateSpool(rounds / "updates"))
        kind = Served(publisher, inbox, seconds=60, named=True)
        training = start_run(new_state(), population(), PLAN, kind=kind)
        for record in training.rounds(ROUNDS):
            print(
                f"round {record.round}: {len(record.staleness)} devices, "
                f"{np.mean(record.bytes_down) / 1000:.1f} kB down and "
                f"{np.mean(record.bytes_up) / 1000:.1f} kB up each"
            )
    return training.state


def main():
    with tempfile.TemporaryDirectory() as directory:
        over_network = train_over_the_service(Path(directory)).model()
    alone = start_run(new_state(), population(), PLAN)
    list(alone.rounds(ROUNDS))
    in_process = alone.state.model()
    same = all(over_network[name].tobytes() == in_process[name].tobytes() for name in MODEL)
    print(f"the whole model is {LAYOUT.server_size * 4 / 1000:.1f} kB")
    print(f"same bytes as in one process: {same}")
    return 0 if same else 1


if __name__ == "__main__":
    if len(sys.argv) > 1:
        be_a_device(sys.argv[1], int(sys.argv[2]))
    else:
        sys.exit(main())
