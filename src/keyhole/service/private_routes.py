"""Adds the routes of private retrieval: params, hints, and queries whose keys it cannot read.

Whatever is wrong with a message, the answer is the same bytes: a sender of damaged, old or borrowed
messages does not learn from the answer what they would have meant. What can be seen of a query is
its length, which follows from the params, its time, and whose it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial

from keyhole.delivery import pir_deliveries
from keyhole.delivery.pir.messages import FRAME_BYTES, REFUSAL, unseal
from keyhole.errors import NotFoundError, ProtocolError, TooLargeError
from keyhole.service.access import Guards, TokenClaims, not_admitted
from keyhole.service.app import immutable, parse_place, parse_round
from keyhole.service.limits import Gate
from keyhole.service.private import Databases, ServedTable
from keyhole.service.routes import BINARY, NO_STORE, Request, Response, Route, file_response, pieces
from keyhole.wire.assignment import OpenRound, RoundSource
from keyhole.wire.private import SERVER_HEADER, PirSettings

_LONG = 1 << 20  # bytes whose check would hold up the loop for a millisecond


def pir_routes(rounds: RoundSource, settings: PirSettings) -> Callable[[Guards], Sequence[Route]]:
    """What makes an `App` a server of private retrieval, as one of its `extra_routes`.

    Args:
        rounds: of the service.
        settings: which server it is, and how much it takes.
    """

    def make(guards: Guards) -> Sequence[Route]:
        gate = Gate(settings.scans, guards.limits.waiting)
        databases = Databases(rounds, settings, gate, guards.metrics)
        return PirRoutes(rounds, guards, settings, databases).routes()

    return make


@dataclass(frozen=True)
class PirRoutes:
    """Answers private queries.

    Args:
        rounds: of the service.
        guards: what stands before them.
        settings: of private retrieval.
        databases: to answer from.
    """

    rounds: RoundSource
    guards: Guards
    settings: PirSettings
    databases: Databases

    def routes(self) -> list[Route]:
        """All of them."""
        table = "/v1/rounds/{round}/tables/{table}/pir/{scheme}"
        return [
            Route("pir params", ("GET",), table, self.params),
            Route("pir query", ("POST",), table, self.query),
            Route("pir hint", ("GET",), f"{table}/hint", self.hint),
        ]

    async def params(self, request: Request) -> Response:
        """What a device must know of a table before it asks."""
        self._admit(request)
        with self._hold(request) as held:
            opened = (await self._table(request, held)).opened
        data, server = opened.params.encode(), str(self.settings.role.server)
        response = self._file(request, data, "t-" + opened.params.digest.hex()[:32])
        response.headers.append((SERVER_HEADER.encode("ascii"), server.encode("ascii")))
        return response

    async def hint(self, request: Request) -> Response:
        """What a device of the one-server scheme must have before it asks."""
        self._admit(request)
        with self._hold(request) as held:
            opened = (await self._table(request, held)).opened
        if not opened.hint:
            raise _missing("hint", "a scheme that needs none", "hints of one server")
        return self._file(request, opened.hint, "h-" + opened.params.digest.hex()[:32])

    async def query(self, request: Request) -> Response:
        """The reply to a query, or the one refusal."""
        guards = self.guards
        claims = self._admit(request)
        guards.check_type(request)
        try:
            async with self._body(request) as body:
                with self._hold(request) as held:
                    table = await self._table(request, held)
                    _check_allowance(claims, table)
                    return await self._answer(table, body)
        except ProtocolError as error:
            guards.metrics.refuse(type(error).__name__)
            return Response.of(ProtocolError.http_status, [BINARY, NO_STORE], REFUSAL)

    async def _answer(self, table: ServedTable, body: bytes) -> Response:
        guards, opened = self.guards, table.opened
        # Most of what cannot be used is refused here, before it meets others in a pass.
        length = table.lengths.query - FRAME_BYTES
        check = partial(unseal, body, "query", opened.params, self.settings.role.server, length)
        if len(body) < _LONG:
            check()
        else:
            await asyncio.to_thread(check)
        weight = table.lengths.reply
        await guards.memory.enter(weight)
        try:
            reply = await table.passes.answer(body)
        except BaseException:
            guards.memory.leave(weight)
            raise
        guards.metrics.add("bytes", len(reply))
        response = Response.of(200, [BINARY, NO_STORE], reply)
        response.after = lambda: guards.memory.leave(weight)
        return response

    @asynccontextmanager
    async def _body(self, request: Request) -> AsyncIterator[bytes]:
        """The body of a query, which counts as held until it is answered."""
        guards, limit = self.guards, self.guards.limits.max_body
        announced = request.announced(limit)
        weight = limit if announced is None else announced
        await guards.uploads.enter(weight)
        try:
            yield bytes(await request.body(limit, guards.limits))
        finally:
            guards.uploads.leave(weight)

    def _admit(self, request: Request) -> TokenClaims | None:
        claims = self.guards.admit(request, parse_round(request.params[0]))
        asked, scheme = request.params[2], self.settings.role.delivery.scheme
        if asked != scheme:
            # Whatever else stands in a path is not repeated.
            raise _missing(
                "scheme of private retrieval",
                asked if asked in {each.scheme for each in pir_deliveries()} else "another",
                f"{scheme} at this service",
            )
        return claims

    def _hold(self, request: Request) -> AbstractContextManager[OpenRound]:
        return self.rounds.hold(request.params[0])

    async def _table(self, request: Request, held: OpenRound) -> ServedTable:
        place = parse_place(request.params[1], len(held.tables), "table")
        table = await self.databases.table(held, place)
        limit, lengths = self.guards.limits, table.lengths
        if lengths.query > limit.max_body or lengths.reply > limit.max_answer:
            raise TooLargeError(
                "private queries of this table are larger than this service takes",
                got=f"{lengths.query} bytes, and {lengths.reply} for a reply",
                allowed=f"{limit.max_body} bytes, and {limit.max_answer} for a reply",
                fix="the operator may raise --max-body-mb, or lower --pir-keys",
            )
        return table

    def _file(self, request: Request, data: bytes, etag: str) -> Response:
        headers, view = [BINARY, immutable(self.guards.access)], memoryview(data)
        return file_response(
            request, headers, etag, len(data), lambda start, stop: pieces(view, start, stop)
        )


def _check_allowance(claims: TokenClaims | None, table: ServedTable) -> None:
    """Every query counts as one for as many keys as it could ask for."""
    limit = table.opened.params.max_keys
    if claims is not None and claims.max_keys is not None and limit > claims.max_keys:
        raise not_admitted(f"queries of {limit} keys", f"{claims.max_keys} keys in one query")


def _missing(what: str, got: str, allowed: str) -> NotFoundError:
    fix = "check the URL of the server, and its --pir"
    return NotFoundError(f"no such {what}", got=got, allowed=allowed, fix=fix)
