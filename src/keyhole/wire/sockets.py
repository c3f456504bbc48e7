"""Opens sockets whose every wait has an end, and says how often a device tries again.

An address is a URL and the certificates to trust for it. A body that was cut goes on where it
ended.
"""

from __future__ import annotations

import errno
import io
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from ipaddress import ip_address
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

import numpy as np

from keyhole.errors import AwayError, DamageError, InputError, ServiceError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


_STEP = 0.1  # seconds between two looks at the stop event
_PIECE = 1 << 16  # bytes that are offered to the system at once


@dataclass(frozen=True)
class Timeouts:
    """Seconds after which a silent service counts as away."""

    connect: float = 10.0  # to reach it
    # until the head of an answer is there, until its next bytes are, or until the next bytes
    # of what is sent are taken
    read: float = 60.0
    # bytes per second of an answer, or of what is sent, from `read` seconds on
    slowest: float = 1024.0


class PacedSocket:
    """What `http.client` needs of a connected socket, with limits.

    The standard limits are either for all of an upload, or for each byte of an answer: the one
    gives up slow lines, and the other lets a service hold a device for ever.

    Args:
        stop: once set, whatever is under way ends within a moment.
    """

    def __init__(
        self, connected: socket.socket, timeouts: Timeouts, stop: threading.Event | None
    ) -> None:
        connected.settimeout(min(_STEP, timeouts.read))
        # Else the system takes megabytes at once, and nobody knows how slowly they leave.
        # Where it lacks this, slow lines need more patience.
        with suppress(AttributeError, OSError):
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _PIECE)
        self._socket, self._timeouts, self._stop = connected, timeouts, stop
        self._end: float | None = None

    @contextmanager
    def one_limit(self) -> Iterator[None]:
        """What is read meanwhile has one limit altogether, however many bytes it comes in."""
        self._end = time.monotonic() + self._timeouts.read
        try:
            yield
        finally:
            self._end = None

    def sendall(self, data: bytes) -> None:
        """Sends in pieces: a slow line may take its time as long as it takes something."""
        left, since = memoryview(data), time.monotonic()
        end = since + self._timeouts.read
        while left:
            try:
                left = left[self._socket.send(left[:_PIECE]) :]
                sent = len(data) - len(left)
                slowest = since + self._timeouts.read + sent / self._timeouts.slowest
                end = min(slowest, time.monotonic() + self._timeouts.read)
            except TimeoutError:
                pass
            self._check(end)

    def read_into(self, buffer: WriteableBuffer) -> int:
        """Waits for the next bytes; returns how many there are, 0 at the end."""
        end = self._end or time.monotonic() + self._timeouts.read
        while True:
            self._check(end)
            try:
                return self._socket.recv_into(buffer)
            except TimeoutError:
                pass

    def makefile(self, mode: Literal["rb"]) -> io.BufferedReader:
        """Returns the answers."""
        return io.BufferedReader(_Answers(self, self._socket.makefile(mode, buffering=0)))

    def close(self) -> None:
        """Closes it, once the answer that is being read is closed as well."""
        self._socket.close()

    def _check(self, end: float) -> None:
        if self._stop is not None and self._stop.is_set():
            raise OSError(errno.ECANCELED, "a stop event")
        if time.monotonic() > end:
            raise TimeoutError


class _Answers(io.RawIOBase):
    """Reads by way of a paced socket, and keeps the real one open until it is closed itself."""

    def __init__(self, paced: PacedSocket, opened: io.IOBase) -> None:
        self._paced, self._opened = paced, opened

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        return self._paced.read_into(buffer)

    def close(self) -> None:
        self._opened.close()
        super().close()


@dataclass(frozen=True)
class Certificate:
    """What a device shows where the service asks for mutual TLS: PEM files."""

    file: Path
    key: Path


