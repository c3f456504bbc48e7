"""Answers private queries by any delivery that has them: routes, and tables in memory.

A published round has its slices in files, but a scan reads all of them for every pass, so a table
is copied when it is first asked for. Tables of the two newest rounds are kept, as far as the memory
that was set aside holds them; those of the older round go first.

Whatever is wrong with a message, the answer is the same bytes: a sender of damaged, old or borrowed
messages does not learn from the answer what they would have meant. What can be seen of a query is
its length, which follows from the params, its time, and whose it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from hashlib import sha256

import numpy as np

from keyhole.crypto.merkle import Tree
from keyhole.delivery import all_deliveries
from keyhole.delivery.base import Lengths, PrivateTable, PublicTable, SelectServer
from keyhole.delivery.paths import path_bytes, top_of
from keyhole.delivery.popular import held_bytes
from keyhole.delivery.records import RecordArray
from keyhole.errors import (
    BusyError,
    MalformedError,
    NotFoundError,
    ProtocolError,
    StorageError,
    TooLargeError,
    TooLateError,
)
from keyhole.service.access import TokenClaims, not_admitted
from keyhole.service.app import immutable, parse_place, parse_round
from keyhole.service.guards import Guards
from keyhole.service.limits import Gate
from keyhole.service.metrics import Metrics
from keyhole.service.passes import Passes
from keyhole.service.routes import BINARY, NO_STORE, Request, Response, Route, file_response, pieces
from keyhole.wire.assignment import OpenRound, RoundSource, SliceTable
from keyhole.wire.http import REFUSAL
from keyhole.wire.manifest import TableInfo, digest_of
from keyhole.wire.private import (
    SERVER_HEADER,
    QuerySettings,
    max_keys_of_table,
    popular_of_table,
    table_id,
    top_path,
)

_ROUNDS = 2  # that are kept: the current one, and the one that late devices still ask for
_FETCH_AT_ONCE = 65_536  # keys, where slices are computed on demand
_LONG = 1 << 20  # bytes whose check would hold up the loop for a millisecond


@dataclass(frozen=True)
class ServedTable:
    """A table that answers: its server, what its params say, where queries go, and the top that
    rows are compared with."""

    server: SelectServer
    public: PublicTable
    lengths: Lengths
    passes: Passes
    top: bytes


@dataclass(frozen=True)
class _Entry:
    number: int
    size: int
    task: asyncio.Task[ServedTable]


class PrivateTables:
    """The tables that a service answers from. Used from one event loop."""

    def __init__(
        self, rounds: RoundSource, settings: QuerySettings, gate: Gate, metrics: Metrics
    ) -> None:
        self._rounds, self._settings = rounds, settings
        self._gate, self._metrics = gate, metrics
        self._entries: dict[tuple[str, int], _Entry] = {}

    @property
    def held_bytes(self) -> int:
        """What the tables that are kept take."""
        return sum(entry.size for entry in self._entries.values())

    async def table(self, held: OpenRound, place: int) -> ServedTable:
        """Returns a table of a round that the caller holds, by its place in the manifest; the first
        who asks has it made, and all wait for the same one.

        Raises:
            NotFoundError: a table that is not retrieved from in private, or too large for it.
        """
        entry = self._entries.get((held.id, place))
        if entry is None:
            entry = self._start(held, place)
        return await asyncio.shield(entry.task)  # anyone who leaves must not stop it for the others

    def _start(self, held: OpenRound, place: int) -> _Entry:
        max_keys, size = self._measured(held, place)
        self._make_room(held.manifest.number, size)
        task = asyncio.create_task(self._make(held.id, place, max_keys))
        name, entry = (held.id, place), _Entry(held.manifest.number, size, task)
        self._entries[name] = entry

        def forget(done: asyncio.Task[ServedTable]) -> None:
            # The next one who asks tries again; nobody may be left to take the error.
            has_failed = done.cancelled() or done.exception() is not None
            if has_failed and self._entries.get(name) is entry:
                del self._entries[name]

        task.add_done_callback(forget)
        return entry

    def _measured(self, held: OpenRound, place: int) -> tuple[int, int]:
        """Keys of a query, and bytes of the table, if the whole round has room: no two of its
        tables take turns.
        """
        settings, sizes = self._settings, {}
        max_keys = max_keys_of_table(settings, held.manifest, _checked(held.tables[place].info))
        for at, table in enumerate(held.tables):
            with suppress(NotFoundError):  # of a table that is not offered
                info = _checked(table.info)
                limit = max_keys_of_table(settings, held.manifest, info)
                row_bytes = info.record_bytes + path_bytes(info.num_keys)
                delivery = settings.role.delivery
                popular = popular_of_table(delivery, held.manifest, info, limit)
                sizes[at] = held_bytes(delivery, info.num_keys, row_bytes, limit, popular)
        if sum(sizes.values()) > settings.max_bytes:
            raise NotFoundError(
                "the round is too large to be retrieved from in private: got "
                f"{sum(sizes.values())} bytes; expected {settings.max_bytes} bytes; serve with a "
                "larger --pir-memory-mb"
            )
        return max_keys, sizes[place]

    def _make_room(self, number: int, size: int) -> None:
        """Lets go of older rounds, and of whatever else must go for `size` bytes to fit."""
        numbers = sorted({number, *(e.number for e in self._entries.values())})[-_ROUNDS:]
        if number not in numbers:
            raise _too_old(number)
        for name, entry in sorted(self._entries.items(), key=lambda item: item[1].number):
            is_full = self.held_bytes + size > self._settings.max_bytes
            is_old = entry.number not in numbers
            if is_old or (is_full and entry.number < number and entry.task.done()):
                del self._entries[name]
        if self.held_bytes + size > self._settings.max_bytes:
            if any(entry.number > number for entry in self._entries.values()):
                raise _too_old(number)  # a newer one has taken its place
            raise BusyError(
                f"there is no room for another table: got {self.held_bytes + size} bytes; expected "
                f"{self._settings.max_bytes} bytes; come back later; the operator may raise "
                "--pir-memory-mb"
            )

    async def _make(self, round_id: str, place: int, max_keys: int) -> ServedTable:
        with self._rounds.hold(round_id) as held:  # of its own: those who wait may leave
            table = held.tables[place]
            on_demand = None if table.info.segments else await _fetch_all(table)

            def open_it() -> ServedTable:
                records = _read_segments(table) if on_demand is None else on_demand
                name, model = table_id(round_id, place), digest_of(round_id)
                role = self._settings.role
                popular = popular_of_table(role.delivery, held.manifest, table.info, max_keys)
                made = PrivateTable.of(name, model, records, max_keys, popular)
                _check_root(table.info, made.tree)
                return self._open(made)

            return await asyncio.to_thread(open_it)

    def _open(self, table: PrivateTable) -> ServedTable:
        settings, delivery = self._settings, self._settings.role.delivery
        server = delivery.open(table)[settings.role.server]
        passes = Passes(server, self._gate, settings.together, self._count)
        public, lengths = delivery.read_params(server.params), delivery.lengths(server.params)
        return ServedTable(server, public, lengths, passes, top_of(table.tree))

    def _count(self, passes: int, queries: int) -> None:
        self._metrics.add("scans", passes)
        self._metrics.add("private", queries)


def _read_segments(table: SliceTable) -> RecordArray:
    """The records of a table's files."""
    info, found = table.info, []
    for place, segment in enumerate(info.segments):
        piece = np.frombuffer(table.segment(place), np.uint8)
        found.append(piece.reshape(segment.count, info.record_bytes))
    return found[0] if len(found) == 1 else np.concatenate(found)


