"""The machine of asynchronous rounds: who starts, whose update counts, when a step is due."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyhole.rounds.machine import (
    Buffering,
    CountIn,
    Ended,
    LeaveOut,
    Start,
    Started,
    StreamMachine,
)


def machine(step=10, at_work=0, **changes):
    settings = {"concurrency": 4, "goal": 2, "max_staleness": 3, **changes}
    return StreamMachine(Buffering(**settings), step, at_work)


def test_as_many_are_at_work_as_should_be():
    one = machine(at_work=1)
    assert one.fill() == Start(3)
    one.handle(Started(3))
    assert one.fill() == Start(0)
    one.handle(Ended(10, has_sent=False))
    assert one.fill() == Start(1)


@pytest.mark.parametrize(
    ("version", "command"), [(10, CountIn(0)), (7, CountIn(3)), (6, LeaveOut(is_stale=True))]
)
def test_an_update_counts_until_it_is_too_old(version, command):
    assert machine(at_work=1).handle(Ended(version, has_sent=True)) == command


def test_who_sends_nothing_is_not_stale_however_old():
    assert machine(at_work=1).handle(Ended(0, has_sent=False)) == LeaveOut(is_stale=False)


def test_a_round_in_which_clients_only_drop_out_ends_without_a_step():
    one, ended = machine(goal=1), 0
    while one.closed is None:
        one.handle(Started(one.fill().clients))
        one.handle(Ended(10, has_sent=False))
        ended += 1
    assert (one.closed, ended) == ("everyone", 100)


def test_a_round_ends_without_a_step_when_nobody_is_left_to_start():
    one = machine(at_work=1)
    one.handle(Ended(10, has_sent=True))
    assert one.closed is None
    one.handle(Started(0))
    assert one.closed == "everyone"


def test_those_at_work_are_waited_for_when_nobody_is_left_to_start():
    one = machine(at_work=1)
    one.handle(Started(0))
    assert one.closed is None


@given(st.lists(st.tuples(st.integers(0, 10), st.booleans()), max_size=30), st.integers(1, 5))
def test_a_step_is_due_exactly_when_so_many_fresh_updates_are_in(ends, goal):
    one = machine(goal=goal, at_work=len(ends))
    fresh = 0
    for version, has_sent in ends:
        fresh += has_sent and 10 - version <= 3
        one.handle(Ended(version, has_sent))
        assert (one.closed == "goal") == (fresh >= goal)
        assert one.counted == fresh