def parse_url(url: str, insecure: bool) -> tuple[str, int, str, bool]:
    """Host, port, prefix of paths, and whether TLS is spoken."""
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").encode("idna").decode(), parts.port
    except ValueError:  # UnicodeError is one: of labels that are empty or too long
        parts, host, port = urlsplit(""), "", None
    is_known = parts.scheme in ("http", "https") and not (parts.query or parts.username)
    if not (is_known and host and _is_visible(host + parts.path)):
        raise InputError(
            f"not the URL of a service: got {url!r}; expected https://host[:port][/prefix]; "
            "pass the address that the operator gave"
        )
    is_tls = parts.scheme == "https"
    if not (is_tls or insecure or _is_loopback(host)):
        raise InputError(
            f"tokens and keys would travel in the clear: got http to {host}; expected https, or "
            "http on this machine; use https, or pass --insecure (insecure=True) where the network "
            "itself is safe"
        )
    return host, port or (443 if is_tls else 80), parts.path.rstrip("/"), is_tls


def _is_visible(text: str) -> bool:
    """Whether it can stand in the head of a request."""
    return text.isascii() and text.isprintable() and " " not in text


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def tls_context(ca: Path | str | None, certificate: Certificate | None) -> ssl.SSLContext:
    """Returns how a device speaks TLS: whom it trusts, and what it shows."""
    try:
        context = ssl.create_default_context(cafile=None if ca is None else str(ca))
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if certificate is not None:
            context.load_cert_chain(certificate.file, certificate.key)
    except OSError as error:  # SSLError is one
        raise InputError(
            f"a certificate cannot be read: got {error!s}; expected PEM files; check the files "
            "of --ca, --cert and --key"
        ) from error
    return context


def not_trusted(error: ssl.SSLCertVerificationError) -> ServiceError:
    """Returns the error of a service that is not who it should be."""
    return ServiceError(
        f"the certificate of the service is not trusted: got {error.verify_message}; expected one "
        "that an authority of --ca has signed, for the host of the URL; pass the operator's "
        "authority, and the host name as the certificate has it"
    )


def not_encrypted() -> ServiceError:
    """Returns the error of a service that does not answer in TLS at an https address."""
    return ServiceError(
        "the service does not speak TLS: got an answer in plain http, or of another protocol; "
        "expected https, as the URL says; check its port, or write http:// where the service "
        "speaks that"
    )


@dataclass(frozen=True)
class Retry:
    """How a device tries again: exponential back-off with full jitter.

    The i-th wait is drawn from `[0, min(longest_wait, first_wait * 2^i)]`, so that devices which
    fail together do not come back together. Where the service says when to come back, that is the
    least wait, though never more than `longest_wait`.
    """

    attempts: int = 8  # how often a request is tried in a row without getting anywhere
    first_wait: float = 0.5  # seconds
    longest_wait: float = 60.0  # seconds
    seed: int | None = None  # of the jitter; None draws it from the system
    # called with the reason of a failure, in words without a key, before the wait; also from
    # several threads at once
    tell: Callable[[str], object] = lambda _: None

    def __post_init__(self) -> None:
        if self.attempts < 1 or not 0 <= self.first_wait <= self.longest_wait < inf:
            raise InputError(
                f"retrying is out of range: got {self.attempts} attempts, waits {self.first_wait} "
                f"to {self.longest_wait} s; expected 1 attempt or more, waits from 0 that do not "
                "shrink; choose other numbers"
            )

    def wait(self, failures: int, after: float | None, uniform: float) -> float:
        """Seconds to wait after this many failures in a row, 1 or more.

        Args:
            after: what the service asks for, in seconds, if it does.

        >>> Retry(first_wait=1.0).wait(3, None, 0.5), Retry(longest_wait=9).wait(1, 600, 0.5)
        (2.0, 9)
        """
        # Doublings beyond 63 would leave the floats; the longest wait is reached long before.
        drawn = uniform * min(self.longest_wait, self.first_wait * 2.0 ** min(failures - 1, 63))
        return min(self.longest_wait, drawn + (after or 0.0))


@dataclass(frozen=True)
class Clock:
    """How time passes; tests bring their own.

    Only differences of `monotonic` are used: what the clock on the wall does is of no consequence,
    but for one thing: whether a service that calls a token untimely may have a wrong one.
    """

    sleep: Callable[[float], object] = time.sleep
    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time  # unix seconds


