"""A sum says itself what a privacy account needs to know, or it is refused."""

from dataclasses import dataclass, replace
from math import inf

import pytest

from keyhole.about import Leak
from keyhole.aggregation import aggregation_named, aggregation_names
from keyhole.aggregation.base import Aggregation, AggregationAbout, SumResult
from keyhole.aggregation.exchange import SumRound, prepare
from keyhole.aggregation.plain import PLAIN
from keyhole.aggregation.privacy.mechanism import Privacy
from keyhole.aggregation.two_servers.method import TwoServers
from keyhole.errors import BudgetError, InputError
from keyhole.rounds.account import Account
from keyhole.rounds.loop import start_run
from keyhole.sampling import Cohorts
from tests.rounds import toy
from tests.seams.toys import Sum, passed_on

AGGREGATIONS = aggregation_names(lambda about: not about.is_robust)

pytest.importorskip("dp_accounting")

PRIVACY = Privacy(clip=1.0, noise=2.0, delta=1e-6, budget=20.0)


def start(aggregate, **loss):
    plan = toy.make_plan(cohorts=Cohorts(20, 5, **loss), privacy=PRIVACY, aggregate=aggregate)
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


@dataclass(frozen=True)
class Said(Forwarded):
    """A wrapper with an `about` of its own."""

    said: AggregationAbout

    @property
    def about(self) -> AggregationAbout:
        return self.said

    def with_ring(self, ring, noise=0.0):
        ready = self.inner.with_ring(ring, noise)
        about = replace(self.said, ring=ring, noise_added=noise)
        return replace(self, inner=ready, said=about)


class NewSelf(Forwarded):
    def with_ring(self, ring, noise=0.0):
        return self


class Quiet(Forwarded):
    """It takes the ring and forgets the noise."""

    def with_ring(self, ring, noise=0.0):
        return Quiet(self.inner.with_ring(ring))


class OtherFacts(Forwarded):
    """It says something else about withheld sums once it has its ring."""

    @property
    def about(self) -> AggregationAbout:
        ring = self.inner.about.ring
        is_ready = ring is not None and ring.clip == PRIVACY.clip
        return replace(self.inner.about, min_clients=9 if is_ready else 2)

    def with_ring(self, ring, noise=0.0):
        return OtherFacts(self.inner.with_ring(ring, noise))


class Delegating:
    """It has a sum of its own, and leaves all else to the one inside: `with_ring`, too."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def add(self, request):
        raise AssertionError("its own sum")


SPARSE = TwoServers()


def said(way, **changes):
    """A wrapper that states all that the sum inside does, but for these."""
    inner = aggregation_named(way)
    return Said(inner, replace(inner.about, **changes))


def test_noise_of_parties_without_a_ring_is_refused():
    with pytest.raises(InputError, match=r"secure-sparse without ring"):
        start(said("secure-sparse", ring=None))


@pytest.mark.parametrize(
    ("wrapper", "stated"),
    [
        (NewSelf, r"ring=Rounding\(clip=16"),
        (Quiet, "noise_added=0"),
        (OtherFacts, "min_clients=9"),
        (Delegating, "got TwoServers"),
    ],
)
def test_a_ring_that_is_not_what_was_asked_for_is_refused(wrapper, stated):
    with pytest.raises(InputError, match=rf"not add up as privacy was promised.*{stated}"):
        start(wrapper(SPARSE))


@pytest.mark.parametrize(
    ("changes", "lacking"),
    [
        ({"failure": None}, "failure"),
        ({"min_clients": None}, "min_clients"),
        ({"noise": "on-sum"}, "noise"),
    ],
)
def test_what_a_sum_leaves_out_is_refused_under_privacy(changes, lacking):
    with pytest.raises(InputError, match=f"secure-dense without {lacking}"):
        start(said("secure-dense", **changes))


def test_an_about_with_nothing_but_noise_is_refused():
    about = AggregationAbout(name="own", title="own", leaks={}, rests_on="", noise="on_sum")
    with pytest.raises(InputError, match="own without min_clients, failure"):
        start(Said(aggregation_named("secure-sketch"), about))


@dataclass(frozen=True)
class Withholding(Said):
    """It opens nothing, whoever came."""

    def add(self, request):
        return SumResult(None, {}, error="it does not decode")


def test_a_sum_that_is_not_opened_and_said_it_would_be_ends_the_run():
    inner = aggregation_named("plain")
    with pytest.raises(InputError, match=r"not opened although .*it does not decode"):
        list(start(Withholding(inner, inner.about)).rounds(1))


@pytest.mark.parametrize(
    ("changes", "loss"),
    [
        ({"failure": lambda *_: 1e-12}, 0.0),
        ({"min_clients": 6}, 0.0),  # five came
        ({"hides_dropouts": False}, 0.5),
    ],
)
def test_a_sum_that_declared_that_it_may_not_be_opened_goes_on(changes, loss):
    inner = aggregation_named("plain")
    own = Withholding(inner, replace(inner.about, **changes))
    (record,) = start(own, lost_after=loss).rounds(1)
    assert record.not_opened == "it does not decode"


@pytest.mark.parametrize(("noise", "norm"), [(0.0, 1.0), (2.0, inf)])
def test_params_that_forget_noise_or_norm_are_refused(noise, norm):
    class Forgetful(TwoServers):
        def params(self, round):
            return SPARSE.with_ring(self.rounding, noise).params(replace(round, norm=norm))

    round = SumRound(toy.LAYOUT, {"feature": 3}, bytes(16), asked=5, norm=1.0)
    ring = replace(SPARSE.rounding, room=100)
    prepare(SPARSE.with_ring(ring, 2.0), round)
    with pytest.raises(
        InputError, match=rf"norm {norm:g}, noise {noise:g}; expected norm 1, noise 2"
    ):
        prepare(Forgetful().with_ring(ring, 2.0), round)


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