def _check_root(info: TableInfo, tree: Tree) -> None:
    """Refuses files that are not what was published: devices would find no row of them right."""
    if info.root and tree.root.hex() != info.root:
        raise StorageError(
            f"records of table {info.name!r} are damaged: got records of another root; expected "
            "the files as they were published; publish the round again"
        )


async def _fetch_all(table: SliceTable) -> RecordArray:
    """All records of a table that is computed on demand."""
    info = table.info
    records = np.empty((info.num_keys, info.record_bytes), np.uint8)
    for start in range(0, info.num_keys, _FETCH_AT_ONCE):
        keys = np.arange(start, min(start + _FETCH_AT_ONCE, info.num_keys))
        records[keys] = (await table.fetch(keys)).records
    return records


def _checked(info: TableInfo) -> TableInfo:
    if info.is_frozen or info.factors == () or not info.record_bytes:
        raise NotFoundError(
            f"table {info.name!r} is not retrieved from in private: got a table that all devices "
            "receive, that is frozen, or without content; expected a table of slices; fetch it as "
            "/v1/rounds/{round}/broadcast, or its segments"
        )
    return info


def _too_old(number: int) -> TooLateError:
    return TooLateError(
        f"round {number} is not retrieved from in private any more: got round {number}; expected "
        f"the {_ROUNDS} newest rounds; take part in the current one"
    )


