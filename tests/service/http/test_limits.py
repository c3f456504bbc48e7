"""Limits: nobody gets more than is allowed, and nobody waits longer than needed."""

import asyncio
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyhole.errors import BusyError, InputError
from keyhole.service.limits import Gate, Limits, TokenBuckets


@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_a_limit_that_lets_nobody_in_is_refused(value):
    with pytest.raises(InputError, match="max_keys"):
        Limits(max_keys=value)


@given(st.lists(st.floats(0, 5), max_size=60), st.floats(0.1, 50), st.floats(1, 20))
def test_a_bucket_never_gives_more_than_its_rate(steps, rate, size):
    buckets, now, given_out = TokenBuckets(rate, size / rate, limit=1), 0.0, 0
    for step in steps:
        now += step
        given_out += buckets.wait("a", now) == 0.0
        assert given_out <= size + rate * now + 1e-6


@given(st.floats(0, 0.99), st.floats(0.1, 50))
def test_anyone_who_waits_as_told_is_let_in(left, rate):
    buckets = TokenBuckets(rate, 5.0 / rate, limit=1, min_size=5.0)  # 5, whatever is rounded
    while not buckets.wait("a", 0.0):
        pass
    now = left / rate  # by then, that much is left
    seconds = buckets.wait("a", now)
    assert seconds > 0.0
    assert buckets.wait("a", (now + seconds) * (1 + 1e-9) + 1e-9) == 0.0


def test_a_clock_that_goes_backwards_neither_gives_nor_takes():
    buckets = TokenBuckets(rate=1.0, burst=2.0, limit=1)
    assert [buckets.wait("a", now) for now in (100.0, 50.0, 50.0)] == [0.0, 0.0, 1.0]


def test_names_have_buckets_of_their_own_and_the_oldest_is_forgotten():
    buckets = TokenBuckets(rate=1.0, burst=1.0, limit=2)
    assert buckets.wait("a", 0.0) == 0.0
    assert buckets.wait("a", 0.0) == 1.0
    assert buckets.wait("b", 0.0) == 0.0
    assert buckets.wait("c", 0.0) == 0.0
    assert len(buckets) == 2
    assert buckets.wait("a", 0.0) == 0.0  # forgotten, so it begins anew


def test_an_infinite_rate_remembers_nobody():
    buckets = TokenBuckets(inf, 1.0, 2)
    assert buckets.wait("a", 0.0) == 0.0
    assert len(buckets) == 0


def test_a_gate_lets_in_as_much_as_fits_in_order_of_arrival():
    async def story():
        gate, order = Gate(3, 10), []

        async def visit(name, weight):
            await gate.enter(weight)
            order.append(name)

        await visit("a", 2)
        waiting = [asyncio.create_task(visit(*who)) for who in (("b", 2), ("c", 1), ("d", 9))]
        await asyncio.sleep(0)
        # c would fit, but b came first.
        assert (order, gate.queued, gate.enter_now(1)) == (["a"], 3, False)
        gate.leave(2)
        await asyncio.sleep(0)
        assert (order, gate.inside) == (["a", "b", "c"], 3)
        gate.leave(2)
        gate.leave(1)
        await asyncio.gather(*waiting)
        assert (order[-1], gate.inside) == ("d", 3)  # too heavy, so alone
        gate.leave(9)
        assert (gate.inside, gate.queued) == (0, 0)

    asyncio.run(story())


def test_too_many_waiting_are_sent_away():
    async def story():
        gate = Gate(1, 1)
        await gate.enter()
        waiting = asyncio.create_task(gate.enter())
        await asyncio.sleep(0)
        with pytest.raises(BusyError):
            await gate.enter()
        gate.leave()
        await waiting

    asyncio.run(story())


@pytest.mark.parametrize("is_admitted_first", [True, False])
def test_whoever_gives_up_leaves_no_place_taken(is_admitted_first):
    async def story():
        depth = []
        gate = Gate(1, 9, depth.append)
        await gate.enter()
        waiting = asyncio.create_task(gate.enter())
        await asyncio.sleep(0)
        if is_admitted_first:
            gate.leave()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        if not is_admitted_first:
            gate.leave()
        assert (gate.inside, gate.queued, sum(depth)) == (0, 0, 0)

    asyncio.run(story())
