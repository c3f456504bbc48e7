"""Each task trains two rounds, on synthetic data and on small real files where they are."""

import numpy as np
import pytest

from keyhole.data.open import make_synthetic, open_dataset
from keyhole.experiments import all_tasks
from keyhole.experiments.experiment import Experiment
from keyhole.experiments.specs import spec_of
from tests.helpers import shared_file, with_slow

TASKS = all_tasks()

SIZES = {
    "so_tag": {"words": 2000, "tags": 100},
    "so_word": {"words": 500, "embedding": 16, "width": 32, "heads": 2, "neurons": 64},
    "emnist_cnn": {"filters": 8, "hidden": 32},
    "emnist_2nn": {"neurons": 20, "hidden": 20},
    "experts": {"experts": 4, "features": 8, "hidden": 8},
    "movies": {"factors": 2},
}
KEYS = {
    "so_tag": {"word": 100},
    "so_word": {"word": 104, "neuron": 16},
    "emnist_cnn": {"filter": 4},
    "emnist_2nn": {"neuron": 10},
    "experts": {"expert": 2},
    "movies": {"movie": 50},
}
SYNTHETIC = {
    "posts": {"users": 60, "words": 2000, "tags": 100},
    "writers": {"writers": 8, "max_images": 40},
    "ratings": {"users": 30, "items": 200},
}
FILES = {
    "posts": "stackexchange_mini.jsonl.xz",
    "writers": "femnist_mini.npz",
    "ratings": "movielens_small.npz",
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def two_rounds(name, dataset, **rest):
    changes = {f"keys.{space}.count": m for space, m in KEYS[name].items()}
    changes |= {"rounds": 2, "cohort.size": 3, "evaluate_every": 1}
    experiment = Experiment(spec_of(name, {**changes, **rest}, sizes=SIZES[name]), dataset)
    records = []
    return experiment, experiment.run(0, on_round=records.append), records


def check(name, experiment, result, records):
    assert [len(record.clients) for record in records] == [3, 3]
    assert all(np.isfinite(value) for value in result.metrics.values())
    assert TASKS[name].metric in result.metrics
    assert TASKS[name].metric in records[-1].metrics
    assert 0 < result.client_size < experiment.task.model.layout.server_size
    assert records[-1].refused == []


# Golden results have two rounds of every task on synthetic data, to the byte.
@pytest.mark.parametrize("name", with_slow(TASKS, fast=["so_tag"]))
def test_on_synthetic_data(name):
    kind = TASKS[name].kind
    check(name, *two_rounds(name, make_synthetic(kind, 0, **SYNTHETIC[kind])))


@pytest.mark.parametrize("name", with_slow(TASKS, fast=["so_tag", "emnist_2nn"]))
def test_on_small_real_data(name, cache):
    path = shared_file(FILES[TASKS[name].kind])
    check(name, *two_rounds(name, open_dataset(path, cache=cache)))


@pytest.mark.slow
def test_a_sampled_softmax_trains_too():
    data = make_synthetic("posts", 0, **SYNTHETIC["posts"])
    check("so_word", *two_rounds("so_word", data, client={"negatives": 0.3}))


@pytest.mark.slow
def test_so_word_has_three_accuracies():
    data = make_synthetic("posts", 0, **SYNTHETIC["posts"])
    _, result, _ = two_rounds("so_word", data)
    assert list(result.metrics) == ["accuracy", "accuracy_no_oov", "accuracy_no_oov_no_eos"]
