"""A TCP proxy that does to answers what networks do: cuts, resets, delays and damages them."""

import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

CUT, RESET, HALF_CLOSE, DELAY, FLIP = "cut", "reset", "half-close", "delay", "flip"


@dataclass(frozen=True)
class Fault:
    """What happens to an answer, once.

    Args:
        kind: cut closes the connection, reset does so rudely, half-close ends the answer and
            goes on reading, delay stops it until the proxy is released, flip inverts one byte.
        at: how many bytes of answers pass before, counted from when the fault was armed.
        then: called when it happens, before anything else passes.
    """

    kind: str
    at: int
    then: Callable[[], None] = lambda: None


class FaultProxy:
    """Passes connections on to a port of this machine; use it in a `with`.

    Attributes:
        port: where it listens.
        passed: bytes of answers that have passed since the last fault was armed.
        connections: how many were opened.
    """

    def __init__(self, target):
        self.target = target
        self.passed = self.connections = 0
        self.released = threading.Event()
        self._fault = None
        self._lock = threading.Lock()
        self._sockets, self._threads = set(), []

    def __enter__(self):
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._start(self._accept)
        return self

    def __exit__(self, *_):
        self.released.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept
        self._listener.close()
        for one in list(self._sockets):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)

    def arm(self, kind=None, at=0, then=lambda: None):
        """The next answers suffer this, once; None lets them pass."""
        with self._lock:
            self._fault = None if kind is None else Fault(kind, at, then)
            self.passed = 0
            self.released.clear()

    def _start(self, target, *args):
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self):
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            try:
                far = socket.create_connection(("127.0.0.1", self.target))
            except OSError:
                near.close()
                continue
            for one in (near, far):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._sockets.add(one)
            is_read = threading.Event()
            self._start(self._pump_requests, near, far, is_read)
            self._start(self._pump_answers, near, far, is_read)

    def _pump_requests(self, near, far, is_read):
        with suppress(OSError):
            while data := near.recv(1 << 16):
                far.sendall(data)
        is_read.set()
        with suppress(OSError):
            far.shutdown(socket.SHUT_WR)

    def _pump_answers(self, near, far, is_read):
        with suppress(OSError):
            while data := far.recv(1 << 16):
                before, after, fault = self._split(data)
                near.sendall(before)
                kind = None if fault is None else fault.kind
                if fault is not None:
                    fault.then()
                if kind == FLIP:
                    near.sendall(bytes([after[0] ^ 0xFF]) + after[1:])
                elif kind == DELAY:
                    self.released.wait(30)
                    near.sendall(after)
                elif kind is not None:
                    self._end(near, kind, is_read)
                    break
        for one in (near, far):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        is_read.wait(10)  # a socket that a thread still reads from is not really closed
        for one in (near, far):
            one.close()
            self._sockets.discard(one)

    def _split(self, data):
        """What passes, what comes behind the fault, and the fault, if its place is in `data`."""
        with self._lock:
            fault, start = self._fault, self.passed
            if fault is None or not start <= fault.at < start + len(data):
                self.passed += len(data)
                return data, b"", None
            place = fault.at - start
            self._fault = None
            self.passed += len(data) if fault.kind in (FLIP, DELAY) else place
            return data[:place], data[place:], fault

    def _end(self, near, kind, is_read):
        if kind == RESET:  # closing without lingering sends RST, once nobody reads any more
            near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            near.shutdown(socket.SHUT_RD)
            is_read.wait(10)
            near.close()
        elif kind == HALF_CLOSE:
            near.shutdown(socket.SHUT_WR)
            is_read.wait(10)  # until the device hangs up
