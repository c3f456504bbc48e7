"""Takes connections and watches them: cuts off slow clients, sends head and body together.

The HTTP protocol is uvicorn's, its server is not: that one sets no limit on the time of a TLS
handshake, on the time and size of a head, nor on a client that does not read. What a connection is
doing can be seen from outside, so one task looks at all of them now and then, and requests cost
nothing more.

uvicorn writes the head and the body of an answer one after the other, and the event loop makes a
system call of each write. Here a head waits for the next write of its connection, or for the next
turn of the loop: a client that asks for 100 slices of 2 KB then takes a seventh less CPU.
"""

from __future__ import annotations

import asyncio
import fcntl
import resource
import socket
import ssl
import sys
import termios
from collections.abc import Callable
from http import HTTPStatus
from itertools import count
from typing import Any, cast

import uvicorn
from httptools import HttpRequestParser
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from keyhole.errors import BusyError, KeyholeError, RequestError, TooLargeError, TooManyError
from keyhole.service.limits import Limits
from keyhole.service.metrics import Metrics
from keyhole.service.routes import IS_GONE, WHOLE_BODY, Application, error_response

BACKLOG = 4096
"""Connections that may wait to be accepted: with fewer, a herd of devices loses some."""

_OTHER_FILES = 128  # descriptors that are kept for rounds, updates and the process itself
_LOOK_EVERY = 0.02  # seconds between looks at what is still under way
_HEAD = b"HTTP/1.1 "
_MAX = 4096  # bytes of a head that waits
_MAX_AHEAD = 64  # requests that a client may send before it has the first answer
_BUSY_SECONDS = 2.0  # after which a client that found no room comes back


class JoinedWrites:
    """Passes everything on, in order; what looks like a head waits for company."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._head = b""
        self._loop = asyncio.get_running_loop()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Sends bytes, after a head that waits."""
        if self._head:
            head, self._head = self._head, b""
            self._transport.writelines((head, data))
        elif isinstance(data, bytes) and len(data) <= _MAX and data.startswith(_HEAD):
            self._head = data
            self._loop.call_soon(self._flush)
        elif data:  # the end of a long answer comes as nothing
            self._transport.write(data)

    def close(self) -> None:
        """Closes once everything has been sent."""
        self._flush()
        self._transport.close()

    def abort(self) -> None:
        """Closes at once."""
        self._head = b""
        self._transport.abort()

    def get_write_buffer_size(self) -> int:
        """Bytes that are not with the system yet."""
        return len(self._head) + self._transport.get_write_buffer_size()

    def __getattr__(self, name: str) -> Any:
        """Everything else is the connection's own."""
        return getattr(self._transport, name)

    def _flush(self) -> None:
        """Sends a head that nothing has followed."""
        head, self._head = self._head, b""
        if head and not self._transport.is_closing():
            self._transport.write(head)


