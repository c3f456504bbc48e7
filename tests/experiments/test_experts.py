"""Experts: which of them a client selects, and that a mixture of a few of them learns."""

import numpy as np
import pytest

from keyhole.data.federated import Dataset, FederatedData
from keyhole.data.open import make_synthetic
from keyhole.errors import InputError
from keyhole.experiments import task_named
from keyhole.experiments.emnist import EXPERTS, expert_of
from keyhole.keys.choice import choose_with
from keyhole.keys.structured import choice_named
from keyhole.models.client_update import ClientUpdate
from keyhole.models.local_training import LocalSgd
from keyhole.rounds.clients import Clients
from keyhole.rounds.loop import start_run
from keyhole.rounds.spec import RunParts
from keyhole.sampling import Cohorts
from keyhole.server.optimizers import SGD
from keyhole.server.state import ServerState

SMALL = {"experts": 4, "features": 16, "hidden": 16}


def writers(count=12, images=20):
    """Four characters as ink in one of four corners; a writer knows three, so any two meet."""
    rng, characters = np.random.default_rng(0), np.array([3, 20, 33, 50])

    def split(n):
        label = np.concatenate([rng.choice(np.delete(characters, w % 4), n) for w in range(count)])
        pixels = np.full((len(label), 28, 28), 255, np.uint8)
        for image, corner in zip(pixels, np.searchsorted(characters, label), strict=True):
            image[14 * (corner // 2) :, 14 * (corner % 2) :][:14, :14] = rng.integers(
                0, 90, (14, 14)
            )
        columns = {"pixels": pixels, "label": label.astype(np.uint8)}
        return FederatedData.of([f"w{i}" for i in range(count)], [n] * count, columns)

    return Dataset("by hand", "writers", {"train": split(images), "test": split(4)}, {})


def run_of(task, rounds, m, cohort, choice="random"):
    choose = choose_with({"expert": choice_named(choice)}, task.count_keys)
    train = LocalSgd(task.model, ClientUpdate(client_lr=0.1, batch_size=20), {"expert": [m]})
    clients = Clients(task.clients, task.data, choose, train, task.localize)
    state = ServerState.dense(task.model.layout, task.model.init(0), SGD(1.0))
    run = start_run(state, clients, RunParts(Cohorts(task.clients, cohort), {"expert": m}))
    list(run.rounds(rounds))
    return run


def test_it_is_found_by_name():
    assert task_named("experts") is EXPERTS


@pytest.mark.parametrize("experts", [1, 3, 8, 62])
def test_every_expert_has_characters_and_neighbours_share_one(experts):
    found = expert_of(np.arange(62), experts)
    assert np.unique(found).tolist() == list(range(experts))
    assert (np.diff(found) >= 0).all()
    assert np.bincount(found).max() - np.bincount(found).min() <= 1


def test_a_client_counts_the_experts_of_its_characters():
    """Of 62 characters and 4 experts, 16 belong to the first, 15 to the second, and so on."""
    task = EXPERTS.on(writers(), SMALL)
    counts = task.count_keys({"label": np.array([0, 15, 16, 61], np.int32)})["expert"]
    assert counts.keys.tolist() == [0, 1, 3]
    assert counts.counts.tolist() == [2, 1, 1]


def test_more_experts_than_characters_are_refused():
    with pytest.raises(InputError, match=r"got 63 experts; expected 1\.\.62"):
        EXPERTS.on(writers(), {"experts": 63})


def test_two_experts_in_four_learn():
    """Chance is a quarter; the whole model is asked, though no client ever held it."""
    task = EXPERTS.on(writers(), SMALL)
    run = run_of(task, rounds=25, m=2, cohort=12)
    assert task.metrics["test"](run.state)["accuracy"] > 0.9
    layout = task.model.layout
    expected = 4 * layout.client_size(expert=2)  # bytes of float32
    assert {b for record in run.records for b in record.bytes_down} == {expected}


@pytest.mark.slow
def test_two_rounds_on_synthetic_writers():
    task = EXPERTS.on(make_synthetic("writers", 0, writers=6), SMALL)
    run = run_of(task, rounds=2, m=2, cohort=4)
    assert 0 <= task.metrics["test"](run.state)["accuracy"] <= 1
