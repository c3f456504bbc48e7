"""Relays sealed requests: mixes those of several clients, and carries them to the gateway.

The relay sees who asks, when and how many requests, and cannot read them. It passes on what is in a
body and nothing of its head, over one connection that tells nothing of who asks; it logs neither
addresses nor sizes. It lets in devices with a token for it, or everyone where it has no keys.

Requests are held back until those of enough different devices have come, and sent in random order;
fewer never go: they are told to come back. One who has no tokens can therefore not fill a batch
around one device. What the gateway can tell from order and time shrinks with the number of devices
that are mixed. It is not nothing: one who watches both sides can match bursts.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TypeAlias

from keyhole.crypto.prg import Prg
from keyhole.delivery.exchange import mix
from keyhole.delivery.relay.gateway import (
    REQUESTS_TYPE,
    decode_answers,
    decode_requests,
    encode_requests,
)
from keyhole.delivery.relay.ohttp import KEYS_TYPE, REQUEST_OVERHEAD, decode_configs
from keyhole.errors import BusyError, InputError, MalformedError, RequestError, ServiceError
from keyhole.service.access import Access, DenyList, Keyring
from keyhole.service.gateway import binary_response, media_type, sealed_response
from keyhole.service.guards import Guards
from keyhole.service.limits import Limits
from keyhole.service.metrics import Metrics
from keyhole.service.routes import (
    Edge,
    Receive,
    Request,
    Response,
    Route,
    Routes,
    Scope,
    Send,
    health_routes,
    json_response,
)
from keyhole.wire.http import HttpClient
from keyhole.wire.private import GATEWAY_PATH, KEYS_PATH, RELAY_KEYS_PATH, RELAY_PATH

_RESTED = 5.0  # seconds after which a connection is made again: the gateway may have closed it
_LOOK_EVERY = 0.05  # seconds between looks at whether enough devices have come
_KNOWN_FOR = 5.0  # seconds for which a key configuration is passed on without asking again


Forward: TypeAlias = Callable[[list[bytes]], Awaitable[list[bytes]]]
"""Takes requests of one length to the gateway; an answer to each in their order."""


@dataclass(frozen=True)
class Mix:
    """How long requests wait for others."""

    seconds: float = 0.2  # after which they go, if enough others are there
    clients: int = 64  # different devices whose requests go as soon as this many have come
    min_devices: int = 1  # different devices; requests of fewer never go
    longest: float = 10.0  # seconds after which those that found too few others come back later
    # of one forwarded batch; more go in several. Their answers together must be within what the
    # gateway gives out at once, 512 MB unless told otherwise
    requests: int = 4096

    def __post_init__(self) -> None:
        is_timed = 0 <= self.seconds <= 60 and 0 < self.longest <= 60
        if not is_timed or not 1 <= self.min_devices <= self.clients or self.requests < 1:
            raise InputError(
                f"the mix is invalid: got {self.seconds:g} s, {self.min_devices} to {self.clients} "
                f"clients, {self.requests} requests; expected 0..60 s, 1 or more clients and "
                "requests, and a min number of clients that is not above the max; choose other "
                "numbers"
            )


@dataclass
class _Pool:
    """What waits: requests by client, and who waits for their answers."""

    timer: asyncio.TimerHandle
    until: float  # when those who wait are told to come back
    names: set[object] = field(default_factory=set)  # of the devices whose requests they are
    waiting: list[tuple[Sequence[bytes], asyncio.Future[list[bytes]]]] = field(default_factory=list)


class Mixer:
    """Collects, shuffles, forwards, and gives everybody their own answers.

    Only requests of one length are mixed with one another: those of one round have one. Tests give
    the `prg` of the order.
    """

    def __init__(self, forward: Forward, mix: Mix, prg: Prg | None = None) -> None:
        self._forward, self._mix, self._prg = forward, mix, prg or Prg.fresh()
        self._pools: dict[int, _Pool] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def ask(self, requests: Sequence[bytes], name: str | None = None) -> list[bytes]:
        """Returns the answers to one client's requests, one or more of one length.

        `name` is that of its device, which counts once however often it asks; None counts again.

        Raises BusyError where too few different devices have come.
        """
        loop, length = asyncio.get_running_loop(), len(requests[0])
        pool = self._pools.get(length)
        if pool is None:
            timer = loop.call_later(self._mix.seconds, self._go, length)
            pool = self._pools[length] = _Pool(timer, loop.time() + self._mix.longest)
        turn: asyncio.Future[list[bytes]] = loop.create_future()
        pool.waiting.append((requests, turn))
        pool.names.add(object() if name is None else name)
        if len(pool.names) >= self._mix.clients:
            self._go(length)
        return await turn

    def _go(self, length: int) -> None:
        """Sends off what waits, once it is of enough devices."""
        pool, loop = self._pools[length], asyncio.get_running_loop()
        pool.timer.cancel()
        if len(pool.names) < self._mix.min_devices and loop.time() < pool.until:
            wait = min(max(self._mix.seconds, _LOOK_EVERY), pool.until - loop.time())
            pool.timer = loop.call_later(wait, self._go, length)
            return
        del self._pools[length]
        if len(pool.names) < self._mix.min_devices:
            _send_away(pool, self._mix.min_devices)
            return
        task = asyncio.get_running_loop().create_task(self._exchange(pool))
        self._tasks.add(task)  # the loop itself would forget it
        task.add_done_callback(self._tasks.discard)

    async def _exchange(self, pool: _Pool) -> None:
        try:
            mixed = mix([requests for requests, _ in pool.waiting], self._prg)
            handed = mixed.hand_back(await self._answers(mixed.requests))
        except BaseException as error:
            # It is each client's to see, and not the loop's, unless it ends the loop.
            broken_off = ServiceError(
                "the relay broke off: got no answer of the gateway; expected an answer to each "
                "request; ask again"
            )
            for _, turn in pool.waiting:
                if not turn.done():
                    turn.set_exception(error if isinstance(error, Exception) else broken_off)
            if not isinstance(error, Exception):
                raise
            return
        for (_, turn), own in zip(pool.waiting, handed, strict=True):
            if not turn.done():  # its client may have left
                turn.set_result(own)

    async def _answers(self, sealed: list[bytes]) -> list[bytes]:
        answers: list[bytes] = []
        for start in range(0, len(sealed), self._mix.requests):
            answers += await self._forward(sealed[start : start + self._mix.requests])
        return answers


def _send_away(pool: _Pool, min_devices: int) -> None:
    for _, turn in pool.waiting:
        if not turn.done():
            turn.set_exception(
                BusyError(
                    f"too few devices to mix requests with: got {len(pool.names)}; expected "
                    f"{min_devices} at one time; come back when the answer says"
                )
            )


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
        loop, body = asyncio.get_running_loop(), encode_requests(sealed)
        got = await loop.run_in_executor(self._pool, self._exchange, "POST", GATEWAY_PATH, body)
        try:
            return decode_answers(got, len(sealed))
        except MalformedError as error:
            raise _no_answer("an answer that makes no sense") from error

    async def configs(self) -> bytes:
        """Returns the gateway's key configuration, as it gives it."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._get_configs)

    def _get_configs(self) -> bytes:
        if time.monotonic() - self._asked > _KNOWN_FOR:
            got = self._exchange("GET", KEYS_PATH)
            try:
                decode_configs(got)
            except MalformedError as error:
                raise _no_answer("no key configuration") from error
            self._configs, self._asked = got, time.monotonic()
        return self._configs

    def _exchange(self, method: str, path: str, body: bytes = b"") -> bytes:
        """One exchange, whose failures are the gateway's and not the client's."""
        if time.monotonic() - self._used > _RESTED:
            self._client.close()
        try:
            got = self._client.exchange(
                method,
                path,
                body,
                headers={"content-type": REQUESTS_TYPE} if body else {},
                token=self._token,
                limit=self._limit,
                may_repeat=False,
            )
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
        return bytes(got.body)


