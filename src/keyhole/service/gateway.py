"""Makes a slice service a gateway of Oblivious HTTP: it answers sealed requests for single slices.

The gateway learns which slices are asked for, as from every plain request; it learns neither who
asks nor which requests belong together, as long as the relay does not work together with it and
mixes the requests of enough devices. A request carries no token: where reading takes one, the relay
shows its own. Not covered: the times at which devices check in and batches arrive, and keys that
only one device can want. Requests that meet are looked up together: one gather for each table that
is asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from keyhole.crypto.once import MAX_REMEMBERED, ReplayWindow
from keyhole.delivery.paths import top_of, with_paths
from keyhole.delivery.relay.binary_http import BinaryRequest, BinaryResponse
from keyhole.delivery.relay.client import parse_slice_path, slice_reply_bytes
from keyhole.delivery.relay.gateway import (
    ANSWERS_TYPE,
    PROBLEM,
    PROBLEM_STATUS,
    PROBLEM_TYPE,
    REQUESTS_TYPE,
    Asked,
    Gateway,
    Reply,
    decode_requests,
    encode_answers,
    refusal,
)
from keyhole.delivery.relay.ohttp import (
    KEYS_TYPE,
    REQUEST_TYPE,
    RESPONSE_TYPE,
    GatewayKey,
    encode_configs,
)
from keyhole.errors import (
    BusyError,
    KeyholeError,
    MalformedError,
    MediaTypeError,
    NotFoundError,
    TooLargeError,
)
from keyhole.service.app import parse_place, parse_round
from keyhole.service.guards import Guards
from keyhole.service.private import top_response
from keyhole.service.routes import NO_STORE, Request, Response, Route
from keyhole.wire.assignment import OpenRound, RoundSource, SliceTable
from keyhole.wire.private import GATEWAY_PATH, KEYS_PATH, row_bytes_of, top_path


@dataclass
class _Group:
    """What is asked of one table: places in the batch, and their keys."""

    table: SliceTable
    places: list[int] = field(default_factory=list)
    keys: list[int] = field(default_factory=list)

    @property
    def reply_bytes(self) -> int:
        return slice_reply_bytes(row_bytes_of(self.table.info))


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

    def weigh(self) -> int:
        """Bytes of their answers; raises TooLargeError."""
        total = sum(len(group.keys) * group.reply_bytes for group in self._groups.values())
        limit = self._guards.limits.max_answer
        if total > limit:
            raise TooLargeError(
                f"the slices asked for are too large for one batch: got {total} bytes; expected "
                f"{limit} bytes; forward fewer requests at a time: `keyhole relay --batch`"
            )
        return total

    async def replies(self) -> dict[int, Reply]:
        """Returns the reply at each place."""
        found = dict(self._refused)
        for group in self._groups.values():
            if group.keys:
                found |= await self._replies(group)
        return found

    async def _replies(self, group: _Group) -> dict[int, Reply]:
        """One answer to each request of a table. Anyone who cannot be answered now is told so with
        the whole batch: devices ask again for whole batches, and for nothing less."""
        try:
            rows = await self._rows(group)
        except BusyError:
            raise
        except KeyholeError as error:
            return dict.fromkeys(group.places, refusal(error, group.reply_bytes))
        return {
            place: Reply(BinaryResponse(200, (), row.tobytes()), group.reply_bytes)
            for place, row in zip(group.places, rows, strict=True)
        }

    async def _rows(self, group: _Group) -> NDArray[np.uint8]:
        """The slices of a group, each with its path where the table has a tree."""
        gate, keys = self._guards.gathers, np.array(group.keys, np.int64)
        await gate.enter()
        try:
            fetched = await group.table.fetch(keys)
        finally:
            gate.leave()
        tree = group.table.tree
        return fetched.records if tree is None else with_paths(tree, keys, fetched.records)

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
                self._kept[round_id] = self._stack.enter_context(self._rounds.hold(round_id))
            except KeyholeError as error:
                self._kept[round_id] = error
        found = self._kept[round_id]
        if isinstance(found, KeyholeError):
            raise found
        return found


def _missing(what: str) -> NotFoundError:
    return NotFoundError(
        f"no such {what}: got another place; expected one of this round; take it from the manifest"
    )


def gateway_routes(
    rounds: RoundSource, keys: Sequence[GatewayKey], max_remembered: int = MAX_REMEMBERED
) -> Callable[[Guards], Sequence[Route]]:
    """Returns what makes an `App` a gateway, as one of its `extra_routes`; the first of `keys` is
    used.

    Each worker process remembers the requests that it has answered for itself, `max_remembered` of
    some 110 bytes each. One that it has forgotten can be replayed until its round is removed:
    slices are only read.
    """

    def make(guards: Guards) -> Sequence[Route]:
        made = _GatewayRoutes(rounds, guards, Gateway(keys, window=ReplayWindow(max_remembered)))
        return [
            Route("gateway keys", ("GET",), KEYS_PATH, made.keys),
            Route("gateway", ("POST",), GATEWAY_PATH, made.answer),
            Route("top", ("GET",), top_path("{round}", "{table}"), made.top),
        ]

    return make


class _GatewayRoutes:
    """Opens, answers and seals."""

    def __init__(self, rounds: RoundSource, guards: Guards, gateway: Gateway) -> None:
        self._rounds, self._guards, self._gateway = rounds, guards, gateway
        self._configs = encode_configs(gateway.configs)
        # One thread: opening takes a tenth of a millisecond each, and must not hold up the loop.
        self._pool = ThreadPoolExecutor(1, "keyhole gateway")

    async def keys(self, request: Request) -> Response:
        """Returns the key configuration: the same for everybody, without a token."""
        self._guards.count(request, None)
        return binary_response(200, KEYS_TYPE, self._configs)

    async def top(self, request: Request) -> Response:
        """Returns what slices are compared with: the same bytes for everybody."""
        round_id = parse_round(request.params[0])
        self._guards.admit(request, round_id)
        with self._rounds.hold(round_id) as held:
            place = parse_place(request.params[1], len(held.tables), "table")
            tree = held.tables[place].tree
            if tree is None:
                raise _missing("top")
            return top_response(request, self._guards, top_of(tree))

    async def answer(self, request: Request) -> Response:
        """Returns the sealed answers to one request or to a batch."""
        guards = self._guards
        needed = guards.access.reads_need_token
        claims = guards.access.identify(request.headers, guards.clock()) if needed else None
        guards.count(request, claims)
        is_batch = media_type(request) == REQUESTS_TYPE
        async with (
            guards.batch_turn(request, claims),
            guards.body(request, gate=guards.messages) as body,
        ):
            sealed = decode_requests(body, guards.limits.max_keys) if is_batch else [body]
            answers, weight = await self._answers(sealed)
        response = sealed_response(answers, is_batch)
        response.after = lambda: guards.memory.leave(weight)
        return response

    async def _answers(self, sealed: Sequence[bytes]) -> tuple[list[bytes], int]:
        """Answers in the order of requests, and what they weigh in memory."""
        guards, loop = self._guards, asyncio.get_running_loop()
        asked = await loop.run_in_executor(self._pool, self._open, sealed)
        with ExitStack() as stack:
            groups = SliceGroups(self._rounds, guards, stack)
            for place, one in enumerate(asked):
                if one is not None and one.request is not None:
                    groups.add(place, one.request)
            weight = groups.weigh()
            await guards.memory.enter(weight)
            try:
                replies = await groups.replies()
                answers = await loop.run_in_executor(self._pool, self._seal, asked, replies)
            except BaseException:
                guards.memory.leave(weight)
                raise
        guards.metrics.add_slices(groups.count, sum(map(len, answers)), groups.ideal)
        return answers, weight

    def _open(self, sealed: Sequence[bytes]) -> list[Asked | None]:
        opened: list[Asked | None] = []
        for one in sealed:
            try:
                opened.append(self._gateway.open(one))
            except MalformedError as error:
                self._guards.metrics.refuse(type(error).__name__)
                opened.append(None)
        return opened

    def _seal(self, asked: Sequence[Asked | None], replies: dict[int, Reply]) -> list[bytes]:
        return [
            b"" if one is None else self._gateway.seal(one, replies.get(place, refusal(one.error)))
            for place, one in enumerate(asked)
        ]


def sealed_response(answers: Sequence[bytes], is_batch: bool) -> Response:
    """Returns the answer to a batch, or to one request, which may not have been opened."""
    if is_batch:
        return binary_response(200, ANSWERS_TYPE, encode_answers(answers))
    if answers[0]:
        return binary_response(200, RESPONSE_TYPE, answers[0])
    return binary_response(PROBLEM_STATUS, PROBLEM_TYPE, PROBLEM)


def binary_response(status: int, kind: str, body: bytes) -> Response:
    """Returns an answer of one content type that nobody keeps."""
    return Response.of(status, [(b"content-type", kind.encode("ascii")), NO_STORE], body)


def media_type(request: Request) -> str:
    """Returns which kind of sealed body a request has; raises MediaTypeError."""
    kind = request.headers.get(b"content-type", b"").decode("latin-1")
    if kind not in (REQUEST_TYPE, REQUESTS_TYPE):
        raise MediaTypeError(
            f"a body of another content type: got another type; expected {REQUEST_TYPE} or "
            f"{REQUESTS_TYPE}; send one of them"
        )
    return kind
