"""Takes a request in and gives an answer out: routes, bodies, errors of one shape, files, ASGI.

Paths are matched as they arrive, byte for byte: nothing is decoded or normalised, so `%2e%2e`, `//`
and the like are paths that do not exist. No error, log line or metric holds a key, an update or the
name of a device.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import re
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping, Sequence, Set
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from traceback import extract_tb
from typing import Any, Protocol, TypeAlias
from urllib.parse import urlsplit

import msgspec

from keyhole.errors import (
    AccessError,
    BusyError,
    KeyholeError,
    MethodError,
    NotFoundError,
    RangeError,
    RequestError,
    SlowError,
    TooLargeError,
    TooManyError,
)
from keyhole.service.limits import Limits
from keyhole.service.metrics import UNEXPECTED, Metrics, RouteMetrics

Body: TypeAlias = bytes | bytearray | memoryview
Headers: TypeAlias = list[tuple[bytes, bytes]]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Scope: TypeAlias = MutableMapping[str, Any]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]

WHOLE_BODY = "keyhole.body"
"""Where the scope of a request has its body, if all of it has arrived with its head."""

IS_GONE = "keyhole.is_gone"
"""Where the scope has a function that tells whether the client has left."""


class GoneError(Exception):
    """The client has left; nobody waits for an answer."""


@dataclass  # not frozen, which would take a microsecond of every request
class Request:
    """A request whose head has arrived."""

    method: str  # in capitals
    params: tuple[str, ...]  # what stands in the variable places of the path
    headers: Mapping[bytes, bytes]  # by name in lower case; of repeated ones the last
    scope: Mapping[str, Any]
    receive: Receive

    @property
    def address(self) -> str:
        """Where it comes from, for counting."""
        client = self.scope.get("client")
        return str(client[0]) if client else "unknown"

    def announced(self, limit: int) -> int | None:
        """Returns the length of the body as the head has it; None where it comes in pieces."""
        text = self.headers.get(b"content-length")
        if text is None:
            return None
        if not text.isdigit() or len(text) > 19:
            raise RequestError(
                f"content-length is not a number: got {len(text)} characters; expected digits; "
                "send the length of the body"
            )
        if int(text) > limit:
            raise _too_large(int(text), limit)
        return int(text)

    async def body(self, limit: int, limits: Limits) -> bytes | bytearray:
        """Returns the body; raises TooLargeError, SlowError, or GoneError if the client leaves."""
        self.announced(limit)
        if WHOLE_BODY in self.scope:
            return _checked(self.scope[WHOLE_BODY], limit)
        start = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout_at(start + limits.body_seconds) as deadline:
                message = await self.receive()
                whole: bytes | bytearray = message.get("body", b"")
                while message.get("more_body", False) and len(whole) <= limit:
                    deadline.reschedule(start + limits.body_seconds + len(whole) / limits.slowest)
                    message = await self.receive()
                    whole = whole if isinstance(whole, bytearray) else bytearray(whole)
                    whole += message.get("body", b"")
        except TimeoutError as error:
            rate = f"1 s more for each {limits.slowest:g} bytes"
            raise SlowError(
                "the body takes too long to arrive: got an unfinished body; expected "
                f"{limits.body_seconds:g} s, and {rate}; try again over a better connection"
            ) from error
        if message["type"] == "http.disconnect":
            raise GoneError
        return _checked(whole, limit)


@dataclass
class Response:
    """An answer."""

    status: int
    headers: Headers  # without content-length
    # one buffer that nobody changes any more, or pieces made one at a time as they are sent
    body: Body | Iterator[Body] = b""
    length: int = 0
    # called once the answer is with the system, or given up
    after: Callable[[], None] | None = None

    @staticmethod
    def of(status: int, headers: Headers, body: Body) -> Response:
        """Returns an answer of one buffer."""
        return Response(status, headers, body, len(body))


Handler: TypeAlias = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True)
class Route:
    """One route."""

    name: str  # under which it is counted
    methods: tuple[str, ...]  # in capitals; HEAD comes with GET
    pattern: str  # a path in which `{...}` stands for one variable place
    handler: Handler


@dataclass
class _Node:
    """One place of a path: what may stand there, and the routes that end there, by method."""

    children: dict[bytes, _Node] = field(default_factory=dict)
    variable: _Node | None = None
    routes: dict[str, tuple[Route, RouteMetrics]] = field(default_factory=dict)


async def _alive(_: Request) -> Response:
    return json_response({"alive": True})


def health_routes(ready: Handler = _alive) -> list[Route]:
    """Returns what probes ask: whether a service lives, and by `ready` whether it has work to
    do."""
    return [
        Route("health", ("GET",), "/healthz", _alive),
        Route("ready", ("GET",), "/readyz", ready),
    ]


class Routes:
    """All routes, compiled to a tree that is walked once for each request."""

    def __init__(self, routes: Sequence[Route], metrics: Metrics) -> None:
        self._root = _Node()
        for route in routes:
            self._add(route, metrics.route(route.name))

    def find(self, method: str, path: bytes) -> tuple[Route, RouteMetrics, tuple[str, ...]]:
        """Returns the route of a path and what stands in its variable places."""
        node, params = self._root, []
        for word in path.split(b"/"):
            child = node.children.get(word)
            if child is None:
                child = node.variable
                if child is None or not word:
                    raise _no_path()
                params.append(word.decode("latin-1"))
            node = child
        found = node.routes.get(method)
        if found is None:
            if not node.routes:
                raise _no_path()
            raise MethodError(
                "the route does not know this method: got another method; expected "
                f"{', '.join(sorted(node.routes))}; use one of them"
            )
        return *found, tuple(params)

    def _add(self, route: Route, metrics: RouteMetrics) -> None:
        node = self._root
        for word in route.pattern.encode("ascii").split(b"/"):
            if word.startswith(b"{"):
                node.variable = node.variable or _Node()
                node = node.variable
            else:
                node = node.children.setdefault(word, _Node())
        methods = (*route.methods, "HEAD") if "GET" in route.methods else route.methods
        node.routes |= dict.fromkeys(methods, (route, metrics))


def _no_path() -> NotFoundError:
    return NotFoundError(
        "no such path: got another path; expected those that docs/wire.md has for this service; "
        "check host and port of the URL, at which another program of keyhole's may listen"
    )


def _checked(whole: bytes | bytearray, limit: int) -> bytes | bytearray:
    if len(whole) > limit:
        raise _too_large(len(whole), limit)
    return whole


def _too_large(length: int, limit: int) -> TooLargeError:
    return TooLargeError(
        f"the body is too large: got {length} bytes; expected {limit} bytes; send less"
    )


BINARY = (b"content-type", b"application/octet-stream")
JSON = (b"content-type", b"application/json")
NO_STORE = (b"cache-control", b"no-store")

_RANGE = re.compile(rb"bytes=([0-9]{0,19})-([0-9]{0,19})")
_PIECE = 1 << 18  # bytes of a file that are copied at a time


def json_response(content: Mapping[str, object], status: int = 200) -> Response:
    """Returns an answer that changes from one moment to the next."""
    return Response.of(status, [JSON, NO_STORE], msgspec.json.encode(content))


def error_response(
    error: KeyholeError, retry_after: float | None = None, *more: tuple[bytes, bytes]
) -> Response:
    """Returns the answer to a refused request: four facts, none of which holds a key."""
    headers: Headers = [JSON, NO_STORE, *more]
    if error.http_status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if error.http_status == 405:
        headers.append((b"allow", error.allowed.encode("latin-1")))
    if retry_after is not None:
        headers.append((b"retry-after", str(math.ceil(retry_after)).encode("ascii")))
    return Response.of(error.http_status, headers, error.to_json())


def file_response(
    request: Request,
    headers: Headers,
    etag: str,
    length: int,
    read: Callable[[int, int], Body | Iterator[Body]],
) -> Response:
    """Returns an answer of bytes that never change: whole, a part, or a word that the client has
    them."""
    quoted = f'"{etag}"'.encode("ascii")
    headers = [*headers, (b"etag", quoted)]
    if _matches(request.headers.get(b"if-none-match"), quoted):
        return Response(304, headers)
    headers.append((b"accept-ranges", b"bytes"))
    part = None if request.method == "HEAD" else _range_of(request, quoted, length)
    start, stop = part or (0, length)
    if start >= stop and part is not None:
        allowed = f"0..{length - 1}" if length else "none"
        return error_response(
            RangeError(
                f"the range begins behind the end: got another range; expected {allowed}; "
                "ask for less"
            ),
            None,
            (b"content-range", b"bytes */%d" % length),
        )
    if part is not None:
        shown = f"bytes {start}-{stop - 1}/{length}".encode("ascii")
        headers.append((b"content-range", shown))
    body = b"" if request.method == "HEAD" else read(start, stop)
    return Response(200 if part is None else 206, headers, body, stop - start)


def pieces(whole: memoryview, start: int, stop: int) -> Iterator[bytes]:
    """Copies a mapped file piece by piece, so that nothing points into it when it is let go."""
    for at in range(start, stop, _PIECE):
        yield bytes(whole[at : min(at + _PIECE, stop)])


def _matches(given: bytes | None, quoted: bytes) -> bool:
    """Whether if-none-match names the validator; weak comparison, as for every GET."""
    if given is None:
        return False
    return given.strip() == b"*" or quoted in {
        tag.strip().removeprefix(b"W/") for tag in given.split(b",")
    }


def _range_of(request: Request, quoted: bytes, length: int) -> tuple[int, int] | None:
    """The one range that is asked for, empty where it lies behind the end; None for the whole."""
    given = request.headers.get(b"range")
    condition = request.headers.get(b"if-range")
    found = None if given is None else _RANGE.fullmatch(given.strip())
    if found is None or (condition is not None and condition.strip() != quoted):
        return None
    first, last = found.groups()
    if not first and not last:
        return None
    if not first:
        start, stop = max(0, length - int(last)), length
    else:
        start, stop = int(first), min(int(last or length) + 1, length)
        if last and int(last) < start:
            return None
    return start, stop


_BUSY_SECONDS = 2.0  # after which a client that was sent away comes back, before jitter
_BUFFERED = 65_536  # bytes that the transport takes without waiting for the client
_LOG = logging.getLogger("keyhole.service")


class Application(Protocol):
    """What the transport serves: the slice service, or a relay."""

    limits: Limits
    metrics: Metrics

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Answers one request, as ASGI defines it."""
        ...


