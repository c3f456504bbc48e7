"""Private ways: the bytes of `pregenerated`, what they cost, and what they tell of keys."""

import copy
import os
import signal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import keyhole as kh
from keyhole.crypto.cuckoo import batch_shape
from keyhole.delivery import all_deliveries, delivery_named
from keyhole.delivery.base import KEYS_OF_SOMEBODY, WHO_TAKES_PART, Retrieved
from keyhole.delivery.exchange import deliver_privately
from keyhole.delivery.records import PLAIN
from keyhole.errors import AttestationError, CostlyError, InputError, ServiceError
from keyhole.planner.prices import check_model_worth, price_of
from keyhole.pricing import Workload
from keyhole.server.optimizers import SGD
from keyhole.server.state import ServerState
from tests.helpers import LAYOUTS, asked, assert_trees_equal, client_keys, model_of, zeros

ROW = kh.KeySpace("row", 300)
MODEL = {"w": np.arange(900, dtype=np.float32).reshape(300, 3), "b": np.ones(2, np.float32)}
LAYOUT = kh.Layout.of(MODEL, kh.Cut(ROW, {"w": 0}))
KEYS = [[5, 7, 5], [299], []]
ASKED = asked(LAYOUT, map(ROW.keys, KEYS))
MAX = 4
PRIVATE_DELIVERIES = [each.about.name for each in all_deliveries() if each.about.is_private]


@pytest.fixture(scope="module")
def ways():
    """One of each, kept for the module: the enclave is a process."""
    made = {
        name: delivery_named(name).for_run({"row": MAX}, allow_simulation=True)
        for name in PRIVATE_DELIVERIES
    }
    made["enclave"].deliver(state_of(), ASKED)  # starts it
    yield made
    made["enclave"].close()


def state_of(layout=LAYOUT, model=MODEL):
    return ServerState.dense(layout, model, SGD(1.0))


def max_of(layout, cohort):
    """The least public maximum under which these clients may ask."""
    counts = [len({*z.array.tolist()}) for keys in cohort for z in keys]
    return {space.name: max([1, *counts]) for space in layout.spaces}


def with_limit(way, limit):
    """The same delivery for other numbers; the enclave keeps its process."""
    other = copy.copy(way)
    object.__setattr__(other, "keys_per_client", limit)
    return other


@pytest.mark.parametrize("way", PRIVATE_DELIVERIES)
@settings(max_examples=8)
@given(name=st.sampled_from(sorted(LAYOUTS)), data=st.data())
def test_private_ways_deliver_what_select_means(ways, way, name, data):
    layout = LAYOUTS[name]
    x = data.draw(model_of(layout))
    cohort = [data.draw(client_keys(layout)) for _ in range(2)]
    limited = with_limit(ways[way], max_of(layout, cohort))
    delivered = limited.deliver(state_of(layout, x), asked(layout, cohort))
    for client, keys in enumerate(cohort):
        assert_trees_equal(delivered.submodels[client], layout.select(x, keys))
        kept = delivered.keys[client]
        assert {n: z.array.tolist() for n, z in kept.items()} == {
            z.space.name: z.array.tolist() for z in keys
        }


@pytest.mark.parametrize("way", PRIVATE_DELIVERIES)
def test_what_is_sent_does_not_depend_on_the_keys_and_is_what_the_planner_says(ways, way):
    cost = ways[way].deliver(state_of(), ASKED).cost
    need = Workload(300, MAX, slice_bytes=12, cohort=3, broadcast_bytes=8)
    planned = price_of(way, need)
    ((up,), (down,)) = set(cost.bytes_up.values()), set(cost.bytes_down.values())
    # A path holds the number of the round: 0 here, and of four digits for the planner.
    assert up == planned.bytes_up - (3 * MAX if way == "relay" else 0)
    if way == "enclave":  # the planner counts a quote and collateral of real hardware
        assert down < planned.bytes_down
    else:
        assert down == planned.bytes_down


def test_two_servers_deliver_from_buckets_what_select_means():
    """Few keys, or few slices, are asked for by queries over the whole table; these are not."""
    row, limit = kh.KeySpace("row", 2_000), 100
    assert batch_shape(limit, row.num_keys).num_buckets > 0
    rng = np.random.default_rng(0)
    model = {"w": rng.normal(size=(row.num_keys, 3)).astype(np.float32)}
    layout = kh.Layout.of(model, kh.Cut(row, {"w": 0}))
    wanted = [rng.choice(row.num_keys, count, replace=False) for count in (limit, 7)]
    deliver = delivery_named("pir").for_run({"row": limit})
    delivered = deliver.deliver(state_of(layout, model), asked(layout, map(row.keys, wanted)))
    for client, keys in enumerate(wanted):
        kept = delivered.keys[client]["row"]
        # A client whose keys crowd each other trains without one: about one in 200,000 does.
        assert set(kept.array) <= set(keys)
        assert len(kept) >= len(keys) - 1
        assert_trees_equal(delivered.submodels[client], layout.select(model, kept))
    planned = price_of("pir", Workload(row.num_keys, limit, slice_bytes=12, cohort=2))
    assert set(delivered.cost.bytes_down.values()) == {planned.bytes_down}
    assert set(delivered.cost.bytes_up.values()) == {planned.bytes_up}