def _no_answer(got: str) -> ServiceError:
    return ServiceError(
        f"the gateway gives no usable answer: got {got}; expected answers as docs/wire.md "
        "describes them; try again later; the operator of the relay may check --gateway"
    )


def relay_access(keyring: Keyring | None = None, denied: DenyList | None = None) -> Access:
    """Returns who is let in at a relay: devices with a token for it, or everyone without keys."""
    return Access(keyring, audience="relay", denied=denied)


class RelayApp:
    """The relay as an ASGI application, for `serving` and `run` of the transport.

    Clients are mixed within one process: there is one worker.
    `access` has the keys of tokens for the relay; without keys everyone is let in, and each body
    counts as a device. `rng` spreads the time after which clients come back; it keeps no secret.
    """

    def __init__(
        self,
        link: GatewayLink,
        *,
        mix: Mix | None = None,
        access: Access | None = None,
        limits: Limits | None = None,
        metrics: Metrics | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self.limits, self.metrics = limits or Limits(), metrics or Metrics()
        self._link, self._mixer = link, Mixer(link.forward, mix or Mix())
        access = access or relay_access()
        self._guards = Guards(access, self.limits, self.metrics, time.time)
        routes = [
            Route("relay", ("POST",), RELAY_PATH, self._relay),
            Route("relay keys", ("GET",), RELAY_KEYS_PATH, self._keys),
            *health_routes(self._ready),
        ]
        rng = rng or random.SystemRandom()
        self._edge = Edge(Routes(routes, self.metrics), self.limits, self.metrics, rng)

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Answers one request."""
        return self._edge(scope, receive, send)

    async def _relay(self, request: Request) -> Response:
        """Answers to one sealed request, or to a batch of one client's."""
        guards, limits, memory = self._guards, self.limits, self._guards.memory
        claims = None
        if guards.access.keyring is not None:
            claims = guards.access.device(request.headers, guards.clock())
        guards.count(request, claims)
        name = None if claims is None else claims.device
        is_batch = media_type(request) == REQUESTS_TYPE
        # Devices without a token may be many behind one address, and mix with each other there.
        turn = nullcontext() if claims is None else guards.batch_turn(request, claims)
        async with turn, guards.body(request) as body:
            sealed = decode_requests(body, limits.max_keys) if is_batch else [body]
            # What cannot be a sealed request goes no further.
            is_possible = len(sealed[0]) >= REQUEST_OVERHEAD
            answers = await self._mixer.ask(sealed, name) if is_possible else [b""] * len(sealed)
            guards.metrics.add("relayed", len(sealed) if is_possible else 0)
        response = sealed_response(answers, is_batch)
        # It counts as held until its client has taken it.
        await memory.enter(response.length)
        response.after = lambda: memory.leave(response.length)
        return response

    async def _keys(self, request: Request) -> Response:
        """The gateway's key configuration, as the relay gets it: for clients to compare."""
        self._guards.count(request, None)
        return binary_response(200, KEYS_TYPE, await self._link.configs())

    async def _ready(self, request: Request) -> Response:
        await self._link.configs()
        return json_response({"gateway": True})
