"""Answers as an ASGI application: a thin edge around rounds, tokens, limits and updates.

Some routes give out rounds: the current one, its manifest, slices, segments. Others take devices
and their updates in. Every route answers errors in one shape. No error, log line or metric holds a
key, an update or the name of a device.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import numpy as np

from keyhole.delivery.records import RecordArray
from keyhole.errors import BusyError, NotFoundError, TooLateError
from keyhole.primitives.layout import Layout
from keyhole.server.inputs import InputBound
from keyhole.service.access import Access, Keyring, TokenClaims, not_admitted
from keyhole.service.answers import answer_query, max_bytes_of, segment_proof
from keyhole.service.guards import Guards
from keyhole.service.limits import Limits
from keyhole.service.metrics import Metrics
from keyhole.service.routes import (
    BINARY,
    JSON,
    NO_STORE,
    Edge,
    Headers,
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
from keyhole.service.spool import UpdateSpool
from keyhole.wire import messages
from keyhole.wire.assignment import (
    Admission,
    Admit,
    CheckIn,
    Fetched,
    Note,
    OpenRound,
    RoundSource,
    SliceTable,
)
from keyhole.wire.manifest import Manifest, digest_of, number_of
from keyhole.wire.settings import bound_of, refuse_clear, sent_layout
from keyhole.wire.signing import SIGNATURE

_PLACE = re.compile(r"0|[1-9][0-9]{0,18}")
_BROADCAST = "everyone"
_MAX_SAID = 256  # bytes of a check-in
_MAX_LAYOUTS = 4  # remembered; two rounds are kept, and their layouts are mostly equal


@dataclass(frozen=True)
class SliceRoutes:
    """Reads rounds."""

    rounds: RoundSource
    guards: Guards

    def routes(self) -> list[Route]:
        """Returns the routes that read published rounds."""
        get, table = ("GET",), "/v1/rounds/{round}/tables/{table}"
        return [
            Route("current", get, "/v1/rounds/current", self.current),
            Route("slices", ("POST", "QUERY"), "/v1/rounds/{round}/slices", self.slices),
            Route("manifest", get, "/v1/rounds/{round}/manifest", self.manifest),
            Route("broadcast", get, "/v1/rounds/{round}/broadcast", self.broadcast),
            Route("slice", get, f"{table}/slices/{{key}}", self.slice),
            Route("segment", get, f"{table}/segments/{{place}}", self.segment),
            Route("proof", get, f"{table}/segments/{{place}}/proof", self.proof),
        ]

    async def current(self, request: Request) -> Response:
        """Returns the newest round."""
        guards = self.guards
        needed = guards.access.reads_need_token
        claims = guards.access.identify(request.headers, guards.clock()) if needed else None
        guards.count(request, claims)
        found = self.rounds.current()
        if found is None:
            raise _missing("round", "no round yet", "come back later")
        shown = {"round": found.round, "number": found.number, "phase": found.phase}
        return json_response({**shown, "trailing": found.trailing})

    async def manifest(self, request: Request) -> Response:
        """Returns what a round holds."""
        with self._held(request) as held:
            name, data, signature = held.id, held.encoded, held.signature
        headers = [JSON, immutable(self.guards.access)]
        if signature is not None:
            headers.append((SIGNATURE.encode("ascii"), signature.hex().encode("ascii")))
        return file_response(request, headers, name, len(data), lambda i, j: data[i:j])

    async def slices(self, request: Request) -> Response:
        """Returns the slices of any keys of any tables: a proof and one gather for each, one
        buffer."""
        guards, limits = self.guards, self.guards.limits
        round_id = parse_round(request.params[0])
        claims = guards.admit(request, round_id)
        guards.check_type(request)
        body = await request.body(messages.max_query_bytes(limits.max_keys), limits)
        with self.rounds.hold(round_id) as held:
            num_keys = [table.info.num_keys for table in held.tables]
            asks = messages.decode_query(body, num_keys, limits.max_keys)
            keys = _count_keys(asks, claims)
            weight = max_bytes_of(asks, held.tables, limits.max_answer)
            if not guards.memory.enter_now(weight):
                await guards.memory.enter(weight)
            try:
                tables = [held.tables[ask.table] for ask in asks]
                answer, ideal = await answer_query(asks, tables, self._gather)
            except BaseException:
                guards.memory.leave(weight)
                raise
        length = len(answer)
        headers = [BINARY, NO_STORE]
        guards.metrics.add_slices(keys, length + _head_bytes(headers, length), ideal)
        return Response(200, headers, answer, length, after=lambda: guards.memory.leave(weight))

    async def slice(self, request: Request) -> Response:
        """Returns one slice, for caches."""
        with self._held(request) as held:
            table = _table(held, request.params[1])
            key = parse_place(request.params[2], table.info.num_keys, "slice")
            etag = f"{held.id}.{request.params[1]}.{key}"
            return await self._records(request, table, np.array([key]), etag)

    async def broadcast(self, request: Request) -> Response:
        """Returns what every device receives."""
        with self._held(request) as held:
            table = next((t for t in held.tables if t.info.name == _BROADCAST), None)
            if table is None:
                raise _missing("broadcast part", "none in this round", "see the manifest")
            return await self._records(request, table, np.arange(table.info.num_keys), held.id)

    async def segment(self, request: Request) -> Response:
        """Returns one segment: many slices in order of their keys."""
        return self._file(request, "", lambda table, place: table.segment(place))

    async def proof(self, request: Request) -> Response:
        """Returns what leads from the records of one segment to the root: a few nodes."""
        return self._file(request, "p-", segment_proof)

    @contextmanager
    def _held(self, request: Request) -> Iterator[OpenRound]:
        """The round of a request, for anyone who may read it."""
        round_id = parse_round(request.params[0])
        self.guards.admit(request, round_id)
        with self.rounds.hold(round_id) as held:
            yield held

    async def _gather(
        self, table: SliceTable, keys: np.ndarray, out: RecordArray | None = None
    ) -> Fetched:
        gate = self.guards.gathers
        if not gate.enter_now():
            await gate.enter()
        try:
            return await table.fetch(keys, out)
        finally:
            gate.leave()

    async def _records(
        self, request: Request, table: SliceTable, keys: np.ndarray, etag: str
    ) -> Response:
        """A proof and records that never change."""
        guards = self.guards
        asks = [messages.Ask(0, keys)]
        weight = max_bytes_of(asks, [table], guards.limits.max_answer)
        await guards.memory.enter(weight)
        try:
            data, ideal = await answer_query(asks, [table], self._gather)
            headers = [BINARY, immutable(guards.access)]
            response = file_response(request, headers, etag, len(data), lambda i, j: data[i:j])
        except BaseException:
            guards.memory.leave(weight)
            raise
        sent = 0 if request.method == "HEAD" else response.length
        if sent:
            guards.metrics.add_slices(len(keys), sent + _head_bytes(response.headers, sent), ideal)
        response.after = lambda: guards.memory.leave(weight)
        return response

    def _file(
        self, request: Request, mark: str, read: Callable[[SliceTable, int], memoryview]
    ) -> Response:
        """A file of a round, which is held until the last piece of it has been copied."""
        with ExitStack() as stack:
            held = stack.enter_context(self._held(request))
            table = _table(held, request.params[1])
            segments = table.info.segments
            place = parse_place(request.params[2], len(segments), "segment")
            data = read(table, place).cast("B")
            etag = f"{mark}{held.id}.{request.params[1]}.{place}"
            headers = [BINARY, immutable(self.guards.access)]
            response = file_response(request, headers, etag, data.nbytes, partial(pieces, data))
            response.after = stack.pop_all().close
        return response


def immutable(access: Access) -> tuple[bytes, bytes]:
    """Rounds never change; what takes a token to read must not lie in a shared cache."""
    whose = b"private" if access.reads_need_token else b"public"
    return (b"cache-control", whose + b", max-age=31536000, immutable, no-transform")


def parse_round(text: str) -> str:
    """Returns the identifier of a round, if it can be one; raises NotFoundError."""
    if number_of(text) is None:
        raise _missing("round", "another identifier", "take it from /v1/rounds/current")
    return text


def parse_place(text: str, count: int, what: str) -> int:
    """Returns a number below `count`; raises NotFoundError."""
    if not _PLACE.fullmatch(text) or int(text) >= count:
        raise _missing(what, "another place", f"0..{count - 1}" if count else "none here")
    return int(text)


def _table(held: OpenRound, text: str) -> SliceTable:
    return held.tables[parse_place(text, len(held.tables), "table")]


def _count_keys(asks: Sequence[messages.Ask], claims: TokenClaims | None) -> int:
    """How many keys are asked for; raises NotAdmittedError if the token allows fewer."""
    total = sum([len(ask.keys) for ask in asks])  # a list: faster than a generator
    if claims is not None and claims.max_keys is not None and total > claims.max_keys:
        raise not_admitted(f"{total} keys", f"{claims.max_keys} keys in one query")
    return total


def _head_bytes(headers: Headers, length: int) -> int:
    """What stands before a body: a status line, headers, a length, and an empty line."""
    written = b"".join([part for header in headers for part in header])
    return 17 + len(written) + 4 * len(headers) + 18 + len(str(length)) + 2


def _missing(what: str, got: str, fix: str) -> NotFoundError:
    return NotFoundError(f"no such {what}: got {got}; expected one of this service; {fix}")


@dataclass(frozen=True)
class UpdateRoutes:
    """Takes devices and their updates in."""

    rounds: RoundSource
    guards: Guards
    spool: UpdateSpool | None  # where updates go; None for a service that takes none
    admit: Admit | None  # decides who takes part; None for a service without devices of its own
    note: Note = lambda device, said, seconds: None  # told of those who wait
    _layouts: dict[str, Layout | None] = field(default_factory=dict)
    _checked_in: dict[str, set[str]] = field(default_factory=dict)  # of the newest round

    def routes(self) -> list[Route]:
        """Returns the routes of devices that take part."""
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
        said = CheckIn.read(await request.body(_MAX_SAID, self.guards.limits))
        current, has_sent = self.rounds.current(newest=True), False
        if current is not None and self.spool is not None:
            has_sent = self.spool.has(current.round, claims.device)
            if self.spool.is_closed(current.round):  # before the file of the current round says so
                current = replace(current, phase="closed")
        told = self.admit(claims.device, current, has_sent)
        if current is not None:
            self._count_anew(current.round)
        if not isinstance(told, Admission):
            self.note(claims.device, said, told.seconds)
            return json_response({"wait": told.seconds})
        self._note(told.round, claims.device)
        issue = partial(
            Keyring.issue,
            kind="round",
            device=claims.device,
            now=now,
            seconds=access.round_seconds,
            token_id=claims.id,
            round_id=told.round,
            max_keys=claims.max_keys,
            runs=access.runs,
        )
        shown = {"round": told.round, "number": told.number, "fetch_after": told.fetch_after}
        # Three: who is shown one cannot act as this device where another one counts.
        rings = [access.keyring.for_aggregator(party) for party in (0, 1)]
        sums = [issue(ring, audience="aggregator") for ring in rings]
        return json_response({**shown, "token": issue(access.keyring), "sum_tokens": sums})

    def _note(self, round_id: str, device: str) -> None:
        """Counts the devices that were told to take part in the newest round, each once."""
        if device not in self._checked_in[round_id]:
            self._checked_in[round_id].add(device)
            self.guards.metrics.change("checked_in", 1)

    def _count_anew(self, round_id: str) -> None:
        """Begins with nobody where the newest round is another one."""
        if round_id not in self._checked_in:
            before = sum(map(len, self._checked_in.values()))
            self._checked_in.clear()
            self._checked_in[round_id] = set()
            self.guards.metrics.change("checked_in", -before)

    async def update(self, request: Request) -> Response:
        """Takes the update of one device in one round."""
        guards, round_id = self.guards, parse_round(request.params[0])
        if self.spool is None:
            raise self._takes_none()
        claims = guards.access.member(request.headers, round_id, guards.clock())
        guards.count(request, claims)
        guards.check_type(request)
        of_layout = self._check_open(self.spool, round_id, claims.device)
        with self.rounds.hold(of_layout) as held:
            refuse_clear(held.manifest.settings)  # before any of the body is read
            layout = self._layout(of_layout, held.manifest)
            bound = bound_of(held.manifest.settings)
        limits = guards.limits
        limit = min(limits.max_body, messages.max_update_bytes(layout, limits.max_keys))
        async with guards.update_turn(claims), guards.body(request, limit) as body:
            with self.rounds.hold(of_layout):
                outcome = await asyncio.to_thread(
                    self._keep, self.spool, layout, bound, round_id, claims.device, body
                )
        guards.metrics.add("stored" if outcome == "stored" else "repeated")
        return json_response({"update": outcome}, 201 if outcome == "stored" else 200)

    def _check_open(self, spool: UpdateSpool, round_id: str, device: str) -> str:
        """Demands the current round, open, and a device of its cohort; or a trailing round, which
        the device has a token of. Returns a round that has the layout of this one and is served.

        A device that has sent its update may send it again: the answer may have been lost.
        """
        current = self.rounds.current(newest=True)
        if current is not None and round_id in current.trailing:
            return current.round  # the slices of this one may have gone
        if current is None or current.round != round_id or current.phase != "open":
            if spool.has(round_id, device):
                return round_id
            raise TooLateError(
                "the round takes no more updates: got a round that is neither current and open, "
                "nor trailing; expected the current round while it is open, and those that trail "
                "it; check in for the next one"
            )
        if current.cohort is not None and device not in current.cohort:
            raise not_admitted("a device outside the cohort", "a device of this round's cohort")
        return round_id

    def _keep(
        self,
        spool: UpdateSpool,
        layout: Layout,
        bound: InputBound,
        round_id: str,
        device: str,
        body: bytes,
    ) -> Literal["stored", "known"]:
        """Checks an update and stores it; takes a disk's time, so it runs in a thread.

        One that is above the norm and to be clipped is stored as it is: who adds it up clips it.
        """
        limit = self.guards.limits.max_keys
        report, of_update = messages.split_report(body, bound)
        update, keys = messages.decode_update(of_update, layout, limit, digest_of(round_id))
        taken = bound.take(update, keys, None if report is None else report.weight)
        if taken.is_above:
            self.guards.metrics.add("above_norm")
        if taken.update is None:
            spool.refuse(round_id, device, "norm" if taken.is_above else "numbers")
            raise bound.refusal(taken)
        return spool.store(round_id, device, body)

    def _layout(self, round_id: str, manifest: Manifest) -> Layout:
        if round_id not in self._layouts:
            if len(self._layouts) >= _MAX_LAYOUTS:
                self._layouts.clear()
            self._layouts[round_id] = sent_layout(manifest.settings, manifest.layout)
        layout = self._layouts[round_id]
        if layout is None:
            raise self._takes_none()
        return layout

    def _takes_none(self) -> NotFoundError:
        other = "send it to the service that coordinates the round"
        has_keys = self.guards.access.keyring is not None
        fix = other if has_keys else f"{other}; if this is to be it, serve with --token-key"
        return NotFoundError(
            f"this service takes no updates: got an update or check-in; expected reads; {fix}"
        )


class App:
    """Answers requests for the slices of rounds.

    Args:
        spool: where updates go; None for a service that takes none.
        admit: decides which devices take part; None for a service without devices of its own.
        note: told of devices that wait, for a trainer that draws cohorts from them.
        extra_routes: makers of further routes, counted, limited and refused like the others; each
            is given what stands before all routes.
        clock: unix seconds, for tokens.
        guards: of a service that this one is a part of, in place of access, limits, metrics, clock.
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
        note: Note = lambda device, said, seconds: None,
        metrics: Metrics | None = None,
        extra_routes: Sequence[Callable[[Guards], Sequence[Route]]] = (),
        clock: Callable[[], float] = time.time,
        rng: random.Random | None = None,
        guards: Guards | None = None,
    ) -> None:
        if guards is None:
            guards = Guards(access or Access(), limits or Limits(), metrics or Metrics(), clock)
        self.guards, self.limits, self.metrics = guards, guards.limits, guards.metrics
        self._rounds, rng = rounds, rng or random.SystemRandom()
        routes = [
            *SliceRoutes(rounds, guards).routes(),
            *UpdateRoutes(rounds, guards, spool, admit, note).routes(),
            *health_routes(self._ready),
            *(route for make in extra_routes for route in make(guards)),
        ]
        self._routes = Routes(routes, self.metrics)
        self._edge = Edge(self._routes, self.limits, self.metrics, rng)

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Answers one request."""
        return self._edge(scope, receive, send)

    def current_round(self) -> str:
        """Returns the round that is given out; raises KeyholeError if none can be."""
        current = self._rounds.current()
        if current is None:
            raise BusyError("no round yet: got none; expected a published round; publish one")
        with self._rounds.hold(current.round):
            return current.round

    async def _ready(self, request: Request) -> Response:
        return json_response({"round": self.current_round()})
