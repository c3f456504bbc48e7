"""Laws of training: Algorithm 2 gives back Algorithm 1 where the paper says so, and the hand-made
oracle."""

import random
from functools import partial

import numpy as np
import pytest

import keyhole as kh
from tests.helpers import assert_trees_equal, load_example
from tests.laws.algorithms import deselect_submodels, train, train_with_select

by_hand = load_example("algorithm2_by_hand")

FEATURE = kh.KeySpace("feature", 60)
LAYOUT = kh.Layout.of({"x": np.zeros(60)}, kh.Cut(FEATURE, {"x": 0}))
CLIENTS = by_hand.make_clients(20, FEATURE.num_keys, seed=5)
ROUNDS = 6


def sample(t):
    return random.Random(t).sample(CLIENTS, 5)


def cohorts():
    return [kh.at_clients(sample(t)) for t in range(ROUNDS)]


def client_update(slices, examples, keys):
    """The oracle's client, on arrays."""
    update = by_hand.sgd_client(0.5)(slices["x"].tolist(), examples, list(keys))
    return {"x": np.array(update)}


def server_update(model, update):
    return {"x": model["x"] - 1.0 * update["x"]}


def last(steps):
    return list(steps)[-1].value


def algorithm_1():
    everything = FEATURE.all_keys()
    start = kh.at_server({"x": np.zeros(60)})
    update = lambda model, examples: client_update(model, examples, everything)  # noqa: E731
    return last(train(start, cohorts(), update, server_update))


def select(server_value, keys):
    return kh.generalized_select(server_value, keys, LAYOUT.select)


def algorithm_2(choose, aggregate=None):
    return last(
        train_with_select(
            kh.at_server({"x": np.zeros(60)}),
            cohorts(),
            choose,
            select,
            client_update,
            aggregate or (lambda u, z: kh.deselect_mean(u, z, LAYOUT.deselect)),
            server_update,
        )
    )


def own_features(examples):
    return FEATURE.keys(by_hand.own_features(examples))


def test_selecting_all_keys_is_algorithm_1():
    assert_trees_equal(algorithm_2(lambda _: FEATURE.all_keys()), algorithm_1())


def test_selecting_the_support_is_full_training_exactly():
    """Eq. 2: features that do not occur contribute neither to a score nor to a gradient."""
    assert_trees_equal(algorithm_2(own_features), algorithm_1())


def test_training_is_the_algorithm_by_hand():
    expected = by_hand.algorithm_2(
        by_hand.sgd_client(0.5),
        by_hand.sgd_server(1.0),
        ROUNDS,
        [0.0] * 60,
        sample,
        by_hand.own_features,
        by_hand.select_coordinate,
        by_hand.deselect_coordinates,
    )
    assert any(expected)
    assert_trees_equal(algorithm_2(own_features), {"x": np.array(expected)})


def test_the_sums_of_rounds_train_to_the_same_bytes():
    fast = algorithm_2(own_features, aggregate=partial(deselect_submodels, LAYOUT))
    assert_trees_equal(fast, algorithm_2(own_features))


def test_the_per_key_mean_takes_larger_steps_on_rare_features():
    rare = algorithm_2(own_features, aggregate=partial(deselect_submodels, LAYOUT, over="choosers"))
    assert np.abs(rare["x"]).sum() > np.abs(algorithm_2(own_features)["x"]).sum()


def test_fewer_keys_than_the_support_are_another_model():
    """The law above can fail: leave out a feature and the result differs."""

    def all_but_one(examples):
        return FEATURE.keys(by_hand.own_features(examples)[1:])

    def masked(slices, examples, keys):
        chosen = set(keys)
        kept = [([f for f in features if f in chosen], label) for features, label in examples]
        return client_update(slices, kept, keys)

    steps = train_with_select(
        kh.at_server({"x": np.zeros(60)}),
        cohorts(),
        all_but_one,
        select,
        masked,
        partial(deselect_submodels, LAYOUT),
        server_update,
    )
    assert np.any(last(steps)["x"] != algorithm_1()["x"])


def test_a_lost_cohort_stops_training_with_the_reason():
    nobody = kh.at_clients(sample(0)).drop(range(5))
    steps = train(kh.at_server({"x": np.zeros(60)}), [nobody], lambda x, _: x, server_update)
    with pytest.raises(kh.KeyholeError, match="nobody is left"):
        next(steps)
