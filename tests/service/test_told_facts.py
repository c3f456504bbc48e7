"""Devices choose by what the round tells of keys: the norms of last updates, and their users."""

from dataclasses import replace
from threading import Event

import numpy as np
import pytest

import keyhole as kh
from keyhole.device.take_part import PopulationClient, keep_taking_part
from keyhole.errors import InputError
from keyhole.keys.choice import KeyCounts, KeyTable, KeyUsers, choose_with
from keyhole.rounds.loop import resume_run, start_run
from keyhole.rounds.machine import Buffering
from keyhole.wire.assignment import device_name
from keyhole.wire.settings import facts_in, facts_settings
from keyhole.wire.sockets import Clock
from tests.rounds import toy
from tests.service.living_devices import EVERYONE, living
from tests.service.small_service import small_service
from tests.service.test_served import served


def count(examples):
    """Own features, each as often as it occurs."""
    own = np.concatenate([features for features, _ in examples])
    return {"feature": KeyCounts.of(toy.FEATURE, own)}


def clients_by(choice, users=None):
    return replace(toy.make_clients(), choose=choose_with({"feature": choice}, count), users=users)


USERS = KeyUsers.among(len(toy.EXAMPLES), toy.get_examples, count)
PARTS = {"keys_per_client": {"feature": 4}}


def run_over(service, clients, plan, directory, rounds, make=start_run):
    """Some rounds with devices that know their own data and what the round tells."""
    stop = Event()

    def live(client):
        one = PopulationClient(client, lambda _: replace(clients, users=None), toy.REHEARSED)
        clock = Clock(sleep=lambda seconds: stop.wait(min(seconds, 0.01)))
        with service.device(name=device_name(client), stop=stop, clock=clock) as device:
            keep_taking_part(device, one.participant())

    with living(live, EVERYONE, stop):
        run = make(toy.make_state(), clients, plan, directory, served(service))
        list(run.rounds(rounds))
        run.close()
    return run


def test_devices_choose_by_importance_as_clients_in_process_do_after_a_restart_too(tmp_path):
    clients, plan = clients_by(kh.keys.importance), toy.make_plan(**PARTS, norms={})
    with small_service(tmp_path / "service") as service:
        run_over(service, clients, plan, tmp_path / "run", 3)
        found = run_over(service, clients, plan, tmp_path / "run", 5, resume_run)
    expected = start_run(toy.make_state(), clients, plan)
    list(expected.rounds(5))
    assert toy.model_bytes(found.state) == toy.model_bytes(expected.state)
    assert found.kind.dump() == expected.kind.dump() != b""


@pytest.mark.parametrize("buffering", [None, Buffering(1, 2)], ids=["rounds", "asynchronous"])
def test_devices_choose_by_tf_idf_as_clients_in_process_do(tmp_path, buffering):
    clients = clients_by(kh.keys.tf_idf, USERS)
    plan = toy.make_plan(**PARTS, buffering=buffering)
    with small_service(tmp_path / "service") as service:
        found = run_over(service, clients, plan, tmp_path / "run", 2)
    assert found.state.steps == 2
    if buffering is None:  # which devices end first is theirs to say
        expected = start_run(toy.make_state(), clients, plan)
        list(expected.rounds(2))
        assert toy.model_bytes(found.state) == toy.model_bytes(expected.state)


def test_tables_come_back_as_they_were_told():
    keys = np.array([0, 7, 2**40])
    table = KeyTable(keys, np.array([0.5, 3.0, 1e-3], np.float32).astype(np.float64))
    told = facts_settings({"word": table, "none": KeyTable.empty()}, USERS)
    norms, users = facts_in(told)
    assert norms["word"].of(keys).tolist() == table.values.tolist()
    assert not len(norms["none"].keys)
    assert users.clients == len(toy.EXAMPLES)
    own = np.arange(60)
    assert (users.tables["feature"].of(own) == USERS.tables["feature"].of(own)).all()
    assert facts_in(facts_settings(None, None)) == (None, None)


@pytest.mark.parametrize(
    "wrong",
    [{"key_norms": {"word": "no base64!"}}, {"key_norms": 3}, {"key_users": {"clients": 0}}],
)
def test_tables_that_make_no_sense_are_refused(wrong):
    with pytest.raises(InputError, match="what a round tells of keys makes no sense"):
        facts_in(wrong)


def test_tables_too_large_for_a_manifest_are_refused(monkeypatch):
    monkeypatch.setattr("keyhole.wire.settings._MAX_TABLE", 1 << 12)  # 4 MiB take seconds
    values = np.random.default_rng(0).random(1 << 10)
    with pytest.raises(InputError, match=r"too large to go with a round: got .* expected 4096"):
        facts_settings({"word": KeyTable(np.arange(1 << 10), values)}, None)
