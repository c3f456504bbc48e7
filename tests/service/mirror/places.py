"""Object stores to test with: an S3 server as a process, and directories."""

import http.client
import os
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec

import pytest

from keyhole.service.mirror import MirrorSettings, fetch_round, push_round
from keyhole.service.object_store import StoreSettings, open_store
from tests.helpers import LONG
from tests.service.sockets import held_port

DENIED = 1  # a port where nobody listens
SIGNED = {"access_key_id": "tester", "secret_access_key": "secret"}


@dataclass(frozen=True)
class Place:
    """A URL with the settings that reach it."""

    url: str
    settings: StoreSettings | None = None

    def push(self, directory, **settings):
        return push_round(
            directory, self.url, store=self.settings, settings=MirrorSettings(**settings)
        )

    def pull(self, directory, **settings):
        return fetch_round(
            self.url, directory, store=self.settings, settings=MirrorSettings(**settings)
        )

    @property
    def store(self):
        return open_store(self.url, self.settings)

    def read(self, name):
        return self.store.get(name, limit=1 << 30)

    def names(self):
        return sorted(self.store.sizes("rounds"))


@contextmanager
def s3_server(log, **environment):
    """The port of an S3 server, as a process of its own."""
    if not all(find_spec(name) for name in ("moto", "flask", "flask_cors")):
        pytest.skip("an S3 server to test against is missing: pip install 'keyhole[dev]'")
    with held_port() as port:
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        with log.open("wb") as out:
            process = subprocess.Popen(
                command, stdout=out, stderr=out, env={**os.environ, **environment}
            )
        try:
            wait_until_open(process, port, log)
            yield port
        finally:
            process.kill()
            process.wait()


def wait_until_open(process, port, log):
    until = time.monotonic() + LONG
    while time.monotonic() < until and process.poll() is None:
        with socket.socket() as trial:
            if trial.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.02)
    pytest.fail(f"the S3 server did not start: {log.read_text()}")


def ask_s3(port, method, target, body=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LONG)
    connection.request(method, target, body)
    assert connection.getresponse().status < 300
    connection.close()


def make_bucket(port, name):
    ask_s3(port, "PUT", f"/{name}")


def s3_settings(port, **changed):
    settings = {"endpoint": f"http://127.0.0.1:{port}", "region": "us-east-1", "retries": 1}
    return StoreSettings(**{**settings, "options": SIGNED, **changed})


def state_of(directory):
    """All files of a rounds directory but the lock and what an attempt left behind."""
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and "/.part-" not in path.as_posix() and path.name != "publisher.lock"
    }


def is_one_line(error):
    return "\n" not in str(error) and "<?xml" not in str(error) and len(str(error)) < 500
