"""Frames between the host and the enclave program: a kind, a length, and that many bytes."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable
from enum import IntEnum

from keyhole.errors import MalformedError

__all__ = ["MOST_BYTES", "PIECE_BYTES", "Channel", "Kind"]

_HEAD = struct.Struct("<II")

PIECE_BYTES = 1 << 20
"""Of rows that travel in one frame; a single longer row travels alone."""

MOST_BYTES = 1 << 31
"""Of any frame. More cannot be a frame, and what follows it could not be found."""


class Kind(IntEnum):
    """What a frame is. An answer has the kind of its command."""

    LOAD = 1
    ROWS = 2
    EVIDENCE = 3
    ANSWER = 4
    STOP = 5
    ROWS_READ = 6
    READY = 7
    REFUSED = 255


class Channel:
    """One end of a pair of sockets, on which frames travel.

    Args:
        end: the socket; the channel closes it.
        watch: is shown every piece of bytes that passes, in either direction.
    """

    def __init__(self, end: socket.socket, watch: Callable[[bytes], None] | None = None) -> None:
        self._end, self._watch = end, watch

    def send(self, kind: int, body: bytes | memoryview = b"", within: float | None = None) -> None:
        """Sends a frame.

        Raises:
            TimeoutError: it is not taken within that many seconds.
            OSError: nobody is there.
        """
        head = _HEAD.pack(kind, len(body))
        self._end.settimeout(within)
        # Nothing is not sent: whoever has the head of STOP may be gone by then.
        for piece in (head, body) if body else (head,):
            self._end.sendall(piece)
            self._show(piece)

    def receive(self, within: float | None = None) -> tuple[int, bytearray]:
        """Returns the next frame.

        Raises:
            TimeoutError: it is not there within that many seconds.
            EOFError: the other end is gone.
            MalformedError: it is too long to be one.
        """
        deadline = None if within is None else time.monotonic() + within
        kind, length = _HEAD.unpack(self._receive(_HEAD.size, deadline))
        if length > MOST_BYTES:
            raise MalformedError(
                "a frame that is too long",
                got=f"{length} bytes",
                allowed=f"{MOST_BYTES} bytes",
                fix="send rows in pieces, and requests of the length that the terms demand",
            )
        return kind, self._receive(length, deadline)

    def close(self) -> None:
        """Closes this end; the other one sees it."""
        self._end.close()

    def _receive(self, length: int, deadline: float | None) -> bytearray:
        whole = bytearray(length)
        left = memoryview(whole)
        while left:
            if deadline is not None:
                self._end.settimeout(max(1e-3, deadline - time.monotonic()))
            count = self._end.recv_into(left)
            if not count:
                raise EOFError
            left = left[count:]
        self._show(whole)
        return whole

    def _show(self, piece: bytes | bytearray | memoryview) -> None:
        if self._watch and piece:
            self._watch(bytes(piece))
