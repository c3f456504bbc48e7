"""Many connections, and clients that send ahead or leave: none of them takes much from the rest."""

import asyncio
import json
import socket
import ssl
import threading

import numpy as np
import pytest

from keyhole.service.connections import Connections
from keyhole.service.limits import Limits
from keyhole.service.metrics import Metrics
from keyhole.service.routes import Response
from keyhole.service.transport import Listen, serving
from keyhole.wire import messages as wire
from tests.service.in_process import Service
from tests.service.jumping_loop import JumpingLoop
from tests.service.sockets import (
    LONG,
    app_with,
    connect,
    get,
    make_certificates,
    read_to_end,
    wait_for,
)

GET = b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n"


def test_more_connections_than_allowed_are_told_to_come_back():
    app = app_with(max_connections=3)
    with serving(app) as url:
        held = [connect(url) for _ in range(3)]
        for connection in held:
            connection.sendall(GET)
            assert connection.recv(4096).startswith(b"HTTP/1.1 200 ")
        with connect(url) as late:
            answer = read_to_end(late)
        assert answer.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
        assert b"\r\nretry-after: 2\r\n" in answer
        assert json.loads(answer.split(b"\r\n\r\n")[1])["error"]["kind"] == "BusyError"
        held.pop().close()
        wait_for(lambda: get(url + "/healthz").status_code == 200)
        for connection in held:
            connection.close()


def test_requests_sent_ahead_are_answered_in_order_unless_they_are_many():
    """A request of forty bytes becomes objects of some kilobytes."""
    app = app_with()
    with serving(app) as url:
        with connect(url) as connection:
            connection.sendall(
                GET * 49 + GET.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
            )
            assert read_to_end(connection).count(b'{"alive":true}') == 50
        with connect(url) as connection:
            connection.sendall(GET * 5000)
            assert read_to_end(connection).count(b'{"alive":true}') < 5000
        assert b'keyhole_refused_total{kind="TooManyError"} 1.0' in app.metrics.page()


def test_a_tls_handshake_that_never_comes_is_cut_off(tmp_path):
    made = make_certificates(tmp_path)
    listen = Listen(certfile=made / "server.pem", keyfile=made / "server.key")
    with serving(app_with(head_seconds=0.3), listen) as url:
        with connect(url) as silent:
            assert read_to_end(silent) == b""
        trusted = ssl.create_default_context(cafile=made / "ca.pem")
        wait_for(lambda: get(url + "/healthz", verify=trusted).status_code == 200)


def test_a_file_is_not_read_for_a_client_that_has_left():
    """Even when the write that fails is the first to tell, and the loop has had no turn since."""
    read, left, ended = [], threading.Event(), threading.Event()

    def pieces():
        for place in range(1000):
            read.append(place)
            yield bytes(1 << 16)
            assert left.wait(LONG)

    async def long(request):
        return Response(200, [], pieces(), 1000 << 16, after=ended.set)

    with serving(app_with(long)) as url:
        with connect(url) as connection:
            connection.setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, bytes([1, 0, 0, 0] + [0] * 4)
            )
            connection.sendall(b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\n")
            assert connection.recv(15) == b"HTTP/1.1 200 OK"
        left.set()
        assert ended.wait(LONG)
        assert len(read) < 10


def test_a_client_that_keeps_up_does_not_keep_the_others_waiting():
    async def long(request):
        return Response(200, [], iter([bytes(1)] * 100), 100)

    async def story():
        app, turns, sent = app_with(long), [], []

        async def send(message):  # never waits
            sent.append(message)

        async def other():
            while len(sent) < 102:
                turns.append(len(sent))
                await asyncio.sleep(0)

        waiting = asyncio.create_task(other())
        await app({"type": "http", "method": "GET", "path": "/slow", "headers": []}, send, send)
        await waiting
        assert len(turns) > 90

    asyncio.run(story())


def test_clients_are_not_blamed_while_the_service_itself_stands_still():
    """What they sent meanwhile waits to be read: they have a few looks more."""
    looks = []

    class Client:
        def is_slow(self, now):
            looks.append(now)

    async def story():
        loop = asyncio.get_running_loop()
        connections = Connections(Limits(head_seconds=1.0), Metrics(), limit=1)
        connections.all.add(Client())
        watching = loop.create_task(connections.watch())
        await asyncio.sleep(0.6)
        loop.stand_still(100.0)
        await asyncio.sleep(0.6)
        watching.cancel()

    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        runner.run(story())
    assert looks == [0.25, 0.5, 0.75, 1.0, 1.25]


def test_what_everyone_receives_counts_as_memory_too():
    """Else as many readers as connect, all slow, each hold a copy of it."""
    service = Service(limits=Limits(max_held=1))  # bytes: one answer at a time
    path = f"/v1/rounds/{service.round.id}/broadcast"

    async def story():
        go, begun = asyncio.Event(), []

        async def send(message):
            begun.append(message)
            await go.wait()

        def ask():
            scope = {"type": "http", "method": "GET", "path": path, "headers": []}
            return asyncio.create_task(service.app(scope, send, send))

        asked = [ask(), ask()]
        while b"keyhole_requests_waiting 1.0" not in service.app.metrics.page():
            await asyncio.sleep(0)
        assert len(begun) == 1
        go.set()
        await asyncio.gather(*asked)
        assert len(begun) == 4

    asyncio.run(asyncio.wait_for(story(), LONG))


@pytest.mark.parametrize("method", ["HEAD", "GET"])
def test_only_slices_that_were_sent_are_counted(method):
    service = Service()
    path = f"/v1/rounds/{service.round.id}/tables/1/slices/3"
    tag = service.ask("GET", path).headers["etag"]
    headers = {} if method == "HEAD" else {"if-none-match": tag}
    assert service.ask(method, path, headers=headers).content == b""
    assert b"keyhole_keys_total 1.0" in service.app.metrics.page()


def test_a_connection_that_rests_holds_no_body():
    """Also where the body came whole and nobody asked for it."""
    service = Service()
    kept = []

    async def story():
        body = bytearray(wire.encode_query([wire.Ask(1, np.arange(3))]))
        for path in (f"/v1/rounds/{service.round.id}/slices", "/nowhere"):
            headers = [(b"content-type", b"application/octet-stream")]
            scope = {"type": "http", "method": "POST", "path": path, "headers": headers}
            scope["keyhole.body"] = body
            kept.append(scope)

            async def send(message):
                pass

            await service.app(scope, send, send)

    asyncio.run(story())
    assert not any("keyhole.body" in scope for scope in kept)
