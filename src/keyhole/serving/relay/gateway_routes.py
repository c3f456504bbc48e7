"""The gateway as routes of the slice service: sealed requests in, sealed slices out.

The service learns which slices are asked for, as from every plain request; it learns neither who
asks nor which requests belong together, as long as the relay does not work together with it and
mixes the requests of enough devices. A request carries no token: where reading takes one, the relay
shows its own, which says that a relay asks. Not covered: the times at which devices check in and
batches arrive, and keys that only one device can want.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from typing import TypeVar

from keyhole.errors import MalformedError, MediaTypeError
from keyhole.private.oblivious.gateway import (
    PROBLEM,
    PROBLEM_STATUS,
    PROBLEM_TYPE,
    Asked,
    Gateway,
    Reply,
    refusal,
)
from keyhole.private.oblivious.key_config import KEYS_TYPE, GatewayKey, encode_configs
from keyhole.private.oblivious.ohttp import REQUEST_TYPE, RESPONSE_TYPE
from keyhole.private.oblivious.replay_window import MOST_REMEMBERED, ReplayWindow
from keyhole.serving.relay.batches import (
    ANSWERS_TYPE,
    REQUESTS_TYPE,
    decode_requests,
    encode_answers,
)
from keyhole.serving.relay.slice_groups import SliceGroups
from keyhole.serving.service.guards import Guards
from keyhole.serving.service.responses import NO_STORE
from keyhole.serving.service.routes import Request, Response, Route
from keyhole.serving.tables import RoundSource

__all__ = ["GATEWAY_PATH", "KEYS_PATH", "gateway_routes", "media_type"]

GATEWAY_PATH = "/v1/gateway"
KEYS_PATH = "/v1/gateway/keys"

_T = TypeVar("_T")


def gateway_routes(
    rounds: RoundSource, keys: Sequence[GatewayKey], most_remembered: int = MOST_REMEMBERED
) -> Callable[[Guards], Sequence[Route]]:
    """What makes an `App` a gateway, as one of its `extra_routes`.

    Each worker process remembers the requests that it has answered for itself. One that it has
    forgotten can be replayed until its round is removed: slices are only read.

    Args:
        rounds: of the service.
        keys: of the gateway, the one to use first; see `load_gateway_keys`.
        most_remembered: requests, of some 110 bytes each; see `ReplayWindow`.
    """

    def make(guards: Guards) -> Sequence[Route]:
        return _GatewayRoutes(rounds, guards, keys, ReplayWindow(most_remembered)).routes()

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
        async with self._body(request) as body:
            is_batch = kind == REQUESTS_TYPE
            sealed = decode_requests(body, guards.limits.most_keys) if is_batch else [body]
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
    async def _body(self, request: Request) -> AsyncIterator[bytes]:
        """The body of a request, which counts as held until it is answered."""
        guards, most = self._guards, self._guards.limits.most_body
        announced = request.announced(most)
        weight = most if announced is None else announced
        await guards.uploads.enter(weight)
        try:
            yield bytes(await request.body(most, guards.limits))
        finally:
            guards.uploads.leave(weight)


def media_type(request: Request) -> str:
    """Which kind of sealed body a request has; raises MediaTypeError."""
    kind = request.headers.get(b"content-type", b"").decode("latin-1")
    if kind not in (REQUEST_TYPE, REQUESTS_TYPE):
        raise MediaTypeError(
            "a body of another content type",
            got="another type",
            allowed=f"{REQUEST_TYPE} or {REQUESTS_TYPE}",
            fix="send one of them",
        )
    return kind


def _response(status: int, kind: str, body: bytes) -> Response:
    return Response.of(status, [(b"content-type", kind.encode("ascii")), NO_STORE], body)
