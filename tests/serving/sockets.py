"""What tests on sockets share: an app to serve, raw connections, certificates."""

import contextlib
import shutil
import socket
import subprocess
import time

import httpx
import pytest

from keyhole.serving.service.app import App
from keyhole.serving.service.limits import Limits
from keyhole.serving.service.routes import Route
from tests.serving.memory_rounds import MemoryRounds


def app_with(handler=None, **limits):
    """An app over rounds in memory, perhaps with a route of the test's own at /slow."""
    rounds = MemoryRounds()
    rounds.open(0)
    extra = [] if handler is None else [Route("slow", ("GET",), "/slow", handler)]
    return App(rounds, limits=Limits(**limits), extra_routes=[lambda _: extra])


def connect(url, **settings):
    host, port = url.split("//")[1].split(":")
    return socket.create_connection((host, int(port)), timeout=20, **settings)


def read_to_end(connection):
    """What the service sends until it hangs up."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(1 << 16):
            received += piece
    return received


def metric(url, name):
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return float(next(line.split()[-1] for line in lines if line.startswith(f"{name} ")))


def wait_for(condition, seconds=20.0):
    """Waits for something that another process does."""
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
