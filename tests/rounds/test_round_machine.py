"""The round machine: whose update counts, and when a round closes."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyhole.errors import InputError
from keyhole.rounds.machine import (
    Answered,
    Close,
    Discard,
    Dropped,
    Elapsed,
    GiveUp,
    Reached,
    Refused,
    RoundMachine,
    Take,
    Terms,
)


def machine(goal=2, asked=(1, 2, 3), now=100.0, **terms):
    return RoundMachine(Terms(goal, **terms), asked, now)


def test_a_round_closes_at_its_goal_and_stays_closed():
    one = machine(seconds=60)
    assert one.handle(Answered(3, 101)) == (Take(3),)
    assert one.handle(Answered(1, 102)) == (Take(1), Close("goal"))
    assert one.handle(Elapsed(999)) == ()
    assert (one.closed, one.taken) == ("goal", (3, 1))
    assert one.fates == {1: "sent", 2: "late", 3: "sent"}


def test_a_round_closes_when_its_time_is_up_with_what_has_arrived():
    one = machine(seconds=60)
    one.handle(Answered(2, 159.9))
    assert one.handle(Elapsed(160.0)) == (Close("time"),)
    assert one.fates == {1: "lost_before", 2: "sent", 3: "lost_before"}


def test_what_is_seen_after_the_deadline_closes_the_round_and_is_late():
    one = machine(seconds=60)
    assert one.handle(Answered(2, 160.0)) == (GiveUp("time", 0), Discard(2, "late"))
    assert one.fates[2] == "late"


def test_without_a_deadline_a_round_waits_for_its_goal():
    one = machine()
    assert one.handle(Elapsed(1e12)) == ()
    assert one.closed is None


def test_a_clock_that_goes_back_does_not_close_a_round():
    one = machine(seconds=5)
    assert one.handle(Elapsed(-1e9)) == ()


def test_a_round_does_not_wait_for_clients_that_are_known_to_be_gone():
    one = machine(goal=3)
    one.handle(Reached(1))
    one.handle(Answered(2))
    assert one.handle(Dropped(1)) == ()
    assert one.handle(Dropped(3)) == (Close("everyone"),)
    assert one.fates == {1: "lost_after", 2: "sent", 3: "lost_before"}


def test_a_client_that_was_thought_lost_counts_if_it_answers_while_the_round_is_open():
    one = machine(goal=2)
    one.handle(Dropped(1))
    assert one.handle(Answered(1)) == (Take(1),)
    assert one.handle(Dropped(1)) == ()
    assert one.handle(Answered(2)) == (Take(2), Close("goal"))


def test_a_refused_update_does_not_count_towards_the_goal():
    one = machine(goal=2)
    assert one.handle(Refused(1)) == ()
    one.handle(Answered(2))
    assert one.handle(Answered(3)) == (Take(3), Close("goal"))
    assert one.fates[1] == "refused"


def test_second_answers_and_those_of_strangers_are_discarded():
    one = machine()
    one.handle(Answered(1))
    assert one.handle(Answered(1)) == (Discard(1, "duplicate"),)
    assert one.handle(Answered(7)) == (Discard(7, "unknown"),)
    one.handle(Refused(2))
    assert one.handle(Answered(2)) == (Discard(2, "duplicate"),)
    one.handle(Answered(3))
    assert one.handle(Answered(1)) == (Discard(1, "duplicate"),)


def test_a_round_with_too_few_is_given_up():
    one = machine(goal=3, min_updates=2, seconds=10)
    one.handle(Answered(1, 105))
    assert one.handle(Elapsed(110)) == (GiveUp("time", 1),)
    assert one.is_given_up


def test_a_round_that_asks_nobody_is_closed_from_the_start():
    assert machine(asked=()).closed == "everyone"
    assert machine(goal=0).closed == "goal"


EVENTS = st.builds(
    lambda kind, client: kind(client),
    st.sampled_from([Reached, Answered, Refused, Dropped]),
    st.integers(0, 7),
)


@given(st.lists(EVENTS, max_size=40), st.integers(1, 6), st.integers(0, 6))
def test_whatever_happens_the_commands_and_the_fates_agree(events, goal, minimum):
    asked = range(6)
    one = machine(goal, asked, min_updates=minimum)
    commands = [command for event in events for command in one.handle(event)]
    commands += one.handle(Elapsed(inf))
    taken = [c.client for c in commands if isinstance(c, Take)]
    ends = [c for c in commands if isinstance(c, Close | GiveUp)]
    assert tuple(taken) == one.taken
    assert len(taken) == len(set(taken)) <= goal
    assert len(ends) == 1
    assert isinstance(ends[0], GiveUp) == (len(taken) < minimum)
    assert list(one.fates) == list(asked)
    assert [c for c, fate in one.fates.items() if fate == "sent"] == sorted(taken)
    assert (one.closed == "goal") == (len(taken) == goal)


@pytest.mark.parametrize(
    "bad", [{"goal": -1}, {"goal": 1, "seconds": 0}, {"goal": 1, "min_updates": -1}]
)
def test_terms_under_which_no_round_could_close_are_refused(bad):
    with pytest.raises(InputError, match="never close"):
        Terms(**bad)
