"""Device, relay and service as processes: who sees whom, and what is in whose memory.

The relay is the program that an operator starts. In the fast test the service and the device stand
in the process of the test, each with an address of its own; in the slow ones they are programs too.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing, contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest

import keyhole as kh
from keyhole.delivery.relay.ohttp import GatewayKey, encode_gateway_key
from keyhole.device.device import Device
from keyhole.device.relayed import RelayedFetch
from keyhole.device.take_part import take_part
from keyhole.server.optimizers import SGD
from keyhole.server.state import ServerState
from keyhole.service.access import Keyring, new_key
from keyhole.service.publishing import Publisher
from keyhole.service.spool import UpdateSpool
from keyhole.wire.http import HttpClient
from tests.helpers import LONG
from tests.service.relay.device_program import from_another_address, participant
from tests.service.relay.gateway_program import gateway_service
from tests.service.relay.memory_scan import found_in_memory

HERE = Path(__file__).parent
WORDS = 2000
KEYS = [1349, 1123, 1901]
LAYOUT = kh.Layout.of(
    {"w": np.broadcast_to(np.float32(0), (WORDS, 8)), "b": np.zeros(3, np.float32)},
    kh.Cut(kh.KeySpace("word", WORDS), {"w": 0}),
)
RELAY = [sys.executable, "-c", "from keyhole.cli.main import main; main()", "relay"]


class Round:
    """A published round, and the programs around it."""

    def __init__(self, folder):
        self.folder, self.rounds, self.notes = folder, folder / "rounds", folder / "notes"
        rng = np.random.default_rng(5)
        model = {
            "w": rng.standard_normal((WORDS, 8)).astype(np.float32),
            "b": rng.standard_normal(3).astype(np.float32),
        }
        self.model = model
        state = ServerState.dense(LAYOUT, model, SGD(lr=0.5))
        with Publisher(self.rounds) as publisher:
            settings = {"keys_per_client": {"word": 6}}
            published = publisher.publish_state(state, number=1, settings=settings, durable=False)
        self.round = published.id
        key = new_key()
        self.ring = Keyring((bytes.fromhex(key),))
        self.key = GatewayKey.fresh()
        for name, text in [("token.key", key), ("gateway.key", encode_gateway_key(self.key))]:
            (folder / name).touch(0o600)
            (folder / name).write_text(text)

    @property
    def paths(self):
        """What `gateway_program.py` takes."""
        keys = [self.folder / "token.key", self.folder / "gateway.key"]
        return [self.rounds, *keys, self.notes]

    @contextmanager
    def gateway(self):
        command = [sys.executable, HERE / "gateway_program.py", *self.paths]
        with _program(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            self.service_url = process.stdout.readline().strip()
            self.gateway_pid = process.pid
            yield process

    @contextmanager
    def relay(self, *options):
        command = [
            *RELAY,
            "--open",
            "--mix-min",
            "1",
            "--gateway",
            self.service_url,
            "--port",
            "0",
            *map(str, options),
        ]
        with _program(command, stderr=subprocess.PIPE) as process:
            self.told = process.stderr.readline()
            self.relay_url = re.fullmatch(r"relaying to \S+ at (\S+)\n", self.told)[1]
            yield process

    def device(self, name, relay="-"):
        token = self.ring.issue("device", name, now=time.time(), seconds=600)
        command = [sys.executable, HERE / "device_program.py", self.service_url, relay, token]
        return subprocess.run(
            [*command, *map(str, KEYS)], capture_output=True, text=True, check=False, timeout=LONG
        )

    def take_part(self, name, fetch=Device.fetch):
        """What `device_program.py` does, here."""
        token = self.ring.issue("device", name, now=time.time(), seconds=600)
        with Device(self.service_url, token=token) as device:
            return take_part(device, participant(KEYS, fetch))

    def update(self, name):
        return UpdateSpool(self.rounds / "updates").read(self.round, name)

    def seen(self):
        """(address, method, path) of what arrived at the service."""
        return [tuple(line.split()) for line in self.notes.read_text().splitlines()]


@contextmanager
def _program(command, **streams):
    process = subprocess.Popen([str(word) for word in command], text=True, **streams)
    try:
        yield process
    finally:
        if process.poll() is None:
            for pid in [*_children(process.pid), process.pid]:
                os.kill(pid, signal.SIGKILL)
            process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def _family(process):
    """A supervisor and its worker."""
    return [process.pid, *_children(process.pid)]


def _children(pid):
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in path.read_text().split()] if path.exists() else []


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    made = Round(tmp_path_factory.mktemp("three"))
    with made.gateway():
        yield made


def test_a_device_behind_a_relay_trains_the_same_and_leaves_no_trace(tmp_path, monkeypatch):
    made = Round(tmp_path)
    with gateway_service(*made.paths) as made.service_url, made.relay("--mix-ms", 5) as relay:
        with monkeypatch.context() as patched, closing(HttpClient(made.relay_url)) as client:
            patched.setattr(socket, "create_connection", from_another_address)
            assert made.take_part("hidden", RelayedFetch(client)).keys == 3
        secrets, public = _needles(made), made.key.config.public
        found = [found_in_memory(pid, [*secrets, public]) for pid in _family(relay)]
        assert found == [set(), {public}]  # the control: the search does find what the relay has
        os.kill(relay.pid, signal.SIGINT)
        rest = relay.communicate(timeout=LONG)[1]
        assert (relay.returncode, rest) == (0, "")  # Ctrl-C; and nothing was logged
        made.take_part("plain")
    assert made.update("hidden") == made.update("plain")
    _check_who_was_seen(made.seen())


@pytest.mark.slow
def test_three_programs_do_the_same(three):
    with three.relay("--mix-ms", 5) as relay:
        done = three.device("hidden", three.relay_url)
        assert (done.returncode, done.stdout) == (0, "round 1, 3 keys\n"), done.stderr
        secrets, public = _needles(three), three.key.config.public
        found = [found_in_memory(pid, [*secrets, public]) for pid in _family(relay)]
        # The control: the search does find what the relay has, and at the gateway the slices.
        assert found == [set(), {public}]
        assert set(secrets[-3:]) <= found_in_memory(three.gateway_pid, secrets)
        os.kill(relay.pid, signal.SIGINT)
        rest = relay.communicate(timeout=LONG)[1]
    assert (relay.returncode, rest) == (0, "")  # Ctrl-C; and nothing was logged
    three.take_part("plain")
    assert three.update("hidden") == three.update("plain")
    _check_who_was_seen(three.seen())


def _needles(three):
    """Plaintext that a relay must not have: requests, keys, slices of the device's keys."""
    paths = [f"/v1/rounds/{three.round}/tables/".encode()]
    keys = [f"/slices/{key}".encode() for key in KEYS]
    return [*paths, *keys, *[three.model["w"][key].tobytes() for key in KEYS]]


