"""Serves an aggregator, one of the two parties of a secure sum.

    POST /v1/sums/{round}                     trainer: opens a sum
    GET  /v1/sums                             trainer: its sums that are here
    GET  /v1/sums/{round}                     trainer: how far it is, and whose shares are here
    POST /v1/sums/{round}/shares              device: its share
    POST /v1/sums/{round}/stop                trainer: no more shares
    POST /v1/sums/{round}/close               trainer: whose count; the aggregators add up
    GET  /v1/sums/{round}/share               trainer: the aggregator's share of the sum
    POST /v1/sums/{round}/forget              trainer: removes it
    GET  /v1/sums/{round}/list                other aggregator: whom this one has
    GET  /v1/sums/{round}/agreed              other aggregator: whom this one will add
    GET  /v1/sums/{round}/publics/{device}    other aggregator: what a device sent for both

Each kind of caller has a keyring of its own: a token of one is worth nothing in the place of
another. No error, log line or metric holds a name, or anything of a share.

Once a sum is closed, the aggregators exchange lists, agree, and each adds up its shares. What the
other one says is believed as far as the protocol goes: it is compared. One thread for each sum that
is closing; one of them adds up at a time, so that memory holds one table. It waits for the other
aggregator as long as that is away. What cannot be mended is written down, and nothing of the sum is
given out.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from traceback import extract_tb

import msgspec
import numpy as np

from keyhole.aggregation.exchange import add_all, settle
from keyhole.aggregation.shares import list_message_bytes
from keyhole.aggregation.sum_server import SumServer
from keyhole.errors import (
    CohortError,
    InputError,
    KeyholeError,
    MalformedError,
    MismatchError,
    NotFoundError,
    ProtocolError,
    RequestError,
    ServiceError,
    TooLateError,
)
from keyhole.service.access import Access, Guards, Keyring, TokenClaims, not_admitted
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
    json_response,
    pieces,
)
from keyhole.service.sums import AggregatorSettings, HeldSum, SumFiles, Sums
from keyhole.wire.http import HttpClient
from keyhole.wire.messages import Closing, Failure, peer_name, read_message

_TOKEN_SECONDS = 120.0
_FIRST_WAIT, _LONGEST_WAIT = 0.02, 2.0  # seconds between two questions to the other aggregator
_LOG = logging.getLogger("keyhole.service")


@dataclass(frozen=True)
class Keyrings:
    """Who is let in, by the key that signed the token."""

    # of devices that send shares. An aggregator with a keyring of its own, from which its operator
    # gave each device a token, need not believe anybody about who is a device; one that has the
    # slice service's takes its word for it
    devices: Keyring
    trainers: Keyring  # of those who open sums and fetch shares
    peer: Keyring  # that both aggregators have, and nobody else

    def __post_init__(self) -> None:
        keys = [*self.devices.keys, *self.trainers.keys, *self.peer.keys]
        if len(set(keys)) != len(keys):
            raise InputError(
                "one key for different callers of an aggregator: got a key twice; expected "
                "different keys for devices, trainers and the other aggregator; make each with "
                "`keyhole token new-key`"
            )


class PeerLine:
    """Asks the other aggregator, by a token that both have the key of, made anew for each request.

    `client` should try once, since anyone who asks comes back; `clock` is in unix seconds.
    """

    def __init__(
        self,
        client: HttpClient,
        keyring: Keyring,
        party: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._client, self._keyring, self._clock = client, keyring, clock
        self._name = peer_name(party)

    def close(self) -> None:
        """Closes connections."""
        self._client.close()

    def get(self, round_id: str, what: str, limit: int) -> bytes:
        """Its `list` once it has closed a sum, whom it `agreed` to add, or the public message of a
        device, `publics/NAME`.

        Raises:
            ServiceError: no usable answer now; asking again may help.
            MismatchError: it has given the sum up, or never had it.
        """
        now = self._clock()
        token = self._keyring.issue("device", self._name, now=now, seconds=_TOKEN_SECONDS)
        path = f"/v1/sums/{round_id}/{what}"
        try:
            got = self._client.exchange("GET", path, headers={}, token=token, limit=limit)
        except (NotFoundError, TooLateError) as error:
            raise MismatchError(
                "the other aggregator has given the sum up, or never had it: got a sum that is "
                "here alone; expected sums that both have; look at its status, and go on with the "
                "next round"
            ) from error
        except RequestError as error:
            raise _away(f"a refusal, {type(error).__name__}") from error
        if got.problem:
            raise _away(got.problem)
        return bytes(got.body)


def _away(got: str) -> ServiceError:
    return ServiceError(
        f"the other aggregator gives no usable answer: got {got}; expected answers as docs/wire.md "
        "describes them; check that it runs, and --peer, --peer-key and --peer-ca; the sum goes on "
        "by itself"
    )


class Finisher:
    """Brings closed sums to their end."""

    def __init__(self, sums: Sums, peer: PeerLine) -> None:
        self._sums, self._files, self._peer = sums, sums.files, peer
        self._stop, self._lock, self._adding = threading.Event(), threading.Lock(), threading.Lock()
        self._threads: dict[str, threading.Thread] = {}
        self._waiting: dict[str, str] = {}

    def resume(self) -> None:
        """Goes on with the sums that were closing when the process ended."""
        for round_id in self._files.rounds():
            if self._sums.phase(round_id) == "closing":
                self.start(round_id)

    def start(self, round_id: str) -> None:
        """Begins with a sum, unless it is under way or over."""
        with self._lock:
            running = self._threads.get(round_id)
            if (running and running.is_alive()) or self._sums.phase(round_id) != "closing":
                return
            # A daemon: anyone who ends the process need not wait, since all is in files.
            thread = threading.Thread(
                target=self._run, args=(round_id,), name="keyhole sum", daemon=True
            )
            self._threads = {r: t for r, t in self._threads.items() if t.is_alive()}
            self._threads[round_id] = thread
            thread.start()

    def waiting(self, round_id: str) -> str:
        """What a sum waits for, in words without a name."""
        return self._waiting.get(round_id, "")

    def close(self) -> None:
        """Ends what is under way; it goes on when there is a `Finisher` again."""
        self._stop.set()
        for thread in list(self._threads.values()):
            thread.join()
        self._peer.close()

    def _run(self, round_id: str) -> None:
        wait = _FIRST_WAIT
        while not self._stop.is_set():
            try:
                self._finish(self._sums.held(round_id))
            except (ProtocolError, CohortError) as error:
                self._give_up(round_id, error)
            except NotFoundError:  # of an upload, or of the sum: then the trainer has forgotten it
                lost = MismatchError(
                    "what devices sent is not here any more: got a list without its messages; "
                    "expected all messages of the list; check the disk of this aggregator, and go "
                    "on with the next round"
                )
                self._give_up(round_id, lost)
            except Exception as error:  # noqa: BLE001 - a disk that is full, or our own mistake
                self._note(round_id, error)
                wait = min(_LONGEST_WAIT, 2 * wait)
                self._stop.wait(wait)
                continue
            self._waiting.pop(round_id, None)
            return

    def _finish(self, held: HeldSum) -> None:
        """One sum, from its closed list to a share on the disk."""
        server, round_id = self._opened(held), held.round
        limit = list_message_bytes(len(held.opening.cohort))
        length = server.facts.public_message_bytes
        sides = settle(server, self._sums.names(round_id, "taken"))
        answer: bytes | None = None  # to what this one told
        with suppress(StopIteration):
            while True:
                kind, told = next(sides) if answer is None else sides.send(answer)
                self._keep(round_id, kind, told)
                answer = self._ask(round_id, kind, limit)
        with self._adding:
            share = add_all(
                server,
                body_of=partial(self._files.spool.read, round_id),
                public_of=lambda name: self._ask(round_id, f"publics/{name}", length),
            )
            self._files.write(round_id, "added", [msgspec.json.encode(server.clients)])
            self._files.write(round_id, "share", share)
        if server.party == 1:  # the first has to keep what devices sent for both
            self._files.spool.remove(round_id)

    def _opened(self, held: HeldSum) -> SumServer:
        """The server of a sum, which has accepted what is in its files."""
        settings = self._sums.settings
        server = settings.aggregation.open(held.opening.terms, settings.party, held.opening.cohort)
        for name in self._files.spool.close(held.round):
            body = self._files.spool.read(held.round, name)
            # Checked when it came: what is refused now repeats another device's message.
            with suppress(ProtocolError):
                server.accept(name, server.facts.split_body(settings.party, body)[0])
        return server

    def _keep(self, round_id: str, name: str, content: bytes) -> None:
        """Writes what the other aggregator will ask for; what it may have been told stays."""
        if not self._files.has(round_id, name):
            self._files.write(round_id, name, [content])
        elif self._files.read(round_id, name) != content:
            raise MismatchError(
                "shares of devices are not those of which the other aggregator was told: got "
                "another list; expected the list that was told; check the disk of this aggregator, "
                "and run the round again"
            )

    def _ask(self, round_id: str, what: str, limit: int) -> bytes:
        """Asks the other aggregator until it answers; raises NotFoundError once nobody cares."""
        wait = _FIRST_WAIT
        while True:
            try:
                found = self._peer.get(round_id, what, limit)
            except ServiceError as error:
                self._waiting[round_id] = f"{error.wrong}: {error.got}"
            else:
                self._waiting.pop(round_id, None)
                return found
            if self._stop.wait(wait) or not self._files.has(round_id, "opening"):
                raise NotFoundError(
                    "no such sum: got one that was forgotten; expected one; open it"
                )
            wait = min(_LONGEST_WAIT, 1.5 * wait)

    def _give_up(self, round_id: str, error: KeyholeError) -> None:
        """Nothing is given out: what devices sent is of no use any more."""
        if self._stop.is_set():
            return
        with suppress(NotFoundError):
            self._sums.held(round_id)
            content = msgspec.json.encode(Failure.of(error))
            self._files.write(round_id, "failed", [content])
            self._files.spool.remove(round_id)

    def _note(self, round_id: str, error: Exception) -> None:
        """Where it happened is logged, what it says is not."""
        frame = extract_tb(error.__traceback__)[-1]
        place = f"{Path(frame.filename).name}:{frame.lineno}"
        self._waiting[round_id] = f"{type(error).__name__} at this aggregator"
        _LOG.error("a sum cannot go on: %s at %s", type(error).__name__, place)


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
        self._finisher = Finisher(self.sums, peer)
        self._guards = Guards(Access(), self.limits, self.metrics, clock)
        self._devices, self._peers = Access(keyrings.devices), Access(keyrings.peer)
        self._trainers, self._peer = Access(keyrings.trainers), peer_name(1 - settings.party)
        routes = [
            *self.routes(),
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

    def routes(self) -> list[Route]:
        """Those of sums."""
        one = "/v1/sums/{round}"
        return [
            Route("sums", ("GET",), "/v1/sums", self._list_sums),
            Route("sum status", ("GET",), one, self._tell_status),
            Route("sum open", ("POST",), one, self._open_sum),
            Route("sum shares", ("POST",), f"{one}/shares", self._take_share),
            Route("sum stop", ("POST",), f"{one}/stop", self._stop_sum),
            Route("sum close", ("POST",), f"{one}/close", self._close_sum),
            Route("sum share", ("GET",), f"{one}/share", self._give_share),
            Route("sum forget", ("POST",), f"{one}/forget", self._forget_sum),
            Route("sum list", ("GET",), f"{one}/list", self._give_list),
            Route("sum agreed", ("GET",), f"{one}/agreed", self._give_agreed),
            Route("sum publics", ("GET",), f"{one}/publics/{{device}}", self._give_public),
        ]

    async def _list_sums(self, request: Request) -> Response:
        owner = self._trainer(request)
        found = await asyncio.to_thread(self.sums.rounds, owner)
        return json_response({"rounds": found})

    async def _open_sum(self, request: Request) -> Response:
        owner, (round_id,) = self._trainer(request), request.params
        async with self._body(request, self._guards.limits.max_body) as body:
            outcome = await asyncio.to_thread(self.sums.open, owner, round_id, body)
        return json_response({"sum": outcome}, 201 if outcome == "opened" else 200)

    async def _tell_status(self, request: Request) -> Response:
        return await self._status(self._trainer(request), request.params[0])

    async def _take_share(self, request: Request) -> Response:
        (round_id,), guards = request.params, self._guards
        claims = self._device(request, round_id)
        guards.count(request, claims)
        guards.check_type(request)
        device = claims.device
        length = await asyncio.to_thread(self.sums.upload_bytes, round_id, device)
        async with self._body(request, length) as body:
            if len(body) != length:
                raise MalformedError(
                    f"a share of another length: got {len(body)} bytes; expected {length} bytes; "
                    "share the update under the params of this round"
                )
            outcome = await asyncio.to_thread(self.sums.upload, round_id, device, body)
        guards.metrics.add("stored" if outcome == "stored" else "repeated")
        return json_response({"share": outcome}, 201 if outcome == "stored" else 200)

    async def _stop_sum(self, request: Request) -> Response:
        owner, (round_id,) = self._trainer(request), request.params
        await asyncio.to_thread(self.sums.stop, owner, round_id)
        return await self._status(owner, round_id)

    async def _close_sum(self, request: Request) -> Response:
        """Begins to add up; the status says when that is done."""
        owner, (round_id,) = self._trainer(request), request.params
        async with self._body(request, self._guards.limits.max_body) as body:
            taken = read_message(body, Closing).taken
        await asyncio.to_thread(self.sums.close, owner, round_id, taken)
        await asyncio.to_thread(self._finisher.start, round_id)
        return await self._status(owner, round_id)

    async def _give_share(self, request: Request) -> Response:
        """The share, whole or the rest of it; the same bytes however often it is asked for."""
        owner, (round_id,) = self._trainer(request), request.params
        path = await asyncio.to_thread(self.sums.share, owner, round_id)
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

    async def _give_agreed(self, request: Request) -> Response:
        self._check_peer(request)
        return _binary(await asyncio.to_thread(self.sums.for_peer, request.params[0], "agreed"))

    async def _give_public(self, request: Request) -> Response:
        self._check_peer(request)
        return _binary(await asyncio.to_thread(self.sums.public_of, *request.params))

    async def _status(self, owner: str, round_id: str) -> Response:
        waiting = self._finisher.waiting(round_id)
        found = await asyncio.to_thread(self.sums.status, owner, round_id, waiting)
        return Response.of(200, [JSON, NO_STORE], msgspec.json.encode(found))

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

    @asynccontextmanager
    async def _body(self, request: Request, limit: int) -> AsyncIterator[bytes]:
        """The body of a request, which counts as held until it is dealt with."""
        guards, announced = self._guards, request.announced(limit)
        weight = limit if announced is None else announced
        await guards.uploads.enter(weight)
        try:
            yield bytes(await request.body(limit, guards.limits))
        finally:
            guards.uploads.leave(weight)


def _binary(body: bytes) -> Response:
    return Response.of(200, [BINARY, NO_STORE], body)
