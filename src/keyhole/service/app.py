"""Answers as an ASGI application: a thin edge around rounds, tokens, limits and updates.

Every route answers errors in one shape. No error, log line or metric holds a key, an update or the
name of a device.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from keyhole.errors import BusyError, NotFiniteError, NotFoundError, TooLateError
from keyhole.primitives.layout import Layout
from keyhole.server.row_sums import usable
from keyhole.service.access import Access, not_admitted
from keyhole.service.edge import Edge, Scope, Send
from keyhole.service.guards import Guards
from keyhole.service.limits import Limits
from keyhole.service.metrics import Metrics
from keyhole.service.responses import NO_STORE, json_response
from keyhole.service.routes import Receive, Request, Response, Route, Routes
from keyhole.service.slice_routes import SliceRoutes, parse_round
from keyhole.service.spool import UpdateSpool
from keyhole.wire import messages
from keyhole.wire.assignment import Admission, Admit
from keyhole.wire.manifest import Manifest
from keyhole.wire.tables import RoundSource

_MAX_LAYOUTS = 4  # remembered; two rounds are kept, and their layouts are mostly equal


@dataclass(frozen=True)
class UpdateRoutes:
    """Takes devices and their updates in.

    Args:
        rounds: of the service.
        guards: what stands before them.
        spool: where updates go; None for a service that takes none.
        admit: decides who takes part; None for a service without devices of its own.
    """

    rounds: RoundSource
    guards: Guards
    spool: UpdateSpool | None
    admit: Admit | None
    _layouts: OrderedDict[str, Layout | None] = field(default_factory=OrderedDict)

    def routes(self) -> list[Route]:
        """All of them."""
        return [
            Route("checkin", ("POST",), "/v1/checkin", self.checkin),
            Route("updates", ("POST",), "/v1/rounds/{round}/updates", self.update),
        ]

    async def checkin(self, request: Request) -> Response:
        """Tells a device which round it takes part in, or when to come back."""
        access, now = self.guards.access, self.guards.clock()
        if self.admit is None or access.keyring is None:
            raise self._takes_none()
        claims = access.device(request.headers, now)
        self.guards.count(request, claims)
        current = self.rounds.current()
        has_sent = (
            current is not None
            and self.spool is not None
            and self.spool.has(current.round, claims.device)
        )
        told = self.admit(claims.device, current, has_sent)
        if not isinstance(told, Admission):
            return json_response({"wait": told.seconds})
        token = access.keyring.issue(
            "round",
            claims.device,
            now=now,
            seconds=access.round_seconds,
            round_id=told.round,
            max_keys=claims.max_keys,
        )
        shown = {"round": told.round, "number": told.number, "fetch_after": told.fetch_after}
        return json_response({**shown, "token": token})

    async def update(self, request: Request) -> Response:
        """Takes the update of one device in one round."""
        guards, limits = self.guards, self.guards.limits
        round_id = parse_round(request.params[0])
        if self.spool is None:
            raise self._takes_none()
        claims = guards.access.member(request.headers, round_id, guards.clock())
        guards.count(request, claims)
        guards.check_type(request)
        of_layout = self._check_open(self.spool, round_id, claims.device)
        announced = request.announced(limits.max_body)
        weight = limits.max_body if announced is None else announced
        await guards.uploads.enter(weight)
        try:
            body = bytes(await request.body(limits.max_body, limits))
            with self.rounds.hold(of_layout) as held:
                layout = self._layout(of_layout, held.manifest)
                outcome = await asyncio.to_thread(
                    self._keep, self.spool, layout, round_id, claims.device, body
                )
        finally:
            guards.uploads.leave(weight)
        guards.metrics.add("stored" if outcome == "stored" else "repeated")
        return json_response({"update": outcome}, 201 if outcome == "stored" else 200)

    def _check_open(self, spool: UpdateSpool, round_id: str, device: str) -> str:
        """Demands the current round, open, and a device of its cohort; or a trailing round, which
        the device has a token of. Returns a round that has the layout of this one and is served.

        A device that has sent its update may send it again: the answer may have been lost.
        """
        current = self.rounds.current()
        if current is not None and round_id in current.trailing:
            return current.round  # the slices of this one may have gone
        if current is None or current.round != round_id or current.phase != "open":
            if spool.has(round_id, device):
                return round_id
            raise TooLateError(
                "the round takes no more updates",
                got="a round that is neither current and open, nor trailing",
                allowed="the current round while it is open, and those that trail it",
                fix="check in for the next one",
            )
        if current.cohort is not None and device not in current.cohort:
            raise not_admitted("a device outside the cohort", "a device of this round's cohort")
        return round_id

    def _keep(
        self, spool: UpdateSpool, layout: Layout, round_id: str, device: str, body: bytes
    ) -> Literal["stored", "known"]:
        """Checks an update and stores it; takes a disk's time, so it runs in a thread."""
        update, _ = messages.decode_update(body, layout, self.guards.limits.max_keys)
        if usable(update) is None:
            raise NotFiniteError(
                "the update cannot be added up",
                got="NaN, infinity or numbers near them",
                allowed="finite numbers below 2^108",
                fix="clip updates, or lower the learning rate",
            )
        return spool.store(round_id, device, body)

    def _layout(self, round_id: str, manifest: Manifest) -> Layout:
        if round_id not in self._layouts:
            self._layouts[round_id] = manifest.layout
            while len(self._layouts) > _MAX_LAYOUTS:
                self._layouts.popitem(last=False)
        layout = self._layouts[round_id]
        if layout is None:
            raise self._takes_none()
        return layout

    def _takes_none(self) -> NotFoundError:
        other = "send it to the service that coordinates the round"
        has_keys = self.guards.access.keyring is not None
        return NotFoundError(
            "this service takes no updates",
            got="an update or check-in",
            allowed="reads",
            fix=other if has_keys else f"{other}; if this is to be it, serve with --token-key",
        )


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
