"""A device and a service that is a process: killed, restarted, behind TLS."""

import os
import select
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from keyhole.device.device import Device
from keyhole.errors import ServiceError
from keyhole.service.access import Keyring, new_key
from keyhole.service.publishing import Publisher
from keyhole.service.spool import UpdateSpool
from keyhole.wire.sockets import Certificate, Clock, Retry
from tests.helpers import assert_trees_equal
from tests.service.fault_proxy import CUT, FaultProxy
from tests.service.service_process import service, start
from tests.service.small_service import LAYOUT, random_state

KEYS = {"word": [7, 0, 2, 2], "neuron": [1, 4]}


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A directory with a round, the state that it was published from, and a device token."""
    directory = tmp_path_factory.mktemp("rounds")
    key, path = new_key(), tmp_path_factory.mktemp("keys") / "token.key"
    path.touch(0o600)
    path.write_text(key)
    state = random_state(LAYOUT)
    with Publisher(directory) as publisher:
        publisher.publish_state(state, number=1)
    token = Keyring((bytes.fromhex(key),)).issue("device", "p", now=time.time(), seconds=600)
    return directory, ("--token-key", path), state, token


def children_of(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


class Restarted:
    """A service that is killed, and started again at its old port."""

    def __init__(self, directory, options):
        self.directory, self.options, self.count = directory, options, 0
        self.running = start(directory, *options)
        self.port = self.running.port

    def kill(self):
        """Ends the process and those it has started, as when a machine loses its power."""
        process = self.running.process
        family = [process.pid, *children_of(process.pid)]
        ends = [os.pidfd_open(pid) for pid in family]
        for pid in family:
            os.kill(pid, signal.SIGKILL)
        for end in ends:
            select.select([end], [], [])
            os.close(end)
        process.wait()
        process.stderr.close()

    def restart(self, *_):
        self.running = start(self.directory, *self.options, port=self.port)
        self.count += 1


@pytest.fixture
def restarted(published):
    directory, options, _, _ = published
    made = Restarted(directory, options)
    yield made
    made.kill()


def test_a_device_survives_a_service_that_is_killed_and_restarted(published, restarted):
    directory, _, state, token = published
    url, clock = f"http://127.0.0.1:{restarted.port}", Clock(sleep=restarted.restart)
    with Device(url, token=token, retry=Retry(attempts=2), clock=clock) as device:
        told = device.check_in()
        restarted.kill()
        found = device.fetch(told, KEYS)
        assert_trees_equal(found.model, state.select(tuple(found.keys.values())))
        restarted.kill()
        device.send(told, found.model, KEYS)
        restarted.kill()
        sent = device.send(told, found.model, KEYS)  # the new one knows it
        assert restarted.count == 3
    spool = UpdateSpool(directory / "updates")
    assert spool.devices(told.round) == ["p"]
    assert len(spool.read(told.round, "p")) == sent


@pytest.mark.slow
def test_a_service_killed_within_an_answer_is_survived(published, restarted):
    _, _, state, token = published
    clock = Clock(sleep=restarted.restart)
    with (
        FaultProxy(restarted.port) as proxy,
        Device(f"http://127.0.0.1:{proxy.port}", token=token, clock=clock) as device,
    ):
        round_id = device.current().round
        device.known(round_id)
        proxy.arm(CUT, 250, then=restarted.kill)
        found = device.fetch(round_id, KEYS)
        assert (restarted.count, found.traffic.requests) == (1, 2)
    assert_trees_equal(found.model, state.select(tuple(found.keys.values())))


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """An authority, and certificates that it signed for a service and a device."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl (apt install openssl)")
    folder = tmp_path_factory.mktemp("certificates")
    new = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    signed = ["-CA", "ca.pem", "-CAkey", "ca.key", "-addext", "subjectAltName=IP:127.0.0.1"]
    for name, more in (("ca", []), ("service", signed), ("device", signed), ("stranger", [])):
        files = ["-nodes", "-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={name}"]
        subprocess.run([*new, *files, *more], cwd=folder, check=True, capture_output=True)
    return folder


def test_a_device_speaks_mutual_tls(published, certificates):
    directory, options, state, _ = published
    files = {"--tls-cert": "service.pem", "--tls-key": "service.key", "--client-ca": "ca.pem"}
    tls = [part for option, name in files.items() for part in (option, certificates / name)]

    def device(name, ca="ca.pem"):
        pair = None
        if name is not None:
            pair = Certificate(certificates / f"{name}.pem", certificates / f"{name}.key")
        retry, clock = Retry(attempts=2), Clock(sleep=lambda _: None)
        authority = certificates / ca
        return Device(running.url, ca=authority, certificate=pair, retry=retry, clock=clock)

    with service(directory, *options, *tls) as running:
        with device("device") as known:
            found = known.fetch(known.current().round, KEYS)
            assert_trees_equal(found.model, state.select(tuple(found.keys.values())))
        for name in ("stranger", None):
            with device(name) as stranger, pytest.raises(ServiceError, match="no usable answer"):
                stranger.current()
        with (
            device("device", "stranger.pem") as mistrusting,
            pytest.raises(ServiceError, match="not trusted"),
        ):
            mistrusting.current()
