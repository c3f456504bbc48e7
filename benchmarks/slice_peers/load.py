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

    def begin(self, request: bytes, answer: int) -> None:
        self.unsent, self.missing = memoryview(request), answer

    def send(self) -> None:
        self.unsent = self.unsent[self.socket.send(self.unsent) :]


def run(job: Job) -> Outcome:
    """Sends requests until the time is over, waits for the last answers, and counts."""
    poll, buffer = select.epoll(), bytearray(RECEIVE)
    count = job.connections if job.seconds else len(job.requests)
    turn = answered = total = errors = 0
    start = time.perf_counter()
    stop = start + job.seconds
    open_ones: dict[int, _Connection] = {}

    def begin(connection: _Connection) -> None:
        nonlocal turn
        place = turn % len(job.requests)
        connection.begin(job.requests[place], job.answers[place])
        turn += 1
        poll.modify(connection.socket, select.EPOLLIN | select.EPOLLOUT)

    def end(connection: _Connection) -> None:
        del open_ones[connection.socket.fileno()]
        connection.socket.close()

    for _ in range(count):
        connection = _Connection(job.port)
        open_ones[connection.socket.fileno()] = connection
        poll.register(connection.socket, select.EPOLLIN | select.EPOLLOUT)
        begin(connection)
    while open_ones:
        events = poll.poll(PATIENCE)
        if not events:
            errors += len(open_ones)
            break
        for number, event in events:
            connection = open_ones[number]
            try:
                if event & select.EPOLLOUT and connection.unsent:
                    connection.send()
                    if not connection.unsent:
                        poll.modify(number, select.EPOLLIN)
                if event & ~select.EPOLLOUT:
                    received = connection.socket.recv_into(buffer, RECEIVE, socket.MSG_TRUNC)
                    if not received or received > connection.missing:
                        raise ConnectionError
                    connection.missing -= received
                    total += received
            except BlockingIOError:
                continue
            except OSError:
                errors += 1
                end(connection)
                continue
            if not connection.missing:
                answered += 1
                if job.seconds and time.perf_counter() < stop:
                    begin(connection)
                else:
                    end(connection)
    return Outcome(answered, total, time.perf_counter() - start, errors)
