"""Movies: a user's taste stays at home, and ratings are predicted better than by means."""

import numpy as np
import pytest

from keyhole.data.federated import Dataset, FederatedData
from keyhole.data.open import make_synthetic, open_dataset
from keyhole.experiments import task_named
from keyhole.experiments.movies import MOVIES, rmse_of_means
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
from tests.helpers import shared_file


def dataset_of(ratings, items):
    """`ratings[split][user]` is a list of (item, half stars)."""

    def split(users):
        flat = [pair for user in users for pair in user]
        columns = {
            "item": np.array([item for item, _ in flat], np.int32),
            "half_stars": np.array([half for _, half in flat], np.uint8),
        }
        return FederatedData.of(
            [f"user{i}" for i in range(len(users))], [*map(len, users)], columns
        )

    splits = {name: split(users) for name, users in ratings.items()}
    return Dataset("by hand", "ratings", splits, {"items": [f"movie{i}" for i in range(items)]})


def two_camps(users=40, items=20):
    """Half of the users love even movies and hate odd ones, the others the other way round."""
    rng, train, test = np.random.default_rng(0), [], []
    for user in range(users):
        rated = rng.permutation(items)[:15].tolist()
        halves = [(item, 9 if (item + user) % 2 == 0 else 2) for item in rated]
        train.append(halves[:12])
        test.append(halves[12:])
    return dataset_of({"train": train, "test": test}, items)


def run_of(task, rounds, m, client_lr=MOVIES.defaults.client.lr):
    settings = ClientUpdate(client_lr, batch_size=64, max_examples=64)
    choose = choose_with({"movie": choice_named("random")}, task.count_keys)
    clients = Clients(
        task.clients, task.data, choose, LocalSgd(task.model, settings), task.localize
    )
    state = ServerState.dense(task.model.layout, task.model.init(0), SGD(1.0))
    run = start_run(state, clients, RunParts(Cohorts(task.clients, 20), {"movie": m}))
    list(run.rounds(rounds))
    return run


def test_it_is_found_by_name():
    assert task_named("movies") is MOVIES


def test_a_client_holds_the_movies_it_rated_and_counts_them_among_its_own():
    data = dataset_of({"train": [[(5, 8), (2, 3), (7, 10)]], "test": [[(1, 4)]]}, items=9)
    task = MOVIES.on(data, {"factors": 2})
    own = task.data(0)
    counts = task.count_keys(own)["movie"]
    assert counts.keys.tolist() == [2, 5, 7]
    space = counts.space
    examples = task.localize(own, {"movie": space.keys([7, 5])})
    assert examples["movie"].tolist() == [1, 0]
    assert examples["stars"].tolist() == [4.0, 5.0]
    nothing = task.localize(own, {"movie": space.keys([0])})
    assert nothing["movie"].tolist() == [-1]


def test_the_error_is_that_of_the_levels_while_movies_say_nothing():
    """With rows of zeros only levels are left: 3.5 + b, b = (sum of residuals) / (n + 4)."""
    data = dataset_of({"train": [[(0, 10), (1, 10)], [(0, 4)]], "test": [[(2, 9)], []]}, items=3)
    task = MOVIES.on(data, {"factors": 2})
    zeros = {"factors": np.zeros((3, 2), np.float32), "bias": np.zeros(3, np.float32)}
    found = task.metrics["test"](ServerState.dense(task.model.layout, zeros, SGD(1.0)))
    # Residuals 1.5 and 1.5 give b = 3 / 6; 4.0 is said of 4.5.
    # Nobody rated movie 2 before, so its mean is that of all: (5 + 5 + 2) / 3 = 4.
    assert found["rmse"] == pytest.approx(0.5, rel=1e-5)
    assert found["rmse_of_means"] == pytest.approx(0.5, rel=1e-5)


def test_ratings_are_predicted_better_than_by_the_means_of_movies():
    """Means say the same to both camps and err by 1.75 stars; a taste tells them apart."""
    task = MOVIES.on(two_camps(), {"factors": 2})
    run = run_of(task, rounds=30, m=20)
    found = task.metrics["test"](run.state)
    assert found["rmse_of_means"] > 1.7
    assert found["rmse"] < 0.7 * found["rmse_of_means"]


def test_tuning_keeps_users_out_of_training():
    task = MOVIES.on(two_camps(), {"factors": 2}, is_tuning=True)
    assert task.clients == 32
    state = ServerState.dense(task.model.layout, task.model.init(0), SGD(1.0))
    assert task.metrics["validation"](state).keys() == {"rmse", "rmse_of_means"}


def test_means_of_movies_by_hand():
    data = dataset_of({"train": [[(0, 2), (1, 8)], [(0, 4)]], "test": [[]]}, items=2)
    asked = {"movie": np.array([0, 1]), "stars": np.array([2.5, 4.0], np.float32)}
    # Said 1.5 and 4: errors 1 and 0.
    assert rmse_of_means(data.splits["train"], asked) == pytest.approx(np.sqrt(0.5))


@pytest.mark.slow
def test_two_rounds_on_synthetic_ratings():
    task = MOVIES.on(make_synthetic("ratings", 0, users=30, items=300))
    run = run_of(task, rounds=2, m=100)
    assert np.isfinite(task.metrics["test"](run.state)["rmse"])
    assert max(record.bytes_down[0] for record in run.records) <= 4 * 100 * 9


@pytest.mark.slow
def test_two_rounds_on_movielens(tmp_path):
    task = MOVIES.on(open_dataset(shared_file("movielens_small.npz"), cache=tmp_path))
    run = run_of(task, rounds=2, m=500)
    found = task.metrics["test"](run.state)
    assert found["rmse"] < 1.1
    assert 0.9 < found["rmse_of_means"] < 1.1
