"""Redis: one value for each slice, MGET for the keys of a client."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from slice_peers.processes import free_port, serving

INSTALL = "apt install redis-server"
_AT_ONCE = 2000  # slices in one MSET


def find() -> str | None:
    """The program, where it is installed."""
    return shutil.which("redis-server")


@contextmanager
def redis(root: Path, table: np.ndarray) -> Iterator[tuple[int, int]]:
    """Serves a table from memory; gives port and process."""
    port, program = free_port(), find()
    assert program is not None
    settings = ["--save", "", "--appendonly", "no", "--dir", str(root), "--bind", "127.0.0.1"]
    with serving([program, "--port", str(port), *settings], port) as pid:
        _fill(port, table)
        yield port, pid


def mget(keys: np.ndarray) -> bytes:
    """The request for some keys."""
    return _command([b"MGET", *(b"%d" % key for key in keys.tolist())])


def answer_length(keys_per_client: int, length: int) -> int:
    """Of the answer to such a request."""
    each = len(f"${length}\r\n") + length + 2
    return len(f"*{keys_per_client}\r\n") + keys_per_client * each


def _command(words: Sequence[bytes]) -> bytes:
    pieces = [b"*%d\r\n" % len(words)]
    for word in words:
        pieces += (b"$%d\r\n" % len(word), word, b"\r\n")
    return b"".join(pieces)


def _fill(port: int, table: np.ndarray) -> None:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        for start in range(0, len(table), _AT_ONCE):
            words = [b"MSET"]
            for key, row in enumerate(table[start : start + _AT_ONCE], start):
                words += (b"%d" % key, row.tobytes())
            connection.sendall(_command(words))
            if connection.recv(5) != b"+OK\r\n":
                raise RuntimeError("Redis refuses a table")
