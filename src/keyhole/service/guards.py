"""Stands before all routes of a service: who is let in, how often, and how much is held at once."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from copy import copy
from dataclasses import replace
from ipaddress import IPv6Address, ip_address
from math import inf

from keyhole.errors import MediaTypeError
from keyhole.service.access import Access, TokenClaims
from keyhole.service.limits import Gate, Limits, TokenBuckets, Turns, too_many
from keyhole.service.metrics import Metrics
from keyhole.service.routes import BINARY, Request

_HOUR = 3600.0
_IPV6_NETWORK = 8  # bytes of an address that name a network, of which somebody has all the rest


class Guards:
    """Access, limits and counts of one service; all its routes share them."""

    def __init__(
        self, access: Access, limits: Limits, metrics: Metrics, clock: Callable[[], float]
    ) -> None:
        self.access, self.limits, self.metrics, self.clock = access, limits, metrics, clock

        def on_wait(change: int) -> None:
            metrics.change("waiting", change)

        self.gathers = Gate(limits.in_flight, limits.waiting, on_wait)
        self.memory = Gate(limits.max_held, limits.waiting, on_wait)
        # Their own: anyone who sends slowly holds up those who send, but not those who read.
        self.uploads = Gate(limits.max_held, limits.waiting, on_wait)
        # Likewise: private messages may be from strangers, and updates are from devices.
        self.messages = Gate(limits.max_held, limits.waiting, on_wait)
        self._by_token = TokenBuckets(limits.rate, limits.burst, limits.max_devices)
        self._by_address = TokenBuckets(limits.rate_per_address, limits.burst, limits.max_devices)
        self._queries = TokenBuckets(limits.queries_per_token / _HOUR, _HOUR, limits.max_devices)
        cpu = limits.cpu_per_address, limits.cpu_burst
        self._cpu = TokenBuckets(*cpu, limits.max_devices, min_size=0.0)
        self._query_turns, self._update_turns = Turns("private queries"), Turns("updates")
        self._batch_turns = Turns("sealed requests")

    def of_run(self, run: str) -> Guards:
        """Returns what stands before the routes of a run: its tokens, within the same budgets."""
        made = copy(self)
        made.access = replace(self.access, run=run)
        return made

    def admit(self, request: Request, round_id: str) -> TokenClaims | None:
        """Anyone who may read a round, if not too often; None where reading is free for all."""
        access, claims = self.access, None
        if access.reads_need_token:
            claims = access.asker(request.headers, round_id, self.clock())
        self.count(request, claims)
        return claims

    def count(self, request: Request, claims: TokenClaims | None) -> None:
        """Counts a request of a device or an address; raises TooManyError if it asks too often.

        A device is known by its token: devices of two runs may have one name.
        """
        if claims is not None:
            seconds = self._by_token.wait(claims.id, time.monotonic())
        elif self.limits.rate_per_address == inf:
            return
        else:
            seconds = self._by_address.wait(request.address, time.monotonic())
        if seconds:
            rate = self.limits.rate_per_address if claims is None else self.limits.rate
            raise too_many("requests", f"{rate:g} a second", seconds)

    def admit_query(self, request: Request, round_id: str) -> TokenClaims | None:
        """Anyone who may send a private query: by default that takes a token of the round."""
        access, claims = self.access, None
        if not access.open_queries:
            claims = access.asker(request.headers, round_id, self.clock())
        self.count(request, claims)
        return claims

    @asynccontextmanager
    async def query_turn(
        self, request: Request, claims: TokenClaims | None
    ) -> AsyncIterator[Callable[[float], None]]:
        """The turn of a private query, within the budgets of its token and its address; gives what
        is to be told the CPU seconds that it took.

        One query of a token is under way at a time: what one device asks is never more than one of
        the queries that share a pass, however many connections it has.
        """
        limits, now, address = self.limits, time.monotonic(), _counted(request.address)
        if address and (wait := self._cpu.wait(address, now, cost=0.0)):
            raise too_many(
                "private queries of one address",
                f"{limits.cpu_per_address:g} CPU seconds per second",
                wait,
            )
        name, room = f"address {address}", (limits.queries_at_once, limits.waiting)
        if claims is not None:
            name, room = f"token {claims.id}", (1, limits.queries_waiting)
            if wait := self._queries.wait(f"{claims.id} {claims.round}", now):
                told = f"{limits.queries_per_token:g} with one token, and as many again in an hour"
                raise too_many("private queries", told, wait)

        def charge(seconds: float) -> None:
            if address:
                self._cpu.charge(address, time.monotonic(), seconds)

        if claims is None and not address:  # a proxy's are of many, and have no turns
            yield charge
            return
        async with self._query_turns.turn(name, *room):
            yield charge

    def update_turn(self, claims: TokenClaims) -> AbstractAsyncContextManager[None]:
        """Returns the turn of an update: a token has few under way in all runs together, so one
        device does not take the room of the others however many connections it has."""
        return self._update_turns.turn(claims.id, self.limits.updates_at_once, waiting=0)

    def batch_turn(
        self, request: Request, claims: TokenClaims | None
    ) -> AbstractAsyncContextManager[None]:
        """Returns the turn of sealed requests: a token has as few bodies of them under way as of
        updates, and so has an address without one, whose others wait. A proxy's are of many, and
        have no turns."""
        at_once, address = self.limits.updates_at_once, _counted(request.address)
        if claims is not None:
            return self._batch_turns.turn(f"token {claims.id}", at_once, waiting=0)
        if not address:
            return nullcontext()
        return self._batch_turns.turn(f"address {address}", at_once, self.limits.waiting)

    @asynccontextmanager
    async def body(
        self, request: Request, limit: int | None = None, gate: Gate | None = None
    ) -> AsyncIterator[bytes]:
        """The body of a request, `max_body` bytes or `limit`; it counts as held until the context
        ends, among updates unless `gate` is another."""
        limit, gate = self.limits.max_body if limit is None else limit, gate or self.uploads
        announced = request.announced(limit)
        weight = limit if announced is None else announced
        await gate.enter(weight)
        try:
            yield bytes(await request.body(limit, self.limits))
        finally:
            gate.leave(weight)

    def check_type(self, request: Request) -> None:
        """Raises MediaTypeError unless the body is said to be a message of `docs/wire.md`."""
        if request.headers.get(BINARY[0]) != BINARY[1]:
            raise MediaTypeError(
                "a body of another content type: got another type; expected "
                f"{BINARY[1].decode('ascii')}; send that content-type"
            )


def _counted(address: str) -> str:
    """The name under which an address is counted: of IPv6 its first half, since one machine has all
    of the rest. Nothing for an address of this machine: a proxy's."""
    try:
        found = ip_address(address.partition("%")[0])
    except ValueError:
        return ""
    if isinstance(found, IPv6Address):
        if found.ipv4_mapped is None:
            return "" if found.is_loopback else found.packed[:_IPV6_NETWORK].hex()
        found = found.ipv4_mapped
    return "" if found.is_loopback else str(found)
