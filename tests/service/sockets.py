"""What tests on sockets share: an app to serve, raw connections, certificates."""

import contextlib
import shutil
import socket
import subprocess
import time

import httpx
import pytest

from keyhole.service.app import App
from keyhole.service.limits import Limits
from keyhole.service.routes import Route
from tests.helpers import LONG
from tests.service.memory_rounds import MemoryRounds


def app_with(handler=None, **limits):
    """An app over rounds in memory, perhaps with a route of the test's own at /slow."""
    rounds = MemoryRounds()
    rounds.open(0)
    extra = [] if handler is None else [Route("slow", ("GET",), "/slow", handler)]
    return App(rounds, limits=Limits(**limits), extra_routes=[lambda _: extra])


@contextlib.contextmanager
def held_port():
    """A port that the system gives to nobody else meanwhile; a service that is told of it, and
    reuses addresses, can listen there, again and again."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def connect(url, **settings):
    host, port = url.split("//")[1].split(":")
    return socket.create_connection((host, int(port)), timeout=LONG, **settings)


def read_to_end(connection):
    """What the service sends until it hangs up."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(1 << 16):
            received += piece
    return received


def answered(url):
    """A connection whose first request was answered; one that was cut off before is made anew."""

    def attempt():
        connection = connect(url)
        with contextlib.suppress(ConnectionError):
            connection.sendall(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
            if b'{"alive":true}' in connection.recv(4096):
                return connection
        connection.close()
        return None

    return wait_for(attempt)


def get(url, **settings):
    return httpx.get(url, timeout=LONG, **settings)


def metric(url, name):
    """A metric of a service process; the URL is that of its metrics."""
    return _value(get(url).text, name)


def counted(app, name):
    """A metric of an app in this process, which takes no connection to be read."""
    return _value(app.metrics.page().decode(), name)


def _value(page, name):
    lines = page.splitlines()
    return float(next(line.split()[-1] for line in lines if line.startswith(f"{name} ")))


def wait_for(condition, seconds=LONG):
    """Waits for something that another process or thread does."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(httpx.TransportError):
            if found := condition():
                return found
        time.sleep(0.02)
    raise AssertionError("it did not happen")


def make_certificates(folder):
    """An authority, a server's certificate and a client's."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl (apt install openssl)")

    def openssl(*args):
        subprocess.run(["openssl", *args], cwd=folder, check=True, capture_output=True)

    new = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    for name in ("ca", "other"):
        openssl(*new, "-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={name}")
    for name in ("server", "client"):
        signed = ["-CA", "ca.pem", "-CAkey", "ca.key", "-addext", "subjectAltName=IP:127.0.0.1"]
        openssl(*new, "-keyout", f"{name}.key", "-out", f"{name}.pem", *signed, "-subj", "/CN=x")
    return folder
