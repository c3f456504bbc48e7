"""nginx and Varnish as docs/deploy.md configures them: only ports and paths differ."""

import http.client
import json
import re
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from keyhole.service.access import Access, Keyring
from keyhole.service.app import App
from keyhole.service.reading import RoundsDirectory
from keyhole.service.spool import UpdateSpool
from keyhole.service.transport import serving
from keyhole.wire import messages as wire
from tests.helpers import LONG, ROOT
from tests.service.sockets import held_port

PAGE = (ROOT / "docs" / "deploy.md").read_text()
OPERATE = (ROOT / "docs" / "operate.md").read_text()
KEY = 41_579  # of a slice; no other number on these pages or in these logs
NUM_KEYS = 50_000
BINARY = {"content-type": "application/octet-stream"}


def blocks(language, page=PAGE):
    """The fenced blocks of a language on a page."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


def needed(program, package):
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed: apt install {package}")
    return shutil.which(program)


def put_in(text, changes):
    """The text with every place filled in; a place that the page does not have is an error."""
    for old, new in changes.items():
        assert old in text, f"the page no longer says {old!r}"
        text = text.replace(old, str(new))
    return text


@contextmanager
def running(command, port, log):
    """A program that listens; it ends with the context."""
    with log.open("wb") as out:
        process = subprocess.Popen([str(part) for part in command], stdout=out, stderr=out)
    try:
        until = time.monotonic() + LONG
        while process.poll() is None and time.monotonic() < until:
            with socket.socket() as trial:
                if trial.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.02)
        else:
            pytest.fail(f"{command[0]} did not start: {log.read_text()}")
        yield process
    finally:
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict
    body: bytes


@dataclass(frozen=True)
class Door:
    """An address where the service can be reached."""

    port: int
    tls: ssl.SSLContext | None = None
    read_log: Callable[[], str] | None = None

    def connect(self):
        if self.tls is None:
            return http.client.HTTPConnection("127.0.0.1", self.port, timeout=LONG)
        return http.client.HTTPSConnection("localhost", self.port, timeout=LONG, context=self.tls)

    def ask(self, method, target, body=None, headers=None):
        connection = self.connect()
        try:
            connection.request(method, target, body, headers or {})
            response = connection.getresponse()
            shown = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, shown, response.read())
        finally:
            connection.close()


@dataclass
class Slow:
    """Rounds that a request gets hold of only when it is let; then all are."""

    rounds: RoundsDirectory
    free: threading.Event = field(default_factory=threading.Event)

    def current(self, newest=False):
        return self.rounds.current(newest)

    @contextmanager
    def hold(self, round_id):
        assert self.free.wait(LONG)
        with self.rounds.hold(round_id) as held:
            yield held


@dataclass(frozen=True)
class Origin:
    """The service itself."""

    directory: Path
    round: str
    door: Door
    free: threading.Event
    token: str
    app: App

    @property
    def metrics(self):
        """The page of its metrics, which no port of devices shows."""
        self.door.ask("GET", "/healthz")  # an answer is counted once it is sent, and in order
        return self.app.metrics.page().decode()

    def count(self, route):
        """How many requests of a route it has answered."""
        page = self.metrics
        found = re.findall(rf'^keyhole_requests_total{{route="{route}".*}} ([0-9.]+)$', page, re.M)
        return sum(map(float, found))

    def url(self, rest):
        return f"/v1/rounds/{self.round}/{rest}"


@contextmanager
def origin_of(directory, name):
    ring = Keyring((b"k" * 32,))
    slow = Slow(RoundsDirectory(directory))
    slow.free.set()
    app = App(slow, access=Access(ring), spool=UpdateSpool(directory / "updates"))
    token = ring.issue("round", "phone", now=time.time(), seconds=600, round_id=name)
    with serving(app) as url:
        yield Origin(directory, name, Door(int(url.rpartition(":")[2])), slow.free, token, app)
    slow.rounds.close()


def certificate(folder):
    """A certificate for localhost, and what trusts it."""
    command = [needed("openssl", "openssl"), "req", "-x509", "-newkey", "ec", "-nodes"]
    command += ["-pkeyopt", "ec_paramgen_curve:prime256v1", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost"]
    command += ["-keyout", folder / "tls.key", "-out", folder / "tls.crt"]
    subprocess.run(command, check=True, capture_output=True)
    return ssl.create_default_context(cafile=folder / "tls.crt")


@contextmanager
def nginx_before(origin_port, folder, slices=None):
    """nginx with the configuration of the page; `slices` takes the place of that upstream."""
    program, tls = needed("nginx", "nginx"), certificate(folder)
    with held_port() as port:
        configure_nginx(origin_port, folder, port, slices)
        is_root = Path("/proc/self").stat().st_uid == 0
        first = f"daemon off; pid {folder}/nginx.pid;" + (" user root;" if is_root else "")
        command = [program, "-p", folder, "-c", folder / "nginx.conf", "-g", first]
        command += ["-e", folder / "error.log"]
        with running(command, port, folder / "nginx.out"):
            yield Door(port, tls, (folder / "access.log").read_text)


def configure_nginx(origin_port, folder, port, slices):
    text = blocks("nginx")[0]
    if slices is not None:
        text = put_in(text, {"upstream slices { server 127.0.0.1:8100; keepalive 64; }": slices})
    changes = {
        "127.0.0.1:8100": f"127.0.0.1:{origin_port}",
        "listen 443 ssl": f"listen 127.0.0.1:{port} ssl",
        "/etc/keyhole/": f"{folder}/",
        "/var/cache/nginx/keyhole": folder / "cache",
        "/var/log/nginx/keyhole.log": folder / "access.log",
        "rlimit_nofile 65536": "rlimit_nofile 4096",  # a machine may allow less
        "worker_connections 16384": "worker_connections 1024",
        "http {\n": "http {\n" + temporary_paths(folder),
    }
    (folder / "nginx.conf").write_text(put_in(text, changes))


def temporary_paths(folder):
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    return "".join(f"    {kind}_temp_path {folder}/{kind};\n" for kind in kinds)


@contextmanager
def varnish_before(origin_port, folder, slices=None):
    """Varnish with the configuration of the page, and its access log."""
    program = needed("varnishd", "varnish")
    default, coordinator, rest = blocks("vcl")[0].partition("backend coordinator")
    text = put_in(default, {'.port = "8100"': f'.port = "{slices or origin_port}"'})
    text += put_in(coordinator + rest, {'.port = "8100"': f'.port = "{origin_port}"'})
    (folder / "keyhole.vcl").write_text(text)
    work = folder / "varnish"
    command = [program, "-j", "none", "-F", "-n", work, "-f", folder / "keyhole.vcl"]
    command += ["-s", "malloc,64m"]
    command += ["-p", "thread_pool_min=50", "-p", "thread_pools=1"]
    logger = [needed("varnishncsa", "varnish"), "-n", work, "-d"]  # what there is, then it ends

    def read():
        return subprocess.run(logger, check=True, capture_output=True, text=True).stdout

    with held_port() as port:
        command += ["-a", f"127.0.0.1:{port}"]
        with running(command, port, folder / "varnishd.out"):
            yield Door(port, read_log=read)


BEFORE = {"nginx": nginx_before, "varnish": varnish_before}


def query(*keys):
    return wire.encode_query([wire.Ask(0, np.array(keys, np.int64))])


def is_error(answer, status):
    shown = json.loads(answer.body)["error"]
    names = {"status", "kind", "wrong", "got", "allowed", "fix"}
    return answer.status == shown["status"] == status and shown.keys() == names
