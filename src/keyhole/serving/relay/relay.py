"""The relay: takes sealed requests from devices to one gateway, and the answers back.

It sees who asks, when and how many requests, and cannot read them. It passes on what is in a body
and nothing of its head; it logs neither addresses nor sizes. It lets in whoever can reach it.
"""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Awaitable

from keyhole.private.oblivious.gateway import PROBLEM, PROBLEM_STATUS, PROBLEM_TYPE
from keyhole.private.oblivious.key_config import KEYS_TYPE
from keyhole.private.oblivious.ohttp import REQUEST_OVERHEAD, RESPONSE_TYPE
from keyhole.serving.relay.batches import (
    ANSWERS_TYPE,
    REQUESTS_TYPE,
    decode_requests,
    encode_answers,
)
from keyhole.serving.relay.gateway_line import GatewayLine
from keyhole.serving.relay.gateway_routes import media_type
from keyhole.serving.relay.mixing import Mix, Mixer
from keyhole.serving.service.access import Access
from keyhole.serving.service.edge import Edge, Scope, Send
from keyhole.serving.service.guards import Guards
from keyhole.serving.service.limits import Limits
from keyhole.serving.service.metrics import Metrics
from keyhole.serving.service.responses import NO_STORE, json_response
from keyhole.serving.service.routes import Receive, Request, Response, Route, Routes

__all__ = ["RELAY_KEYS_PATH", "RELAY_PATH", "RelayApp"]

RELAY_PATH = "/v1/relay"
RELAY_KEYS_PATH = "/v1/relay/keys"


class RelayApp:
    """The relay as an ASGI application, for `serving` and `run` of the transport.

    Clients are mixed within one process: there is one worker.

    Args:
        line: to the gateway, the only place where requests go.
        mix: how long they wait for others.
        limits: how much clients may ask.
        metrics: what is counted.
        rng: spreads the time after which clients come back; it keeps no secret.
    """

    def __init__(
        self,
        line: GatewayLine,
        *,
        mix: Mix | None = None,
        limits: Limits | None = None,
        metrics: Metrics | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self.limits, self.metrics = limits or Limits(), metrics or Metrics()
        self._line, self._mixer = line, Mixer(line.forward, mix or Mix())
        self._guards = Guards(Access(), self.limits, self.metrics, time.time)
        routes = [
            Route("relay", ("POST",), RELAY_PATH, self._relay),
            Route("relay keys", ("GET",), RELAY_KEYS_PATH, self._keys),
            Route("health", ("GET",), "/healthz", self._health),
            Route("ready", ("GET",), "/readyz", self._ready),
            Route("metrics", ("GET",), "/metrics", self._metrics),
        ]
        rng = rng or random.Random(secrets.randbits(64))
        self._edge = Edge(Routes(routes, self.metrics), self.limits, self.metrics, rng)

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Answers one request."""
        return self._edge(scope, receive, send)

    async def _relay(self, request: Request) -> Response:
        """Answers to one sealed request, or to a batch of one client's."""
        guards, limits = self._guards, self.limits
        guards.count(request, None)
        is_batch = media_type(request) == REQUESTS_TYPE
        weight = request.announced(limits.most_body) or limits.most_body
        await guards.uploads.enter(weight)
        try:
            body = bytes(await request.body(limits.most_body, limits))
            sealed = decode_requests(body, limits.most_keys) if is_batch else [body]
            # What cannot be a sealed request goes no further.
            is_possible = len(sealed[0]) >= REQUEST_OVERHEAD
            answers = await self._mixer.ask(sealed) if is_possible else [b""] * len(sealed)
        finally:
            guards.uploads.leave(weight)
        response = _response(200, ANSWERS_TYPE, encode_answers(answers)) if is_batch else None
        return await self._weighed(response or _single(answers[0]))

    async def _weighed(self, response: Response) -> Response:
        """An answer that counts as held until its client has taken it."""
        memory = self._guards.memory
        await memory.enter(response.length)
        response.after = lambda: memory.leave(response.length)
        return response

    async def _keys(self, request: Request) -> Response:
        """The gateway's key configuration, as the relay gets it: for clients to compare."""
        self._guards.count(request, None)
        return _response(200, KEYS_TYPE, await self._line.configs())

    async def _health(self, request: Request) -> Response:
        return json_response({"alive": True})

    async def _ready(self, request: Request) -> Response:
        await self._line.configs()
        return json_response({"gateway": True})

    async def _metrics(self, request: Request) -> Response:
        text = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")
        return Response.of(200, [text, NO_STORE], self.metrics.page())


def _single(answer: bytes) -> Response:
    if answer:
        return _response(200, RESPONSE_TYPE, answer)
    return _response(PROBLEM_STATUS, PROBLEM_TYPE, PROBLEM)


def _response(status: int, kind: str, body: bytes) -> Response:
    return Response.of(status, [(b"content-type", kind.encode("ascii")), NO_STORE], body)
