"""A socket that nobody can hold: every wait has an end, and a stop event is one."""

from __future__ import annotations

import errno
import io
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

__all__ = ["PacedSocket", "Timeouts"]

_STEP = 0.1  # seconds between two looks at the stop event
_PIECE = 1 << 16  # bytes that are offered to the system at once


@dataclass(frozen=True)
class Timeouts:
    """Seconds after which a silent service counts as away.

    Args:
        connect: to reach it.
        read: until the head of an answer is there, until its next bytes are, or until the next
            bytes of what is sent are taken.
        slowest: bytes a second of an answer, or of what is sent, from `read` seconds on.
    """

    connect: float = 10.0
    read: float = 60.0
    slowest: float = 1024.0


class PacedSocket:
    """What `http.client` needs of a connected socket, with limits.

    The standard limits are either for all of an upload, or for each byte of an answer: the one
    gives up slow lines, and the other lets a service hold a device for ever.

    Args:
        connected: plain or TLS.
        timeouts: limits of each step.
        stop: once set, whatever is under way ends within a moment.
    """

    def __init__(
        self, connected: socket.socket, timeouts: Timeouts, stop: threading.Event | None
    ) -> None:
        connected.settimeout(min(_STEP, timeouts.read))
        # Else the system takes megabytes at once, and nobody knows how slowly they leave.
        with suppress(
            AttributeError, OSError
        ):  # where it lacks this, slow lines need more patience
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
        """The answers."""
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
