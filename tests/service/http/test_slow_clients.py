"""Slow clients: whoever takes too long is cut off, whoever is merely slow is served."""

import json
import ssl
import threading
import time

import pytest

from keyhole.service.routes import Response
from keyhole.service.transport import Listen, serving
from tests.service.sockets import (
    LONG,
    answered,
    app_with,
    connect,
    counted,
    get,
    make_certificates,
    read_to_end,
    wait_for,
)

SLOW = "keyhole_slow_connections_total"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    return make_certificates(tmp_path_factory.mktemp("certificates"))


def test_an_unfinished_head_is_cut_off():
    app = app_with(head_seconds=0.2)
    with serving(app) as url, connect(url) as slow:
        slow.sendall(b"GET /healthz HTTP/1.1\r\nhost: x\r\n")
        assert read_to_end(slow) == b""
        assert counted(app, SLOW) == 1


def test_a_head_that_drips_is_cut_off():
    def drip(connection):
        connection.sendall(b"GET /healthz HTTP/1.1\r\nx: ")
        for _ in range(3000):  # a minute of them
            connection.sendall(b"x")
            time.sleep(0.02)

    with (
        serving(app_with(head_seconds=0.3)) as url,
        connect(url) as slow,
        pytest.raises(ConnectionError),
    ):
        drip(slow)


def test_a_second_head_on_a_connection_is_watched_as_well():
    with serving(app_with(head_seconds=0.2, idle_seconds=600.0)) as url, answered(url) as slow:
        slow.sendall(b"GET /heal")
        assert read_to_end(slow) == b""


def test_a_connection_may_rest_as_long_as_allowed():
    app = app_with(head_seconds=0.1, idle_seconds=600.0)
    with serving(app) as url, answered(url) as idle:
        before = counted(app, SLOW)
        for _ in range(2):
            time.sleep(0.4)  # several times what a head may take
            idle.sendall(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
            assert b'{"alive":true}' in idle.recv(4096)
        assert counted(app, SLOW) == before


def test_an_endless_head_is_refused():
    with serving(app_with(max_head=2000)) as url, connect(url) as endless:
        endless.sendall(b"GET /healthz HTTP/1.1\r\n")
        for _ in range(2):
            endless.sendall(b"x: " + b"y" * 1200 + b"\r\n")
        answer = read_to_end(endless)
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert json.loads(answer.split(b"\r\n\r\n")[1])["error"]["kind"] == "TooLargeError"


def test_a_body_that_stalls_is_answered_408():
    with serving(app_with(body_seconds=0.2)) as url, connect(url) as slow:
        current = get(f"{url}/v1/rounds/current").json()["round"]
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

    app = app_with(large, send_seconds=0.3, idle_seconds=0.1)
    with serving(app) as url:
        with connect(url) as reader:
            reader.sendall(b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\n")
            assert reader.recv(15) == b"HTTP/1.1 200 OK"
            assert ended.wait(LONG)
            wait_for(lambda: counted(app, SLOW) == 1)
            assert len(read_to_end(reader)) < size
        assert get(url + "/healthz").status_code == 200


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
        wait_for(lambda: counted(app, SLOW) == 1)
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
