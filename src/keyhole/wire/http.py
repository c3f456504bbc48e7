"""Speaks HTTP on a device: one exchange at a time, tried again where that helps, then resumed.

Made of the standard library: `http.client` takes a fifth of the processor time of httpx for an
answer of 2 MB, and bodies are read straight into the buffer they stay in.

Errors of a service are rebuilt from what came over the wire. What a service says is not trusted:
its words are bounded, stripped of control characters, and never shown where the shape of an error
is missing.
"""

from __future__ import annotations

import random
import socket
import ssl
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field
from http.client import (
    HTTPConnection,
    HTTPException,
    HTTPResponse,
    HTTPSConnection,
    RemoteDisconnected,
)
from pathlib import Path
from typing import TypeAlias, cast

import msgspec

from keyhole import errors
from keyhole.errors import DamageError, InputError, KeyholeError, ProtocolError, ServiceError
from keyhole.wire.sockets import (
    Attempts,
    Certificate,
    Clock,
    PacedSocket,
    PartialBody,
    Retry,
    Timeouts,
    fresh_buffer,
    not_encrypted,
    not_trusted,
    parse_url,
    tls_context,
)

MAX_ERROR_BYTES = 1 << 16
"""Bytes of the body of an error; longer ones are not read to their end."""

REFUSAL = b"KHP2\x03".ljust(72, b"\0")
"""The answer to every unusable private message: it does not tell why."""

_MAX_WORDS = 400  # characters of one fact


class _Facts(msgspec.Struct, frozen=True):
    status: int
    kind: str
    wrong: str
    got: str
    allowed: str
    fix: str


class _Shape(msgspec.Struct, frozen=True):
    error: _Facts


def refusal_of(status: int, body: bytes | memoryview) -> KeyholeError:
    """Returns the error that an answer stands for.

    >>> body = b'{"error": {"status": 410, "kind": "TooLateError", "wrong": "the round is closed",'
    >>> body += b' "got": "round 3", "allowed": "an open round", "fix": "check in again"}}'
    >>> refusal_of(410, body)
    TooLateError('the round is closed: got round 3; expected an open round; check in again')
    """
    if status == ProtocolError.http_status and body == REFUSAL:
        return ProtocolError(
            "the service refuses a private message: got one that is damaged, stale, used before or "
            "for another server (it does not say); expected messages as docs/wire.md describes "
            "them; ask again; if it recurs, check that all servers have the same round"
        )
    try:
        facts = msgspec.json.decode(body, type=_Shape).error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ServiceError(
            f"the answer does not come from a slice service: got status {status} without the shape "
            "of an error; expected answers as docs/wire.md describes them; check the URL and what "
            "stands between the device and the service"
        )
    kind = getattr(errors, facts.kind, None) if facts.kind in errors.__all__ else None
    # Only refusals are taken over as they are: that the service has failed is no error of ours.
    if kind is None or not issubclass(kind, InputError):
        kind = ServiceError
    said = facts.wrong, facts.got, facts.allowed, facts.fix
    refusal: KeyholeError = kind(errors.worded(*map(_words, said)))
    return refusal


def _words(text: str) -> str:
    """A fact that cannot flood or steer a terminal."""
    kept = "".join(c if c.isprintable() else " " for c in text[:_MAX_WORDS])
    return kept + "..." * (len(text) > _MAX_WORDS)


OCTETS = "application/octet-stream"

_GOOD = (200, 201, 206)
# The service, or what stands before it, is busy, away, out of room or surprised by a failure.
_AGAIN = (408, 429, 500, 502, 503, 504, 507)
_MAX_IDLE = 4  # connections kept open between requests

_Place: TypeAlias = Callable[[int, Mapping[str, str], int], memoryview]
"""`(status, headers, length) -> where the body goes`; as long as the body."""


@dataclass
class Received:
    """What one exchange brought."""

    status: int = 0  # 0 if there was no answer
    headers: Mapping[str, str] = field(default_factory=dict)  # by name in lower case
    body: memoryview = field(default_factory=lambda: memoryview(b""))
    # why the request should be tried again; empty if the answer is whole and good
    problem: str = ""
    after: float | None = None  # seconds that the service asks to wait before that