@pytest.mark.parametrize("way", PRIVATE_DELIVERIES)
def test_every_slice_is_made_before_anybody_asks(ways, way):
    cost = ways[way].deliver(state_of(), ASKED).cost
    assert (cost.select_calls, cost.cache_hits, cost.distinct_slices) == (300, 4, 3)


def test_parties_learn_what_their_way_says(ways):
    seen = {name: ways[name].about.leaks for name in ways}
    assert seen["pir"] == {"first server": WHO_TAKES_PART, "second server": WHO_TAKES_PART}
    assert seen["pir-one-server"] == {"server": WHO_TAKES_PART}
    assert seen["relay"] == {"relay": WHO_TAKES_PART, "gateway": KEYS_OF_SOMEBODY}


def test_a_simulated_enclave_says_that_its_host_can_learn_everything(ways):
    ((party, learned),) = ways["enclave"].about.leaks.items()
    assert "NO HARDWARE PROTECTION" in party
    assert learned.keys
    assert learned.whose


def test_a_simulated_enclave_says_so_when_it_is_made(caplog):
    delivery_named("enclave").for_run({"row": MAX}, allow_simulation=True)
    assert "NO HARDWARE PROTECTION" in caplog.text


def test_an_enclave_that_ends_loses_its_round_and_the_next_one_starts_another(ways):
    deliver = ways["enclave"]
    deliver.deliver(state_of(), ASKED)
    first = deliver._process
    os.kill(first.pid, signal.SIGKILL)
    with pytest.raises(ServiceError):
        deliver.deliver(state_of(), ASKED)
    delivered = deliver.deliver(state_of(), ASKED)
    assert deliver._process.pid != first.pid
    assert_trees_equal(delivered.submodels[0], LAYOUT.select(MODEL, ROW.keys(KEYS[0])))


def test_ways_name_the_cryptography_that_they_rest_on():
    rests_on = {"relay": "HPKE", "pir": "AES", "enclave": "HPKE"}
    for way, word in rests_on.items():
        assert word in delivery_named(way).about.rests_on


def test_a_simulated_enclave_is_refused_unless_allowed():
    with pytest.raises(AttestationError, match="would be simulated"):
        delivery_named("enclave").for_run({"row": MAX})


def test_a_part_of_which_clients_take_every_key_is_sent_to_everyone():
    def refuse(table, wanted, tally):
        raise AssertionError

    delivered = deliver_privately(refuse, state_of(), ASKED, {"row": 300}, PLAIN, {})
    assert set(delivered.cost.bytes_down.values()) == {300 * 12 + 8}
    assert_trees_equal(delivered.submodels[0], LAYOUT.select(MODEL, ROW.keys(KEYS[0])))


def test_keys_without_a_place_are_left_out_and_reported():
    def find_all_but_7(table, wanted, tally):
        return {c: Retrieved(table.records[z], z != 7) for c, z in wanted.items()}

    delivered = deliver_privately(find_all_but_7, state_of(), ASKED, {"row": MAX}, PLAIN, {})
    left = delivered.keys[0]["row"]
    assert left.array.tolist() == [5, 5]
    assert_trees_equal(delivered.submodels[0], LAYOUT.select(MODEL, ROW.keys([5, 5])))


def test_a_private_way_dearer_than_broadcast_is_refused():
    check_model_worth(
        delivery_named("pir"), LAYOUTS["rows"], {"row": 7}
    )  # every key: sent to everyone
    wide = kh.Layout.of(zeros(w=(300, 100)), kh.Cut(kh.KeySpace("row", 300), {"w": 0}))
    check_model_worth(delivery_named("relay"), wide, {"row": MAX})
    with pytest.raises(CostlyError, match="more than the whole model"):  # the top is longer
        check_model_worth(delivery_named("relay"), LAYOUT, {"row": MAX})
    with pytest.raises(CostlyError, match="more than the whole model"):
        check_model_worth(delivery_named("pir-one-server"), LAYOUT, {"row": MAX})


def test_an_unknown_way_is_refused():
    with pytest.raises(InputError, match="no such delivery"):
        delivery_named("pigeon")