def _check_who_was_seen(seen):
    """The device shows itself only with what is no secret; slices are asked for by the relay."""
    hidden = seen[: next(i for i, one in enumerate(seen) if one[2].endswith("/updates"))]
    gateway = [address for address, _, path in hidden if path == "/v1/gateway"]
    assert gateway == ["127.0.0.1"]
    shown = {path.split("/")[-1] for address, _, path in hidden if address == "127.0.0.2"}
    assert shown == {"checkin", "current", "manifest", "slices", "keys", "top"}
    assert not [path for _, _, path in hidden if "/tables/" in path and path[-4:] != "/top"]


@pytest.mark.slow
def test_without_its_relay_a_device_asks_for_nothing(three):
    with three.relay() as relay:
        for pid in [*_children(relay.pid), relay.pid]:
            os.kill(pid, signal.SIGKILL)
        relay.wait()
    before = len(three.seen())
    done = three.device("stranded", three.relay_url)
    assert done.returncode != 0
    assert "ServiceError" in done.stderr
    new = [path.split("/")[-1] for _, _, path in three.seen()[before:]]
    assert set(new) <= {"checkin", "current", "manifest", "top"}


@pytest.mark.slow
def test_devices_that_come_together_arrive_in_one_batch(three):
    with three.relay("--mix-ms", 20_000, "--mix-count", 2):
        before = len(three.seen())
        token = [three.ring.issue("device", n, now=time.time(), seconds=600) for n in ("a", "b")]
        command = [sys.executable, HERE / "device_program.py", three.service_url, three.relay_url]
        running = [
            subprocess.Popen([*map(str, command), one, *map(str, KEYS)], stdout=subprocess.PIPE)
            for one in token
        ]
        for process in running:
            assert process.communicate(timeout=LONG)[0] == b"round 1, 3 keys\n"
        new = [path for _, _, path in three.seen()[before:]]
        assert new.count("/v1/gateway") == 1


@pytest.mark.slow
def test_the_service_command_is_a_gateway_too(three):
    serve = [sys.executable, "-c", "from keyhole.cli.main import main; main()", "serve"]
    options = ["--port", "0", "--gateway-key", three.folder / "gateway.key"]
    with _program([*serve, three.rounds, *options], stderr=subprocess.PIPE) as process:
        url = process.stderr.readline().split()[-1]
        assert httpx.get(f"{url}/v1/gateway/keys", timeout=LONG).status_code == 200
