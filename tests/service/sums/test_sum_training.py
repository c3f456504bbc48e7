"""Training with two aggregators: the bytes of a run in process, whatever stops on the way."""

import threading
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import count

import msgspec
import numpy as np
import pytest

import keyhole as kh
from keyhole.aggregation.base import Rounding
from keyhole.aggregation.plain import PLAIN
from keyhole.aggregation.privacy.ledger import Ledger, read_ledger
from keyhole.aggregation.privacy.mechanism import Privacy
from keyhole.aggregation.two_servers.method import TwoServers
from keyhole.device.device import Device
from keyhole.device.sums import SumPolicy, SumSend, _check_bound, params_in
from keyhole.device.take_part import Participant, keep_taking_part
from keyhole.errors import (
    InputError,
    RequestError,
    ServiceError,
    ViolationError,
)
from keyhole.rounds.loop import start_run
from keyhole.sampling import Cohorts, sample_cohort
from keyhole.service.sum_services import AggregatorClient, SumServices
from keyhole.wire.http import HttpClient
from keyhole.wire.sockets import Retry
from tests.service.small_service import small_service
from tests.service.sums.aggregators import aggregators
from tests.service.sums.private_run import (
    LAYOUT,
    POPULATION,
    SALT,
    devices,
    make_clients,
    make_plan,
    make_state,
    model_bytes,
    served,
    services,
    train,
    with_nan,
)


@pytest.fixture
def both(tmp_path):
    with small_service(tmp_path / "rounds") as service, aggregators(tmp_path / "sums") as pair:
        yield service, pair


def asked_of(plan, t=0):
    return sample_cohort(plan.cohorts, plan.seed, plan.trial, t)


def make_weighted():
    """Clients that weigh 1, 2 or 3 and report halves: a quarter of them is exact."""

    def weigh(submodel, data, rng):
        told = {"loss": 0.5 * (data % 5), "other": 7.0}
        return kh.Report(train(submodel, data, rng), weight=1 + data % 3, metrics=told)

    return replace(make_clients(), train=weigh)


SLOW = [pytest.param(over, marks=pytest.mark.slow) for over in ("choosers", "examples")]


@pytest.mark.parametrize("over", ["cohort", *SLOW])
def test_a_run_with_two_aggregators_has_the_bytes_of_one_in_process(both, over):
    plan = make_plan(over=over, max_weight=4.0, sum_metrics={"loss": 4.0})
    with devices(*both, population=make_weighted):
        run = start_run(make_state(), make_weighted(), plan, kind=served(*both))
        records = list(run.rounds(3))
    expected = start_run(make_state(), make_weighted(), plan)
    for record, other in zip(records, expected.rounds(3), strict=True):
        assert record.clients == other.clients
        assert record.total_weight == other.total_weight
        assert record.client_metrics == other.client_metrics
        assert list(record.client_metrics) == ["loss"]  # the one that the run names
        weights = [1 + client % 3 if over == "examples" else 1 for client in record.clients]
        losses = [0.5 * (client % 5) for client in record.clients]
        mean = np.average(losses, weights=weights)
        assert record.client_metrics["loss"].mean == pytest.approx(mean, abs=1e-3)
        assert record.not_opened is None
    assert model_bytes(run.state) == model_bytes(expected.state)
    assert set(records[0].seen_in_sum) == {"first server", "second server", "trainer"}


def test_rows_of_few_are_dropped_in_process_and_by_aggregators_alike(both):
    plan = make_plan(aggregate=TwoServers(Rounding(), min_clients=2, min_per_key=2))
    with devices(*both):
        run = start_run(make_state(), make_clients(), plan, kind=served(*both))
        (record,) = run.rounds(1)
    expected = start_run(make_state(), make_clients(), plan)
    (other,) = expected.rounds(1)
    assert record.dropped_rows == other.dropped_rows > 0
    assert model_bytes(run.state) == model_bytes(expected.state)
    assert run.state.model()["bias"].any()  # everybody sends it
    assert "2 or more chose" in record.seen_in_sum["trainer"]
    for party in ("first server", "second server"):
        assert "how many chose each key" in record.seen_in_sum[party]


@pytest.mark.slow
def test_the_plain_update_never_reaches_the_slice_service_or_an_aggregator(both, tmp_path):
    with devices(*both):
        run = start_run(make_state(), make_clients(), make_plan(), kind=served(*both))
        list(run.rounds(1))
    assert both[0].spool.rounds() == []


