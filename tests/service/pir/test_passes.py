"""Passes: whatever becomes of one, everybody who waits is told."""

import asyncio
import threading

import pytest

from keyhole.errors import BusyError, KeyholeError
from keyhole.service.limits import Gate
from keyhole.service.passes import Passes
from tests.helpers import LONG


class PanicError(BaseException):
    """What a library may raise that is written in another language."""


class Failing:
    """A server whose first pass waits to be let go, and fails; then it answers."""

    params = None

    def __init__(self, error):
        self.error, self.started, self.go = error, threading.Event(), threading.Event()

    def answer(self, queries):
        if not self.started.is_set():
            self.started.set()
            self.go.wait(LONG)
            raise self.error
        return [b"to " + query for query in queries]


async def outcomes(passes, server):
    """What becomes of a query in a pass that fails, of two that wait for the next, and of one that
    comes later."""
    first = asyncio.create_task(passes.answer(b"0"))
    while not server.started.is_set():
        await asyncio.sleep(0.001)
    rest = [asyncio.create_task(passes.answer(query)) for query in (b"1", b"2")]
    await asyncio.sleep(0)
    server.go.set()
    waiting = asyncio.gather(first, *rest, return_exceptions=True)
    found = await asyncio.wait_for(waiting, LONG)
    return [*found, await asyncio.wait_for(passes.answer(b"3"), LONG)]


def test_a_pass_that_fails_spoils_no_other():
    server = Failing(ValueError("no"))
    found = asyncio.run(outcomes(Passes(server, Gate(1, 9), together=1), server))
    assert found == [server.error, b"to 1", b"to 2", b"to 3"]


def test_a_pass_that_panics_leaves_nobody_waiting():
    server, gate, panics = Failing(PanicError()), Gate(1, 9), []

    async def run():
        asyncio.get_running_loop().set_exception_handler(lambda _, c: panics.append(c["exception"]))
        passes = Passes(server, gate, together=1)
        found = await outcomes(passes, server)
        del passes
        return found

    *failed, last = asyncio.run(run())
    assert [type(each) for each in failed] == [KeyholeError] * 3
    assert {each.__cause__ for each in failed} == {server.error}
    assert last == b"to 3"
    assert gate.inside == 0
    assert panics == [server.error]  # and it is not lost


def test_a_gate_that_sends_a_pass_away_leaves_nobody_waiting():
    async def run():
        gate = Gate(1, 0)
        await gate.enter()
        passes = Passes(Failing(None), gate, together=1)
        with pytest.raises(BusyError):
            await asyncio.wait_for(passes.answer(b"0"), LONG)
        with pytest.raises(BusyError):
            await passes._running  # so that the loop does not tell of it

    asyncio.run(run())
