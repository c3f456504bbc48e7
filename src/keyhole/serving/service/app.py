"""The slice service as an ASGI application: a thin edge around rounds, tokens and limits.

Every route answers errors in one shape. No error, log line or metric holds a key, an update or the
name of a device.
"""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence

from keyhole.errors import BusyError
from keyhole.serving.coordinator import Admit
from keyhole.serving.files.update_spool import UpdateSpool
from keyhole.serving.service.access import Access
from keyhole.serving.service.edge import Edge, Scope, Send
from keyhole.serving.service.guards import Guards
from keyhole.serving.service.limits import Limits
from keyhole.serving.service.metrics import Metrics
from keyhole.serving.service.responses import NO_STORE, json_response
from keyhole.serving.service.routes import Receive, Request, Response, Route, Routes
from keyhole.serving.service.slice_routes import SliceRoutes
from keyhole.serving.service.update_routes import UpdateRoutes
from keyhole.serving.tables import RoundSource

__all__ = ["App"]


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
        rng = rng or random.Random(secrets.randbits(64))
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
        self._edge = Edge(self._routes, self.limits, self.metrics, rng)

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Answers one request."""
        return self._edge(scope, receive, send)

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