class BoundedHeads:
    """Passes on what the parser finds, and stops it where a head is too long.

    Counted as they are found, since one read may bring a head of any length, and the next one with
    it. Headers behind a body count, too.
    """

    def __init__(self, inner: HttpToolsProtocol, limit: int) -> None:
        self._inner, self._limit, self._left = inner, limit, limit
        self.found = 0  # how often the parser has found something
        self.on_headers_complete = inner.on_headers_complete
        self.on_message_complete = inner.on_message_complete

    @property
    def is_too_long(self) -> bool:
        """Whether the parser was stopped."""
        return self._left < 0

    def on_message_begin(self) -> None:
        """A request begins."""
        self._left = self._limit
        self._inner.on_message_begin()

    def on_url(self, url: bytes) -> None:
        """A piece of its target."""
        self._take(len(url))
        self._inner.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header: with a colon, a space and the end of its line."""
        self._take(len(name) + len(value) + 4)
        self._inner.on_header(name, value)

    def on_body(self, body: bytes) -> None:
        """A piece of its body."""
        self.found += 1
        self._inner.on_body(body)

    def _take(self, count: int) -> None:
        self.found += 1
        self._left -= count
        if self._left < 0:
            raise _too_long(self._limit)  # which ends the parser, and comes to no one


def _too_long(limit: int) -> TooLargeError:
    return TooLargeError(
        f"the head of the request is too long: got more bytes; expected {limit} bytes; send fewer "
        "headers"
    )


class Connection(asyncio.Protocol):
    """One connection: passes everything on to uvicorn's protocol, and can tell if it is slow."""

    def __init__(self, inner: HttpToolsProtocol, owner: Connections) -> None:
        self._inner, self._owner = inner, owner
        self._heads = BoundedHeads(inner, owner.limits.max_head)
        inner.parser = HttpRequestParser(self._heads)
        inner.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        self._unclear = 0  # bytes of an unfinished head, or between pieces of a body
        self._since: float | None = None  # when the wait for a head was first seen
        self._mark: tuple[int, float] | None = None  # bytes unsent, and when that was so
        self._transport: JoinedWrites | None = None
        inner.send_400_response = self._refuse_unread  # type: ignore[method-assign]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begins."""
        self._transport = JoinedWrites(transport)  # type: ignore[arg-type]
        self._owner.all.add(self)
        self._inner.connection_made(self._transport)  # type: ignore[arg-type]
        if len(self._owner.all) > self._owner.limit:
            self._refuse(
                BusyError(
                    f"too many connections: got one more; expected {self._owner.limit}; come back "
                    "when the answer says"
                ),
                retry_after=_BUSY_SECONDS,
            )

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends."""
        self._owner.all.discard(self)
        self._inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Passes bytes on; too many of them without the end of a head are refused."""
        inner, cycle, found = self._inner, self._inner.cycle, self._heads.found
        is_body = cycle is not None and cycle.more_body  # asked first: these may be its last bytes
        inner.data_received(data)
        is_found = inner.cycle is not cycle or (is_body and self._heads.found != found)
        self._unclear = 0 if is_found else self._unclear + len(data)
        if self._unclear > self._owner.limits.max_head:
            self._refuse_head()
        if inner.cycle is not cycle:
            inner.cycle.scope[IS_GONE] = self._is_gone  # type: ignore[literal-required]
            if not inner.cycle.more_body:
                # Anyone who answers need not wait for it, nor set a timer while waiting.
                inner.cycle.scope[WHOLE_BODY] = inner.cycle.body  # type: ignore[literal-required]
                inner.cycle.body = bytearray()  # else it would stay while the connection rests
        if len(inner.pipeline) > _MAX_AHEAD:  # an answer in between would be taken for another
            self._owner.metrics.refuse(TooManyError.__name__)
            self.cut_off()

    def eof_received(self) -> None:
        """The client sends no more."""
        self._inner.eof_received()

    def pause_writing(self) -> None:
        """The client reads slowly."""
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        """The client has caught up."""
        self._inner.resume_writing()

    def is_slow(self, now: float) -> bool:
        """Returns whether the client takes longer than it may, for a head or for an answer."""
        unsent, cycle = self._unsent(), self._inner.cycle
        if unsent:
            return self._reads_slowly(unsent, now)
        self._mark = None
        is_between = cycle is None or cycle.response_complete
        # uvicorn's own timer runs while a connection rests; it stops with the first byte.
        if not is_between or self._inner.timeout_keep_alive_task is not None:
            self._since = None
            return False
        self._since = now if self._since is None else self._since
        return now - self._since > self._owner.limits.head_seconds

    def cut_off(self) -> None:
        """Ends the connection at once; what is unsent is dropped."""
        if self._transport is not None:
            self._transport.abort()

    def _is_gone(self) -> bool:
        # A write that failed closes the transport at once; the protocol hears of it a turn later.
        transport = self._transport
        return self._inner.cycle.disconnected or transport is None or transport.is_closing()

    def _unsent(self) -> int:
        """Bytes of answers that the client has not taken."""
        if self._transport is None:
            return 0
        size = self._transport.get_write_buffer_size()
        if size or self._inner.scheme == "http":
            return size
        # Under TLS the loop does not tell what it has encrypted and not sent. The system tells what
        # it has not passed on: while that stays the same, nothing moves.
        held = self._transport.get_extra_info("socket").fileno()
        return int.from_bytes(fcntl.ioctl(held, termios.TIOCOUTQ, bytes(4)), sys.byteorder)

    def _reads_slowly(self, unsent: int, now: float) -> bool:
        limits, mark = self._owner.limits, self._mark
        enough = limits.slowest * limits.send_seconds
        if mark is None or unsent > mark[0] or mark[0] - unsent >= enough:
            self._mark = (unsent, now)
            return False
        return now - mark[1] > limits.send_seconds

    def _refuse_unread(self, msg: str) -> None:
        """What uvicorn calls where a request cannot be parsed."""
        if self._heads.is_too_long:
            self._refuse_head()
            return
        self._refuse(
            RequestError(
                "not a request that can be read: got other bytes; expected HTTP/1.1; check the "
                "client and what stands between"
            )
        )

    def _refuse_head(self) -> None:
        """Answers that a head is too long; behind an answer that is not whole, hangs up alone."""
        error, cycle = _too_long(self._owner.limits.max_head), self._inner.cycle
        if cycle is None or cycle.response_complete:
            self._refuse(error)
        else:
            self._owner.metrics.refuse(type(error).__name__)
            self.cut_off()

    def _refuse(self, error: KeyholeError, retry_after: float | None = None) -> None:
        """Answers before there is a request, and hangs up."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        self._owner.metrics.refuse(type(error).__name__)
        response = error_response(error, retry_after)
        phrase = HTTPStatus(response.status).phrase
        lines = [b"HTTP/1.1 %d %s" % (response.status, phrase.encode("ascii"))]
        lines += [name + b": " + value for name, value in response.headers]
        lines += [b"content-length: %d" % response.length, b"connection: close", b"", b""]
        transport.write(b"\r\n".join(lines) + bytes(response.body))  # type: ignore[arg-type]
        transport.close()


class Connections:
    """All connections of a server; above `limit` at one time, more are told to come back."""

    def __init__(self, limits: Limits, metrics: Metrics, limit: int) -> None:
        self.limits, self.metrics, self.limit = limits, metrics, limit
        self.all: set[Connection] = set()

    async def watch(self) -> None:
        """Looks at all connections, again and again."""
        step = min(1.0, self.limits.head_seconds / 4, self.limits.send_seconds / 4)
        # Time is counted in looks: what clients sent while the service itself stood still has not
        # been read yet, and a clock would blame them for it.
        for look in count(1):
            await asyncio.sleep(step)
            now = look * step
            for slow in [each for each in self.all if each.is_slow(now)]:
                self.metrics.add("cut_off")
                slow.cut_off()


def allow_many_files() -> None:
    """Lets this process have as many descriptors as the system allows; shells ask for 1024."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def accept(
    app: Application,
    listener: socket.socket,
    tls: ssl.SSLContext | None,
    stop: asyncio.Event,
    on_ready: Callable[[], None] = lambda: None,
) -> None:
    """Serves until `stop` is set, which closes `listener`, and until requests under way are
    answered, or out of time."""
    limits, state, loop = app.limits, ServerState(), asyncio.get_running_loop()
    room = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _OTHER_FILES
    connections = Connections(limits, app.metrics, max(1, min(limits.max_connections, room)))
    config = _config(app)
    server = await loop.create_server(
        lambda: Connection(HttpToolsProtocol(config, state, app_state={}), connections),
        sock=listener,
        ssl=tls,
        backlog=BACKLOG,
        ssl_handshake_timeout=None if tls is None else limits.head_seconds,
    )
    watch = loop.create_task(connections.watch())
    on_ready()
    await stop.wait()
    server.close()
    listener.close()
    for connection in list(state.connections):
        connection.shutdown()
    deadline = loop.time() + limits.drain_seconds
    while (state.connections or state.tasks) and loop.time() < deadline:
        await asyncio.sleep(_LOOK_EVERY)
    watch.cancel()
    for each in list(connections.all):
        each.cut_off()


def _config(app: Application) -> uvicorn.Config:
    """What uvicorn's protocol asks for: the app, and how long a connection may rest."""
    config = uvicorn.Config(
        cast("Any", app),
        http=HttpToolsProtocol,
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        log_level="error",
        access_log=False,
        proxy_headers=False,
        timeout_keep_alive=cast("int", app.limits.idle_seconds),
    )
    config.load()
    return config
