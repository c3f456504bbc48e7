"""Limits how much one request, one device, one address and all together may ask of a service."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, fields
from math import inf

from keyhole.errors import BusyError, InputError, TooManyError

_MIB = 1 << 20


@dataclass(frozen=True)
class Limits:
    """What the service allows. Each worker process counts for itself."""

    max_keys: int = 65_536  # of one query, over all tables
    max_body: int = 64 * _MIB  # bytes of an update
    max_answer: int = 512 * _MIB  # bytes of the records that one query asks for
    in_flight: int = 64  # queries whose slices are looked up at one time
    waiting: int = 8192  # requests that wait for their turn; the next ones are told to come back
    # bytes of answers in memory over all connections, as many of updates, and of private messages
    max_held: int = 1024 * _MIB
    rate: float = 100.0  # requests per second of one device, known by its token
    # likewise of one address, where there are no tokens. Devices behind one gateway share an
    # address, so the default does not count
    rate_per_address: float = inf
    burst: float = 10.0  # seconds of its rate that a device may use up at once
    # private queries of one token of a round, and as many again in each hour; a device makes one
    # for each table, and some more where it has to ask again
    queries_per_token: float = 64.0
    # CPU seconds that private queries of one address may take in a second, and at once. Addresses
    # of the machine itself are those of a proxy, which knows its clients, and are not counted
    cpu_per_address: float = 0.5
    cpu_burst: float = 30.0
    queries_waiting: int = 4  # private queries of one token beside the one under way
    queries_at_once: int = 8  # those of one address under way, where queries take no token
    updates_at_once: int = 2  # of one token; the next ones are told to come back
    max_devices: int = 65_536  # whose rates are remembered
    max_connections: int = 16_384  # at one time; fewer where the system allows fewer descriptors
    max_head: int = 16_384  # bytes of the head of a request
    # until the head of a request is there; and before it, a TLS handshake
    head_seconds: float = 10.0
    body_seconds: float = 30.0  # until its body is there, besides the time that `slowest` allows
    send_seconds: float = 30.0  # in which a reader must take `slowest` bytes for each
    idle_seconds: float = 15.0  # that a connection may rest between requests
    drain_seconds: float = 30.0  # that requests under way have left when the service stops
    slowest: float = 4096.0  # bytes per second; slower clients are cut off

    def __post_init__(self) -> None:
        for limit in fields(self):
            if not getattr(self, limit.name) > 0:
                raise InputError(
                    f"the limit {limit.name} would let nobody in: got {getattr(self, limit.name)}; "
                    "expected above 0; raise it"
                )


class TokenBuckets:
    """One bucket for each of a bounded number of names; the one not seen for longest is forgotten.

    A bucket fills with `rate` requests per second, up to `burst` seconds of it, and at `least` one;
    an infinite rate counts nothing.

    >>> buckets = TokenBuckets(rate=2.0, burst=0.5, limit=10)
    >>> [buckets.wait("phone-1", now) for now in (0.0, 0.25, 0.5)]
    [0.0, 0.25, 0.0]
    """

    def __init__(self, rate: float, burst: float, limit: int, min_size: float = 1.0) -> None:
        self._rate, self._size, self._limit = rate, max(min_size, rate * burst), limit
        # Requests that may be made at once, and the monotonic seconds when that was so.
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._buckets)

    def wait(self, name: str, now: float, cost: float = 1.0) -> float:
        """Counts a request; the seconds after which it may be made, 0 if it may now."""
        if self._rate == inf:
            return 0.0
        left = self._left(name, now)
        is_full = left >= cost  # with one request or more
        self._keep(name, left - cost if is_full else left, now)
        return 0.0 if is_full else (cost - left) / self._rate

    def charge(self, name: str, now: float, cost: float) -> None:
        """Takes what a request came to, once it is known; less than nothing may be left."""
        if self._rate < inf:
            self._keep(name, self._left(name, now) - cost, now)

    def _left(self, name: str, now: float) -> float:
        left, since = self._buckets.pop(name, (self._size, now))
        # A clock that goes backwards fills nothing, and takes nothing away.
        return min(self._size, left + self._rate * max(0.0, now - since))

    def _keep(self, name: str, left: float, now: float) -> None:
        self._buckets[name] = left, now
        if len(self._buckets) > self._limit:
            self._buckets.popitem(last=False)


class Gate:
    """Lets in so much at a time; the others wait in order, and too many are sent away.

    A weight above `limit` counts as `limit`: it goes in alone.
    """

    def __init__(
        self, limit: int, waiting: int, on_wait: Callable[[int], None] = lambda _: None
    ) -> None:
        self._limit, self._waiting, self._on_wait = limit, waiting, on_wait
        self.inside = 0  # the weight inside
        self._queue: deque[tuple[asyncio.Future[None], int]] = deque()

    @property
    def queued(self) -> int:
        """How many wait."""
        return len(self._queue)

    def enter_now(self, weight: int = 1) -> bool:
        """Goes in if that is possible without waiting."""
        weight = min(weight, self._limit)
        if self._queue or self.inside + weight > self._limit:
            return False
        self.inside += weight
        return True

    async def enter(self, weight: int = 1) -> None:
        """Goes in, after those who came before; raises BusyError if too many wait already."""
        if self.enter_now(weight):
            return
        if len(self._queue) >= self._waiting:
            raise BusyError(
                f"the service has too much under way: got {len(self._queue)} requests wait; "
                f"expected {self._waiting}; come back when the answer says"
            )
        turn = asyncio.get_running_loop().create_future()
        place = (turn, min(weight, self._limit))
        self._queue.append(place)
        self._on_wait(1)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave(weight)
            else:
                with suppress(ValueError):
                    self._queue.remove(place)
                    self._on_wait(-1)
                self._admit()
            raise

    def leave(self, weight: int = 1) -> None:
        """Goes out; anyone who is next and fits goes in."""
        self.inside -= min(weight, self._limit)
        self._admit()

    def _admit(self) -> None:
        while self._queue and self.inside + self._queue[0][1] <= self._limit:
            turn, weight = self._queue.popleft()
            self._on_wait(-1)
            if not turn.done():
                self.inside += weight
                turn.set_result(None)


class Turns:
    """Lets each name have so much under way; its others wait in order, and too many come back
    later. Names without anything under way are not kept, so that one who asks much makes nobody
    else wait but himself. The error says `what` there is too much of."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._gates: dict[str, Gate] = {}

    def __len__(self) -> int:
        return len(self._gates)

    @asynccontextmanager
    async def turn(self, name: str, at_once: int, waiting: int) -> AsyncIterator[None]:
        """Waits until it is the turn of a request; raises TooManyError if too many wait."""
        gate = self._gates.setdefault(name, Gate(at_once, waiting))
        if gate.queued >= waiting and gate.inside >= at_once:
            allowed = f"{at_once}, and {waiting} that wait"
            raise too_many(f"{self._what} at one time", allowed, 1.0)
        await gate.enter()
        try:
            yield
        finally:
            gate.leave()
            if not gate.inside and not gate.queued:
                self._gates.pop(name, None)


def too_many(what: str, allowed: str, seconds: float) -> TooManyError:
    """Returns the error of one who asks too much; the answer says after how many seconds to come
    back."""
    error = TooManyError(f"too many {what}: got one more; expected {allowed}; wait {seconds:.3g} s")
    error.retry_after = seconds
    return error