class Edge:
    """Finds the route of a request, and answers whatever becomes of it."""

    def __init__(
        self, routes: Routes, limits: Limits, metrics: Metrics, rng: random.Random
    ) -> None:
        self.limits, self.metrics = limits, metrics
        self._routes, self._rng = routes, rng
        self._nowhere = self.metrics.route("none")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        if scope["type"] != "http":
            return
        start = time.perf_counter()
        self.metrics.change("in_flight", 1)
        counted, response, method = self._nowhere, None, scope["method"]
        try:
            try:
                path = scope.get("raw_path") or scope["path"].encode("utf-8", "replace")
                route, counted, params = self._routes.find(method, path)
                response = await route.handler(
                    Request(method, params, dict(scope["headers"]), scope, receive)
                )
            except KeyholeError as error:
                response = self._refuse(error, counted.name)
            except GoneError:
                self.metrics.add("gone")
                return
            except Exception as error:  # noqa: BLE001 - the edge: whatever it is, one answer
                response = self._fail(error)
            await send_response(response, scope, send)
        finally:
            if response is not None:
                if response.after is not None:
                    response.after()
                counted.count(response.status, time.perf_counter() - start)
            self.metrics.change("in_flight", -1)
            scope.pop(WHOLE_BODY, None)  # the scope lives as long as its connection rests

    def _refuse(self, error: KeyholeError, route: str) -> Response:
        """An expected error."""
        self.metrics.refuse(type(error).__name__)
        if route == "updates":
            self.metrics.add("unused")
        if error.http_status >= 500 and not isinstance(error, BusyError):
            _LOG.error("%s on route %s", type(error).__name__, route)
        retry_after = None  # spread, so that not all come back at once
        if isinstance(error, TooManyError):
            retry_after = error.retry_after + self._rng.random()
        elif error.http_status == 503:
            retry_after = _BUSY_SECONDS * (0.5 + self._rng.random())
        return error_response(error, retry_after)

    def _fail(self, error: Exception) -> Response:
        """An error nobody expected: where it happened is logged, what it says is not."""
        self.metrics.refuse(UNEXPECTED)
        frame = extract_tb(error.__traceback__)[-1]
        place = f"{Path(frame.filename).name}:{frame.lineno}"
        _LOG.error("unexpected %s at %s", type(error).__name__, place)
        hidden = KeyholeError(
            "the service has failed: got an unexpected error; expected none; try again; the "
            "operator finds its place in the log"
        )
        return error_response(hidden)


