"""A sum says itself what a privacy account needs to know, or it is refused."""

from dataclasses import dataclass, replace

import pytest

from keyhole.about import Leak
from keyhole.aggregation import aggregation_named, aggregation_names
from keyhole.aggregation.base import Aggregation, AggregationAbout, SumResult
from keyhole.aggregation.plain import PLAIN
from keyhole.aggregation.privacy.mechanism import Privacy
from keyhole.errors import BudgetError, InputError
from keyhole.rounds.account import Account
from keyhole.rounds.loop import start_run
from keyhole.sampling import Cohorts
from tests.rounds import toy
from tests.seams.toys import Sum, passed_on

AGGREGATIONS = aggregation_names()

pytest.importorskip("dp_accounting")

PRIVACY = Privacy(clip=1.0, noise=2.0, delta=1e-6, budget=20.0)


def start(aggregate):
    plan = toy.make_plan(cohorts=Cohorts(20, 5), privacy=PRIVACY, aggregate=aggregate)
    return start_run(toy.make_state(), toy.make_clients(), plan)


def test_a_sketch_that_may_not_decode_is_refused():
    with pytest.raises(BudgetError):
        start(aggregation_named("secure-sketch"))


def test_a_wrapper_does_not_make_the_account_smaller():
    with pytest.raises((BudgetError, InputError)):
        start(passed_on(aggregation_named("secure-sketch")))


def test_a_sum_that_declares_nothing_is_refused_under_privacy():
    def own_sum(request) -> SumResult:
        return PLAIN.add(request)

    with pytest.raises(InputError, match="does not declare"):
        start(Sum(own_sum))
    plan = toy.make_plan(aggregate=Sum(own_sum))  # which promises nothing
    list(start_run(toy.make_state(), toy.make_clients(), plan).rounds(1))


@dataclass(frozen=True)
class Forwarded:
    """A wrapper that changes nothing and passes on what the sum declares."""

    inner: Aggregation

    @property
    def about(self) -> AggregationAbout:
        return self.inner.about

    def with_ring(self, ring, noise=0.0):
        return Forwarded(self.inner.with_ring(ring, noise))

    def price(self, load):
        return self.inner.price(load)

    def add(self, request):
        return self.inner.add(request)


@pytest.mark.parametrize("way", AGGREGATIONS)
@pytest.mark.parametrize("sampling", ["fixed", "poisson"])
def test_a_wrapper_that_passes_on_what_is_declared_has_the_same_account(way, sampling):
    one = aggregation_named(way)
    layout, cohorts = toy.make_state().layout, Cohorts(20, 5, sampling)
    accounts = [
        Account.of(PRIVACY, cohorts, each, layout, {"feature": 3}) for each in (one, Forwarded(one))
    ]
    assert accounts[0] == accounts[1]


def test_a_wrapped_sum_gives_the_same_private_model():
    one = aggregation_named("secure-sparse")
    models = []
    for each in (one, Forwarded(one)):
        run = start(each)
        list(run.rounds(1))
        models.append(run.state.model()["x"].tobytes())
    assert models[0] == models[1]


def test_a_ring_that_cannot_be_changed_is_refused_under_privacy():
    @dataclass(frozen=True)
    class Stiff:
        inner: Aggregation

        @property
        def about(self) -> AggregationAbout:
            return self.inner.about

        def add(self, request):
            return self.inner.add(request)

    with pytest.raises(InputError, match="with_ring"):
        start(Stiff(aggregation_named("secure-sparse")))


def test_a_record_shows_what_a_sum_declares_and_that_another_declares_nothing():
    def silent(request) -> SumResult:
        return replace(PLAIN.add(request), seen_by={})

    @dataclass(frozen=True)
    class Silent:
        about = replace(PLAIN.about, name="own", leaks={"auditor": Leak(updates="every update")})

        def add(self, request):
            return silent(request)

    seen = []
    for own in (Silent(), Sum(silent)):
        plan = toy.make_plan(aggregate=own)
        (record,) = start_run(toy.make_state(), toy.make_clients(), plan).rounds(1)
        seen.append(record.seen_in_sum)
    assert seen[0] == {"auditor": "every update"}
    assert "declares nothing" in seen[1]["server"]
