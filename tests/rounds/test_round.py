"""Rounds: Algorithm 2 with dropouts, late clients, refused updates, budgets and exact costs."""

from dataclasses import replace

import numpy as np
import pytest

import keyhole as kh
from keyhole.delivery.clear import Broadcast, OnDemand, Pregenerated
from keyhole.errors import InputError
from keyhole.keys.budget import DeviceClass
from keyhole.keys.choice import KeyCounts, choose_with
from keyhole.keys.sampled import independent
from keyhole.keys.structured import top
from keyhole.rounds.loop import start_run
from keyhole.rounds.machine import Buffering, RoundMachine
from keyhole.rounds.round import run_round
from keyhole.sampling import Cohorts, Stream, generator, sample_cohort
from keyhole.server.optimizers import Adam
from tests.laws.algorithms import train_with_select
from tests.rounds import toy


def run(rounds=4, clients=None, optimizer=None, **plan):
    made = start_run(
        toy.make_state(optimizer), clients or toy.make_clients(), toy.make_plan(**plan)
    )
    records = list(made.rounds(rounds))
    return toy.model_bytes(made.state), records


def test_a_run_is_algorithm_2_step_by_step():
    """The algorithm written with the primitives gives the same bytes."""
    plan = toy.make_plan()

    def cohorts():
        for t in range(4):
            asked = sample_cohort(plan.cohorts, plan.seed, plan.trial, t)
            yield kh.at_clients({c: (t, c) for c in asked})

    def train(slices, place, keys):
        rng = generator(plan.seed, plan.trial, Stream.CLIENT, *place)
        return toy.train(slices, toy.localize(toy.EXAMPLES[place[1]], {"feature": keys}), rng)

    *_, last = train_with_select(
        kh.at_server({"x": np.zeros(60, np.float32)}),
        cohorts(),
        choose=lambda place: toy.chosen(toy.EXAMPLES[place[1]])["feature"],
        deliver=lambda x, z: kh.generalized_select(x, z, toy.LAYOUT.select),
        client_update=train,
        aggregate=lambda u, z: kh.deselect_mean(u, z, toy.LAYOUT.deselect),
        server_update=lambda x, u: {"x": x["x"] - np.float32(1.0) * u["x"]},
    )
    assert last.value["x"].tobytes() == run()[0]


@pytest.mark.parametrize("delivery", [Broadcast(), OnDemand(), Pregenerated()])
def test_every_delivery_trains_the_same_bytes(delivery):
    assert run(delivery=delivery)[0] == run()[0]


def test_a_client_may_write_into_the_whole_model_that_it_received():
    def train(slices, examples, rng):
        before = slices["x"].copy()
        slices["x"] += 1
        return {"x": before - slices["x"]}

    clients = replace(toy.make_clients(), train=train, choose=lambda *_: toy.FEATURE.all_keys())
    x, records = run(2, clients)
    assert np.array_equal(np.frombuffer(x, np.float32), np.full(60, 2))
    assert not any(record.refused for record in records)


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others():
    assert run() == run()
    assert run(seed=4)[0] != run()[0]
    assert run(trial=1)[0] != run()[0]


def test_dividing_by_those_who_chose_a_key_takes_larger_steps():
    per_key, mean = (
        np.frombuffer(run(over=over)[0], np.float32) for over in ("choosers", "cohort")
    )
    assert np.abs(per_key).sum() > np.abs(mean).sum()


def test_what_became_of_everyone_is_not_asked_for_each_client(monkeypatch):
    """It is a list of all: asked for each, a round costs the square of its clients."""
    asked, outcomes = [], RoundMachine.outcomes.fget
    monkeypatch.setattr(
        RoundMachine, "outcomes", property(lambda machine: asked.append(1) or outcomes(machine))
    )
    counts = []
    for size in (5, 20):
        asked.clear()
        run(rounds=1, cohorts=Cohorts(20, size))
        counts.append(len(asked))
    assert 0 < counts[0] == counts[1]


