"""Starts the enclave program, hands it a table, and carries sealed messages to and fro in frames.

The host sees the table, who asks and when, and ciphertext. It is not trusted with more, and need
not be: whatever it changes, withholds or repeats is refused by the client or by the program.
"""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from enum import IntEnum
from types import TracebackType
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from keyhole.delivery.enclave.evidence import EnclaveParams, Evidence, params_of
from keyhole.errors import InputError, KeyholeError, MalformedError, ProtocolError, ServiceError

_HEAD = struct.Struct("<II")

PIECE_BYTES = 1 << 20
"""Of rows that travel in one frame; a single longer row travels alone."""

MAX_BYTES = 1 << 31
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
        watch: is shown every piece of bytes that passes, in either direction.
    """

    def __init__(self, end: socket.socket, watch: Callable[[bytes], None] | None = None) -> None:
        self._end, self._watch = end, watch

    def send(self, kind: int, body: bytes | memoryview = b"", within: float | None = None) -> None:
        """Sends a frame."""
        head = _HEAD.pack(kind, len(body))
        self._end.settimeout(within)
        # Nothing is not sent: anyone who has the head of STOP may be gone by then.
        for piece in (head, body) if body else (head,):
            self._end.sendall(piece)
            self._show(piece)

    def receive(self, within: float | None = None) -> tuple[int, bytearray]:
        """Returns the next frame."""
        deadline = None if within is None else time.monotonic() + within
        kind, length = _HEAD.unpack(self._receive(_HEAD.size, deadline))
        if length > MAX_BYTES:
            raise MalformedError(
                f"a frame that is too long: got {length} bytes; expected {MAX_BYTES} bytes; send "
                "rows in pieces, and requests of the length that the params demand"
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


_MODULE = "keyhole.delivery.enclave.program"
_STOP_WITHIN = 10.0  # seconds that an idle program has to end by itself


class EnclaveProcess:
    """The enclave program as a process, for as long as the context lasts.

    Threads may share it: commands are carried one after the other.

    Args:
        attester: what makes the evidence: "simulated" is all there is without hardware.
        start_within: seconds until the program must have started.
        answer_within: seconds that a command may take. A program that takes longer is ended.
        watch: is shown every byte that passes between host and program, for audits.
    """

    def __init__(
        self,
        attester: Literal["simulated"],
        *,
        start_within: float = 60.0,
        answer_within: float = 60.0,
        watch: Callable[[bytes], None] | None = None,
    ) -> None:
        if attester != "simulated":
            raise InputError(
                f"an unknown attester: got {attester!r}; expected 'simulated'; name the attester; "
                "hardware needs one of its own"
            )
        self._lock = threading.Lock()
        self._answer_within = answer_within
        self._params: EnclaveParams | None = None
        near, far = socket.socketpair()
        with far:
            self._channel = Channel(near, watch)
            # A session of its own: Ctrl-C is for the host, which then ends the program.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", _MODULE, "--attester", attester],
                stdin=far.fileno(),
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        with self._lock:
            self._exchange(Kind.READY, None, start_within)

    def __enter__(self) -> EnclaveProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    @property
    def params(self) -> EnclaveParams:
        """Of the table that is loaded, for clients."""
        if self._params is None:
            raise InputError(
                "an enclave without a table: got none; expected one; call load() first"
            )
        return self._params

    def load(self, round: bytes, records: NDArray[np.uint8], max_keys: int) -> EnclaveParams:
        """Hands the program a table in place of any other. Evidence of another is worthless then.

        Args:
            round: 16 bytes that name the round, see `name_of_round`.
            records: (K, record_bytes).

        Returns:
            The params that clients need.
        """
        params = params_of(round, records, max_keys)
        rows_at_once = max(1, PIECE_BYTES // params.record_bytes)
        with self._lock:
            self._params = None
            self._command(Kind.LOAD, params.encode())
            for start in range(0, params.num_keys, rows_at_once):
                piece = np.ascontiguousarray(records[start : start + rows_at_once])
                self._command(Kind.ROWS, piece.data.cast("B"))
            self._params = params
        return params

    def evidence(self, nonce: bytes) -> Evidence:
        """Fetches evidence for the client that drew a nonce."""
        with self._lock:
            return Evidence.decode(self._command(Kind.EVIDENCE, nonce))

    def answer(self, sealed: bytes) -> bytes:
        """Carries a sealed request to the program and its sealed reply back."""
        with self._lock:
            return bytes(self._command(Kind.ANSWER, sealed))

    def rows_read(self) -> int:
        """How many rows the program has read since its start, over all keys and padding."""
        with self._lock:
            (count,) = struct.unpack("<Q", self._command(Kind.ROWS_READ, b""))
        return int(count)

    def close(self) -> None:
        """Ends the program: it is asked, then made to. Nothing is left of it."""
        with self._lock:
            if self._process.returncode is None:
                try:
                    self._channel.send(Kind.STOP, within=_STOP_WITHIN)
                    self._process.wait(_STOP_WITHIN)
                except (OSError, subprocess.TimeoutExpired):
                    pass  # it is ended below
            self._end()

    def _command(self, kind: Kind, body: bytes | memoryview) -> bytearray:
        """Sends a command and returns the body of its answer."""
        if self._process.returncode is not None:
            raise self._gone()
        return self._exchange(kind, body, self._answer_within)

    def _exchange(self, wanted: Kind, body: bytes | memoryview | None, within: float) -> bytearray:
        """Sends a frame, if there is one to send, and returns the body of the one that follows."""
        try:
            if body is not None:
                self._channel.send(wanted, body, within)
            kind, answer = self._channel.receive(within)
        except (OSError, EOFError, KeyholeError) as error:
            raise self._lost(error, within) from error
        except BaseException:
            self._end()  # interrupted amid a frame: the next answer would be that of this command
            raise
        if kind == Kind.REFUSED:
            raise ProtocolError(
                "the enclave refuses a message: got a refusal, which does not tell why; expected "
                "a fresh message under the params of its table; fetch params and evidence anew, "
                "and ask once with each nonce"
            )
        if kind != wanted:
            raise self._lost(None, within)
        return answer

    def _lost(self, error: Exception | None, within: float) -> ServiceError:
        """The error of a program that hangs or has ended; nothing is left of it."""
        if isinstance(error, TimeoutError):
            self._end()
            return ServiceError(
                f"the enclave program hangs: got no answer within {within} s; expected an answer; "
                "start it anew, or give it more time with answer_within"
            )
        self._end()
        return self._gone()

    def _end(self) -> None:
        self._channel.close()
        if self._process.returncode is None:
            self._process.kill()
            self._process.wait()
        self._params = None

    def _gone(self) -> ServiceError:
        return ServiceError(
            f"the enclave program has ended: got exit code {self._process.returncode}; expected a "
            "program that runs; start a new EnclaveProcess and load the table"
        )
