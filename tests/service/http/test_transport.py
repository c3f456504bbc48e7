"""The service on sockets: TLS, workers that die, and an orderly end."""

import asyncio
import os
import shutil
import signal
import ssl
import threading

import httpx
import numpy as np
import pytest

from keyhole.cli.main import keyhole
from keyhole.errors import InputError
from keyhole.server.optimizers import SGD
from keyhole.server.state import ServerState
from keyhole.service.app import App
from keyhole.service.publishing import Publisher
from keyhole.service.reading import RoundsDirectory
from keyhole.service.routes import json_response
from keyhole.service.transport import Listen, bind, serving
from keyhole.wire import messages as wire
from tests.service.memory_rounds import WIDTH, WORDS, layout
from tests.service.service_process import service, start
from tests.service.sockets import (
    LONG,
    app_with,
    connect,
    get,
    make_certificates,
    metric,
    read_to_end,
    wait_for,
)

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
    with httpx.Client(base_url=url, timeout=LONG, **settings) as client:
        current = client.get("/v1/rounds/current").raise_for_status().json()
        body = wire.encode_query([wire.Ask(1, np.asarray(keys), wants_proof=False)])
        path = f"/v1/rounds/{current['round']}/slices"
        answer = client.post(path, content=body, headers=BINARY).raise_for_status()
    return np.frombuffer(answer.content, np.float32).reshape(-1, WIDTH)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    return make_certificates(tmp_path_factory.mktemp("certificates"))


def tls(certificates, **names):
    return {f"--{name.replace('_', '-')}": certificates / file for name, file in names.items()}


def options(settings):
    return [part for pair in settings.items() for part in pair]


def test_slices_come_over_tls_and_plain_text_is_not_spoken(published, certificates):
    app = App(RoundsDirectory(published))
    listen = Listen(certfile=certificates / "server.pem", keyfile=certificates / "server.key")
    trusted = ssl.create_default_context(cafile=certificates / "ca.pem")
    with serving(app, listen) as url:
        assert url.startswith("https://")
        found = fetch(url, [3, 1], verify=trusted)
        np.testing.assert_array_equal(found, MODEL["w"][[3, 1]])
        with pytest.raises(httpx.TransportError):
            get(url.replace("https", "http") + "/healthz")
        with pytest.raises(httpx.ConnectError):
            get(url + "/healthz")  # an authority that nobody trusts
        old = ssl.create_default_context(cafile=certificates / "ca.pem")
        with pytest.warns(DeprecationWarning, match="TLSv1_1"):
            old.maximum_version = ssl.TLSVersion.TLSv1_1
        with pytest.raises(httpx.ConnectError):
            get(url + "/healthz", verify=old)


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
                get(running.url + "/healthz", verify=context)
        assert get(running.url + "/healthz", verify=known).status_code == 200


# Where to listen


def test_others_cannot_reach_it_without_tls_unless_told(published):
    with pytest.raises(InputError, match="--insecure"):
        keyhole.main(
            ["serve", str(published), "--port", "0", "--host", "0.0.0.0"], standalone_mode=False
        )
    for host in ("0.0.0.0", "::"):
        with pytest.raises(InputError, match="without TLS"):
            bind(Listen(host))
    bind(Listen("0.0.0.0", insecure=True)).close()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.1.2.3"])
def test_loopback_needs_no_tls(host):
    with bind(Listen(host)) as taken:
        assert taken.getsockname()[0].startswith("127.")


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
    client = threading.Thread(target=lambda: answers.append(get(url + "/slow")))
    client.start()
    assert begun.wait(LONG)
    ending = threading.Thread(target=lambda: context.__exit__(None, None, None))
    ending.start()
    wait_for(lambda: not _accepts(url))
    go.set()
    for thread in (client, ending):
        thread.join(LONG)
    assert answers[0].json() == {"late": True}


def _accepts(url):
    try:
        connect(url).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    ("sent", "workers"),
    [pytest.param(signal.SIGINT, 1, marks=pytest.mark.slow), (signal.SIGTERM, 2)],
)
def test_a_signal_ends_the_service_with_success(published, sent, workers):
    with service(published, "--workers", workers, "--log-level", "error") as running:
        body = wire.encode_query([wire.Ask(1, np.arange(WORDS))])
        current = get(running.url + "/v1/rounds/current").json()["round"]
        with connect(running.url) as connection:
            head = f"POST /v1/rounds/{current}/slices HTTP/1.1\r\nhost: x\r\n"
            head += f"content-length: {len(body)}\r\ncontent-type: application/octet-stream\r\n\r\n"
            connection.sendall(head.encode() + body[:-1])
            wait_for(lambda: metric(running.metrics, "keyhole_requests_in_flight") == 1)
            running.process.send_signal(sent)
            wait_for(lambda: not _accepts(running.url))
            connection.sendall(body[-1:])
            assert read_to_end(connection).endswith(MODEL["w"].tobytes())
        assert running.process.wait(LONG) == 0
        assert running.process.stderr.read() == ""


def test_a_killed_service_comes_back_on_the_same_port(published):
    with service(published) as running:
        first = fetch(running.url, [5, 5, 2])
        running.process.kill()
        running.process.wait()
        wait_for(lambda: not _accepts(running.url))  # a worker ends as soon as it notices
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


def test_a_worker_that_dies_is_replaced_its_counts_stay_and_all_end_with_their_parent(published):
    with service(published, "--workers", 2) as running:
        wait_for(lambda: len(_workers_of(running.process.pid)) == 2)
        for _ in range(20):
            fetch(running.url, [1, 2, 3])
        assert metric(running.metrics, "keyhole_keys_total") == 60
        before = _workers_of(running.process.pid)
        for worker in before:
            os.kill(worker, signal.SIGKILL)
        wait_for(lambda: len(set(_workers_of(running.process.pid)) - set(before)) == 2)
        np.testing.assert_array_equal(fetch(running.url, [4]), MODEL["w"][[4]])
        assert metric(running.metrics, "keyhole_keys_total") == 61
        workers = _workers_of(running.process.pid)  # they end with their parent
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
    with pytest.raises(AssertionError, match="leaves differ"):
        start(damaged, "--verify")