_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


def refuse_led_here(request: Request, hosts: Set[str] = frozenset()) -> None:
    """Raises AccessError for a request under another name than an address, localhost or one of
    `hosts`: a site whose name was pointed here leads a browser here so, and would read the
    answer."""
    host = request.headers.get(b"host", b"").decode("latin-1")
    try:
        name = urlsplit(f"//{host}").hostname or ""
        if name not in _LOOPBACK | hosts:
            ip_address(name)
    except ValueError:
        raise AccessError(
            f"the page has another name: got {len(host)} characters of a host; expected "
            "localhost, an address, or the --host it was started with; open the address that it "
            "prints"
        ) from None


class MetricsPage(Protocol):
    """What is shown at the address of metrics."""

    def page(self) -> bytes:
        """Returns all numbers, as Prometheus reads them."""
        ...


class MetricsApp:
    """Shows the metrics of a service at an address of their own, and nothing else.

    What is counted of all devices together still tells an operator's habits, and a page costs more
    to make than most requests: it is not for everyone who can reach the service, nor for a site
    in a browser of its machine.
    """

    def __init__(self, shown: MetricsPage, limits: Limits) -> None:
        self.limits, self.metrics = limits, Metrics()  # its own: looking changes no count
        self._shown = shown
        routes = Routes([Route("metrics", ("GET",), "/metrics", self._page)], self.metrics)
        self._edge = Edge(routes, limits, self.metrics, random.SystemRandom())

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Answers one request."""
        return self._edge(scope, receive, send)

    async def _page(self, request: Request) -> Response:
        at = request.scope.get("server")
        if at and at[0] in _LOOPBACK:  # another address has names that only its operator knows
            refuse_led_here(request)
        text = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")
        return Response.of(200, [text, NO_STORE], self._shown.page())


async def send_response(response: Response, scope: Scope, send: Send) -> None:
    """Sends an answer; returns when all of it but a little is with the system, or nobody waits."""
    headers = response.headers
    if response.status != 304:
        headers = [*headers, (b"content-length", b"%d" % response.length)]
    await send({"type": "http.response.start", "status": response.status, "headers": headers})
    body = b"" if scope["method"] == "HEAD" else response.body
    if not isinstance(body, bytes | bytearray | memoryview):
        for piece in body:
            if IS_GONE in scope and scope[IS_GONE]():
                return
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            await asyncio.sleep(0)  # a client that keeps up must not keep the others waiting
        body = b""
    elif len(body) > _BUFFERED:
        await send({"type": "http.response.body", "body": body, "more_body": True})
        body = b""
    await send({"type": "http.response.body", "body": body})
