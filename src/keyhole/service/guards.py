"""Checks what stands between a request and the work it asks for."""

from __future__ import annotations

import time
from collections.abc import Callable
from math import inf

from keyhole.errors import MediaTypeError, TooManyError
from keyhole.service.access import Access, TokenClaims
from keyhole.service.limits import Gate, Limits, TokenBuckets
from keyhole.service.metrics import Metrics
from keyhole.service.responses import BINARY
from keyhole.service.routes import Request


class Guards:
    """Access, limits and counts of one service; all its routes share them.

    Args:
        access: who may do what.
        limits: how much.
        metrics: what is counted.
        clock: unix seconds, for tokens.
    """

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
        self._by_device = TokenBuckets(limits.rate, limits.burst, limits.max_devices)
        self._by_address = TokenBuckets(limits.rate_per_address, limits.burst, limits.max_devices)

    def admit(self, request: Request, round_id: str) -> TokenClaims | None:
        """Anyone who may read a round, if not too often; None where reading is free for all."""
        access, claims = self.access, None
        if access.reads_need_token:
            claims = access.member(request.headers, round_id, self.clock())
        self.count(request, claims)
        return claims

    def count(self, request: Request, claims: TokenClaims | None) -> None:
        """Counts a request of a device or an address.

        Raises:
            TooManyError: it asks too often.
        """
        if claims is not None:
            seconds = self._by_device.wait(claims.device, time.monotonic())
        elif self.limits.rate_per_address == inf:
            return
        else:
            seconds = self._by_address.wait(request.address, time.monotonic())
        if seconds:
            rate = self.limits.rate_per_address if claims is None else self.limits.rate
            raise TooManyError(
                "too many requests",
                got="one more",
                allowed=f"{rate:g} a second",
                fix=f"wait {seconds:.3g} s",
            )

    def check_type(self, request: Request) -> None:
        """Raises MediaTypeError unless the body is said to be a message of `docs/wire.md`."""
        if request.headers.get(BINARY[0]) != BINARY[1]:
            raise MediaTypeError(
                "a body of another content type",
                got="another type",
                allowed=BINARY[1].decode("ascii"),
                fix="send that content-type",
            )
