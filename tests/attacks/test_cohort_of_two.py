"""A trainer names a cohort of two: the victim and a device of its own, whose update it knows.

Two thirds of two are two: the sum without the own device's update is the victim's, to the bit. That
is one of N - 1, which no share of the cohort stops. What stops it is a number that an operator
says: of an aggregator, or of the device.
"""

import pytest

from keyhole.device.sums import SumPolicy
from keyhole.errors import InputError, ViolationError
from tests.attacks.secure_sums import (
    OWN,
    SEEDS,
    VICTIM,
    is_the_victims,
    round_name,
    what_remains,
)
from tests.service.sums.aggregators import aggregators, terms_of

ROUND, TWO, LEAST = round_name(), [VICTIM, OWN[0]], 4


def opening(minimum=2):
    return terms_of(cohort=2, minimum=minimum)


def test_with_no_number_of_its_own_an_aggregator_adds_up_two(tmp_path):
    """The admission: the page says that it is so."""
    of = opening()
    with aggregators(tmp_path, min_clients=None) as pair:
        pair.open(ROUND, of, TWO)
        for name in TWO:
            pair.share(ROUND, of, name, SEEDS[name])
        pair.close(ROUND)
        pair.wait(ROUND, ("ready",))
        assert is_the_victims(of, what_remains(of, pair.combined(ROUND, of), OWN[:1]))


@pytest.mark.parametrize("says", [2, LEAST])
def test_a_number_of_one_aggregator_is_enough(tmp_path, says):
    """Also where the trainer says that number, which two devices never reach."""
    with aggregators(tmp_path, min_clients=LEAST) as pair:
        if says < LEAST:
            with pytest.raises(InputError, match="expected at least 4 of 2"):
                pair.trainer(0).open(ROUND, opening(says).encode(), TWO)
            return
        of = opening(says)
        pair.open(ROUND, of, TWO)
        for name in TWO:
            pair.share(ROUND, of, name, SEEDS[name])
        pair.close(ROUND)
        assert {one.phase for one in pair.wait(ROUND)} == {"failed"}


def test_a_number_of_the_device_is_enough():
    with pytest.raises(ViolationError, match="sums of 2 clients"):
        SumPolicy(min_clients=LEAST).check(opening().facts)
    SumPolicy(min_clients=LEAST).check(opening(LEAST).facts)
