"""The least that a gather takes in Python: an event loop, a protocol, `numpy.take`. No service.

python bare.py PORT PACKED RECORD_BYTES
"""

from __future__ import annotations

import asyncio
import sys

import numpy as np
import uvloop

from keyhole.arrays import keep_freed_memory

_BEFORE_KEYS = 16  # bytes of a query in front of its keys: head and block of `wire/messages.py`


class Gather(asyncio.Protocol):
    """Answers queries for slices of one table; checks the range of keys alone."""

    def __init__(self, table: np.ndarray) -> None:
        self._table, self._received = table, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        end = self._received.find(b"\r\n\r\n")
        if end < 0:
            return
        start = self._received.index(b"content-length: ") + 16
        length = int(self._received[start : self._received.index(b"\r", start)])
        if len(self._received) < end + 4 + length:
            return
        keys = np.frombuffer(self._received, "<i4", offset=end + 4 + _BEFORE_KEYS).astype(np.int64)
        self._received = b""
        if len(keys) and not 0 <= keys.min() <= keys.max() < len(self._table):
            self._transport.abort()
            return
        records = np.take(self._table, keys, axis=0, mode="clip")
        head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % records.nbytes
        self._transport.writelines((head, memoryview(records).cast("B")))  # one system call


async def main(port: int, packed: str, record_bytes: int) -> None:
    table = np.memmap(packed, np.uint8, "r").reshape(-1, record_bytes)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Gather(table), "127.0.0.1", port, backlog=4096)
    await server.serve_forever()


if __name__ == "__main__":
    keep_freed_memory()
    uvloop.run(main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
