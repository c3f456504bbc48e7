"""Runs of PyTorch models: the same bytes with any number of threads and after a kill."""

import multiprocessing
import os
import signal
import threading

import numpy as np
import pytest

import keyhole as kh
from keyhole.errors import InputError
from keyhole.models.client_update import ClientUpdate
from keyhole.rounds.cores import Cores

pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch==2.13.0")

from tests.front.test_torch import (
    EACH,
    KEYS,
    SETTINGS,
    client,
    make_data,
    make_model,
    make_task,
    same_bytes,
    torch,
)


def train_with(threads, net, **changes):
    task = make_task(make_model(net, **changes))
    return kh.train(task, rounds=4, m=6, engine=Cores(threads), **SETTINGS).model()


@pytest.mark.parametrize("net", [{}, {"dropout": 0.5}, {"norm": True}], ids=str)
def test_one_thread_and_two_give_the_same_bytes(net):
    torch.manual_seed(len(str(net)))
    one = train_with(1, net)
    torch.rand(3)
    assert same_bytes(one, train_with(2, net))
    assert same_bytes(one, train_with(2, net, stochastic=True))


def test_how_clients_train_is_set_by_keywords():
    told = {"epochs": 3, "client_momentum": 0.5, "client_clip_norm": 0.05}
    start, settings = make_model().init(0), {**SETTINGS, "cohort": 8, "batch_size": EACH, **told}
    run = kh.train(make_task(), rounds=1, start=start, **settings)
    update = ClientUpdate(0.5, epochs=3, batch_size=EACH, momentum=0.5, clip_norm=0.05)
    train, people = make_model().trainer(update), make_data()
    clients = [people.splits["train"].client(n) for n in range(8)]
    ends = [train(start, each, np.random.default_rng(0)).update["items.weight"] for each in clients]
    expected = start["items.weight"] - np.mean(ends, axis=0)
    assert np.allclose(run.model()["items.weight"], expected, atol=1e-6)


def test_clients_train_in_parallel_unless_told_otherwise():
    threads = set()

    def forward(net, batch):
        if net.training:
            threads.add(threading.current_thread())
        return net(batch)

    ours = kh.train(make_task(make_model(forward=forward)), rounds=1, m=6, **SETTINGS)
    assert threads
    assert threading.main_thread() not in threads
    assert same_bytes(ours.model(), kh.train(make_task(), rounds=1, m=6, **SETTINGS).model())


def test_dropout_draws_anew_for_each_client():
    model = make_model({"dropout": 0.5})
    train = model.trainer(ClientUpdate(client_lr=0.3, batch_size=100))
    slices = model.layout.select(model.init(1), KEYS)
    before = torch.get_rng_state()
    updates = [train(slices, client(), np.random.default_rng(s)).update for s in (0, 1, 0)]
    assert same_bytes(updates[0], updates[2])
    assert not np.allclose(updates[0]["out.weight"], updates[1]["out.weight"], atol=1e-4)
    assert torch.equal(before, torch.get_rng_state())


def test_one_that_draws_now_and_then_is_noticed_when_it_does():
    """The first client does not draw; a later one does, and has the same bytes in any order."""

    def forward(net, batch):
        noise = torch.rand(()) if batch["label"].sum() > 2 else 0.0
        return net(batch) * (1 + noise)

    model = make_model(forward=forward)
    slices = model.layout.select(model.init(1), KEYS)
    quiet = {"item": np.array([0, 1]), "label": np.array([0.0, 1.0])}
    loud = {"item": np.array([0, 1, 2, 3]), "label": np.ones(4)}

    def updates(*clients):
        train = model.trainer(ClientUpdate(client_lr=0.3))
        return [train(slices, data, np.random.default_rng(3)).update for data in clients]

    first, second = updates(quiet, loud)
    torch.rand(1)
    again, before = updates(loud, quiet)
    assert same_bytes(second, again)
    assert same_bytes(first, before)


def train_until_killed(folder, rounds):
    def kill(trial, record):
        if record.round == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    kh.train(make_task(), rounds=rounds, m=6, out=folder, **SETTINGS | {"progress": kill})


def test_a_killed_run_goes_on_to_the_same_bytes(tmp_path):
    process = multiprocessing.get_context("spawn").Process(
        target=train_until_killed, args=(tmp_path / "run", 6)
    )
    process.start()
    process.join(300)
    assert process.exitcode == -signal.SIGKILL
    resumed = kh.train(make_task(), rounds=6, m=6, out=tmp_path / "run", **SETTINGS)
    whole = kh.train(make_task(), rounds=6, m=6, **SETTINGS)
    assert same_bytes(resumed.model(), whole.model())


def test_another_net_is_another_run(tmp_path):
    kh.train(make_task(), rounds=1, m=6, out=tmp_path / "run", **SETTINGS)
    task = make_task(make_model({"norm": True}))
    with pytest.raises(InputError, match="holds a run with another"):
        kh.train(task, rounds=1, m=6, out=tmp_path / "run", **SETTINGS)


def test_a_run_learns_and_measures():
    run = kh.train(make_task(), rounds=150, m=EACH, **SETTINGS)
    assert run.metrics["accuracy"] > 0.8
    assert run.metrics["accuracy"] == run.evaluate()["accuracy"]
