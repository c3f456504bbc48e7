"""Frozen leaves: each row reaches a device once, is kept by its root, and is in no update."""

import threading
from dataclasses import replace

import numpy as np
import pytest

import keyhole as kh
from keyhole.crypto.merkle import TreeShape, proof_length
from keyhole.delivery.clear import Broadcast, OnDemand, Pregenerated
from keyhole.device.cache import SliceCache
from keyhole.device.frozen import with_frozen
from keyhole.device.take_part import PopulationClient, fetch_at_home, take_part
from keyhole.rounds.loop import resume_run, start_run
from keyhole.rounds.machine import Buffering
from keyhole.sampling import Cohorts
from keyhole.server.frozen import FrozenLeaves, Receipts
from keyhole.server.optimizers import Adam
from keyhole.service.inbox import SpoolInbox
from keyhole.service.served import Served
from keyhole.wire.assignment import Wait, device_name
from tests.helpers import assert_trees_equal
from tests.rounds import toy
from tests.service.small_service import at_service, random_state, small_service

ROW = kh.KeySpace("row", 50)
TRAINED = kh.Layout.of({"w": np.zeros((50, 8), np.float32)}, kh.Cut(ROW, {"w": 0}))


def leaves_of(space, seed=0):
    """A base that all receive, and a table that is cut."""
    rng = np.random.default_rng(seed)
    values = {"base": rng.random((3, 4), np.float32), "table": rng.random((space.num_keys, 5))}
    values = {name: np.float32(value) for name, value in values.items()}
    return FrozenLeaves(kh.Layout.of(values, kh.Cut(space, {"table": 0})), values)


def cost_of(keys, space=ROW, base=True):
    """Bytes of these rows of the table with their proof, and of the base."""
    proof = 32 * proof_length(TreeShape(space.num_keys), np.array(keys))
    return 20 * len(keys) + proof + 48 * base


def fetch(device, state, keys, is_private=False):
    bare = device.fetch(state.published.id, {"row": keys})
    before = bare.traffic.bytes_down
    found = with_frozen(device, state.published.id, replace(bare, is_told=not is_private))
    return found.frozen, found.traffic.bytes_down - before


@pytest.mark.parametrize("on_disk", [False, True])
def test_rows_are_sent_once_for_as_long_as_their_table_is_the_same(service, tmp_path, on_disk):
    cache = SliceCache(tmp_path / "cache") if on_disk else None
    leaves, receipts = leaves_of(ROW), Receipts(leaves_of(ROW))
    state = random_state(TRAINED)
    with service.device(cache=cache) as device:
        for keys, fresh, base in [([7, 3], [3, 7], True), ([3, 9, 9], [9], False), ([9], [], 0)]:
            service.publish_state(state, frozen=leaves.state)  # a round later
            if on_disk:
                device.frozen = SliceCache(tmp_path / "cache").beside("frozen")  # a restart
            frozen, sent = fetch(device, state, keys)
            assert_trees_equal(frozen, leaves.layout.select(leaves.values, ROW.keys(keys)))
            assert sent == (cost_of(fresh, base=base) if fresh else 0)
            chosen = {"row": ROW.keys(keys)}
            assert receipts.charge(0, chosen, whole=False, proofs=True) == sent
        other = leaves_of(ROW, seed=1)
        service.publish_state(state, frozen=other.state)
        frozen, sent = fetch(device, state, [3])
        assert_trees_equal(frozen, other.layout.select(other.values, ROW.keys([3])))
        assert sent == cost_of([3])
        known = device.known(state.published.id)
        assert [t.name for t in known.manifest.tables] == ["row", "frozen everyone", "frozen row"]
        assert_trees_equal(
            device.fetch_all(known.id).select({"row": [1]}).model,
            {"w": state.select(ROW.keys([1]))["w"]},
        )


def test_a_device_that_names_no_keys_downloads_whole_tables_once(service):
    leaves, state = leaves_of(ROW), random_state(TRAINED)
    service.publish_state(state, frozen=leaves.state)
    with service.device() as device:
        frozen, sent = fetch(device, state, [3, 1], is_private=True)
        assert_trees_equal(frozen, leaves.layout.select(leaves.values, ROW.keys([3, 1])))
        assert sent == 48 + 50 * 20
        assert fetch(device, state, [40], is_private=True)[1] == 0
    receipts = Receipts(leaves)
    charged = receipts.charge(0, {"row": ROW.keys([3, 1])}, whole=True, proofs=True)
    assert (charged, receipts.charge(0, {"row": ROW.keys([9])}, whole=True, proofs=True)) == (
        sent,
        0,
    )


def clients_with(train, leaves=None):
    frozen = None if leaves is None else Receipts(leaves)
    return replace(toy.make_clients(), train=train, frozen=frozen)


def train_beside(leaves):
    """Training that reads frozen leaves: those that arrived, or the model's own."""

    def train(slices, examples, rng, context):
        arrived = context.frozen or leaves.layout.select(leaves.values, context.keys)
        update = toy.train(slices, examples, rng)
        return {"x": update["x"] * arrived["table"][:, 0] + arrived["base"][0, 0]}

    return train


LEAVES = leaves_of(toy.FEATURE)


