"""Connects a device to each server of private retrieval, and carries its queries to all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from keyhole.delivery.exchange import Unanswered
from keyhole.delivery.pir.database import PirParams
from keyhole.device.device import Assignment, Device
from keyhole.device.fetch import FetchTraffic
from keyhole.errors import (
    NotFoundError,
    ProtocolError,
    ServiceError,
    StaleError,
)
from keyhole.wire.assignment import NO_ROUND
from keyhole.wire.http import OCTETS, Received
from keyhole.wire.private import SERVER_HEADER

_MAX_TERMS = 1024  # bytes

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class ServerLine:
    """One server.

    Args:
        device: that speaks to it.
        round: as this server knows the device in it.
    """

    device: Device
    round: Assignment | str

    def get(
        self, path: str, limit: int, check: Callable[[memoryview], None] = lambda _: None
    ) -> Received:
        """GETs something of the round; `check` as for `Client.get`."""
        token = self.device.token_for(self.round)
        return self.device.client.get(path, token=token, limit=limit, check=check)

    def post(self, path: str, message: bytes, limit: int) -> Received:
        """Sends a message, once."""
        return self.device.client.exchange(
            "POST",
            path,
            message,
            headers={"content-type": OCTETS},
            token=self.device.token_for(self.round),
            limit=limit,
            may_repeat=False,
        )


@dataclass(frozen=True)
class Lines:
    """All servers of a scheme, in their order.

    Args:
        each: one line to each.
        pool: threads, as many as lines: servers are asked at the same time.
        traffic: what asking costs is added here.
    """

    each: Sequence[ServerLine]
    pool: Executor
    traffic: FetchTraffic

    def params(self, path: str) -> PirParams:
        """The params of a table, which all servers must state alike.

        Raises:
            StaleError: they do not, or one of them does not have the round.
            ServiceError: a server is not the one it is taken for. Both halves of a question at one
                server would show it all keys. Or it is set up otherwise than the first.
            RequestError: one of them refuses.
        """
        calls = [partial(self._params, server, line, path) for server, line in enumerate(self.each)]
        found = self._at_once(calls)
        self.traffic.requests += len(found)
        self.traffic.bytes_down += sum(len(params.encode()) for params in found)
        if any(params.max_keys != found[0].max_keys for params in found):
            raise _set_up_wrongly(
                "queries padded to " + " and ".join(f"{params.max_keys} keys" for params in found)
            )
        if any(params != found[0] for params in found):
            raise _differ("params that differ")
        return found[0]

    def exchange(self, path: str, messages: Sequence[bytes], limit: int) -> list[Received]:
        """Sends one message to each server, at the same time; `limit` is of one reply."""
        self.traffic.requests += len(messages)
        self.traffic.bytes_up += sum(map(len, messages))
        got = self._at_once(
            [
                partial(line.post, path, message, limit)
                for line, message in zip(self.each, messages, strict=True)
            ]
        )
        self.traffic.bytes_down += sum(len(each.body) for each in got)
        return got

    def _params(self, server: int, line: ServerLine, path: str) -> PirParams:
        try:
            got = line.get(path, _MAX_TERMS)
        except NotFoundError as error:
            if server == 0:
                raise
            if error.wrong != NO_ROUND:  # no later round will be there either
                raise _set_up_wrongly(f"{error.wrong} at server {server}") from error
            raise _differ(f"{error.wrong} at server {server}") from error
        if got.headers.get(SERVER_HEADER) != str(server):
            raise ServiceError(
                "another server answers",
                got=f"one that does not say that it is server {server}",
                allowed=f"server {server}",
                fix="name the service that runs with --pir 0 first, the other one second",
            )
        return PirParams.decode(bytes(got.body))

    def _at_once(self, calls: Sequence[Callable[[], _Result]]) -> list[_Result]:
        """Runs calls side by side, all to their end; then the first error counts."""
        started = [self.pool.submit(call) for call in calls]
        failures = [each.exception() for each in started]
        for failure in failures:
            if failure is not None:
                raise failure
        return [each.result() for each in started]


@dataclass(frozen=True)
class Target:
    """Where one table is retrieved from.

    Args:
        path: of its private retrieval.
        reply_bytes: of one reply.
    """

    path: str
    reply_bytes: int


class TableLinks:
    """The links to the servers of some tables, as `retrieve` uses them.

    Args:
        lines: to the servers.
        targets: the tables; their lengths are such that this device takes them.
    """

    def __init__(self, lines: Lines, targets: Sequence[Target]) -> None:
        self._lines, self._targets = lines, targets
        client = lines.each[0].device.client
        self._attempts = [client.attempts(f"POST {target.path}") for target in targets]

    def exchange(
        self, sent: Mapping[int, tuple[bytes, ...]]
    ) -> Mapping[int, Sequence[bytes] | Unanswered]:
        """Implements `Links.exchange`, table by table."""
        return {place: self._exchange(place, messages) for place, messages in sent.items()}

    def failed(self, place: int, failure: Unanswered) -> None:
        """Implements `Links.failed`: waits, or raises ServiceError."""
        self._attempts[place].failed(failure.reason, failure.after)

    def _exchange(self, place: int, messages: Sequence[bytes]) -> Sequence[bytes] | Unanswered:
        target = self._targets[place]
        try:
            got = self._lines.exchange(target.path, messages, target.reply_bytes)
        except StaleError:
            raise
        except ProtocolError:
            return Unanswered("a message that was refused")
        if reason := _problem(got):
            return Unanswered(reason, max(each.after or 0.0 for each in got))
        return [bytes(each.body) for each in got]


def _problem(got: Sequence[Received]) -> str:
    """Why the first server that failed did, and which of several it is; empty if none did."""
    for server, each in enumerate(got):
        if each.problem:
            return each.problem + f" at server {server}" * (len(got) > 1)
    return ""


def _set_up_wrongly(got: str) -> ServiceError:
    return ServiceError(
        "the servers are not set up alike",
        got=got,
        allowed="private retrieval with the same settings at every server",
        fix="check the URLs, and --pir and --pir-keys at each",
    )


def _differ(got: str) -> StaleError:
    return StaleError(
        "the servers do not hold the same slices",
        got=got,
        allowed="the same round, slices and settings at every server",
        fix="wait until the round is at all of them; else check --pir-keys at each",
    )
