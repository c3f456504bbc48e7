"""Joined writes: the bytes that were written, in their order, the head not in a call of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from keyhole.service.connections import JoinedWrites

HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\n"


class Recorder(asyncio.Transport):
    """Keeps what each call sends."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[bytes] = []
        self.is_closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.is_closed
        self.calls.append(bytes(data))

    def writelines(self, pieces: Iterable[bytes | bytearray | memoryview]) -> None:
        self.write(b"".join(pieces))

    def is_closing(self) -> bool:
        return self.is_closed

    def get_write_buffer_size(self) -> int:
        return 0

    def close(self) -> None:
        self.is_closed = True

    abort = close


def calls_of(play: Callable[[JoinedWrites], None]) -> list[bytes]:
    """The calls that some use of a transport comes to, one turn of the loop later."""
    recorder = Recorder()

    async def run() -> None:
        play(JoinedWrites(recorder))
        await asyncio.sleep(0)

    uvloop.run(run())
    return recorder.calls


def test_a_head_and_its_body_leave_in_one_call() -> None:
    def answer(transport: JoinedWrites) -> None:
        transport.write(HEAD)
        transport.write(memoryview(b"abc"))
        transport.write(b"")

    assert calls_of(answer) == [HEAD + b"abc"]


def test_a_head_that_nothing_follows_leaves_with_the_next_turn_of_the_loop() -> None:
    assert calls_of(lambda transport: transport.write(HEAD)) == [HEAD]


def test_a_head_leaves_before_its_connection_is_closed() -> None:
    def refuse(transport: JoinedWrites) -> None:
        transport.write(HEAD)
        assert transport.get_write_buffer_size() == len(HEAD)
        transport.close()
        assert transport.is_closing()

    assert calls_of(refuse) == [HEAD]


def test_a_connection_that_is_cut_off_sends_no_more() -> None:
    def cut(transport: JoinedWrites) -> None:
        transport.write(HEAD)
        transport.abort()

    assert calls_of(cut) == []


def test_a_head_of_a_connection_that_was_lost_is_dropped() -> None:
    def lose(transport: JoinedWrites) -> None:
        transport.write(HEAD)
        transport._transport.close()

    assert calls_of(lose) == []


PIECES = st.lists(st.sampled_from([HEAD, b"abc", b"", b"HTTP/1.1 ", HEAD * 200]), max_size=8)


@given(PIECES)
def test_bytes_arrive_as_they_were_written(pieces: list[bytes]) -> None:
    async def exchange() -> bytes:
        def serve() -> asyncio.Protocol:
            return _Sender(pieces)

        server = await asyncio.get_running_loop().create_server(serve, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            received = await reader.read()
            writer.close()
            await writer.wait_closed()
        return received

    assert uvloop.run(exchange()) == b"".join(pieces)


class _Sender(asyncio.Protocol):
    """Sends pieces and closes."""

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        joined = JoinedWrites(transport)  # type: ignore[arg-type]
        for piece in self._pieces:
            joined.write(piece)
        joined.close()


@pytest.mark.parametrize("name", ["peername", "sockname"])
def test_what_is_known_of_the_connection_is_passed_on(name: str) -> None:
    async def ask() -> object:
        known = Recorder()
        known._extra = {name: ("127.0.0.1", 7)}
        return JoinedWrites(known).get_extra_info(name)

    assert uvloop.run(ask()) == ("127.0.0.1", 7)
