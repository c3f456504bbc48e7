"""The configurations of docs/deploy.md, run as they stand there: only ports and paths differ."""

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
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from importlib import import_module
from pathlib import Path

import click
import numpy as np
import pytest

from keyhole.serving import wire
from keyhole.serving.access import Access, Keyring
from keyhole.serving.app import App
from keyhole.serving.reading import RoundsDirectory
from keyhole.serving.transport import serving
from keyhole.serving.update_spool import UpdateSpool
from tests.helpers import ROOT
from tests.serving.hand_made import content_of, write_round

PAGE = (ROOT / "docs" / "deploy.md").read_text()
KEY = 41_579  # of a slice; no other number on these pages or in these logs
NUM_KEYS = 50_000
BINARY = {"content-type": "application/octet-stream"}


def blocks(language):
    """The fenced blocks of a language on the page."""
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def needed(program, package):
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed: apt install {package}")
    return shutil.which(program)


def free_port():
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return trial.getsockname()[1]


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
        until = time.monotonic() + 30
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
            return http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        return http.client.HTTPSConnection("localhost", self.port, timeout=30, context=self.tls)

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

    def current(self):
        return self.rounds.current()

    @contextmanager
    def hold(self, round_id):
        assert self.free.wait(30)
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

    def count(self, route):
        """How many requests of a route it has answered."""
        page = self.door.ask("GET", "/metrics").body.decode()
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
        yield Origin(directory, name, Door(int(url.rpartition(":")[2])), slow.free, token)
    slow.rounds.close()


@pytest.fixture(scope="module")
def origin(tmp_path_factory):
    directory = tmp_path_factory.mktemp("rounds")
    name = write_round(directory, 5, num_keys=NUM_KEYS, width=4, per_segment=5_000)
    with origin_of(directory, name) as made:
        yield made


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
    program, tls, port = needed("nginx", "nginx"), certificate(folder), free_port()
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
    is_root = Path("/proc/self").stat().st_uid == 0
    first = f"daemon off; pid {folder}/nginx.pid;" + (" user root;" if is_root else "")
    command = [program, "-p", folder, "-c", folder / "nginx.conf", "-g", first]
    command += ["-e", folder / "error.log"]
    with running(command, port, folder / "nginx.out"):
        yield Door(port, tls, (folder / "access.log").read_text)


def temporary_paths(folder):
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    return "".join(f"    {kind}_temp_path {folder}/{kind};\n" for kind in kinds)


@contextmanager
def varnish_before(origin_port, folder):
    """Varnish with the configuration of the page, and its access log."""
    program, port = needed("varnishd", "varnish"), free_port()
    text = put_in(blocks("vcl")[0], {'.port = "8100"': f'.port = "{origin_port}"'})
    (folder / "keyhole.vcl").write_text(text)
    work = folder / "varnish"
    command = [program, "-j", "none", "-F", "-n", work, "-f", folder / "keyhole.vcl"]
    command += ["-s", "malloc,64m"]
    command += ["-a", f"127.0.0.1:{port}", "-p", "thread_pool_min=50", "-p", "thread_pools=1"]
    logger = [needed("varnishncsa", "varnish"), "-n", work, "-d"]  # what there is, then it ends

    def read():
        return subprocess.run(logger, check=True, capture_output=True, text=True).stdout

    with running(command, port, folder / "varnishd.out"):
        yield Door(port, read_log=read)


BEFORE = {"nginx": nginx_before, "varnish": varnish_before}


