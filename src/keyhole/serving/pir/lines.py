"""Lines: a device's way to each server of private retrieval, and one question asked over all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from keyhole.errors import MalformedError, NotFoundError, ProtocolError, ServiceError, StaleError
from keyhole.private.pir.retrieval import Asker, Question, Retrieved
from keyhole.private.pir.terms import Terms
from keyhole.serving.device.client import OCTETS, Received
from keyhole.serving.device.device import Assignment, Device
from keyhole.serving.device.partial_body import refuse_longer
from keyhole.serving.device.slice_query import Traffic
from keyhole.serving.pir.schemes import SERVER_HEADER, Lengths
from keyhole.types import KeyArray

__all__ = ["Line", "Lines", "Target"]

_MOST_TERMS = 1024  # bytes

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
        self, path: str, most: int, check: Callable[[memoryview], None] = lambda _: None
    ) -> Received:
        """GETs something of the round; `check` as for `Client.get`."""
        token = self.device.token_for(self.round)
        return self.device.client.get(path, token=token, most=most, check=check)

    def post(self, path: str, message: bytes, most: int) -> Received:
        """Sends a message, once."""
        return self.device.client.exchange(
            "POST",
            path,
            message,
            headers={"content-type": OCTETS},
            token=self.device.token_for(self.round),
            most=most,
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
    traffic: Traffic

    def terms(self, path: str) -> Terms:
        """The terms of a table, which all servers must state alike.

        Raises:
            StaleError: they do not, or one of them does not have the round.
            ServiceError: a server is not the one it is taken for. Both halves of a question at one
                server would show it all keys.
            RequestError: one of them refuses.
        """
        calls = [partial(self._terms, server, line, path) for server, line in enumerate(self.each)]
        found = self._at_once(calls)
        self.traffic.requests += len(found)
        self.traffic.bytes_down += sum(len(terms.encode()) for terms in found)
        if any(terms != found[0] for terms in found):
            raise _differ("terms that differ")
        return found[0]

    def retrieve(self, target: Target, question: Question) -> Retrieved:
        """Asks until there is a whole answer of every server to one and the same question.

        No message is ever sent twice: after a failure, whatever it was, all keys are asked for
        anew, with fresh secrets.

        Args:
            target: what to retrieve.
            question: the first one, made of the target's keys.

        Raises:
            IntegrityError: a server lies or is damaged; nothing is tried again.
            StaleError: a server answers about other slices.
            ServiceError, RequestError: no usable answer.
        """
        first = self.each[0].device
        refuse_longer("a private query", target.lengths.query, first.most_answer)
        refuse_longer("a private reply", target.lengths.reply, first.most_answer)
        attempts = first.client.attempts(f"POST {target.path}")
        while True:
            reason, after = "", None
            try:
                replies = self._exchange(target, question.messages())
                reason = next((got.problem for got in replies if got.problem), "")
                after = max((got.after or 0.0 for got in replies), default=None)
                if not reason:
                    return question.open([bytes(got.body) for got in replies])
            except MalformedError:
                reason = "a reply that cannot be read"
            except ProtocolError as error:
                if isinstance(error, StaleError):
                    raise
                reason = "a message that was refused"
            attempts.failed(reason, after)
            question = target.asker.ask(target.keys)

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
            got = line.get(path, _MOST_TERMS)
        except NotFoundError as error:
            if server == 0:
                raise
            raise _differ(f"a server that has no such table: {error.wrong}") from error
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


def _differ(got: str) -> StaleError:
    return StaleError(
        "the servers do not hold the same slices",
        got=got,
        allowed="the same round, slices and settings at every server",
        fix="wait until the round is at all of them; else check --pir-keys at each",
    )
