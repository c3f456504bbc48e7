"""What a device tells of wrong rows: late, coarsely, to its own operator."""

import pytest

from keyhole.device.take_part import Taken, WrongRows
from tests.helpers import DIGEST


def told_after(counts):
    told = []
    rows = WrongRows(told.append)
    for number, wrong in enumerate(counts):
        rows.add(Taken(f"{number}-{DIGEST}", number, 5, wrong, 1, 1, 0, wrong))
    return told


def test_nothing_is_told_before_sixteen_rounds():
    assert told_after([7] * 15) == []


@pytest.mark.parametrize(("each", "least"), [(1, 10), (6, 10), (7, 100), (700, 10_000)])
def test_a_power_of_ten_is_told_every_sixteen_rounds(each, least):
    (words,) = told_after([each] * 16)
    assert words == f"{least} or more slices of the last 16 rounds were wrong"


def test_rounds_without_a_wrong_row_tell_nothing_and_counts_start_anew():
    assert told_after([0] * 32) == []
    assert len(told_after([1] + [0] * 15 + [0] * 16 + [3] + [0] * 15)) == 2


def test_how_many_keys_were_missing_in_which_round_is_not_told():
    first, last = told_after([3] + [0] * 15), told_after([0] * 15 + [3])
    assert first == last == ["1 or more slices of the last 16 rounds were wrong"]