class Attempts:
    """The failures of one request in a row; waits after each, and gives up in the end.

    Args:
        what: is asked for, in words for the error; names no key.
        is_known: whether the service has answered before: it is away, and not a wrong address.
    """

    def __init__(
        self,
        what: str,
        retry: Retry,
        uniform: Callable[[], float],
        clock: Clock,
        stop: threading.Event | None = None,
        is_known: bool = False,
    ) -> None:
        self._what, self._retry, self._uniform = what, retry, uniform
        self._failure = AwayError if is_known else ServiceError
        self._clock, self._stop = clock, stop
        self._failures = self._damages = 0

    def got_further(self) -> None:
        """A part of the answer is here: what failed before does not count any more, but for
        damage, which makes all parts worthless."""
        self._failures = 0

    def failed(
        self, reason: str, after: float | None = None, error: DamageError | None = None
    ) -> None:
        """Waits, if there is another attempt.

        Args:
            error: the damage, if that was it; raised instead of a ServiceError in the end.

        Raises:
            ServiceError: that was the last attempt, or the device is to stop; AwayError where the
                service has answered before.
        """
        self._failures += error is None
        self._damages += error is not None
        failures = self._failures + self._damages
        self._check_stop()
        if failures >= self._retry.attempts:
            raise error or self._failure(
                f"no usable answer: {self._what}: got {reason}, the last of {failures} failures in "
                "a row; expected an answer; check that the service runs and can be reached, then "
                "try again"
            )
        self._retry.tell(reason)
        self._clock.sleep(self._retry.wait(failures, after, self._uniform()))
        self._check_stop()

    def _check_stop(self) -> None:
        if self._stop is not None and self._stop.is_set():
            raise ServiceError(
                f"stopped: {self._what}: got a stop event; expected no stop before the answer; "
                "take part again when there is time"
            )


_FURTHER = 1 << 16  # bytes that count as having got further


def fresh_buffer(length: int) -> memoryview:
    """Bytes to be written, which nobody has set to zero first."""
    try:
        return np.empty(length, np.uint8).data
    except MemoryError as error:
        raise ServiceError(
            f"the answer does not fit into memory: got {length} bytes; expected what this device "
            "has room for; ask for less at a time, with a smaller max_answer"
        ) from error


def refuse_longer(what: str, length: int, limit: int) -> None:
    """Refuses what a manifest describes before anything is asked for or allocated."""
    if length > limit:
        raise ServiceError(
            f"{what} is longer than this device takes: got {length} bytes; expected {limit} bytes; "
            "raise max_answer, if the service is to be trusted with the memory"
        )


class PartialBody:
    """What has arrived of a body that is fetched in one or more goes."""

    def __init__(self) -> None:
        self.body = memoryview(b"")  # whole, once all of it is there
        self._count = self._furthest = 0
        self._tag = ""

    @property
    def headers(self) -> dict[str, str]:
        """Asks for the rest, if the service can tell whether it is the rest of the same."""
        if not (self._tag and self._count):
            return {}
        return {"range": f"bytes={self._count}-", "if-range": self._tag}

    def place(self, status: int, headers: Mapping[str, str], length: int) -> memoryview:
        """Returns where the body of an answer goes."""
        total = len(self.body)
        if status == 206:
            expected = f"bytes {self._count}-{total - 1}/{total}"
            if headers.get("content-range") != expected or length != total - self._count:
                self._count = 0
                raise ServiceError(
                    "the answer continues another one: got a range that was not asked for; "
                    "expected the rest of the body; check what stands between the device and the "
                    "service"
                )
            return self.body[self._count :]
        self.body, self._count = fresh_buffer(length), 0
        tag = headers.get("etag", "")
        self._tag = "" if tag.startswith("W/") else tag  # a weak tag does not vouch for bytes
        return self.body

    def add(self, status: int, count: int) -> bool:
        """Takes note of how many bytes have arrived; returns whether the body has got further.

        Bytes that came once before are no progress: else a service that cuts every answer, and
        resumes none, would be asked for ever.
        """
        if status not in (200, 206):
            return False  # of an error, which is no part of the body
        self._count += count
        if self._count < self._furthest + _FURTHER:
            return False
        self._furthest = self._count
        return True
