"""Turns one ASGI request into one answer, with errors of one shape.

No error, log line or metric holds a key, an update or the name of a device.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from traceback import extract_tb
from typing import Any, Protocol, TypeAlias

from keyhole.errors import (
    BusyError,
    KeyholeError,
    TooManyError,
)
from keyhole.service.limits import Limits
from keyhole.service.metrics import UNEXPECTED, Metrics
from keyhole.service.responses import error_response
from keyhole.service.routes import (
    IS_GONE,
    WHOLE_BODY,
    GoneError,
    Receive,
    Request,
    Response,
    Routes,
)

Scope: TypeAlias = MutableMapping[str, Any]


Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]


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
    """Finds the route of a request, and answers whatever becomes of it.

    Args:
        routes: of the service.
        limits: say when anyone who asks too often comes back.
        metrics: what is counted.
        rng: spreads the time after which clients come back; it keeps no secret.
    """

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
            await _send(response, scope, send)
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
        return error_response(error, self._retry_after(error))

    def _retry_after(self, error: KeyholeError) -> float | None:
        """When to come back, spread so that not all come back at once."""
        if isinstance(error, TooManyError):
            slowest = min(self.limits.rate, self.limits.rate_per_address)
            return 1.0 / slowest + self._rng.random()
        if error.http_status == 503:
            return _BUSY_SECONDS * (0.5 + self._rng.random())
        return None

    def _fail(self, error: Exception) -> Response:
        """An error nobody expected: where it happened is logged, what it says is not."""
        self.metrics.refuse(UNEXPECTED)
        frame = extract_tb(error.__traceback__)[-1]
        place = f"{Path(frame.filename).name}:{frame.lineno}"
        _LOG.error("unexpected %s at %s", type(error).__name__, place)
        hidden = KeyholeError(
            "the service has failed",
            got="an unexpected error",
            allowed="none",
            fix="try again; the operator finds its place in the log",
        )
        return error_response(hidden)


async def _send(response: Response, scope: Scope, send: Send) -> None:
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
