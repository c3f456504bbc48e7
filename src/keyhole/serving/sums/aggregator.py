"""An aggregator as a service: one of the two parties of a secure sum, for `serving` and `run`."""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Awaitable, Callable

from keyhole.serving.service.access import Access
from keyhole.serving.service.edge import Edge, Scope, Send
from keyhole.serving.service.guards import Guards
from keyhole.serving.service.limits import Limits
from keyhole.serving.service.metrics import Metrics
from keyhole.serving.service.responses import NO_STORE, json_response
from keyhole.serving.service.routes import Receive, Request, Response, Route, Routes
from keyhole.serving.sums.finishing import Finisher
from keyhole.serving.sums.peer_line import PeerLine
from keyhole.serving.sums.routes import Keyrings, SumRoutes
from keyhole.serving.sums.settings import AggregatorSettings
from keyhole.serving.sums.sum_files import SumFiles
from keyhole.serving.sums.sums import Sums

__all__ = ["AggregatorApp"]


class AggregatorApp:
    """One of both aggregators as an ASGI application.

    It works in one process: sums that were closing when it ended go on when it is made again.

    Hidden from it: every device's keys and numbers, if the other aggregator does not work with it
    and both follow the protocol. It sees who takes part, when, and who reached the other one. It
    must be run by other people than the other one: nothing here can make sure of that.

    Args:
        files: what it keeps.
        settings: what it allows.
        keyrings: who is let in.
        peer: the other aggregator.
        limits: of requests.
        metrics: what is counted.
        clock: unix seconds, for tokens.
        rng: spreads the time after which clients come back; it keeps no secret.
    """

    def __init__(
        self,
        files: SumFiles,
        settings: AggregatorSettings,
        keyrings: Keyrings,
        peer: PeerLine,
        *,
        limits: Limits | None = None,
        metrics: Metrics | None = None,
        clock: Callable[[], float] = time.time,
        rng: random.Random | None = None,
    ) -> None:
        self.limits, self.metrics = limits or Limits(), metrics or Metrics()
        self.sums = Sums(files, settings)
        self._finisher = Finisher(self.sums, peer)
        guards = Guards(Access(), self.limits, self.metrics, clock)
        routes = [
            *SumRoutes(self.sums, self._finisher, guards, keyrings).routes(),
            Route("health", ("GET",), "/healthz", self._health),
            Route("ready", ("GET",), "/readyz", self._health),
            Route("metrics", ("GET",), "/metrics", self._metrics),
        ]
        rng = rng or random.Random(secrets.randbits(64))
        self._edge = Edge(Routes(routes, self.metrics), self.limits, self.metrics, rng)
        self._finisher.resume()

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Answers one request."""
        return self._edge(scope, receive, send)

    def close(self) -> None:
        """Ends what is under way; files keep it, and may be taken by another process."""
        self._finisher.close()
        self.sums.files.close()

    async def _health(self, request: Request) -> Response:
        return json_response({"alive": True})

    async def _metrics(self, request: Request) -> Response:
        text = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")
        return Response.of(200, [text, NO_STORE], self.metrics.page())
