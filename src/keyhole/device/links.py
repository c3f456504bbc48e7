"""Connects a device to each server of private retrieval, and asks one question over all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from keyhole.arrays import KeyArray
from keyhole.delivery.pir.database import Terms
from keyhole.delivery.pir.messages import Asker, Retrieved
from keyhole.device.device import Assignment, Device
from keyhole.device.fetch import FetchTraffic
from keyhole.errors import (
    KeyholeError,
    MalformedError,
    NotFoundError,
    ProtocolError,
    ServiceError,
    StaleError,
)
from keyhole.wire.http import OCTETS, Received
from keyhole.wire.private import SERVER_HEADER, Lengths
from keyhole.wire.sockets import Attempts
from keyhole.wire.tables import NO_ROUND

_MAX_TERMS = 1024  # bytes

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Line:
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
class Target:
    """One table to retrieve from.

    Args:
        path: of its private retrieval.
        asker: of it.
        lengths: of its messages.
        keys: what the device wants of it.
    """

    path: str
    asker: Asker
    lengths: Lengths
    keys: KeyArray

    def __repr__(self) -> str:
        """Keys are private: printing shows what everybody sees."""
        return f"Target({self.path})"


class _Asking:
    """A table while it is asked: its present question, and in the end what was found."""

    def __init__(self, target: Target, attempts: Attempts) -> None:
        self.target, self._attempts = target, attempts
        self.question = target.asker.ask(target.keys)
        self.found: list[Retrieved] = []

    def again(self, reason: str, after: float | None = None) -> None:
        """Makes a new question, after a while; raises ServiceError if that is of no use."""
        self._attempts.failed(reason, after)
        self.question = self.target.asker.ask(self.target.keys)


@dataclass(frozen=True)
class Lines:
    """All servers of a scheme, in their order.

    Args:
        each: one line to each.
        pool: threads, as many as lines: servers are asked at the same time.
        traffic: what asking costs is added here.
    """

    each: Sequence[Line]
    pool: Executor
    traffic: FetchTraffic

    def terms(self, path: str) -> Terms:
        """The terms of a table, which all servers must state alike.

        Raises:
            StaleError: they do not, or one of them does not have the round.
            ServiceError: a server is not the one it is taken for. Both halves of a question at one
                server would show it all keys. Or it is set up otherwise than the first.
            RequestError: one of them refuses.
        """
        calls = [partial(self._terms, server, line, path) for server, line in enumerate(self.each)]
        found = self._at_once(calls)
        self.traffic.requests += len(found)
        self.traffic.bytes_down += sum(len(terms.encode()) for terms in found)
        if any(terms.max_keys != found[0].max_keys for terms in found):
            raise _set_up_wrongly(
                "queries padded to " + " and ".join(f"{terms.max_keys} keys" for terms in found)
            )
        if any(terms != found[0] for terms in found):
            raise _differ("terms that differ")
        return found[0]

    def retrieve(self, targets: Sequence[Target]) -> list[Retrieved]:
        """Asks until there is a whole answer of every server about every table.

        No reply is opened before all tables have been asked: whoever finds out that something in
        one of them is wrong stops, and must not show in which. No message is ever sent twice:
        after a failure, whatever it was, all keys of a table are asked for anew, with fresh
        secrets. What is asked again shows which reply could not be read, and never what was in it.

        Args:
            targets: what to retrieve; their lengths are such that this device takes them.

        Returns:
            What was found in each.

        Raises:
            KeySpaceError: keys that cannot be asked for; nothing has been sent.
            IntegrityError: a server lies or is damaged; nothing is tried again.
            StaleError: a server answers about other slices.
            ServiceError, RequestError: no usable answer.
        """
        client = self.each[0].device.client
        asking = [_Asking(target, client.attempts(f"POST {target.path}")) for target in targets]
        left = asking
        while left:
            left = _open_all([(each, self._replies(each)) for each in left])
        return [found for each in asking for found in each.found]

    def _replies(self, asking: _Asking) -> list[bytes]:
        """One whole reply of every server about one table, not opened."""
        while True:
            reason, after = "", None
            try:
                got = self._exchange(asking.target, asking.question.messages())
                reason = _problem(got)
                after = max((each.after or 0.0 for each in got), default=None)
                if not reason:
                    return [bytes(each.body) for each in got]
            except StaleError:
                raise
            except ProtocolError:
                reason = "a message that was refused"
            asking.again(reason, after)

    def _exchange(self, target: Target, messages: Sequence[bytes]) -> list[Received]:
        """One message to each server, at the same time."""
        self.traffic.requests += len(messages)
        self.traffic.bytes_up += sum(map(len, messages))
        got = self._at_once(
            [
                partial(line.post, target.path, message, target.lengths.reply)
                for line, message in zip(self.each, messages, strict=True)
            ]
        )
        self.traffic.bytes_down += sum(len(each.body) for each in got)
        return got

    def _terms(self, server: int, line: Line, path: str) -> Terms:
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
        return Terms.decode(bytes(got.body))

    def _at_once(self, calls: Sequence[Callable[[], _Result]]) -> list[_Result]:
        """Runs calls side by side, all to their end; then the first error counts."""
        started = [self.pool.submit(call) for call in calls]
        failures = [each.exception() for each in started]
        for failure in failures:
            if failure is not None:
                raise failure
        return [each.result() for each in started]


def _open_all(replies: Sequence[tuple[_Asking, list[bytes]]]) -> list[_Asking]:
    """Opens the replies about all tables, then raises what was wrong with the first of them.

    Returns:
        The tables whose replies cannot be read, with new questions.
    """
    unread, failures = [], []
    for asking, got in replies:
        try:
            asking.found = [asking.question.open(got)]
        except MalformedError:
            unread.append(asking)
        except KeyholeError as error:
            failures.append(error)
    if failures:
        raise failures[0]
    for asking in unread:
        asking.again("a reply that cannot be read")
    return unread


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
