"""The service on sockets: TLS, slow clients, workers that die, and an orderly end."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import threading
import time

import httpx
import numpy as np
import pytest

from keyhole.errors import InputError
from keyhole.server.optimizers import SGD
from keyhole.server.state import ServerState
from keyhole.serving import wire
from keyhole.serving.app import App
from keyhole.serving.limits import Limits
from keyhole.serving.publishing import Publisher
from keyhole.serving.responses import json_response
from keyhole.serving.routes import Response, Route
from keyhole.serving.transport import Listen, bind, serving
from tests.serving.memory_rounds import WIDTH, WORDS, MemoryRounds, layout
from tests.serving.service_process import COMMAND, service, start

BINARY = {"content-type": "application/octet-stream"}
MODEL = {
    "w": np.arange(WORDS * WIDTH, dtype=np.float32).reshape(WORDS, WIDTH),
    "b": np.ones(5, np.float32),
}


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A rounds directory with one round."""
    directory = tmp_path_factory.mktemp("rounds")
    with Publisher(directory) as publisher:
        publisher.publish_state(ServerState.dense(layout(), MODEL, SGD(1.0)), number=0)
    return directory


def fetch(url, keys, **settings):
    """The slices of keys, through the routes a device uses."""
    with httpx.Client(base_url=url, timeout=20, **settings) as client:
        current = client.get("/v1/rounds/current").raise_for_status().json()
        body = wire.encode_query([wire.Ask(1, np.asarray(keys))])
        path = f"/v1/rounds/{current['round']}/slices"
        answer = client.post(path, content=body, headers=BINARY).raise_for_status()
    return np.frombuffer(answer.content, np.float32).reshape(-1, WIDTH)


def app_with(handler=None, **limits):
    """An app over rounds in memory, perhaps with a route of the test's own at /slow."""
    rounds = MemoryRounds()
    rounds.open(0)
    extra = [] if handler is None else [Route("slow", ("GET",), "/slow", handler)]
    return App(rounds, limits=Limits(**limits), extra_routes=extra)


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


