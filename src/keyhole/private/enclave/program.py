"""The enclave program: `python -m keyhole.private.enclave.program`.

A process of its own that answers commands in frames on the socket it was given as its standard
input; it ends with the command STOP, with its host, or on SIGINT or SIGTERM. Every command that
cannot be fulfilled is answered by the same frame, whatever the reason.

Run as it is, it is an ordinary process that its host can look into: isolation is neither provided
nor tested here. Inside an enclave it would be Python, which is not constant-time.
"""

from __future__ import annotations

import argparse
import signal
import socket
import struct
import sys
from collections.abc import Sequence

import numpy as np

from keyhole.errors import KeyholeError, MalformedError
from keyhole.private.enclave.claims import NO_HARDWARE_PROTECTION
from keyhole.private.enclave.frames import Channel, Kind
from keyhole.private.enclave.inside import Inside
from keyhole.private.enclave.simulated import SimulatedAttester, simulated_measurement
from keyhole.private.enclave.terms import EnclaveTerms

__all__ = ["main", "serve"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program until it is stopped; returns its exit code.

    Args:
        arguments: of the command line; those of the process if None.
    """
    parser = argparse.ArgumentParser(prog="keyhole.private.enclave.program")
    parser.add_argument(
        "--attester",
        choices=["simulated"],
        required=True,
        help=f"simulated: {NO_HARDWARE_PROTECTION}",
    )
    parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    channel = Channel(socket.socket(fileno=sys.stdin.fileno()))
    try:
        serve(channel, Inside(SimulatedAttester(simulated_measurement())))
    except KeyboardInterrupt:
        return 130
    except (EOFError, OSError):
        return 0  # the host is gone, and with it whoever could ask
    except Exception as error:  # noqa: BLE001 - a trace could show what only this process may know
        sys.stderr.write(f"the enclave program ends on {type(error).__name__}\n")
        return 1
    return 0


def serve(channel: Channel, inside: Inside) -> None:
    """Answers commands until STOP.

    Raises:
        EOFError, OSError: the host is gone.
    """
    channel.send(Kind.READY)
    while True:
        try:
            kind, body = channel.receive()
        except MalformedError:
            channel.send(Kind.REFUSED)
            return  # where the next frame begins is unknown
        if kind == Kind.STOP and not body:
            channel.send(Kind.STOP)
            return
        try:
            answer = _obey(inside, kind, body)
        except (KeyholeError, MemoryError):
            channel.send(Kind.REFUSED)
        else:
            channel.send(kind, answer)


def _obey(inside: Inside, kind: int, body: bytearray) -> bytes:
    """Fulfils one command; returns the body of its answer."""
    if kind == Kind.LOAD:
        inside.load(EnclaveTerms.decode(bytes(body)))
        return b""
    if kind == Kind.ROWS:
        inside.add_rows(np.frombuffer(body, np.uint8))
        return b""
    if kind == Kind.EVIDENCE:
        return inside.evidence(bytes(body)).encode()
    if kind == Kind.ANSWER:
        return inside.answer(body)
    if kind == Kind.ROWS_READ and not body:
        return struct.pack("<Q", inside.rows_read)
    raise MalformedError(
        "an unknown command",
        got=f"kind {kind}, {len(body)} bytes",
        allowed="a command of docs/wire.md",
        fix="check that both sides are of one version",
    )


if __name__ == "__main__":
    sys.exit(main())
