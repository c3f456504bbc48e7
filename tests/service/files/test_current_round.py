"""The current round: whom it is for, which rounds trail it, and which may follow it."""

import json
from itertools import count

import pytest

from keyhole.errors import BudgetError, InputError
from keyhole.service.publishing import Publisher
from keyhole.service.reading import RoundsDirectory
from tests.service.small_rounds import check_current, files_of, names_of, small_state, step


def test_the_round_is_open_until_it_is_closed(tmp_path):
    with Publisher(tmp_path) as publisher:
        with pytest.raises(InputError, match="no round yet"):
            publisher.close_round()
        found = publisher.publish_state(small_state(), number=7)
        assert json.loads((tmp_path / "current.json").read_text()) == {
            "round": found.id,
            "number": 7,
            "phase": "open",
        }
        publisher.close_round()
        assert RoundsDirectory(tmp_path).current().phase == "closed"


def test_the_newest_round_is_read_however_short_ago_the_last_look_was(tmp_path):
    with Publisher(tmp_path) as publisher:
        publisher.publish_state(small_state(), number=7)
        rounds = RoundsDirectory(tmp_path, clock=lambda: 1.0)
        assert rounds.current().phase == "open"
        publisher.close_round()
        assert rounds.current().phase == "open"
        assert rounds.current(newest=True).phase == "closed"


def test_others_are_invited_to_the_round_that_is_there(tmp_path):
    with Publisher(tmp_path) as publisher:
        with pytest.raises(InputError, match="no round yet"):
            publisher.invite(["a"])
        found = publisher.publish_state(small_state(), number=7, cohort=["a"])
        rounds = RoundsDirectory(tmp_path, clock=count().__next__)
        assert list(rounds.current().cohort) == ["a"]
        files = files_of(tmp_path / "rounds" / found.id / "table-0")
        publisher.invite(["a", "b"])
        assert list(rounds.current().cohort) == ["a", "b"]
        assert files_of(tmp_path / "rounds" / found.id / "table-0") == files


def test_earlier_rounds_trail_for_as_long_as_they_are_named(tmp_path):
    state, rounds = small_state(), RoundsDirectory(tmp_path, clock=count().__next__)
    with Publisher(tmp_path) as publisher:
        first = publisher.publish_state(state, number=0).id
        second = publisher.publish_state(state, number=1, trailing=[first]).id
        assert (rounds.current().round, rounds.current().trailing) == (second, (first,))
        publisher.close_round([first, second])
        assert rounds.current().trailing == (first, second)
        publisher.publish_state(state, number=2)
        assert rounds.current().trailing == ()


def test_a_run_that_goes_on_from_before_the_current_round_forgets_what_came_since(tmp_path):
    state, rounds = small_state(), RoundsDirectory(tmp_path, clock=count().__next__)
    with Publisher(tmp_path) as publisher:
        first = publisher.publish_state(state, number=3, cohort=["a"]).id
        for number in (4, 5):
            publisher.publish_state(state, number=number)
        assert publisher.cohort_of(3) is None
        again = publisher.publish_state(state, number=3, cohort=["b"], may_go_back=True).id
        assert again == first == rounds.current().round
        assert [name for name in names_of(tmp_path) if not name.startswith(".")] == [first]
        assert (publisher.cohort_of(3), publisher.cohort_of(4)) == (["b"], None)
        publisher.publish_state(state, number=4)
        assert check_current(tmp_path)[0] == 4


@pytest.mark.parametrize("number", [3, 4])
def test_a_run_that_replaces_another_leaves_nothing_of_it(tmp_path, number):
    """Also where both are at the same number, with another model."""
    state = small_state()
    with Publisher(tmp_path) as publisher:
        for before in range(3, number + 1):
            publisher.publish_state(state, number=before)
        step(state)
        other = publisher.publish_state(state, number=3, may_go_back=True).id
        assert [name for name in names_of(tmp_path) if not name.startswith(".")] == [other]
        assert check_current(tmp_path)[0] == 3


def test_a_round_that_is_refused_before_it_is_seen_leaves_the_one_before(tmp_path):
    state, told = small_state(), []
    with Publisher(tmp_path) as publisher:
        publisher.publish_state(state, number=7, before=told.append)
        step(state)
        before = files_of(tmp_path)

        def refuse(round_id):
            assert round_id not in names_of(tmp_path)
            raise BudgetError("too dear: got 9; expected 5 or less; add noise")

        with pytest.raises(BudgetError):
            publisher.publish_state(state, number=8, before=refuse)
        assert files_of(tmp_path) == before
        assert [f"rounds/{told[0]}/manifest.json"] == [n for n in before if "manifest" in n]


def test_the_same_round_again_is_harmless_and_open(tmp_path):
    state = small_state()
    with Publisher(tmp_path) as publisher:
        first = publisher.publish_state(state, number=7, cohort=["a", "b"])
        publisher.close_round()
        before = files_of(tmp_path / "rounds")
        again = publisher.publish_state(state, number=7, cohort=["c"])
        assert again == first
    current = RoundsDirectory(tmp_path).current()
    assert (current.phase, current.cohort) == ("open", {"c": 0})
    cohort = f"{first.id}/cohort.json"
    assert {**files_of(tmp_path / "rounds"), cohort: b""} == {**before, cohort: b""}


@pytest.mark.parametrize("number", [0, 6, 7])
def test_round_numbers_grow(tmp_path, number):
    state = small_state()
    with Publisher(tmp_path) as publisher:
        publisher.publish_state(state, number=7)
        step(state)
        before = files_of(tmp_path)
        with pytest.raises(InputError, match=f"{tmp_path} holds rounds of another run"):
            publisher.publish_state(state, number=number)
        assert files_of(tmp_path) == before
        for impossible in (-1, 10**18):
            with pytest.raises(InputError, match="not the number of a round"):
                publisher.publish_state(state, number=impossible)
        publisher.publish_state(state, number=8)