# Certificates


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """An authority, a server's certificate and a client's."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl (apt install openssl)")
    folder = tmp_path_factory.mktemp("certificates")

    def openssl(*args):
        subprocess.run(["openssl", *args], cwd=folder, check=True, capture_output=True)

    new = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    for name in ("ca", "other"):
        openssl(*new, "-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={name}")
    for name in ("server", "client"):
        signed = ["-CA", "ca.pem", "-CAkey", "ca.key", "-addext", "subjectAltName=IP:127.0.0.1"]
        openssl(*new, "-keyout", f"{name}.key", "-out", f"{name}.pem", *signed, "-subj", "/CN=x")
    return folder


def tls(certificates, **names):
    return {f"--{name.replace('_', '-')}": certificates / file for name, file in names.items()}


def options(settings):
    return [part for pair in settings.items() for part in pair]


def test_slices_come_over_tls_and_plain_text_is_not_spoken(published, certificates):
    settings = options(tls(certificates, tls_cert="server.pem", tls_key="server.key"))
    trusted = ssl.create_default_context(cafile=certificates / "ca.pem")
    with service(published, *settings) as running:
        assert running.url.startswith("https://")
        found = fetch(running.url, [3, 1], verify=trusted)
        np.testing.assert_array_equal(found, MODEL["w"][[3, 1]])
        with pytest.raises(httpx.TransportError):
            httpx.get(running.url.replace("https", "http") + "/healthz")
        with pytest.raises(httpx.ConnectError):
            httpx.get(running.url + "/healthz")  # an authority that nobody trusts
        old = ssl.create_default_context(cafile=certificates / "ca.pem")
        with pytest.warns(DeprecationWarning, match="TLSv1_1"):
            old.maximum_version = ssl.TLSVersion.TLSv1_1
        with pytest.raises(httpx.ConnectError):
            httpx.get(running.url + "/healthz", verify=old)


def test_mutual_tls_lets_in_only_known_clients(published, certificates):
    names = {"tls_cert": "server.pem", "tls_key": "server.key", "client_ca": "ca.pem"}
    with service(published, *options(tls(certificates, **names))) as running:
        known = ssl.create_default_context(cafile=certificates / "ca.pem")
        known.load_cert_chain(certificates / "client.pem", certificates / "client.key")
        np.testing.assert_array_equal(fetch(running.url, [7], verify=known), MODEL["w"][[7]])
        foreign = ssl.create_default_context(cafile=certificates / "ca.pem")
        foreign.load_cert_chain(certificates / "other.pem", certificates / "other.key")
        nobody = ssl.create_default_context(cafile=certificates / "ca.pem")
        for context in (foreign, nobody):
            with pytest.raises(httpx.TransportError):
                httpx.get(running.url + "/healthz", verify=context)
        assert httpx.get(running.url + "/healthz", verify=known).status_code == 200


# Where to listen


def test_others_cannot_reach_it_without_tls_unless_told(published):
    command = [*COMMAND, str(published), "--port", "0", "--host", "0.0.0.0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "--insecure" in line
    for host in ("0.0.0.0", "::"):
        with pytest.raises(InputError, match="without TLS"):
            bind(Listen(host))
    bind(Listen("0.0.0.0", insecure=True)).close()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.1.2.3"])
def test_loopback_needs_no_tls(host):
    bind(Listen(host)).close()


def test_a_port_in_use_is_told_in_one_line():
    with bind(Listen()) as taken, pytest.raises(InputError, match="in use"):
        bind(Listen(port=taken.getsockname()[1]))


@pytest.mark.parametrize(
    "settings", [{"host": "no.such.host.invalid"}, {"keyfile": "x"}, {"client_ca": "x"}]
)
def test_a_place_that_makes_no_sense_is_refused(settings):
    with pytest.raises(InputError):
        bind(Listen(**settings))


def test_a_certificate_that_is_none_is_refused(tmp_path):
    (tmp_path / "x.pem").write_text("nothing")
    for file in ("x.pem", "missing.pem"):
        with pytest.raises(InputError, match="certificate"):
            Listen(certfile=tmp_path / file).tls()


# Slow clients


def test_an_unfinished_head_is_cut_off():
    with serving(app_with(head_seconds=0.2)) as url, connect(url) as slow:
        slow.sendall(b"GET /healthz HTTP/1.1\r\nhost: x\r\n")
        assert read_to_end(slow) == b""
        assert metric(url, "keyhole_slow_connections_total") == 1


def test_a_head_that_drips_is_cut_off():
    with serving(app_with(head_seconds=0.3)) as url, connect(url) as slow:
        slow.sendall(b"GET /healthz HTTP/1.1\r\nx: ")
        begun = time.monotonic()
        with contextlib.suppress(OSError):
            while time.monotonic() - begun < 20:
                slow.sendall(b"x")
                time.sleep(0.02)
        assert time.monotonic() - begun < 10


def test_a_second_head_on_a_connection_is_watched_as_well():
    with serving(app_with(head_seconds=0.2, idle_seconds=20.0)) as url, connect(url) as slow:
        slow.sendall(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
        assert slow.recv(4096).startswith(b"HTTP/1.1 200")
        slow.sendall(b"GET /heal")
        assert read_to_end(slow) == b""


def test_a_connection_may_rest_as_long_as_allowed():
    with serving(app_with(head_seconds=0.1, idle_seconds=20.0)) as url:
        with connect(url) as idle:
            for _ in range(2):
                idle.sendall(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
                assert b'{"alive":true}' in idle.recv(4096)
                time.sleep(0.4)  # several times what a head may take
        assert metric(url, "keyhole_slow_connections_total") == 0


def test_an_endless_head_is_refused():
    with serving(app_with(most_head=2000)) as url, connect(url) as endless:
        endless.sendall(b"GET /healthz HTTP/1.1\r\n")
        for _ in range(2):
            endless.sendall(b"x: " + b"y" * 1200 + b"\r\n")
        answer = read_to_end(endless)
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert json.loads(answer.split(b"\r\n\r\n")[1])["error"]["kind"] == "TooLargeError"


def test_a_body_that_stalls_is_answered_408():
    with serving(app_with(body_seconds=0.2)) as url, connect(url) as slow:
        current = httpx.get(f"{url}/v1/rounds/current").json()["round"]
        head = f"POST /v1/rounds/{current}/slices HTTP/1.1\r\nhost: x\r\ncontent-length: 99\r\n"
        slow.sendall(head.encode() + b"content-type: application/octet-stream\r\n\r\nKHQ1")
        answer = slow.recv(4096)
        assert answer.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
        assert json.loads(answer.split(b"\r\n\r\n")[1])["error"]["kind"] == "SlowError"


@pytest.mark.parametrize("is_whole", [True, False], ids=["one buffer", "pieces"])
def test_a_client_that_does_not_read_is_cut_off_and_frees_the_memory(is_whole):
    size, ended = 64 << 20, threading.Event()

    async def large(request):
        body = bytes(size) if is_whole else iter([bytes(1 << 20)] * 64)
        return Response(200, [], body, size, after=ended.set)

    with serving(app_with(large, send_seconds=0.3, idle_seconds=0.1)) as url:
        with connect(url) as reader:
            reader.sendall(b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\n")
            assert reader.recv(15) == b"HTTP/1.1 200 OK"
            assert ended.wait(10)
            wait_for(lambda: metric(url, "keyhole_slow_connections_total") == 1)
            assert len(read_to_end(reader)) < size
        assert httpx.get(url + "/healthz").status_code == 200


def test_a_client_that_does_not_read_over_tls_is_cut_off(certificates):
    size = 64 << 20

    async def large(request):
        return Response(200, [], bytes(size), size)

    app = app_with(large, send_seconds=0.3)
    listen = Listen(certfile=certificates / "server.pem", keyfile=certificates / "server.key")
    trusted = ssl.create_default_context(cafile=certificates / "ca.pem")
    with serving(app, listen) as url, connect(url) as plain:
        reader = trusted.wrap_socket(plain, server_hostname="127.0.0.1")
        reader.sendall(b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\n")
        assert reader.recv(15) == b"HTTP/1.1 200 OK"
        wait_for(lambda: b"keyhole_slow_connections_total 1.0" in app.metrics.page())
        reader.close()


def test_a_client_that_reads_slowly_but_enough_gets_everything():
    size = 12 << 20

    async def large(request):
        return Response(200, [], bytes(size), size)

    app = app_with(large, send_seconds=0.3, idle_seconds=20.0, slowest=1000.0)
    with serving(app) as url, connect(url) as reader:
        reader.sendall(b"GET /slow HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        received = 0
        while piece := reader.recv(1 << 18):
            received += len(piece)
            time.sleep(0.02)
        assert received > size


def test_bytes_that_are_no_request_are_refused_in_the_shape_of_errors():
    with serving(app_with()) as url:
        for junk in (b"\x00\x01\r\n\r\n", b"GET\r\n\r\n", b"GET /\xff HTTP/1.1\r\n\r\n"):
            with connect(url) as connection:
                connection.sendall(junk)
                answer = read_to_end(connection)
            assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\n")
            assert json.loads(answer.split(b"\r\n\r\n")[1])["error"]["kind"] == "RequestError"


# Processes


def test_the_service_answers_what_is_under_way_before_it_ends():
    begun, go = threading.Event(), threading.Event()

    async def slow(request):
        begun.set()
        await asyncio.to_thread(go.wait)
        return json_response({"late": True})

    answers = []
    context = serving(app_with(slow))
    url = context.__enter__()
    client = threading.Thread(target=lambda: answers.append(httpx.get(url + "/slow", timeout=20)))
    client.start()
    assert begun.wait(10)
    ending = threading.Thread(target=lambda: context.__exit__(None, None, None))
    ending.start()
    wait_for(lambda: not _accepts(url))
    go.set()
    for thread in (client, ending):
        thread.join(20)
    assert answers[0].json() == {"late": True}


def _accepts(url):
    try:
        connect(url).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    ("sent", "workers"), [(signal.SIGTERM, 1), (signal.SIGINT, 1), (signal.SIGTERM, 2)]
)
def test_a_signal_ends_the_service_with_success(published, sent, workers):
    with service(published, "--workers", workers) as running:
        body = wire.encode_query([wire.Ask(1, np.arange(WORDS))])
        current = httpx.get(running.url + "/v1/rounds/current").json()["round"]
        with connect(running.url) as connection:
            head = f"POST /v1/rounds/{current}/slices HTTP/1.1\r\nhost: x\r\n"
            head += f"content-length: {len(body)}\r\ncontent-type: application/octet-stream\r\n\r\n"
            connection.sendall(head.encode() + body[:-1])
            wait_for(lambda: metric(running.url, "keyhole_requests_in_flight") == 2)
            running.process.send_signal(sent)
            wait_for(lambda: not _accepts(running.url))
            connection.sendall(body[-1:])
            assert read_to_end(connection).endswith(MODEL["w"].tobytes())
        assert running.process.wait(20) == 0
        assert running.process.stderr.read() == ""


def test_a_killed_service_comes_back_on_the_same_port(published):
    with service(published) as running:
        first = fetch(running.url, [5, 5, 2])
        running.process.kill()
        running.process.wait()
        with pytest.raises(httpx.ConnectError):
            httpx.get(running.url)
        again = start(published, port=running.port)
        try:
            np.testing.assert_array_equal(fetch(again.url, [5, 5, 2]), first)
        finally:
            again.process.kill()
            again.process.wait()
            again.process.stderr.close()


def _workers_of(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:  # noqa: PTH123
        return [int(child) for child in file.read().split()]


def test_a_worker_that_dies_is_replaced_and_its_counts_stay(published):
    with service(published, "--workers", 2) as running:
        wait_for(lambda: len(_workers_of(running.process.pid)) == 2)
        for _ in range(20):
            fetch(running.url, [1, 2, 3])
        assert metric(running.url, "keyhole_keys_total") == 60
        before = _workers_of(running.process.pid)
        for worker in before:
            os.kill(worker, signal.SIGKILL)
        wait_for(lambda: len(set(_workers_of(running.process.pid)) - set(before)) == 2)
        np.testing.assert_array_equal(fetch(running.url, [4]), MODEL["w"][[4]])
        assert metric(running.url, "keyhole_keys_total") == 61


def test_workers_end_with_their_parent(published):
    with service(published, "--workers", 2) as running:
        workers = wait_for(lambda: _workers_of(running.process.pid))
        running.process.kill()
        running.process.wait()
        wait_for(lambda: not any(_is_running(worker) for worker in workers))


def _is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_herd_of_connections_is_accepted(published):
    with service(published) as running:
        herd = [connect(running.url) for _ in range(500)]
        for connection in herd:
            connection.sendall(b"GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        answers = [read_to_end(connection) for connection in herd]
        for connection in herd:
            connection.close()
        assert all(answer.endswith(b'{"alive":true}') for answer in answers)


def test_verify_refuses_a_damaged_round(published, tmp_path):
    damaged = tmp_path / "rounds"
    shutil.copytree(published, damaged)
    (segment,) = damaged.glob("rounds/*/table-1/seg-0.bin")
    data = bytearray(segment.read_bytes())
    data[7] ^= 1
    segment.write_bytes(data)
    with pytest.raises(AssertionError, match="sums differ"):
        start(damaged, "--verify")