@pytest.mark.parametrize(
    "delivery", [OnDemand(), Pregenerated(), Broadcast()], ids=lambda d: d.about.name
)
def test_the_record_counts_what_a_client_has_not_received_yet(delivery):
    train, plan = train_beside(LEAVES), toy.make_plan(delivery=delivery)
    with_leaves = start_run(toy.make_state(Adam(0.1)), clients_with(train, LEAVES), plan)
    without = start_run(toy.make_state(Adam(0.1)), clients_with(train), plan)
    held = {}
    for counted, bare in zip(with_leaves.rounds(6), without.rounds(6), strict=True):
        down = zip(counted.clients, counted.bytes_down, bare.bytes_down, strict=True)
        for client, some, none in down:
            keys = set(toy.chosen(toy.EXAMPLES[client])["feature"])
            fresh = sorted(keys - held.get(client, set()))
            expected = cost_of(fresh, toy.FEATURE, client not in held) if fresh else 0
            if delivery.about.name == "on-demand":
                expected = 20 * len(fresh) + 48 * (client not in held)
            if delivery.about.name == "broadcast":
                expected = (20 * 60 + 48) * (client not in held)
            assert some - none == expected
            held[client] = keys | held.get(client, set())
        assert replace(counted, bytes_down=[]) == replace(bare, bytes_down=[])
    assert max(len(counted.clients) for counted in with_leaves.records) < len(held) < 30
    assert toy.model_bytes(with_leaves.state) == toy.model_bytes(without.state)
    assert sum(table.slab.nbytes for table in LEAVES.state.tables) < 60 * 24 + 100  # no moments


@pytest.mark.parametrize("buffering", [None, Buffering(6, 3)], ids=["rounds", "asynchronous"])
def test_a_resumed_run_knows_who_has_what(tmp_path, buffering):
    cohorts = Cohorts(20, 3 if buffering else 5)
    plan = toy.make_plan(buffering=buffering, cohorts=cohorts)

    def clients(leaves=LEAVES):
        return clients_with(train_beside(LEAVES), leaves)

    whole = list(start_run(toy.make_state(), clients(), plan).rounds(6))
    first = start_run(toy.make_state(), clients(), plan, tmp_path / "run")
    list(first.rounds(3))
    first.close()
    again = resume_run(toy.make_state(), clients(), plan, tmp_path / "run")
    assert [*again.records, *again.rounds(6)][-6:] == whole
    again.close()
    with pytest.raises(kh.KeyholeError, match="was started with another frozen"):
        resume_run(toy.make_state(), clients(leaves_of(toy.FEATURE, 1)), plan, tmp_path / "run")


def test_a_run_over_the_service_makes_the_bytes_and_the_record_of_the_one_in_process(tmp_path):
    train, sent = train_beside(leaves_of(toy.FEATURE, 9)), {}  # a device's own are not used
    plan = toy.make_plan(delivery=Pregenerated())
    expected = start_run(toy.make_state(), clients_with(train_beside(LEAVES), LEAVES), plan)
    expected_records = list(expected.rounds(3))
    with small_service(tmp_path) as service:
        kind = Served(service.publisher, SpoolInbox(service.spool), poll=0.005, named=True)
        mine = clients_with(train, LEAVES)
        run = start_run(toy.make_state(), mine, plan, kind=kind)
        _drive(service, run, train, sent)
    assert toy.model_bytes(run.state) == toy.model_bytes(expected.state)
    assert run.records == at_service(expected_records)
    for record in run.records:  # what arrived, and the names of keys in both directions aside
        told = dict(zip(record.clients, record.bytes_down, strict=True))
        assert told == {client: sent[record.round, client] for client in record.clients}


def _drive(service, run, train, sent):
    """Devices in a thread take part until the run has three rounds; notes what they received."""
    stop = threading.Event()

    def live(client):
        one = PopulationClient(
            client, lambda _: replace(toy.make_clients(), train=train), toy.REHEARSED
        )
        with service.device(name=device_name(client)) as device:
            done = None
            while not stop.is_set():
                taken = take_part(device, one.participant(), done)
                if isinstance(taken, Wait):
                    stop.wait(0.01)
                else:
                    sent[taken.number, client], done = taken.bytes_down, taken.round

    threads = [threading.Thread(target=live, args=(c,)) for c in range(20)]
    try:
        for thread in threads:
            thread.start()
        list(run.rounds(3))
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_a_device_that_selects_at_home_trains_with_whole_tables(service):
    state, seen = toy.make_state(), []

    def train(slices, examples, rng, context):
        seen.append(context.frozen)
        return {"x": np.zeros_like(slices["x"])}

    settings = {"nonce": "0" * 32, "keys_per_client": {"feature": 60}}
    service.publish_state(state, frozen=LEAVES.state, settings=settings)
    one = PopulationClient(0, lambda _: replace(toy.make_clients(), train=train))
    with service.device(name=device_name(0)) as device:
        taken = take_part(device, one.participant(fetch=fetch_at_home))
        assert taken.bytes_down == 60 * 4 + 60 * 20 + 48
    keys = toy.chosen(toy.EXAMPLES[0])
    assert_trees_equal(seen[0], LEAVES.layout.select(LEAVES.values, keys))