@pytest.mark.slow
def test_a_device_that_reaches_one_aggregator_is_not_in_the_sum(both):
    """It is not whole: the round waits for it until its deadline."""
    plan = make_plan()
    lost, *rest = asked_of(plan)

    def to(client, send):
        def one_only(device, round, update, keys):
            send.second.client.close()
            broken = replace(send, second=unreachable(send.second))
            return broken(device, round, update, keys)

        return one_only if client == lost else send

    with devices(*both, to=to) as met:
        run = start_run(make_state(), make_clients(), plan, kind=served(*both, seconds=4.0))
        (record,) = run.rounds(1)
    assert any(isinstance(error, ServiceError) for error in met)
    assert record.closed == "time"
    assert len(record.staleness) == len(rest)
    assert lost in record.lost_before + record.lost_after


def unreachable(device):
    """A line to where nobody listens."""
    return type(device)("http://127.0.0.1:9", token="x", retry=Retry(attempts=1))


@pytest.mark.slow
def test_an_update_with_nan_is_sent_as_zeros(both):
    plan = make_plan()
    bad, *rest = asked_of(plan)
    with devices(*both, population=lambda: with_nan(bad)) as met:
        run = start_run(make_state(), make_clients(), plan, kind=served(*both))
        (record,) = run.rounds(1)
    assert met == []
    assert len(record.staleness) == 1 + len(rest)
    assert all(np.isfinite(leaf).all() for leaf in run.state.model().values())


@pytest.mark.slow
def test_with_too_few_devices_the_round_makes_no_step(both):
    plan = make_plan(aggregate=TwoServers(Rounding(), min_clients=4))
    there = asked_of(plan)[:3]
    with devices(*both, clients=there):
        run = start_run(make_state(), make_clients(), plan, kind=served(*both, seconds=2.0))
        (record,) = run.rounds(1)
    assert "too few clients" in record.not_opened
    assert run.state.steps == 0


def test_a_device_refuses_a_smaller_cohort_than_its_own_minimum(both, tmp_path):
    plan = make_plan()
    with devices(*both, policy=SumPolicy(min_clients=3)) as met:
        looks = count()  # the clock runs once all have refused, a second with every look
        kind = served(*both, seconds=1.5, clock=lambda: float(next(looks) * (len(met) >= 5)))
        run = start_run(make_state(), make_clients(), plan, kind=kind)
        (record,) = run.rounds(1)
    assert all(isinstance(error, ViolationError) for error in met)
    assert len(met) == 5
    assert record.not_opened is not None
    assert not list((tmp_path / "sums").rglob("uploads/*/device*"))


def mixed_up(pair, how):
    """Lines to both aggregators, by an operator who has mixed something up."""
    tokens = [pair.device_token(party, "device-0") for party in (0, 1)]
    if how == "order":
        return [Device(pair.urls[1 - party], token=tokens[1 - party]) for party in (0, 1)]
    if how == "name":
        tokens[1] = pair.device_token(1, "device-7")  # which is not asked
    if how == "kind":
        tokens[1] = pair.device_token(1, "device-0", audience="slices")
    if how == "expired":
        tokens[1] = pair.device_token(1, "device-0", now=1.0)
    if how == "tokens":
        tokens.reverse()
    return [Device(url, token=token) for url, token in zip(pair.urls, tokens, strict=True)]


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("order", "another order: got party 1 at .* named as party 0"),
        ("tokens", "aggregator 0 does not take .* was not signed here"),
        ("name", "aggregator 1 does not take .*a device outside the cohort"),
        ("kind", "aggregator 1 does not take .* another kind of service"),
        ("expired", "aggregator 1 does not take .* expired"),
    ],
)
def test_what_an_operator_has_mixed_up_ends_a_device_before_it_spends(both, tmp_path, how, said):
    """It does not try round after round, nothing is sent, and the ledger is as it was."""
    service, pair = both
    inbox = services(pair)
    told = {"settings": inbox.open(0, range(3), LAYOUT, make_plan()), "before": inbox.begin}
    service.publish_state(make_state(), cohort=["device-0"], **told)
    keys = {"row": np.arange(2)}
    with ExitStack() as stack:
        lines = [stack.enter_context(line) for line in mixed_up(pair, how)]
        ledger = stack.enter_context(closing(Ledger(tmp_path / "ledger")))
        send = SumSend(*lines, (pair.public(0), pair.public(1)), ledger=ledger)
        own = {"name": "device-0", "trainer_key": service.trainer.public}
        device = stack.enter_context(service.device(**own))
        habit = Participant(lambda _: keys, lambda _, fetched: fetched.model, send=send)
        with pytest.raises(InputError, match=said) as met:
            keep_taking_part(device, habit)
    assert not isinstance(met.value, RequestError)
    assert not list((tmp_path / "sums").rglob("uploads/*/device*"))
    assert read_ledger(tmp_path / "ledger") == []


