"""Moves Oblivious HTTP at the server side: the gateway's routes, and the relay before it.

The gateway is a slice service that answers sealed requests for single slices. It learns which
slices are asked for, as from every plain request; it learns neither who asks nor which requests
belong together, as long as the relay does not work together with it and mixes the requests of
enough devices. A request carries no token: where reading takes one, the relay shows its own. Not
covered: the times at which devices check in and batches arrive, and keys that only one device can
want. Requests that meet are looked up together: one gather for each table that is asked.

The relay sees who asks, when and how many requests, and cannot read them. It passes on what is in a
body and nothing of its head, over one connection that tells nothing of who asks; it logs neither
addresses nor sizes. Anyone who can reach it is let in. `mixing.py` says what order and time tell.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import numpy as np

from keyhole.crypto.once import MAX_REMEMBERED, ReplayWindow
from keyhole.delivery.relay.binary_http import BinaryRequest, BinaryResponse
from keyhole.delivery.relay.client import CHECK_FIELD, parse_slice_path, slice_reply_bytes
from keyhole.delivery.relay.gateway import (
    ANSWERS_TYPE,
    PROBLEM,
    PROBLEM_STATUS,
    PROBLEM_TYPE,
    REQUESTS_TYPE,
    Asked,
    Gateway,
    Reply,
    decode_answers,
    decode_requests,
    encode_answers,
    encode_requests,
    refusal,
)
from keyhole.delivery.relay.ohttp import (
    KEYS_TYPE,
    REQUEST_OVERHEAD,
    REQUEST_TYPE,
    RESPONSE_TYPE,
    GatewayKey,
    decode_configs,
    encode_configs,
)
from keyhole.errors import (
    BusyError,
    KeyholeError,
    MalformedError,
    MediaTypeError,
    NotFoundError,
    RequestError,
    ServiceError,
    TooLargeError,
)
from keyhole.service.access import Access, Guards
from keyhole.service.app import parse_round
from keyhole.service.limits import Limits
from keyhole.service.metrics import Metrics
from keyhole.service.mixing import Mix, Mixer
from keyhole.service.routes import (
    NO_STORE,
    Edge,
    Receive,
    Request,
    Response,
    Route,
    Routes,
    Scope,
    Send,
    json_response,
)
from keyhole.wire import messages
from keyhole.wire.assignment import Fetched, OpenRound, RoundSource, SliceTable
from keyhole.wire.http import HttpClient, Received
from keyhole.wire.private import GATEWAY_PATH, KEYS_PATH, RELAY_KEYS_PATH, RELAY_PATH

_RESTED = 5.0  # seconds after which a connection is made anew: the gateway may have closed it
_KNOWN_FOR = 5.0  # seconds for which a key configuration is passed on without asking again

_T = TypeVar("_T")


class GatewayLink:
    """Carries batches to the gateway.

    A batch is sent once: whether a request was processed cannot be told from a connection that
    breaks (RFC 9458, section 6.5). What goes with it are the content type, the length and, where
    reading takes a token, the relay's own.

    Args:
        token: of the relay; None where reading is free for all.
        max_answer: bytes of the answers to one batch.
    """

    def __init__(self, client: HttpClient, token: str | None, max_answer: int) -> None:
        self._client, self._token, self._limit = client, token, max_answer
        # One thread, one connection: what the gateway sees is one stream of batches.
        self._pool = ThreadPoolExecutor(1, "keyhole relay")
        self._used = self._asked = -1e9
        self._configs = b""

    def close(self) -> None:
        """Closes the connection, once what is under way is over."""
        self._pool.shutdown()
        self._client.close()

    async def forward(self, sealed: list[bytes]) -> list[bytes]:
        """Returns the answer to each request, empty where the gateway could not open it."""
        body = encode_requests(sealed)
        got = await self._in_thread(partial(self._post, body))
        try:
            return decode_answers(bytes(got.body), len(sealed))
        except MalformedError as error:
            raise _no_answer("an answer that makes no sense") from error

    async def configs(self) -> bytes:
        """The gateway's key configuration, as it gives it."""
        return await self._in_thread(self._get_configs)

    def _post(self, body: bytes) -> Received:
        headers = {"content-type": REQUESTS_TYPE}
        return self._exchange(
            partial(self._client.exchange, "POST", GATEWAY_PATH, body, headers=headers)
        )

    def _get_configs(self) -> bytes:
        if time.monotonic() - self._asked > _KNOWN_FOR:
            got = self._exchange(partial(self._client.exchange, "GET", KEYS_PATH, headers={}))
            try:
                decode_configs(bytes(got.body))
            except MalformedError as error:
                raise _no_answer("no key configuration") from error
            self._configs, self._asked = bytes(got.body), time.monotonic()
        return self._configs

    def _exchange(self, ask: Callable[..., Received]) -> Received:
        """One exchange, whose failures are the gateway's and not the client's."""
        if time.monotonic() - self._used > _RESTED:
            self._client.close()
        try:
            got = ask(token=self._token, limit=self._limit, may_repeat=False)
        except RequestError as error:
            raise _no_answer(f"a refusal, {type(error).__name__}") from error
        finally:
            self._used = time.monotonic()
        if got.status in (429, 503):
            raise BusyError(
                f"the gateway has too much under way: got status {got.status}; expected fewer "
                "requests; come back when the answer says"
            )
        if got.problem:
            raise _no_answer(got.problem)
        return got

    async def _in_thread(self, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)


