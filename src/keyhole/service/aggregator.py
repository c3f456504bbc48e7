"""Serves an aggregator, one of the two parties of a secure sum.

    POST /v1/sums/{round}                     trainer: opens a sum
    GET  /v1/sums                             trainer: its sums that are here
    GET  /v1/sums/{round}                     trainer: how far it is, and whose shares are here
    GET  /v1/sums/{round}/shares              device: whether its share would be taken
    POST /v1/sums/{round}/shares              device: its share
    POST /v1/sums/{round}/close               trainer: no more shares; the aggregators add up
    GET  /v1/sums/{round}/share               trainer: the aggregator's share of the sum
    GET  /v1/sums/{round}/receipt             trainer, other aggregator: what this one adds
    POST /v1/sums/{round}/forget              trainer: removes it
    GET  /v1/sums/{round}/list                other aggregator: whom this one has
    GET  /v1/sums/{round}/counts              other aggregator: share of how many sent each key
    GET  /v1/sums/{round}/publics/{device}    other aggregator: what a device sent for both

Each kind of caller has a keyring of its own: a token of one is worth nothing in the place of
another. No error, log line or metric holds a name, or anything of a share. Everybody whose share is
at both aggregators is added: the trainer says when to close a sum, and not whom to add.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import msgspec
import numpy as np

from keyhole.errors import (
    AccessError,
    InputError,
    KeyholeError,
    MalformedError,
)
from keyhole.logs import Fact, tell
from keyhole.service.access import Access, DenyList, Keyring, TokenClaims, not_admitted
from keyhole.service.finishing import Finisher, PeerLine
from keyhole.service.guards import Guards
from keyhole.service.limits import Limits
from keyhole.service.metrics import Metrics
from keyhole.service.routes import (
    BINARY,
    JSON,
    NO_STORE,
    Edge,
    Receive,
    Request,
    Response,
    Route,
    Routes,
    Scope,
    Send,
    file_response,
    health_routes,
    json_response,
    pieces,
)
from keyhole.service.status import RoundStatus
from keyhole.service.sum_files import SumFiles
from keyhole.service.sums import AggregatorSettings, Sums
from keyhole.service.telling import round_gauges
from keyhole.wire.manifest import number_of
from keyhole.wire.messages import SharePlace, peer_name


@dataclass(frozen=True)
class Keyrings:
    """Who is let in, by the key that signed the token."""

    # of devices that send shares. An aggregator with a keyring of its own, from which its operator
    # gave each device a token, need not believe anybody about who is a device; one that has the
    # slice service's takes its word for it
    devices: Keyring
    trainers: Keyring  # of those who open sums and fetch shares
    peer: Keyring  # that both aggregators have, and nobody else
    denied: DenyList | None = None  # tokens of any of them that were revoked

    def __post_init__(self) -> None:
        keys = [*self.devices.keys, *self.trainers.keys, *self.peer.keys]
        if len(set(keys)) != len(keys):
            raise InputError(
                "one key for different callers of an aggregator: got a key twice; expected "
                "different keys for devices, trainers and the other aggregator; make each with "
                "`keyhole token new-key`"
            )


class AggregatorApp:
    """One of the two aggregators as an ASGI application.

    It works in one process: sums that were closing when it ended go on when it is made again.

    Hidden from it: every device's keys and numbers, if the other aggregator does not work with it
    and both follow the protocol. It sees who takes part, when, and who reached the other one. It
    must be run by other people than the other one: nothing here can make sure of that.

    Args:
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
        self._finisher = Finisher(self.sums, peer, clock)
        self._guards = Guards(Access(), self.limits, self.metrics, clock)
        rings = keyrings.devices, keyrings.trainers, keyrings.peer
        self._devices, self._trainers, self._peers = (
            Access(ring, audience="aggregator", denied=keyrings.denied) for ring in rings
        )
        self._peer = peer_name(1 - settings.party)
        routes = [
            *self.routes(),
            *health_routes(),
        ]
        rng = rng or random.SystemRandom()
        self._edge = Edge(Routes(routes, self.metrics), self.limits, self.metrics, rng)
        self._finisher.resume()
        self.metrics.show(lambda: round_gauges(self._statuses(clock())))

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Answers one request."""
        return self._edge(scope, receive, send)

    def _statuses(self, now: float) -> dict[str, RoundStatus]:
        status = self.status(now)
        return {} if status is None else {"": status}

    def status(self, now: float) -> RoundStatus | None:
        """Returns how the newest sum stands at `now`, in unix seconds; None where there is none."""
        files = self.sums.files
        newest = max(files.rounds(), key=lambda name: number_of(name) or 0, default=None)
        if newest is None:
            return None
        with suppress(KeyholeError, OSError):  # it may be forgotten at any moment
            held, devices = self.sums.held(newest), files.spool.devices(newest)
            facts, cohort = held.checker.facts, len(held.opening.cohort)
            return RoundStatus(
                newest,
                number_of(newest) or 0,
                "open" if self.sums.phase(newest) == "open" else "closed",
                cohort,
                facts.min_clients,
                len(devices),
                refused=0,
                bytes=len(devices) * facts.body_bytes(self.sums.settings.party),
                seconds_open=max(0.0, now - files.opened_at(newest)),
            )
        return None

    def close(self) -> None:
        """Ends what is under way; files keep it, and may be taken by another process."""
        self._finisher.close()
        self.sums.files.close()
        self.sums.ledger.close()

    def routes(self) -> list[Route]:
        """Those of sums."""
        one = "/v1/sums/{round}"
        return [
            Route("sums", ("GET",), "/v1/sums", self._list_sums),
            Route("sum status", ("GET",), one, self._tell_status),
            Route("sum open", ("POST",), one, self._open_sum),
            Route("sum place", ("GET",), f"{one}/shares", self._tell_place),
            Route("sum shares", ("POST",), f"{one}/shares", self._take_share),
            Route("sum close", ("POST",), f"{one}/close", self._close_sum),
            Route("sum share", ("GET",), f"{one}/share", self._give_share),
            Route("sum forget", ("POST",), f"{one}/forget", self._forget_sum),
            Route("sum list", ("GET",), f"{one}/list", self._give_list),
            Route("sum counts", ("GET",), f"{one}/counts", self._give_counts),
            Route("sum receipt", ("GET",), f"{one}/receipt", self._give_receipt),
            Route("sum publics", ("GET",), f"{one}/publics/{{device}}", self._give_public),
        ]

    async def _list_sums(self, request: Request) -> Response:
        owner = self._trainer(request)
        found = await asyncio.to_thread(self.sums.rounds, owner)
        return json_response({"rounds": found})

    async def _open_sum(self, request: Request) -> Response:
        owner, (round_id,) = self._trainer(request), request.params
        async with self._guards.body(request) as body:
            outcome = await asyncio.to_thread(self.sums.open, owner, round_id, body)
        if outcome == "opened":
            await asyncio.to_thread(self._tell, round_id, "round opened", "a sum is open")
        return json_response({"sum": outcome}, 201 if outcome == "opened" else 200)

    async def _tell_status(self, request: Request) -> Response:
        return await self._status(self._trainer(request), request.params[0])

    async def _tell_place(self, request: Request) -> Response:
        """Whether a device may send its share, before it does: it costs neither side anything."""
        (round_id,), guards = request.params, self._guards
        claims = self._device(request, round_id)
        guards.count(request, claims)
        await asyncio.to_thread(self.sums.upload_bytes, round_id, claims.device)
        return json_response(msgspec.structs.asdict(SharePlace(self.sums.settings.party)))

    async def _take_share(self, request: Request) -> Response:
        (round_id,), guards = request.params, self._guards
        claims = self._device(request, round_id)
        guards.count(request, claims)
        guards.check_type(request)
        device, token = claims.device, self._devices.whole(request.headers)
        length = await asyncio.to_thread(self.sums.upload_bytes, round_id, device)
        async with guards.update_turn(claims), guards.body(request, length) as body:
            if len(body) != length:
                raise MalformedError(
                    f"a share of another length: got {len(body)} bytes; expected {length} bytes; "
                    "share the update under the params of this round"
                )
            outcome = await asyncio.to_thread(self.sums.upload, round_id, device, token, body)
        guards.metrics.add("stored" if outcome == "stored" else "repeated")
        return json_response({"share": outcome}, 201 if outcome == "stored" else 200)

    async def _close_sum(self, request: Request) -> Response:
        """Begins to add up; the status says when that is done. There is nothing else to say: a
        body, of a trainer that would choose whom to add, is refused."""
        owner, (round_id,) = self._trainer(request), request.params
        async with self._guards.body(request, 0):
            was_open = await asyncio.to_thread(self.sums.phase, round_id) == "open"
            await asyncio.to_thread(self.sums.close, owner, round_id)
        if was_open:
            await asyncio.to_thread(self._tell, round_id, "round closed", "a sum is closed")
        await asyncio.to_thread(self._finisher.start, round_id)
        return await self._status(owner, round_id)

    async def _give_share(self, request: Request) -> Response:
        """The share, whole or the rest of it; the same bytes however often it is asked for."""
        owner, (round_id,) = self._trainer(request), request.params
        path = await asyncio.to_thread(self.sums.given_out, owner, round_id, "share")
        share, etag = np.memmap(path, mode="r").data, f"{round_id}.{self.sums.settings.party}"
        return file_response(
            request, [BINARY, NO_STORE], etag, share.nbytes, partial(pieces, share)
        )

    async def _forget_sum(self, request: Request) -> Response:
        owner, (round_id,) = self._trainer(request), request.params
        await asyncio.to_thread(self.sums.forget, owner, round_id)
        return json_response({"sum": "forgotten"})

    async def _give_list(self, request: Request) -> Response:
        self._check_peer(request)
        return _binary(await asyncio.to_thread(self.sums.for_peer, request.params[0], "list"))

    async def _give_counts(self, request: Request) -> Response:
        self._check_peer(request)
        return _binary(await asyncio.to_thread(self.sums.for_peer, request.params[0], "counts"))

    async def _give_receipt(self, request: Request) -> Response:
        """To the other aggregator before anything is added, to the trainer when all is."""
        (round_id,) = request.params
        try:
            self._check_peer(request)
        except AccessError:
            owner = self._trainer(request)
            path = await asyncio.to_thread(self.sums.given_out, owner, round_id, "receipt")
            return _binary(await asyncio.to_thread(path.read_bytes))
        return _binary(await asyncio.to_thread(self.sums.for_peer, round_id, "receipt"))

    async def _give_public(self, request: Request) -> Response:
        self._check_peer(request)
        return _binary(await asyncio.to_thread(self.sums.public_of, *request.params))

    async def _status(self, owner: str, round_id: str) -> Response:
        waiting = self._finisher.waiting(round_id)
        found = await asyncio.to_thread(self.sums.status, owner, round_id, waiting)
        return Response.of(200, [JSON, NO_STORE], msgspec.json.encode(found))

    def _tell(self, round_id: str, event: str, text: str) -> None:
        """Writes a line on a sum: counts, and nobody's name."""
        held, here = self.sums.held(round_id), len(self.sums.files.spool.devices(round_id))
        cohort, goal = len(held.opening.cohort), held.checker.facts.min_clients
        told = f"round {number_of(round_id)}: {text}; {here} shares of {cohort} devices are here"
        facts: dict[str, Fact] = {"round": number_of(round_id), "round_id": round_id}
        facts |= {"cohort": cohort, "goal": goal, "updates": here}
        tell("aggregator", event, told, party=self.sums.settings.party, **facts)

    def _trainer(self, request: Request) -> str:
        """The name of the trainer that asks."""
        claims = self._trainers.device(request.headers, self._guards.clock())
        self._guards.count(request, claims)
        return claims.device

    def _device(self, request: Request, round_id: str) -> TokenClaims:
        """The claims of a device: of a token for this round, or of one for all."""
        claims = self._devices.identify(request.headers, self._guards.clock())
        if claims.kind == "round" and claims.round != round_id:
            raise not_admitted("a token of another round", "a token of this round")
        return claims

    def _check_peer(self, request: Request) -> None:
        claims = self._peers.device(request.headers, self._guards.clock())
        if claims.device != self._peer:
            raise not_admitted("a token of another party", "a token of the other aggregator")


def _binary(body: bytes) -> Response:
    return Response.of(200, [BINARY, NO_STORE], body)
