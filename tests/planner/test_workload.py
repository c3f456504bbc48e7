"""Workload: numbers that contradict each other, and what the refusal says."""

import pytest

from keyhole.errors import InputError
from keyhole.pricing import Workload


@pytest.mark.parametrize(
    "numbers",
    [
        (0, 1, 1, 1),
        (10, 11, 1, 1),
        (10, 0, 1, 1),
        (10, 1, 0, 1),
        (10, 1, 1, 0),
        (10, 5, 1, 2, 4),
        (10, 5, 1, 1, 6),
        (10, 5, 1, 2, None, -1),
        (2**41, 1, 1, 1),
    ],
)
def test_numbers_that_contradict_each_other_are_refused(numbers):
    with pytest.raises(InputError, match="out of range"):
        Workload(*numbers)


@pytest.mark.parametrize(
    ("numbers", "fix"),
    [
        ((0, 1, 1, 1), "count the slices there are"),
        ((10, 11, 1, 1), "take no more than num_keys"),
        ((10, 5, 1, 2, 4), "check it against num_keys, keys_per_client and cohort"),
    ],
)
def test_a_refusal_names_other_numbers_than_the_one_it_is_about(numbers, fix):
    with pytest.raises(InputError) as refused:
        Workload(*numbers)
    name, _, rest = str(refused.value).partition(" ")
    assert rest.endswith(fix)
    assert name not in rest