def _no_answer(got: str) -> KeyholeError:
    return ServiceError(
        f"the gateway gives no usable answer: got {got}; expected answers as docs/wire.md "
        "describes them; try again later; the operator of the relay may check --gateway"
    )


class RelayApp:
    """The relay as an ASGI application, for `serving` and `run` of the transport.

    Clients are mixed within one process: there is one worker.
    `rng` spreads the time after which clients come back; it keeps no secret.
    """

    def __init__(
        self,
        line: GatewayLink,
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
        async with _body(request, guards) as body:
            sealed = decode_requests(body, limits.max_keys) if is_batch else [body]
            # What cannot be a sealed request goes no further.
            is_possible = len(sealed[0]) >= REQUEST_OVERHEAD
            answers = await self._mixer.ask(sealed) if is_possible else [b""] * len(sealed)
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


@dataclass
class _Group:
    """What is asked of one table: places in the batch, and their keys."""

    table: SliceTable
    places: list[int] = field(default_factory=list)
    keys: list[int] = field(default_factory=list)

    @property
    def reply_bytes(self) -> int:
        return slice_reply_bytes(self.table.info.record_bytes)


class SliceGroups:
    """The slices that a batch asks for; `stack` holds their rounds until it is closed."""

    def __init__(self, rounds: RoundSource, guards: Guards, stack: ExitStack) -> None:
        self._rounds, self._guards, self._stack = rounds, guards, stack
        self._kept: dict[str, OpenRound | KeyholeError] = {}
        self._groups: dict[tuple[str, int], _Group] = {}
        self._refused: dict[int, Reply] = {}

    def add(self, place: int, request: BinaryRequest) -> None:
        """Takes in what is asked at one place of the batch; what is wrong is answered there."""
        try:
            round_id, table, key = parse_slice_path(request)
            group = self._group(round_id, table)
        except KeyholeError as error:
            self._refused[place] = refusal(error)
            return
        if key < group.table.info.num_keys:
            group.places.append(place)
            group.keys.append(key)
        else:
            self._refused[place] = refusal(_missing("slice"), group.reply_bytes)

    @property
    def count(self) -> int:
        """How many slices are asked for."""
        return sum(len(group.keys) for group in self._groups.values())

    @property
    def ideal(self) -> int:
        """Bytes of these slices."""
        return sum(len(g.keys) * g.table.info.record_bytes for g in self._groups.values())

    @property
    def weight(self) -> int:
        """Bytes of their answers."""
        total = sum(len(group.keys) * group.reply_bytes for group in self._groups.values())
        limit = self._guards.limits.max_answer
        if total > limit:
            raise TooLargeError(
                f"the slices asked for are too large for one batch: got {total} bytes; expected "
                f"{limit} bytes; forward fewer requests at a time: `keyhole relay --batch`"
            )
        return total

    async def replies(self) -> dict[int, Reply]:
        """The reply at each place."""
        found = dict(self._refused)
        for group in self._groups.values():
            if group.keys:
                found |= await self._replies(group)
        return found

    async def _replies(self, group: _Group) -> dict[int, Reply]:
        try:
            fetched = await self._gather(group)
        except KeyholeError as error:
            return dict.fromkeys(group.places, refusal(error, group.reply_bytes))
        return {
            place: Reply(_slice(fetched, at), group.reply_bytes)
            for at, place in enumerate(group.places)
        }

    async def _gather(self, group: _Group) -> Fetched:
        gate = self._guards.gathers
        await gate.enter()
        try:
            return await group.table.fetch(np.array(group.keys, np.int64))
        finally:
            gate.leave()

    def _group(self, round_id: str, table: int) -> _Group:
        """The group of a table; raises what keeps it from being read."""
        found = self._groups.get((round_id, table))
        if found is None:
            held = self._hold(parse_round(round_id))
            if table >= len(held.tables):
                raise _missing("table")
            found = self._groups[round_id, table] = _Group(held.tables[table])
        return found

    def _hold(self, round_id: str) -> OpenRound:
        if round_id not in self._kept:
            try:
                held = self._stack.enter_context(self._rounds.hold(round_id))
            except KeyholeError as error:
                self._kept[round_id] = error
            else:
                self._kept[round_id] = held
        found = self._kept[round_id]
        if isinstance(found, KeyholeError):
            raise found
        return found


def _slice(fetched: Fetched, at: int) -> BinaryResponse:
    """One slice with what vouches for it."""
    check = messages.check_of([fetched.sums[at : at + 1]]).encode("ascii")
    return BinaryResponse(200, ((CHECK_FIELD, check),), fetched.records[at].tobytes())


def _missing(what: str) -> NotFoundError:
    return NotFoundError(
        f"no such {what}: got another place; expected one of this round; take it from the manifest"
    )


def gateway_routes(
    rounds: RoundSource, keys: Sequence[GatewayKey], max_remembered: int = MAX_REMEMBERED
) -> Callable[[Guards], Sequence[Route]]:
    """What makes an `App` a gateway, as one of its `extra_routes`; the first of `keys` is used.

    Each worker process remembers the requests that it has answered for itself, `max_remembered` of
    some 110 bytes each. One that it has forgotten can be replayed until its round is removed:
    slices are only read.
    """

    def make(guards: Guards) -> Sequence[Route]:
        return _GatewayRoutes(rounds, guards, keys, ReplayWindow(max_remembered)).routes()

    return make


class _GatewayRoutes:
    """Opens, answers and seals."""

    def __init__(
        self, rounds: RoundSource, guards: Guards, keys: Sequence[GatewayKey], window: ReplayWindow
    ) -> None:
        self._rounds, self._guards = rounds, guards
        self._gateway = Gateway(keys, window=window)
        self._configs = encode_configs(self._gateway.configs)
        # One thread: opening takes a tenth of a millisecond each, and must not hold up the loop.
        self._pool = ThreadPoolExecutor(1, "keyhole gateway")

    def routes(self) -> list[Route]:
        """All of them."""
        return [
            Route("gateway keys", ("GET",), KEYS_PATH, self.keys),
            Route("gateway", ("POST",), GATEWAY_PATH, self.answer),
        ]

    async def keys(self, request: Request) -> Response:
        """The key configuration: the same for everybody, without a token."""
        self._guards.count(request, None)
        headers = [(b"content-type", KEYS_TYPE.encode("ascii")), NO_STORE]
        return Response.of(200, headers, self._configs)

    async def answer(self, request: Request) -> Response:
        """The sealed answers to one request or to a batch."""
        guards = self._guards
        needed = guards.access.reads_need_token
        claims = guards.access.identify(request.headers, guards.clock()) if needed else None
        guards.count(request, claims)
        kind = media_type(request)
        async with _body(request, guards) as body:
            is_batch = kind == REQUESTS_TYPE
            sealed = decode_requests(body, guards.limits.max_keys) if is_batch else [body]
            answers, weight = await self._answers(sealed)
        if is_batch:
            response = _response(200, ANSWERS_TYPE, encode_answers(answers))
        elif answers[0]:
            response = _response(200, RESPONSE_TYPE, answers[0])
        else:
            response = _response(PROBLEM_STATUS, PROBLEM_TYPE, PROBLEM)
        response.after = lambda: guards.memory.leave(weight)
        return response

    async def _answers(self, sealed: Sequence[bytes]) -> tuple[list[bytes], int]:
        """Answers in the order of requests, and what they weigh in memory."""
        guards = self._guards
        asked = await self._in_thread(partial(self._open, sealed))
        with ExitStack() as stack:
            groups = SliceGroups(self._rounds, guards, stack)
            for place, one in enumerate(asked):
                if one is not None and one.request is not None:
                    groups.add(place, one.request)
            await guards.memory.enter(groups.weight)
            try:
                replies = await groups.replies()
                answers = await self._in_thread(partial(self._seal, asked, replies))
            except BaseException:
                guards.memory.leave(groups.weight)
                raise
        guards.metrics.add_slices(groups.count, sum(map(len, answers)), groups.ideal)
        return answers, groups.weight

    def _open(self, sealed: Sequence[bytes]) -> list[Asked | None]:
        return [self._opened(one) for one in sealed]

    def _opened(self, sealed: bytes) -> Asked | None:
        try:
            return self._gateway.open(sealed)
        except MalformedError as error:
            self._guards.metrics.refuse(type(error).__name__)
            return None

    def _seal(self, asked: Sequence[Asked | None], replies: dict[int, Reply]) -> list[bytes]:
        return [
            b"" if one is None else self._gateway.seal(one, replies.get(place, refusal(one.error)))
            for place, one in enumerate(asked)
        ]

    async def _in_thread(self, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)


@asynccontextmanager
async def _body(request: Request, guards: Guards) -> AsyncIterator[bytes]:
    """The body of a request, which counts as held until it is answered."""
    limit = guards.limits.max_body
    announced = request.announced(limit)
    weight = limit if announced is None else announced
    await guards.uploads.enter(weight)
    try:
        yield bytes(await request.body(limit, guards.limits))
    finally:
        guards.uploads.leave(weight)


def media_type(request: Request) -> str:
    """Which kind of sealed body a request has; raises MediaTypeError."""
    kind = request.headers.get(b"content-type", b"").decode("latin-1")
    if kind not in (REQUEST_TYPE, REQUESTS_TYPE):
        raise MediaTypeError(
            f"a body of another content type: got another type; expected {REQUEST_TYPE} or "
            f"{REQUESTS_TYPE}; send one of them"
        )
    return kind
