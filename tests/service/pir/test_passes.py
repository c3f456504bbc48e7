"""Passes: queries that come together share one; whatever becomes of one, all who wait are told."""

import asyncio
import threading
import time
from functools import partial

import pytest

from keyhole.errors import BusyError, KeyholeError, MalformedError
from keyhole.service.limits import Gate
from keyhole.service.passes import GATHERED_SECONDS, Passes
from tests.helpers import LONG
from tests.service.jumping_loop import JumpingLoop


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


class Refusing:
    """A server that works for some time and then refuses a pass with a certain query."""

    params = None

    def answer(self, queries):
        end = time.thread_time() + 0.002
        while time.thread_time() < end:
            pass
        if b"bad" in queries:
            raise MalformedError("a pass: got a bad query; expected good ones; send others")
        return list(queries)


def test_a_query_is_charged_its_share_of_a_pass_that_refuses_it():
    charged = {}

    async def run():
        passes = Passes(Refusing(), Gate(1, 9), together=3)
        asked = [
            passes.answer(query, partial(charged.__setitem__, query))
            for query in (b"bad", b"one", b"two")
        ]
        return await asyncio.gather(*asked, return_exceptions=True)

    refused, *replies = asyncio.run(run())
    assert isinstance(refused, MalformedError)
    assert replies == [b"one", b"two"]
    assert charged.keys() == {b"bad", b"one", b"two"}
    assert len(set(charged.values())) == 1
    assert sum(charged.values()) >= 3 * 0.002  # all three; one alone; the other two


class Echo:
    """Answers; holds the queries of each pass."""

    params = None

    def __init__(self):
        self.passes = []

    def answer(self, queries):
        self.passes.append(list(queries))
        return [b"to " + query for query in queries]


def play(together, pauses, monkeypatch):
    """The queries of each pass where as many come one after the other, after seconds each; and the
    seconds until the first and until the last were answered."""
    server = Echo()

    async def at_once(work, *args):  # no thread, whose time the clock does not know
        return work(*args)

    async def ask(passes, place, begin):
        await asyncio.sleep(begin)
        answer = await passes.answer(b"%d" % place)
        return answer, asyncio.get_running_loop().time()

    async def run():
        passes = Passes(server, Gate(1, 9), together)
        begins = [sum(pauses[: place + 1]) for place in range(len(pauses))]
        asked = [ask(passes, place, begin) for place, begin in enumerate(begins)]
        return await asyncio.gather(*asked)

    monkeypatch.setattr(asyncio, "to_thread", at_once)
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        answers = runner.run(run())
    assert [answer for answer, _ in answers] == [b"to %d" % n for n in range(len(pauses))]
    return [len(one) for one in server.passes], answers[0][1], answers[-1][1]


def test_sixteen_queries_of_a_few_milliseconds_are_answered_in_one_pass(monkeypatch):
    assert play(64, [0.0003] * 16, monkeypatch)[0] == [16]


def test_a_lone_query_waits_as_long_as_is_said_and_no_longer(monkeypatch):
    passes, answered, _ = play(64, [0.0], monkeypatch)
    assert passes == [1]
    assert answered == pytest.approx(GATHERED_SECONDS)
    assert GATHERED_SECONDS <= 0.005


def test_a_query_that_comes_later_has_a_pass_of_its_own_and_waits_as_long(monkeypatch):
    passes, first, last = play(64, [0.0, 1.0], monkeypatch)
    assert passes == [1, 1]
    assert (first, last - 1.0) == pytest.approx((GATHERED_SECONDS, GATHERED_SECONDS))


def test_a_full_pass_waits_for_nobody(monkeypatch):
    passes, first, last = play(4, [0.0] * 6, monkeypatch)
    assert passes == [4, 2]
    assert first == last == 0.0
