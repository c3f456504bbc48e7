"""The round machine: whose update counts, and when a round closes."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyhole.errors import InputError
from keyhole.rounds.machine import (
    Answered,
    Dropped,
    Elapsed,
    Reached,
    Refused,
    RoundMachine,
    Terms,
)


def machine(goal=2, asked=(1, 2, 3), now=100.0, **terms):
    return RoundMachine(Terms(goal, **terms), asked, now)


def test_a_round_closes_at_its_goal_and_stays_closed():
    one = machine(seconds=60)
    one.handle(Answered(3, 101))
    assert one.closed is None
    one.handle(Answered(1, 102))
    one.handle(Elapsed(999))
    assert (one.closed, one.taken) == ("goal", (3, 1))
    assert one.outcomes == {1: "sent", 2: "late", 3: "sent"}


def test_a_round_closes_when_its_time_is_up_with_what_has_arrived():
    one = machine(seconds=60)
    one.handle(Answered(2, 159.9))
    one.handle(Elapsed(160.0))
    assert one.closed == "time"
    assert one.outcomes == {1: "lost_before", 2: "sent", 3: "lost_before"}


def test_what_is_seen_after_the_deadline_closes_the_round_and_is_late():
    one = machine(seconds=60)
    one.handle(Answered(2, 160.0))
    assert (one.closed, one.taken, one.outcomes[2]) == ("time", (), "late")


def test_without_a_deadline_a_round_waits_for_its_goal():
    one = machine()
    one.handle(Elapsed(1e12))
    assert one.closed is None


def test_a_clock_that_goes_back_does_not_close_a_round():
    one = machine(seconds=5)
    one.handle(Elapsed(-1e9))
    assert one.closed is None


def test_a_round_does_not_wait_for_clients_that_are_known_to_be_gone():
    one = machine(goal=3)
    one.handle(Reached(1))
    one.handle(Answered(2))
    one.handle(Dropped(1))
    assert one.closed is None
    one.handle(Dropped(3))
    assert one.closed == "everyone"
    assert one.outcomes == {1: "lost_after", 2: "sent", 3: "lost_before"}


def test_a_client_that_was_thought_lost_counts_if_it_answers_while_the_round_is_open():
    one = machine(goal=2)
    one.handle(Dropped(1))
    one.handle(Answered(1))
    one.handle(Dropped(1))
    assert (one.closed, one.taken) == (None, (1,))
    one.handle(Answered(2))
    assert (one.closed, one.taken) == ("goal", (1, 2))


def test_a_refused_update_does_not_count_towards_the_goal():
    one = machine(goal=2)
    one.handle(Refused(1))
    one.handle(Answered(2))
    assert one.closed is None
    one.handle(Answered(3))
    assert (one.closed, one.taken) == ("goal", (2, 3))
    assert one.outcomes[1] == "refused"


def test_a_client_without_examples_is_told_from_one_that_is_refused():
    one = machine(goal=2)
    one.handle(Refused(1, is_empty=True))
    one.handle(Refused(2))
    assert one.outcomes == {1: "empty", 2: "refused"}


def test_second_answers_and_those_of_strangers_do_not_count():
    one = machine()
    one.handle(Refused(2))
    for client in (1, 1, 7, 2):
        one.handle(Answered(client))
    assert (one.closed, one.taken) == (None, (1,))
    one.handle(Answered(3))
    one.handle(Answered(1))
    assert one.taken == (1, 3)
    assert one.outcomes == {1: "sent", 2: "refused", 3: "sent"}


def test_a_round_that_asks_nobody_is_closed_from_the_start():
    assert machine(asked=()).closed == "everyone"
    assert machine(goal=0).closed == "goal"


EVENTS = st.builds(
    lambda kind, client: kind(client),
    st.sampled_from([Reached, Answered, Refused, Dropped]),
    st.integers(0, 7),
)


@given(st.lists(EVENTS, max_size=40), st.integers(1, 6))
def test_whatever_happens_a_round_closes_once_and_everyone_has_an_outcome(events, goal):
    asked = range(6)
    one = machine(goal, asked)
    reasons = []
    for event in [*events, Elapsed(inf)]:
        one.handle(event)
        reasons.append(one.closed)
    assert {reason for reason in reasons if reason} == {one.closed}
    assert reasons == sorted(reasons, key=bool)  # once closed, it stays closed
    assert len(one.taken) == len(set(one.taken)) <= goal
    assert list(one.outcomes) == list(asked)
    assert [c for c, end in one.outcomes.items() if end == "sent"] == sorted(one.taken)
    assert (one.closed == "goal") == (len(one.taken) == goal)


@pytest.mark.parametrize("bad", [{"goal": -1}, {"goal": 1, "seconds": 0}])
def test_terms_under_which_no_round_could_close_are_refused(bad):
    with pytest.raises(InputError, match="never close"):
        Terms(**bad)
