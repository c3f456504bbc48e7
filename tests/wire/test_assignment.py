"""The coordinator: who is admitted, and when it begins."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyhole.errors import InputError
from keyhole.wire.assignment import Admission, Current, Pace, Wait, admit
from tests.helpers import DIGEST

OPEN = Current(f"3-{DIGEST}", 3, "open", {"ann": 0, "bob": 1})
PACE = Pace(spread=10, again=4)


def ask(device, current, has_sent=False, draw=0.5):
    return admit(device, current, has_sent, PACE, lambda: draw)


def test_a_device_of_the_cohort_takes_part_at_a_time_of_its_own():
    assert ask("ann", OPEN) == Admission(OPEN.round, 3, fetch_after=5)


def test_any_device_takes_part_where_there_is_no_cohort():
    assert isinstance(ask("zoe", Current(f"3-{DIGEST}", 3, "open")), Admission)


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


@pytest.mark.parametrize("bad", [{"spread": -1}, {"again": 0}, {"again": inf}])
def test_an_impossible_pace_is_refused(bad):
    with pytest.raises(InputError, match="pace"):
        Pace(**bad)