@pytest.fixture(scope="module", params=["nginx", "varnish"])
def door(request, origin, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    with BEFORE[request.param](origin.door.port, folder) as made:
        yield made


def query(*keys):
    return wire.encode_query([wire.Ask(0, np.array(keys, np.int64))])


def is_error(answer, status):
    shown = json.loads(answer.body)["error"]
    names = {"status", "kind", "wrong", "got", "allowed", "fix"}
    return answer.status == shown["status"] == status and shown.keys() == names


CACHED = {
    "manifest": "manifest",
    "broadcast": "broadcast",
    "slice": f"tables/0/slices/{KEY}",
    "segment": "tables/0/segments/3",
    "sums": "tables/0/segments/3/sums",
}


@pytest.mark.parametrize(("route", "rest"), CACHED.items())
def test_the_second_get_is_answered_without_the_service(door, origin, route, rest):
    direct = origin.door.ask("GET", origin.url(rest))
    before = origin.count(route)
    first, second = (door.ask("GET", origin.url(rest)) for _ in range(2))
    assert first.body == second.body == direct.body
    assert first.status == second.status == direct.status == 200
    assert origin.count(route) == before + 1
    assert second.headers["x-cache"] == "HIT"
    for name in (
        "etag",
        "cache-control",
        "content-type",
        *(["keyhole-check"] * (route == "slice")),
    ):
        assert second.headers[name] == direct.headers[name]


def test_whoever_has_it_is_told_so(door, origin):
    url = origin.url("tables/0/segments/4")
    tag = door.ask("GET", url).headers["etag"]
    again = door.ask("GET", url, headers={"if-none-match": tag})
    assert (again.status, again.body) == (304, b"")
    assert door.ask("GET", url, headers={"if-none-match": '"another"'}).status == 200


@pytest.mark.parametrize("is_warm", [False, True])
def test_a_part_of_a_segment_is_that_part(door, origin, is_warm):
    url = origin.url(f"tables/0/segments/{5 + is_warm}")
    whole = origin.door.ask("GET", url).body
    if is_warm:
        door.ask("GET", url)
    part = door.ask("GET", url, headers={"range": "bytes=100-299"})
    assert (part.status, part.body) == (206, whole[100:300])


@pytest.mark.parametrize("method", ["POST", "QUERY"])
def test_queries_pass_through_uncached(door, origin, method):
    body, url = query(KEY, 3, KEY, 49_999), origin.url("slices")
    direct = origin.door.ask(method, url, body, BINARY)
    before = origin.count("slices")
    for _ in range(2):
        through = door.ask(method, url, body, BINARY)
        assert (through.status, through.body) == (200, direct.body)
        assert through.headers["keyhole-check"] == direct.headers["keyhole-check"]
    assert len(direct.body) == 4 * 16
    assert origin.count("slices") == before + 2


@pytest.mark.parametrize("method", ["POST", "QUERY"])
def test_a_query_of_the_largest_size_passes(door, origin, method):
    keys = np.random.default_rng(0).integers(NUM_KEYS, size=65_536)
    url, body = origin.url("slices"), query(*keys)
    through = door.ask(method, url, body, BINARY)
    assert through.status == 200
    assert through.body == origin.door.ask(method, url, body, BINARY).body


def test_the_current_round_is_never_cached(door, origin):
    before = origin.count("current")
    for _ in range(2):
        shown = json.loads(door.ask("GET", "/v1/rounds/current").body)
        assert shown == {"round": origin.round, "number": 5, "phase": "open"}
    assert origin.count("current") == before + 2


def test_errors_of_the_service_keep_their_shape(door, origin):
    post = [("POST", origin.url("slices"))]
    assert is_error(door.ask(*post[0], query(NUM_KEYS), BINARY), 400)
    assert is_error(door.ask(*post[0], b"nonsense", BINARY), 400)
    assert is_error(door.ask(*post[0], query(1), {"content-type": "text/plain"}), 415)
    assert is_error(door.ask("GET", origin.url("tables/0/slices/50000")), 404)
    assert is_error(door.ask("GET", "/v1/rounds/6-0123456789abcdef/manifest"), 404)
    assert is_error(door.ask("DELETE", origin.url("manifest")), 405)
    assert is_error(door.ask("POST", origin.url("updates"), b"", BINARY), 401)
    assert is_error(door.ask("POST", "/v1/checkin"), 404)


def test_a_token_reaches_the_service(door, origin):
    headers = {**BINARY, "authorization": f"Bearer {origin.token}"}
    answer = door.ask("POST", origin.url("updates"), b"nonsense", headers)
    assert is_error(answer, 404)  # with a token: tables of select functions take no updates
    assert "takes no updates" in json.loads(answer.body)["error"]["wrong"]


@pytest.mark.parametrize("path", ["/metrics", "/healthz", "/readyz"])
def test_what_is_for_the_operator_is_not_for_the_world(door, path):
    assert is_error(door.ask("GET", path), HTTPStatus.NOT_FOUND)


def logged(door, mark):
    """The access log, once it holds a line of this request."""
    until = time.monotonic() + 10
    while mark not in (text := door.read_log()):
        assert time.monotonic() < until, "the access log does not show the request"
        time.sleep(0.05)
    return text


@pytest.mark.parametrize("kind", ["nginx", "varnish"])
def test_keys_of_a_query_are_in_no_access_log(kind, origin, tmp_path):
    with BEFORE[kind](origin.door.port, tmp_path) as door:
        for method in ("POST", "QUERY"):
            door.ask(method, origin.url("slices"), query(KEY), BINARY)
            assert str(KEY) not in logged(door, method)
        door.ask("GET", origin.url(f"tables/0/slices/{KEY}"))
        # As the page says: the URL has the key; nginx is told to hide it, Varnish shows it.
        assert (str(KEY) in logged(door, "tables/0/slices/")) == (kind == "varnish")


def stampede(door, origin, url, count):
    """`count` GETs that have all been sent before the service answers the first."""
    answers, ready = [], threading.Barrier(count + 1)

    def fetch():
        connection = door.connect()
        connection.request("GET", url)
        ready.wait(30)
        answers.append(connection.getresponse().read())
        connection.close()

    threads = [threading.Thread(target=fetch) for _ in range(count)]
    origin.free.clear()
    for thread in threads:
        thread.start()
    ready.wait(30)
    origin.free.set()
    for thread in threads:
        thread.join(60)
    return answers


def test_a_stampede_on_a_cold_segment_asks_the_service_once(door, origin):
    before = origin.count("segment")
    answers = stampede(door, origin, origin.url("tables/0/segments/8"), 50)
    expected = content_of(origin.directory, origin.round)["table-0/seg-8.bin"]
    assert answers == [expected] * 50
    assert origin.count("segment") == before + 1


@pytest.mark.parametrize("kind", ["nginx", "varnish"])
def test_a_service_that_is_down_is_an_error_of_the_same_shape(kind, origin, tmp_path):
    with origin_of(origin.directory, origin.round) as doomed:
        stack = ExitStack()
        door = stack.enter_context(BEFORE[kind](doomed.door.port, tmp_path))
        warm = door.ask("GET", doomed.url("manifest"))
    with stack:
        refused = door.ask("POST", origin.url("slices"), query(1), BINARY)
        assert is_error(refused, 503)
        assert int(refused.headers["retry-after"]) > 0
        assert door.ask("GET", origin.url("manifest")).body == warm.body  # from the cache


def test_too_many_requests_of_one_address_are_an_error_of_the_same_shape(origin, tmp_path):
    with nginx_before(origin.door.port, tmp_path) as door:
        connection = door.connect()
        for _ in range(1000):
            connection.request("GET", "/v1/rounds/current")
            response = connection.getresponse()
            answer = Answer(response.status, dict(response.getheaders()), response.read())
            if answer.status != 200:
                break
        connection.close()
    assert is_error(answer, 429)
    assert answer.headers["retry-after"] == "1"


def test_a_body_beyond_the_limit_is_an_error_of_the_same_shape(origin, tmp_path):
    with nginx_before(origin.door.port, tmp_path) as door:
        headers = {**BINARY, "content-length": str(65 << 20)}
        assert is_error(door.ask("POST", origin.url("updates"), b"", headers), 413)


def test_a_round_that_a_replica_does_not_have_yet_comes_from_the_coordinator(origin, tmp_path):
    edge, folder = tmp_path / "edge", tmp_path / "nginx"
    edge.mkdir(), folder.mkdir()
    old = write_round(edge, 4)
    with origin_of(edge, old) as replica:
        places = {
            "server 10.0.0.21:8100;": f"server 127.0.0.1:{replica.door.port};",
            "server 10.0.0.22:8100;": "",
            "10.0.0.10:8100 backup": f"127.0.0.1:{origin.door.port} backup",
        }
        upstream = put_in(blocks("nginx")[1], places)
        with nginx_before(origin.door.port, folder, upstream) as door:
            assert door.ask("GET", f"/v1/rounds/{old}/manifest").status == 200
            assert replica.count("manifest") == 1
            for method in ("POST", "QUERY"):
                answer = door.ask(method, origin.url("slices"), query(KEY), BINARY)
                assert answer.status == 200
            assert replica.count("slices") == 2  # it was asked first
            assert is_error(door.ask("GET", "/v1/rounds/9-0123456789abcdef/manifest"), 404)


def commands():
    """Every `keyhole` command line of the page."""
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    lines += re.findall(r"ExecStart=\S*/(keyhole .*)", PAGE)
    return [line for line in lines if line.startswith("keyhole ")]


@pytest.mark.parametrize("line", commands())
def test_commands_of_the_page_have_the_options_that_it_gives(line, monkeypatch, tmp_path):
    _, name, *rest = line.split()
    command = getattr(import_module(f"keyhole.cli.{name}"), name)
    if isinstance(command, click.Group):
        command, rest = command.commands[rest[0]], rest[1:]
    for option in [part for part in rest if part.startswith("--")]:
        assert option in {name for each in command.params for name in each.opts}, line


def test_metrics_of_the_page_exist(origin):
    origin.door.ask("POST", origin.url("slices"), query(1), BINARY)
    shown = origin.door.ask("GET", "/metrics").body.decode()
    named = set(re.findall(r"`(keyhole_[a-z_]+)`", PAGE))
    assert len(named) > 5
    for name in named:
        assert re.search(rf"^(# TYPE )?{name}\b", shown, re.MULTILINE), name