class HttpClient:
    """Requests to one service. Threads may share it; each request has a connection of its own.

    Args:
        url: of the service, `https://host[:port][/prefix]`; plain `http` only on this machine,
            unless `insecure` says otherwise, since tokens and keys can be read on the way.
        ca: PEM file of the certificates to trust; None trusts those of the system.
        stop: once set, nothing is tried again.
    """

    def __init__(
        self,
        url: str,
        *,
        ca: Path | str | None = None,
        certificate: Certificate | None = None,
        retry: Retry | None = None,
        timeouts: Timeouts | None = None,
        clock: Clock | None = None,
        stop: threading.Event | None = None,
        insecure: bool = False,
    ) -> None:
        self._host, self._port, self._prefix, is_tls = parse_url(url, insecure)
        self._tls = tls_context(ca, certificate) if is_tls else None
        self._retry, self._timeouts = retry or Retry(), timeouts or Timeouts()
        self._clock, self._stop = clock or Clock(), stop
        # Draws from [0, 1), by the seed or else from the system.
        self._uniform = random.Random(self._retry.seed).random  # jitter  # nosec B311
        self._idle: list[HTTPConnection] = []
        self._is_known = False  # whether there ever was a good answer
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"Client({self.place})"

    @property
    def place(self) -> str:
        """Host and port that it speaks to."""
        return f"{self._host}:{self._port}"

    def close(self) -> None:
        """Closes the connections that are kept; a later request opens a new one."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def apart(self) -> HttpClient:
        """Returns a client of the same service that shares no connection with this one: the service
        cannot tell by those that both are one."""
        made = copy(self)
        made._idle, made._lock = [], threading.Lock()
        return made

    def attempts(self, what: str) -> Attempts:
        """Returns the attempts of one request, `what` in words."""
        drawn = self._retry, self._uniform, self._clock
        return Attempts(what, *drawn, self._stop, is_known=self._is_known)

    def send(
        self, path: str, body: bytes, *, token: str | None, limit: int, content_type: str
    ) -> Received:
        """POSTs something that may safely be sent twice, until there is a whole answer."""
        attempts = self.attempts(f"POST {path}")
        headers = {"content-type": content_type}
        while True:
            got = self.exchange("POST", path, body, headers=headers, token=token, limit=limit)
            if not got.problem:
                return got
            attempts.failed(got.problem, got.after)

    def get(
        self,
        path: str,
        *,
        token: str | None = None,
        limit: int,
        check: Callable[[memoryview], None] = lambda _: None,
    ) -> Received:
        """GETs something; a body that was cut goes on where it ended.

        Args:
            check: raises DamageError on a body that is not right; it is fetched again.
        """
        attempts, part = self.attempts(f"GET {path}"), PartialBody()
        while True:
            got = self.exchange(
                "GET", path, headers=part.headers, token=token, limit=limit, place=part.place
            )
            if part.add(got.status, len(got.body)):
                attempts.got_further()
            if got.problem:
                attempts.failed(got.problem, got.after)
                continue
            try:
                check(part.body)
                return Received(got.status, got.headers, part.body)
            except DamageError as error:
                part = PartialBody()
                attempts.failed("damage", error=error)

    def exchange(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        headers: Mapping[str, str],
        token: str | None,
        limit: int,
        place: _Place | None = None,
        may_repeat: bool = True,
    ) -> Received:
        """Asks once.

        Args:
            may_repeat: whether the same bytes may be sent a second time, where a connection turns
                out to have been closed before. Messages of private protocols must not.

        Returns:
            The answer; with a `problem` where asking again may help.
        """
        given = {"accept": "*/*", **headers}
        if token is not None:
            given["authorization"] = f"Bearer {token}"
        while True:
            connection, is_used = self._take()
            try:
                response = self._ask(connection, method, self._prefix + path, body, given)
            except (OSError, HTTPException) as error:
                connection.close()
                if isinstance(error, ssl.SSLCertVerificationError):
                    raise not_trusted(error) from error  # the next one would be no better
                if isinstance(error, ssl.SSLError) and error.reason in _NO_TLS:
                    raise not_encrypted() from error
                if may_repeat and is_used and isinstance(error, _HUNG_UP):
                    continue  # the service had closed it in the meantime: no failure of this one
                return Received(problem=_reason(error))
            try:
                got = self._receive(connection, response, limit, place)
            except BaseException:
                connection.close()
                raise
            if not got.problem and got.status not in _GOOD:
                raise refusal_of(got.status, got.body)  # its connection is as good as before
            self._is_known = self._is_known or not got.problem
            return got

    def _take(self) -> tuple[HTTPConnection, bool]:
        """A connection, and whether it has been used."""
        with self._lock:
            if self._idle:
                return self._idle.pop(), True
        where, seconds = (self._host, self._port), self._timeouts.connect
        if self._tls is None:
            return HTTPConnection(*where, timeout=seconds), False
        return HTTPSConnection(*where, timeout=seconds, context=self._tls), False

    def _ask(
        self,
        connection: HTTPConnection,
        method: str,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
    ) -> HTTPResponse:
        if getattr(connection, "sock", None) is None:
            connection.connect()
            paced = PacedSocket(connection.sock, self._timeouts, self._stop)
            connection.sock = cast("socket.socket", paced)
        try:
            connection.request(method, path, body or None, dict(headers))
        except (BrokenPipeError, ConnectionResetError):
            # A service that refuses a body may answer before it has read it, and hang up.
            with suppress(OSError, HTTPException):
                return _head(connection)
            raise
        return _head(connection)

    def _receive(
        self,
        connection: HTTPConnection,
        response: HTTPResponse,
        limit: int,
        place: _Place | None,
    ) -> Received:
        headers = {name.lower(): value for name, value in response.getheaders()}
        got = Received(response.status, headers)
        is_good, length = response.status in _GOOD, response.length
        allowed = limit if is_good else MAX_ERROR_BYTES
        # Without a length the end of a body cannot be told from a cut, not even in the headers.
        if length is None:
            connection.close()
            got.problem = "an answer that was cut, or has no length"
            return got
        if length > allowed:
            connection.close()
            raise ServiceError(
                f"the answer is longer than it can be: got {length} bytes with status "
                f"{response.status}; expected {allowed} bytes; check the URL and what stands "
                "between the device and the service"
            )
        if place is None or not is_good:
            buffer = fresh_buffer(length)
        else:
            buffer = place(response.status, headers, length)
        count, problem = self._read(response, buffer)
        got.body = buffer[:count]
        if problem:
            connection.close()
            got.problem = problem
            return got
        self._give_back(connection, response)
        if response.status in _AGAIN:
            got.problem = f"status {response.status}"
            got.after = _seconds(headers.get("retry-after", ""))
            got.body = got.body[:0]
        return got

    def _read(self, response: HTTPResponse, buffer: memoryview) -> tuple[int, str]:
        """How much of a body arrived, and why no more."""
        count, since, limits = 0, self._clock.monotonic(), self._timeouts
        while count < len(buffer):
            # What is there, and no more: so it is known what arrived before a failure, and a
            # trickle is noticed. `HTTPResponse.readinto` would wait for all of it.
            try:
                n = response.fp.readinto1(buffer[count:])
            except (OSError, HTTPException) as error:
                return count, _reason(error)
            if not n:
                return count, "an answer that was cut"
            count += n
            spent = self._clock.monotonic() - since
            if spent > limits.read + count / limits.slowest:
                return count, "an answer that is too slow"
        response.close()  # of this answer; the connection stays open
        return count, ""

    def _give_back(self, connection: HTTPConnection, response: HTTPResponse) -> None:
        """Keeps a connection for the next request, if it can be used again."""
        with self._lock:
            if not response.will_close and len(self._idle) < _MAX_IDLE:
                self._idle.append(connection)
                return
        connection.close()


def _head(connection: HTTPConnection) -> HTTPResponse:
    """Waits for the head of an answer; any number of interim ones count as one."""
    with cast("PacedSocket", connection.sock).one_limit():
        return connection.getresponse()


_NO_TLS = "WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE"
_HUNG_UP = (ConnectionResetError, BrokenPipeError, ConnectionAbortedError)


def _reason(error: Exception) -> str:
    """Why an exchange failed, in words without what was sent."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, RemoteDisconnected):
        return "a connection that was closed"
    if isinstance(error, OSError):
        return (error.strerror or type(error).__name__).lower()
    return f"an answer that is not HTTP ({type(error).__name__})"


def _seconds(text: str) -> float | None:
    """Retry-After in seconds; dates are not used, since clocks of devices are often wrong."""
    return float(text) if text.isdecimal() and len(text) < 10 else None