def query_routes(
    rounds: RoundSource, settings: QuerySettings
) -> Callable[[Guards], Sequence[Route]]:
    """Returns what makes an `App` a server of private retrieval, as one of its `extra_routes`."""

    def make(guards: Guards) -> Sequence[Route]:
        gate = Gate(settings.scans, guards.limits.waiting)
        tables = PrivateTables(rounds, settings, gate, guards.metrics)
        return QueryRoutes(rounds, guards, settings, tables).routes()

    return make


@dataclass(frozen=True)
class QueryRoutes:
    """Answers private queries, behind the guards of the service."""

    rounds: RoundSource
    guards: Guards
    settings: QuerySettings
    tables: PrivateTables

    def routes(self) -> list[Route]:
        """Returns the routes of a server of private retrieval."""
        table = "/v1/rounds/{round}/tables/{table}/pir/{scheme}"
        return [
            Route("pir params", ("GET",), table, self.params),
            Route("pir query", ("POST",), table, self.query),
            Route("pir hint", ("GET",), f"{table}/hint", self.hint),
            Route("top", ("GET",), top_path("{round}", "{table}"), self.top),
        ]

    async def params(self, request: Request) -> Response:
        """Returns what a device must know of a table before it asks."""
        self._admit(request)
        with self.rounds.hold(request.params[0]) as held:
            params = (await self._table(request, held)).server.params
        response = self._file(request, params, "t-", params)
        server = str(self.settings.role.server)
        response.headers.append((SERVER_HEADER.encode("ascii"), server.encode("ascii")))
        return response

    async def hint(self, request: Request) -> Response:
        """Returns what a device must have before it asks, where the delivery has hints."""
        self._admit(request)
        with self.rounds.hold(request.params[0]) as held:
            server = (await self._table(request, held)).server
        if not server.hint:
            raise _missing("hint", "a scheme that needs none", "hints of one server")
        return self._file(request, server.hint, "h-", server.params)

    async def top(self, request: Request) -> Response:
        """Returns what rows are compared with: the same bytes for everybody."""
        self.guards.admit(request, parse_round(request.params[0]))
        with self.rounds.hold(request.params[0]) as held:
            table = await self._table(request, held)
        return top_response(request, self.guards, table.top)

    async def query(self, request: Request) -> Response:
        """Returns the reply to a query, or the one refusal."""
        guards = self.guards
        claims = guards.admit_query(request, parse_round(request.params[0]))
        self._check_scheme(request)
        guards.check_type(request)
        try:
            async with guards.query_turn(request, claims) as charge:
                with self.rounds.hold(request.params[0]) as held:
                    table = await self._table(request, held)
                _check_allowance(claims, table)
                limit = self._limit(request, table)
                async with guards.body(request, limit, guards.messages) as body:
                    with self.rounds.hold(request.params[0]):
                        return await self._answer(table, body, charge)
        except ProtocolError as error:
            guards.metrics.refuse(type(error).__name__)
            return Response.of(ProtocolError.http_status, [BINARY, NO_STORE], REFUSAL)

    def _limit(self, request: Request, table: ServedTable) -> int:
        """The length of a query, beyond which no room is kept for one that comes slowly, or never;
        raises MalformedError where a longer one is announced."""
        announced, longest = request.announced(self.guards.limits.max_body), table.lengths.query
        if announced is not None and announced > longest:
            raise MalformedError(
                f"a query of another length: got {announced} bytes; expected {longest} bytes; make "
                "it with the params of this table"
            )
        return longest

    async def _answer(
        self, table: ServedTable, body: bytes, charge: Callable[[float], None]
    ) -> Response:
        guards = self.guards
        # Most of what cannot be used is refused here, before it meets others in a pass.
        if len(body) < _LONG:
            table.server.check(body)
        else:
            await asyncio.to_thread(table.server.check, body)
        weight = table.lengths.reply
        await guards.memory.enter(weight)
        try:
            reply = await table.passes.answer(body, charge)
        except BaseException:
            guards.memory.leave(weight)
            raise
        guards.metrics.add("bytes", len(reply))
        response = Response.of(200, [BINARY, NO_STORE], reply)
        response.after = lambda: guards.memory.leave(weight)
        return response

    def _admit(self, request: Request) -> None:
        self.guards.admit(request, parse_round(request.params[0]))
        self._check_scheme(request)

    def _check_scheme(self, request: Request) -> None:
        asked, scheme = request.params[2], self.settings.role.delivery.about.path_name
        if asked != scheme:
            # Whatever else stands in a path is not repeated.
            known = {each.about.path_name for each in all_deliveries()}
            got = asked if asked in known else "another"
            raise _missing("scheme of private retrieval", got, f"{scheme} at this service")

    async def _table(self, request: Request, held: OpenRound) -> ServedTable:
        place = parse_place(request.params[1], len(held.tables), "table")
        table = await self.tables.table(held, place)
        limit, lengths = self.guards.limits, table.lengths
        if lengths.query > limit.max_body or lengths.reply > limit.max_answer:
            raise TooLargeError(
                "private queries of this table are larger than this service takes: got "
                f"{lengths.query} bytes, and {lengths.reply} for a reply; expected "
                f"{limit.max_body} bytes, and {limit.max_answer} for a reply; the operator may "
                "raise --max-body-mb, or lower --pir-keys"
            )
        return table

    def _file(self, request: Request, data: bytes, mark: str, params: bytes) -> Response:
        """Bytes that do not change as long as the params do not."""
        headers, etag = [BINARY, immutable(self.guards.access)], sha256(params).hexdigest()[:32]
        read = partial(pieces, memoryview(data))
        return file_response(request, headers, mark + etag, len(data), read)


def top_response(request: Request, guards: Guards, top: bytes) -> Response:
    """Returns the top of a table, which caches may keep."""
    headers, etag = [BINARY, immutable(guards.access)], "p-" + sha256(top).hexdigest()[:32]
    return file_response(request, headers, etag, len(top), partial(pieces, memoryview(top)))


def _check_allowance(claims: TokenClaims | None, table: ServedTable) -> None:
    """Every query counts as one for as many keys as it could ask for."""
    limit = table.public.max_keys
    if claims is not None and claims.max_keys is not None and limit > claims.max_keys:
        raise not_admitted(f"queries of {limit} keys", f"{claims.max_keys} keys in one query")


def _missing(what: str, got: str, allowed: str) -> NotFoundError:
    fix = "check the URL of the server, and its --pir"
    return NotFoundError(f"no such {what}: got {got}; expected {allowed}; {fix}")
