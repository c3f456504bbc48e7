"""A sum says itself what a privacy account needs to know, or it is refused."""

import pytest

from keyhole.aggregation.base import Summed
from keyhole.aggregation.named import aggregation_named
from keyhole.aggregation.plain import plain
from keyhole.aggregation.privacy.mechanism import Privacy
from keyhole.errors import BudgetError, InputError
from keyhole.rounds.loop import start_run
from keyhole.sampling import Cohorts
from tests.rounds import toy
from tests.seams.toys import passed_on

pytest.importorskip("dp_accounting")

PRIVACY = Privacy(clip=1.0, noise=2.0, delta=1e-6, budget=20.0)


def start(aggregate):
    plan = toy.make_plan(cohorts=Cohorts(20, 5), privacy=PRIVACY, aggregate=aggregate)
    return start_run(toy.make_state(), toy.make_clients(), plan)


def test_a_sketch_that_may_not_decode_is_refused():
    with pytest.raises(BudgetError):
        start(aggregation_named("secure-sketch"))


@pytest.mark.xfail(strict=True, reason="the account asks for the class of a sum")
def test_a_wrapper_does_not_make_the_account_smaller():
    with pytest.raises((BudgetError, InputError)):
        start(passed_on(aggregation_named("secure-sketch")))


@pytest.mark.xfail(strict=True, reason="what is not of a known class counts as a sum in the clear")
def test_a_sum_that_declares_nothing_is_refused_under_privacy():
    def own_sum(request) -> Summed:
        return plain(request)

    with pytest.raises(InputError, match="declare"):
        start(own_sum)
