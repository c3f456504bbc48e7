"""Finds the handler that answers a path, and says what handlers take and give.

Paths are matched as they arrive, byte for byte: nothing is decoded or normalised, so `%2e%2e`, `//`
and the like are paths that do not exist.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from keyhole.errors import (
    MethodError,
    NotFoundError,
    RequestError,
    SlowError,
    TooLargeError,
)
from keyhole.service.limits import Limits
from keyhole.service.metrics import Metrics, RouteMetrics

Body: TypeAlias = bytes | bytearray | memoryview
Headers: TypeAlias = list[tuple[bytes, bytes]]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]


WHOLE_BODY = "keyhole.body"
"""Where the scope of a request has its body, if all of it has arrived with its head."""


IS_GONE = "keyhole.is_gone"
"""Where the scope has a function that tells whether the client has left."""


class GoneError(Exception):
    """The client has left; nobody waits for an answer."""


@dataclass  # not frozen, which would take a microsecond of every request
class Request:
    """A request whose head has arrived.

    Args:
        method: in capitals.
        params: what stands in the variable places of the path.
        headers: by name in lower case; of repeated ones the last.
        scope: of ASGI.
        receive: of ASGI.
    """

    method: str
    params: tuple[str, ...]
    headers: Mapping[bytes, bytes]
    scope: Mapping[str, Any]
    receive: Receive

    @property
    def address(self) -> str:
        """Where it comes from, for counting."""
        client = self.scope.get("client")
        return str(client[0]) if client else "unknown"

    def announced(self, limit: int) -> int | None:
        """The length of the body as the head has it; None where it comes in pieces.

        Raises:
            RequestError: it is not a number.
            TooLargeError: it is above `limit`.
        """
        text = self.headers.get(b"content-length")
        if text is None:
            return None
        if not text.isdigit() or len(text) > 19:
            raise RequestError(
                "content-length is not a number",
                got=f"{len(text)} characters",
                allowed="digits",
                fix="send the length of the body",
            )
        if int(text) > limit:
            raise _too_large(int(text), limit)
        return int(text)

    async def body(self, limit: int, limits: Limits) -> bytes | bytearray:
        """Returns the body.

        Raises:
            TooLargeError: it is longer than `limit` bytes.
            SlowError: it takes too long to arrive.
            GoneError: the client leaves before its end.
        """
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
            raise _too_slow(limits) from error
        if message["type"] == "http.disconnect":
            raise GoneError
        return _checked(whole, limit)


@dataclass
class Response:
    """An answer.

    Args:
        status: of HTTP.
        headers: without content-length.
        body: one buffer that nobody changes any more, or pieces made one at a time as they are
            sent.
        length: bytes of the body.
        after: called once the answer is with the system, or given up.
    """

    status: int
    headers: Headers
    body: Body | Iterator[Body] = b""
    length: int = 0
    after: Callable[[], None] | None = None

    @staticmethod
    def of(status: int, headers: Headers, body: Body) -> Response:
        """An answer of one buffer."""
        return Response(status, headers, body, len(body))


Handler: TypeAlias = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True)
class Route:
    """One route.

    Args:
        name: under which it is counted.
        methods: in capitals; HEAD comes with GET.
        pattern: a path in which `{...}` stands for one variable place.
        handler: answers.
    """

    name: str
    methods: tuple[str, ...]
    pattern: str
    handler: Handler


@dataclass
class _Node:
    """One place of a path: what may stand there, and the routes that end there, by method."""

    children: dict[bytes, _Node] = field(default_factory=dict)
    variable: _Node | None = None
    routes: dict[str, tuple[Route, RouteMetrics]] = field(default_factory=dict)


class Routes:
    """All routes, compiled to a tree that is walked once for each request."""

    def __init__(self, routes: Sequence[Route], metrics: Metrics) -> None:
        self._root = _Node()
        for route in routes:
            self._add(route, metrics.route(route.name))

    def find(self, method: str, path: bytes) -> tuple[Route, RouteMetrics, tuple[str, ...]]:
        """The route of a path and what stands in its variable places.

        Raises:
            NotFoundError: there is no such path.
            MethodError: it does not know this method.
        """
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
                "the route does not know this method",
                got="another method",
                allowed=", ".join(sorted(node.routes)),
                fix="use one of them",
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
        "no such path", got="another path", allowed="those of docs/wire.md", fix="check the URL"
    )


def _checked(whole: bytes | bytearray, limit: int) -> bytes | bytearray:
    if len(whole) > limit:
        raise _too_large(len(whole), limit)
    return whole


def _too_large(length: int, limit: int) -> TooLargeError:
    return TooLargeError(
        "the body is too large", got=f"{length} bytes", allowed=f"{limit} bytes", fix="send less"
    )


def _too_slow(limits: Limits) -> SlowError:
    return SlowError(
        "the body takes too long to arrive",
        got="an unfinished body",
        allowed=f"{limits.body_seconds:g} s, and 1 s more for each {limits.slowest:g} bytes",
        fix="try again over a better connection",
    )
