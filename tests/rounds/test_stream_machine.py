"""The machine of asynchronous rounds: who starts, whose update counts, when a step is due."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyhole.aggregation.base import ClientResult
from keyhole.rounds.asynchronous import AsyncRound
from keyhole.rounds.machine import Buffering, StreamMachine
from keyhole.rounds.spec import RunParts
from keyhole.sampling import Cohorts


def machine(step=10, at_work=0, **changes):
    settings = {"concurrency": 4, "goal": 2, "max_staleness": 3, **changes}
    return StreamMachine(Buffering(**settings), step, at_work)


def test_as_many_are_at_work_as_should_be():
    one = machine(at_work=1)
    assert one.vacant == 3
    one.start(3)
    assert one.vacant == 0
    one.end(10, has_sent=False)
    assert one.vacant == 1


@pytest.mark.parametrize(("version", "staleness"), [(10, 0), (7, 3), (6, None)])
def test_an_update_counts_until_it_is_too_old(version, staleness):
    assert machine(at_work=1).end(version, has_sent=True) == staleness


@pytest.mark.parametrize("version", [10, 0])
def test_nothing_counts_of_a_client_that_sends_nothing(version):
    one = machine(at_work=1)
    assert (one.end(version, has_sent=False), one.counted) == (None, 0)


def test_only_an_update_that_was_sent_is_stale():
    sent, lost = (
        ClientResult(client=client, outcome=outcome, keys={}, update=None)
        for client, outcome in enumerate(["sent", "lost_after"])
    )
    this = AsyncRound()
    this.end(sent, None)
    this.end(lost, None)
    _, record = this.close(0, 10, "everyone", None, RunParts(Cohorts(2, 2), {}))
    assert record.stale == [0]


def test_a_round_in_which_clients_only_drop_out_ends_without_a_step():
    one, ended = machine(goal=1), 0
    while one.closed is None:
        one.start(one.vacant)
        one.end(10, has_sent=False)
        ended += 1
    assert (one.closed, ended) == ("everyone", 100)


def test_a_round_ends_without_a_step_when_nobody_is_left_to_start():
    one = machine(at_work=1)
    one.end(10, has_sent=True)
    assert one.closed is None
    one.start(0)
    assert one.closed == "everyone"


def test_those_at_work_are_waited_for_when_nobody_is_left_to_start():
    one = machine(at_work=1)
    one.start(0)
    assert one.closed is None


@given(st.lists(st.tuples(st.integers(0, 10), st.booleans()), max_size=30), st.integers(1, 5))
def test_a_step_is_due_exactly_when_so_many_fresh_updates_are_in(ends, goal):
    one = machine(goal=goal, at_work=len(ends))
    fresh = 0
    for version, has_sent in ends:
        fresh += has_sent and 10 - version <= 3
        one.end(version, has_sent)
        assert (one.closed == "goal") == (fresh >= goal)
        assert one.counted == fresh
