"""The slice service as an ASGI application: a thin edge around rounds, tokens and limits.

Every route answers errors in one shape. No error, log line or metric holds a key, an update or the
name of a device.
"""

from __future__ import annotations

import logging
import random
import secrets
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from pathlib import Path
from traceback import extract_tb
from typing import Any, TypeAlias

from keyhole.errors import BusyError, KeyholeError, TooManyError
from keyhole.serving.coordinator import Admit
from keyhole.serving.files.update_spool import UpdateSpool
from keyhole.serving.service.access import Access
from keyhole.serving.service.guards import Guards
from keyhole.serving.service.limits import Limits
from keyhole.serving.service.metrics import UNEXPECTED, Metrics
from keyhole.serving.service.responses import NO_STORE, error_response, json_response
from keyhole.serving.service.routes import (
    IS_GONE,
    WHOLE_BODY,
    GoneError,
    Receive,
    Request,
    Response,
    Route,
    Routes,
)
from keyhole.serving.service.slice_routes import SliceRoutes
from keyhole.serving.service.update_routes import UpdateRoutes
from keyhole.serving.tables import RoundSource

__all__ = ["App"]

Scope: TypeAlias = MutableMapping[str, Any]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_BUSY_SECONDS = 2.0  # after which a client that was sent away comes back, before jitter
_BUFFERED = 65_536  # bytes that the transport takes without waiting for the client
_LOG = logging.getLogger("keyhole.serving")


class App:
    """Answers requests for the slices of rounds.

    Args:
        rounds: where slices come from.
        access: who may do what.
        limits: how much.
        spool: where updates go; None for a service that takes none.
        admit: decides which devices take part; None for a service without devices of its own.
        metrics: what is counted.
        extra_routes: makers of further routes, counted, limited and refused like the others; each
            is given what stands before all routes.
        clock: unix seconds, for tokens.
        rng: spreads the time after which clients come back; it keeps no secret.

    `app(scope, receive, send)` is one request, as ASGI defines it.
    """

    def __init__(
        self,
        rounds: RoundSource,
        *,
        access: Access | None = None,
        limits: Limits | None = None,
        spool: UpdateSpool | None = None,
        admit: Admit | None = None,
        metrics: Metrics | None = None,
        extra_routes: Sequence[Callable[[Guards], Sequence[Route]]] = (),
        clock: Callable[[], float] = time.time,
        rng: random.Random | None = None,
    ) -> None:
        self.limits, self.metrics = limits or Limits(), metrics or Metrics()
        self._rounds = rounds
        self._rng = rng or random.Random(secrets.randbits(64))
        guards = Guards(access or Access(), self.limits, self.metrics, clock)
        routes = [
            *SliceRoutes(rounds, guards).routes(),
            *UpdateRoutes(rounds, guards, spool, admit).routes(),
            Route("health", ("GET",), "/healthz", self._health),
            Route("ready", ("GET",), "/readyz", self._ready),
            Route("metrics", ("GET",), "/metrics", self._metrics),
            *(route for make in extra_routes for route in make(guards)),
        ]
        self._routes = Routes(routes, self.metrics)
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

    async def _health(self, request: Request) -> Response:
        return json_response({"alive": True})

    async def _ready(self, request: Request) -> Response:
        current = self._rounds.current()
        if current is None:
            raise BusyError(
                "no round yet", got="none", allowed="a published round", fix="publish one"
            )
        with self._rounds.hold(current.round):
            return json_response({"round": current.round})

    async def _metrics(self, request: Request) -> Response:
        text = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")
        return Response.of(200, [text, NO_STORE], self.metrics.page())


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
        body = b""
    elif len(body) > _BUFFERED:
        await send({"type": "http.response.body", "body": body, "more_body": True})
        body = b""
    await send({"type": "http.response.body", "body": body})