@pytest.mark.parametrize(
    "policy",
    [
        SumPolicy(max_clients=4),
        SumPolicy(max_clip=1.0),
        SumPolicy(min_noise=0.5),
        SumPolicy(max_upload=100),
        SumPolicy(min_per_key=2),
    ],
    ids=repr,
)
def test_a_device_refuses_terms_that_its_operator_does_not_allow(policy):
    inbox = SumServices(*fake_lines(), salt=SALT)
    inbox.open(0, range(5), LAYOUT, make_plan())
    with pytest.raises(ViolationError, match="expected sums of at least 2 and at most"):
        policy.check(inbox._now().facts)


def fake_lines():
    return [AggregatorClient(HttpClient("http://127.0.0.1:9"), "x", party) for party in (0, 1)]


def test_a_round_whose_tables_have_no_root_is_not_sent_to_aggregators(both):
    """Slices on demand are bound to nothing."""
    service, _ = both
    state = service.publish()
    with service.device() as device:
        known = device.known(state.published.id)
        _check_bound(known)
        first, *rest = known.manifest.tables
        tables = (msgspec.structs.replace(first, root=""), *rest)
        loose = replace(known, manifest=msgspec.structs.replace(known.manifest, tables=tables))
        with pytest.raises(ViolationError, match="1 tables without a root"):
            _check_bound(loose)


def test_a_round_without_a_secure_sum_is_not_sent_to_aggregators(both):
    service, _ = both
    state = service.publish()
    with service.device() as device, pytest.raises(InputError, match="has no secure sum"):
        params_in(device.known(state.published.id))


@pytest.mark.parametrize(
    "changes",
    [
        {"aggregate": PLAIN},
        {"privacy": Privacy(1.0, 1.0, kind="thresholded"), "cohorts": Cohorts(POPULATION, 5)},
        {
            "privacy": Privacy(1.0, 1.0, kind="correlated", rounds=4),
            "cohorts": Cohorts(POPULATION, 4, sampling="cyclic"),
        },
    ],
    ids=["plain", "thresholded", "correlated"],
)
def test_plans_that_aggregators_cannot_carry_out_are_refused(changes):
    inbox = SumServices(*fake_lines(), salt=SALT)
    with pytest.raises(InputError, match="cannot add up for this run"):
        inbox.open(0, range(5), LAYOUT, make_plan(**changes))


@pytest.mark.slow
def test_with_privacy_updates_are_shortened_and_noise_is_on_every_row(both):
    privacy = Privacy(clip=2.0, noise=0.3, delta=1e-2)
    plan = make_plan(privacy=privacy)
    with devices(*both):
        run = start_run(make_state(), make_clients(), plan, kind=served(*both))
        (record,) = run.rounds(1)
    assert record.privacy
    model = run.state.model()
    flat = np.concatenate([leaf.reshape(-1) for leaf in model.values()])
    assert np.count_nonzero(flat) > 0.99 * flat.size
    # Two servers with sd 0.6 each over a cohort of 5, and at most 5 updates of norm 2.
    sd = np.sqrt(2) * 0.3 * 2.0 / 5
    assert np.median(np.abs(flat)) / 0.6745 == pytest.approx(sd, rel=0.15)
    assert np.linalg.norm(flat) <= 2.0 + 1.1 * sd * np.sqrt(flat.size)


def test_a_run_goes_on_after_an_aggregator_was_away_when_the_round_closed(both):
    service, pair = both
    plan = make_plan()
    stopped = threading.Event()

    class Closing(SumServices):
        """Stops the second aggregator once all shares are there."""

        def close(self, round_id):
            here = super().close(round_id)
            if not stopped.is_set():
                pair.stop(1)
                stopped.set()
            return here

    kind = served(service, pair)
    kind.inbox = Closing(pair.trainer(0), pair.trainer(1), salt=SALT, seconds=0.5)
    with devices(service, pair):
        run = start_run(make_state(), make_clients(), plan, kind=kind)
        with pytest.raises(ServiceError):
            list(run.rounds(1))
        pair.start(1)
        kind.inbox = services(pair)
        again = start_run(make_state(), make_clients(), plan, kind=kind)
        list(again.rounds(1))
    expected = start_run(make_state(), make_clients(), plan)
    list(expected.rounds(1))
    assert model_bytes(again.state) == model_bytes(expected.state)


def test_the_name_of_a_sum_depends_on_salt_round_and_run():
    def name(salt, t, **changes):
        inbox = SumServices(*fake_lines(), salt=salt)
        inbox.open(t, range(5), LAYOUT, make_plan(**changes))
        return inbox._now().facts.round

    names = [name(SALT, 0), name(bytes(16), 0), name(SALT, 1), name(SALT, 0, trial=4)]
    assert len(set(names)) == 4
    assert name(SALT, 0) == names[0]