def test_clients_lost_before_receive_nothing_and_after_send_nothing():
    cohorts = Cohorts(20, 10, lost_before=0.3, lost_after=0.3)
    _, records = run(rounds=8, cohorts=cohorts)
    assert any(r.lost_before for r in records)
    assert any(r.lost_after for r in records)
    for record in records:
        for client, down, up in zip(
            record.clients, record.bytes_down, record.bytes_up, strict=True
        ):
            if client in record.lost_before:
                assert (down, up) == (0, 0)
            elif client in record.lost_after:
                assert up == 8 * down // 4  # keys it asked with, 8 bytes for 4 of weights
            else:
                assert up == 2 * 8 * (down // 4) + down


def test_over_selection_closes_the_round_at_its_goal():
    _, records = run(cohorts=Cohorts(20, 5, over_selection=1.6))
    for record in records:
        assert len(record.clients) == 8
        assert len(record.late) == 3
        assert len(record.staleness) == 5


def test_a_round_with_nobody_left_is_recorded_and_skipped():
    _, records = run(rounds=3, cohorts=Cohorts(20, 5, lost_before=1.0))
    assert [(r.is_skipped, r.step, len(r.lost_before)) for r in records] == [(True, 0, 5)] * 3


@pytest.mark.parametrize("poison", [np.nan, np.inf, 1e39, 3e38])
def test_an_update_that_cannot_be_added_up_is_refused_and_the_round_goes_on(poison):
    """1e39 is beyond float32, and five times 3e38 would be."""
    bad = sample_cohort(Cohorts(20, 5), 3, 0, 0)[2]

    def localize(examples, keys):
        return toy.localize(examples, keys), examples == toy.EXAMPLES[bad]

    def spoiled(submodel, data, rng):
        examples, is_bad = data
        update = toy.train(submodel, examples, rng)["x"]
        return {"x": update.astype(np.float64) + (poison if is_bad else 0)}

    clients = replace(toy.make_clients(), train=spoiled, localize=localize)
    updates, record = run_round(0, toy.make_state(), clients, toy.make_plan())
    assert record.refused == [bad]
    assert len(record.staleness) == 4
    assert np.all(np.isfinite(updates[0].rows))


def test_devices_of_less_memory_get_fewer_keys():
    devices = (DeviceClass("phone", 0.5, 240), DeviceClass("watch", 0.5, 20))
    _, records = run(rounds=6, devices=devices)
    sizes = {down // 4 for r in records for down in r.bytes_down}
    assert 5 in sizes
    assert max(sizes) > 5


def test_a_client_keeps_its_device():
    devices = (DeviceClass("phone", 0.5, 240), DeviceClass("watch", 0.5, 20))
    _, records = run(rounds=10, devices=devices)
    seen = {}
    for record in records:
        for client, down in zip(record.clients, record.bytes_down, strict=True):
            assert seen.setdefault(client, down) == down


def test_a_record_accounts_for_every_byte_and_slice():
    _, (record, *_) = run()
    keys = [len(toy.chosen(toy.EXAMPLES[c])["feature"]) for c in record.clients]
    assert record.bytes_down == [4 * m for m in keys]
    assert record.bytes_up == [8 * m + 8 * m + 4 * m for m in keys]
    assert record.select_calls == record.distinct_keys
    assert record.select_calls + record.cache_hits == sum(keys)
    assert max(record.client_sizes) == max(keys)
    assert record.seen_by == {"server": "keys and whose they are"}


def chosen_keys(choice, rounds=3, **plan):
    """The keys of every client, by delivery."""
    seen = {}

    def count(examples):
        own = np.array(toy.oracle.own_features(examples), np.int64)
        return {"feature": KeyCounts.of(toy.FEATURE, own)}

    def train(submodel, data, rng):
        return {"x": np.zeros_like(submodel["x"])}

    class Watched:
        about = OnDemand().about

        def deliver(self, state, keys):
            seen[len(seen)] = {c: (z["feature"],) for c, z in keys.items()}
            return OnDemand().deliver(state, keys)

    clients = replace(
        toy.make_clients(), choose=choose_with({"feature": choice}, count), train=train
    )
    run(rounds, clients, keys_per_client={"feature": 7}, delivery=Watched(), **plan)
    return [[tuple(*z) for z in keys.values()] for keys in seen.values()]


def test_shared_keys_are_the_same_for_all_clients_of_a_round_and_others_in_the_next():
    rounds = chosen_keys(independent, shared_keys=True)
    assert [len(set(keys)) for keys in rounds] == [1, 1, 1]
    assert len({keys[0] for keys in rounds}) == 3


def test_keys_are_each_clients_own_unless_shared():
    for keys in chosen_keys(independent):
        assert len(set(keys)) == len(keys)


def test_structured_keys_do_not_change_when_random_ones_are_shared():
    assert chosen_keys(top, shared_keys=True) == chosen_keys(top)


def test_a_small_device_shares_the_first_keys_of_a_large_one():
    devices = (DeviceClass("phone", 0.5, 240), DeviceClass("watch", 0.5, 20))
    for keys in chosen_keys(independent, shared_keys=True, devices=devices):
        longest = max(keys, key=len)
        assert all(z == longest[: len(z)] for z in keys)


def test_clients_that_start_in_one_asynchronous_round_share_keys():
    """Three start at once, then one whenever another ends, some of them in the same round."""
    buffering = Buffering(concurrency=3, goal=2, duration=lambda rng: rng.exponential())
    batches = chosen_keys(independent, rounds=6, buffering=buffering, shared_keys=True)
    assert [len(keys) for keys in batches[:3]] == [3, 1, 1]
    assert len({keys for batch in batches[:2] for keys in batch}) == 1
    assert len({keys for batch in batches for keys in batch}) == 6


def test_a_choice_beyond_the_budget_is_refused():
    greedy = replace(toy.make_clients(), choose=lambda examples, context: toy.FEATURE.all_keys())
    with pytest.raises(InputError, match="got 60; expected 3 or fewer"):
        run(clients=greedy, keys_per_client={"feature": 3})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"keys_per_client": {"feature": 61}}, "got 61; expected 0..60"),
        ({"keys_per_client": {"word": 3}}, "got word; expected feature"),
        ({"cohorts": Cohorts(30, 5)}, "got 30; expected 20"),
        ({"keys_per_client": {"feature": 2.5}}, "got 2.5; expected a whole number"),
        ({"seed": -1}, "got -1; expected a whole number from 0"),
        ({"over": "chooser"}, "got chooser"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_before_the_first_round(changes, message):
    with pytest.raises(InputError, match=message):
        run(**changes)


def test_adam_and_lazy_rows_train_the_same_bytes_as_dense_ones():
    from keyhole.server.state import ServerState

    dense = start_run(toy.make_state(Adam(0.1)), toy.make_clients(), toy.make_plan())
    lazy = start_run(ServerState.lazy(toy.LAYOUT, Adam(0.1)), toy.make_clients(), toy.make_plan())
    for made in (dense, lazy):
        list(made.rounds(5))
    assert toy.model_bytes(dense.state) == toy.model_bytes(lazy.state)
