"""The load: connections that send prepared requests and count the bytes that come back.

Answers are not parsed while it is measured: a first pass learns how long each one is, and from then
on an answer is a number of bytes. That keeps the client cheap enough for one core to load another.
"""

from __future__ import annotations

import os
import resource
import select
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

RECEIVE = 1 << 20  # bytes taken at once
PATIENCE = 60.0  # seconds without a byte after which a run counts as stuck


@dataclass(frozen=True)
class Job:
    """What to send, and where.

    Args:
        port: on loopback.
        requests: whole requests, as bytes.
        answers: the length of each answer.
        connections: that ask at the same time, each one request after the other.
        seconds: to go on for; 0 sends every request once, each on a connection of its own.
    """

    port: int
    requests: Sequence[bytes]
    answers: Sequence[int]
    connections: int
    seconds: float


@dataclass(frozen=True)
class Outcome:
    """What a run did."""

    answered: int
    bytes: int
    wall: float
    errors: int


def prepare(core: int) -> None:
    """Gives this process a core of its own and as many sockets as it may have."""
    os.sched_setaffinity(0, {core})
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def http_length(head: bytes) -> int | None:
    """The length of a whole answer with this beginning; None if its head is not complete."""
    end = head.find(b"\r\n\r\n")
    if end < 0:
        return None
    fields = head[:end].lower().split(b"\r\n")
    if fields[0].split(b" ")[1] not in (b"200", b"206"):
        raise ValueError(f"refused: {head[: end + 300]!r}")
    (length,) = (int(field[15:]) for field in fields if field.startswith(b"content-length:"))
    return end + 4 + length


def ask(port: int, request: bytes, length_of: Callable[[bytes], int | None]) -> bytes:
    """One answer, whole."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as connection:
        connection.sendall(request)
        answer = bytearray()
        while (length := length_of(bytes(answer[:4096]))) is None or len(answer) < length:
            piece = connection.recv(RECEIVE)
            if not piece:
                raise ValueError(f"cut short: {bytes(answer[:300])!r}")
            answer += piece
    return bytes(answer)


class _Connection:
    """A socket, what it has yet to send, and how many bytes it has yet to receive."""

    def __init__(self, port: int) -> None:
        self.socket = socket.socket()
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setblocking(False)
        self.socket.connect_ex(("127.0.0.1", port))
        self.unsent = memoryview(b"")
        self.missing = 0


class _Run:
    """One run: which connections there are, and what they have done."""

    def __init__(self, job: Job) -> None:
        self.answered = self.received = self.errors = 0
        self._job, self._turn = job, 0
        self._poll, self._open = select.epoll(), dict[int, _Connection]()
        self._buffer = bytearray(RECEIVE)
        self._start = time.perf_counter()

    def play(self) -> Outcome:
        """All of it."""
        for _ in range(self._job.connections if self._job.seconds else len(self._job.requests)):
            connection = _Connection(self._job.port)
            self._open[connection.socket.fileno()] = connection
            self._poll.register(connection.socket, select.EPOLLIN | select.EPOLLOUT)
            self._ask(connection)
        while self._open:
            events = self._poll.poll(PATIENCE)
            if not events:
                self.errors += len(self._open)
                break
            for number, event in events:
                self._go_on(self._open[number], event)
        return Outcome(self.answered, self.received, self._seconds(), self.errors)

    def _seconds(self) -> float:
        return time.perf_counter() - self._start

    def _ask(self, connection: _Connection) -> None:
        """Begins the next request."""
        place = self._turn % len(self._job.requests)
        self._turn += 1
        connection.unsent = memoryview(self._job.requests[place])
        connection.missing = self._job.answers[place]
        self._poll.modify(connection.socket, select.EPOLLIN | select.EPOLLOUT)

    def _go_on(self, connection: _Connection, event: int) -> None:
        """Sends and receives what can be; asks again when an answer is complete."""
        try:
            if event & select.EPOLLOUT and connection.unsent:
                connection.unsent = connection.unsent[connection.socket.send(connection.unsent) :]
                if not connection.unsent:
                    self._poll.modify(connection.socket, select.EPOLLIN)
            if event & ~select.EPOLLOUT:
                self._receive(connection)
        except BlockingIOError:
            return
        except OSError:
            self.errors += 1
            self._close(connection)
            return
        if not connection.missing:
            self.answered += 1
            if self._seconds() < self._job.seconds:
                self._ask(connection)
            else:
                self._close(connection)

    def _receive(self, connection: _Connection) -> None:
        # MSG_TRUNC: the kernel drops the bytes instead of copying them.
        received = connection.socket.recv_into(self._buffer, RECEIVE, socket.MSG_TRUNC)
        if not received or received > connection.missing:
            raise ConnectionError
        connection.missing -= received
        self.received += received

    def _close(self, connection: _Connection) -> None:
        del self._open[connection.socket.fileno()]
        connection.socket.close()


def run(job: Job) -> Outcome:
    """Sends requests until the time is over, waits for the last answers, and counts."""
    return _Run(job).play()
