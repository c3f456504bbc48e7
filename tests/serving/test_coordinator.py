"""The coordinator: who is admitted, and when a round closes."""

import itertools
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyhole.errors import InputError
from keyhole.serving.coordinator import (
    Admission,
    Gathering,
    Pace,
    Terms,
    Wait,
    admit,
    gather,
    opened,
)
from keyhole.serving.tables import Current

OPEN = Current("3-0123456789abcdef", 3, "open", {"ann": 0, "bob": 1})
PACE = Pace(spread=10, again=4)


def ask(device, current, has_sent=False, draw=0.5):
    return admit(device, current, has_sent, PACE, lambda: draw)


def test_a_device_of_the_cohort_takes_part_at_a_time_of_its_own():
    assert ask("ann", OPEN) == Admission(OPEN.round, 3, fetch_after=5)


def test_any_device_takes_part_where_there_is_no_cohort():
    assert isinstance(ask("zoe", Current("3-0123456789abcdef", 3, "open")), Admission)


@pytest.mark.parametrize(
    ("device", "current", "has_sent"),
    [
        ("ann", None, False),
        ("zoe", OPEN, False),
        ("ann", OPEN, True),
        ("ann", Current(OPEN.round, 3, "closed", OPEN.cohort), False),
    ],
)
def test_others_wait(device, current, has_sent):
    assert ask(device, current, has_sent) == Wait(4)


@given(st.floats(0, 1, exclude_max=True))
def test_nobody_waits_less_than_half_or_more_than_one_and_a_half_times_the_pace(draw):
    assert 2 <= ask("zoe", OPEN, draw=draw).seconds < 6


def test_a_round_closes_at_its_goal_and_stays_closed():
    terms = Terms(goal=2, seconds=60)
    state = gather(opened(100.0), terms, ["ann", "bob"], now=101.0)
    assert state == Gathering(100.0, ("ann", "bob"), "goal")
    assert gather(state, terms, ["ann", "bob", "zoe"], now=999.0) == state


def test_a_round_closes_when_its_time_is_up_with_what_has_arrived():
    terms = Terms(goal=2, seconds=60)
    state = gather(opened(100.0), terms, ["bob"], now=159.9)
    assert state.closed is None
    assert gather(state, terms, ["bob"], now=160.0) == Gathering(100.0, ("bob",), "time")


def test_without_a_time_it_waits_for_its_goal():
    assert gather(opened(0.0), Terms(goal=1, seconds=inf), [], now=1e12).closed is None


def test_a_clock_that_goes_back_does_not_close_a_round():
    assert gather(opened(100.0), Terms(goal=1, seconds=5), [], now=-1e9).closed is None


@given(st.lists(st.sets(st.sampled_from("abcdef")), max_size=6), st.integers(1, 6))
def test_devices_are_counted_once_and_in_the_order_they_were_seen(steps, goal):
    seen = list(itertools.accumulate(steps, set.union))
    state, terms = opened(0.0), Terms(goal)
    for now, here in enumerate(seen):
        before = state.arrived
        state = gather(state, terms, here, float(now))
        assert state.arrived[: len(before)] == before
    assert len(set(state.arrived)) == len(state.arrived)
    assert (state.closed == "goal") == (len(state.arrived) >= goal)


@pytest.mark.parametrize("bad", [{"goal": 0}, {"goal": 1, "seconds": 0}])
def test_terms_under_which_no_round_could_close_are_refused(bad):
    with pytest.raises(InputError, match="never close"):
        Terms(**bad)


@pytest.mark.parametrize("bad", [{"spread": -1}, {"again": 0}, {"again": inf}])
def test_an_impossible_pace_is_refused(bad):
    with pytest.raises(InputError, match="pace"):
        Pace(**bad)
