"""Row-sparse optimizers equal optax's dense ones, also in the steps in which a row is not
touched."""

import jax
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keyhole.errors import InputError
from keyhole.server.groups import Schedule, Scheduled
from keyhole.server.optimizers import (
    SGD,
    Adagrad,
    Adam,
    Momentum,
    Slab,
    Yogi,
    describe_optimizer,
    optimizer_named,
)
from tests.helpers import SEEDS, grid, with_slow


def scheduled(optimizer, of_rate, schedule):
    """Ours with a schedule, and optax's; it counts steps from 0."""
    rates = np.array([0.1 * schedule.factor(t + 1) for t in range(4096)], np.float32)
    return Scheduled(optimizer, schedule), of_rate(lambda count: jax.numpy.asarray(rates)[count])


FALLING, RISING = Schedule(3, "cosine", 60), Schedule(5, "inverse-sqrt")
PAIRS = {
    "scheduled sgd": scheduled(SGD(0.1), optax.sgd, Schedule(0, "linear", 9)),
    "scheduled adagrad": scheduled(Adagrad(0.1), optax.adagrad, RISING),
    "scheduled adam": scheduled(Adam(0.1), optax.adam, FALLING),
    "scheduled yogi": scheduled(Yogi(0.1), optax.yogi, RISING),
    "sgd": (SGD(0.1), optax.sgd(0.1)),
    "momentum": (Momentum(0.1, 0.9), optax.sgd(0.1, 0.9)),
    "nesterov": (Momentum(0.1, 0.8, True), optax.sgd(0.1, 0.8, nesterov=True)),
    "no momentum": (Momentum(0.1, 0.0), optax.sgd(0.1)),
    "adagrad": (Adagrad(0.1), optax.adagrad(0.1)),
    "adagrad from zero": (
        Adagrad(0.1, eps=1e-3, initial=0),
        optax.adagrad(0.1, initial_accumulator_value=0, eps=1e-3),
    ),
    "adam": (Adam(0.1), optax.adam(0.1)),
    "federated adam": (Adam(0.03, 0.9, 0.99, 1e-3), optax.adam(0.03, 0.9, 0.99, 1e-3)),
    "adam without momentum": (Adam(0.1, b1=0), optax.adam(0.1, b1=0)),
    "adam whose second moment dies first": (
        Adam(0.03, 0.95, 0.8, 1e-2),
        optax.adam(0.03, 0.95, 0.8, 1e-2),
    ),
    "yogi": (Yogi(0.1), optax.yogi(0.1)),
    "yogi from far": (
        Yogi(0.01, 0.9, 0.99, 1e-3, initial=0.3),
        optax.chain(
            optax.scale_by_yogi(0.9, 0.99, 1e-3, initial_accumulator_value=0.3),
            optax.scale_by_learning_rate(0.01),
        ),
    ),
}
WIDTHS = (1, 3, 8, 13)


class Ours:
    """All rows of one table under one of our optimizers."""

    def __init__(self, optimizer, values):
        self.optimizer = optimizer
        moments = tuple(np.full_like(values, start) for start in optimizer.initial_moments)
        self.slab = Slab(values.copy(), moments, np.zeros(len(values), np.int32))
        self.now = 0

    def step(self, keys, rows):
        self.now += 1
        self.optimizer.step(self.slab, keys, rows, self.now)(0, len(keys))

    def read(self):
        out = np.empty_like(self.slab.values)
        slots = np.arange(len(out))
        self.optimizer.read(self.slab, slots, out, self.now)(0, len(out))
        return out


class Dense:
    """The same under optax, with zero gradients on rows that are not touched."""

    def __init__(self, optimizer, values):
        self.values, self.state = values, optimizer.init(values)
        self.update = jax.jit(optimizer.update)

    def step(self, keys, rows):
        gradient = np.zeros_like(self.values)
        gradient[keys] = rows
        with jax.numpy_dtype_promotion("standard"):  # optax raises floats to whole powers
            move, self.state = self.update(gradient, self.state)
        self.values = np.asarray(self.values + np.asarray(move))


def assert_equal_to_rounding(ours, dense, largest, steps):
    """A dense loop rounds x once a step: half a unit in the last place of the largest x."""
    np.testing.assert_allclose(ours, dense, rtol=0, atol=2**-24 * largest * (8 + steps**0.5 * 3))


def run(name, width, touches, seed):
    """Runs both through steps that touch the given rows; yields after each step."""
    ours_like, dense_like = PAIRS[name]
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(5, width)).astype(np.float32)
    ours, dense = Ours(ours_like, values), Dense(dense_like, values)
    for step, keys in enumerate(touches, start=1):
        rows = rng.normal(size=(len(keys), width)).astype(np.float32)
        ours.step(np.array(sorted(keys), np.int64), rows)
        dense.step(np.array(sorted(keys), np.int64), rows)
        yield step, ours, dense


@pytest.mark.parametrize("name", with_slow(PAIRS, fast=["momentum", "adagrad", "adam", "yogi"]))
@given(
    width=st.sampled_from(WIDTHS),
    touches=st.lists(st.sets(st.integers(0, 4), max_size=3), min_size=1, max_size=25),
    seed=SEEDS,
)
@settings(max_examples=25)
def test_any_pattern_of_touches_equals_optax(name, width, touches, seed):
    largest = 1.0
    for step, ours, dense in run(name, width, touches, seed):
        largest = max(largest, np.abs(dense.values).max())
        assert_equal_to_rounding(ours.read(), dense.values, largest, step)


@grid("name, width", PAIRS, [1, 8])
def test_gaps_of_up_to_a_thousand_steps_equal_optax(name, width):
    """Row r is touched in the first steps and again after gaps[r] steps, then left alone."""
    gaps = [1, 10, 100, 400, 1000]
    touches = [{0, 1, 2, 3, 4}] * 3 + [
        {r for r, gap in enumerate(gaps) if step == gap} for step in range(1, 1010)
    ]
    largest = 1.0
    for step, ours, dense in run(name, width, touches, seed=3):
        largest = max(largest, np.abs(dense.values).max())
        if step % 50 < 2 or step > 1000 or step < 20:
            assert_equal_to_rounding(ours.read(), dense.values, largest, step)


@pytest.mark.parametrize("name", PAIRS)
def test_a_row_rests_after_the_horizon(name):
    """To the bit, and forever: after 2,000,000 steps even v is gone, and nothing has become NaN."""
    optimizer, _ = PAIRS[name]
    ours = Ours(optimizer, np.ones((1, 2), np.float32))
    ours.step(np.array([0]), np.ones((1, 2), np.float32))
    at_horizon = []
    for now in (optimizer.horizon + 1, optimizer.horizon + 2, 60_000, 2_000_000):
        ours.now = max(now, 1)
        at_horizon.append(ours.read())
    for later in at_horizon[1:]:
        np.testing.assert_array_equal(later, at_horizon[0])
    ours.step(np.array([0]), np.ones((1, 2), np.float32))
    assert np.all(np.isfinite(ours.slab.values))


@pytest.mark.parametrize("name", PAIRS)
def test_reading_changes_nothing(name):
    for _, ours, _ in run(name, 3, [{0, 1}, {2}, set(), {1}], seed=1):
        before = [array.copy() for array in ours.slab.named().values()]
        ours.read()
        for old, new in zip(before, ours.slab.named().values(), strict=True):
            np.testing.assert_array_equal(old, new)


@grid("name, width", PAIRS, WIDTHS)
def test_spans_in_any_order_give_the_same_bytes(name, width):
    optimizer, _ = PAIRS[name]
    rng = np.random.default_rng(0)
    values = rng.normal(size=(40, width)).astype(np.float32)
    whole, split = Ours(optimizer, values), Ours(optimizer, values)
    for _ in range(6):
        keys = np.flatnonzero(rng.random(40) < 0.5)
        rows = rng.normal(size=(len(keys), width)).astype(np.float32)
        whole.step(keys, rows)
        split.now += 1
        work, cut = optimizer.step(split.slab, keys, rows, split.now), len(keys) // 3
        work(cut, len(keys))
        work(0, cut)
        assert whole.read().tobytes() == split.read().tobytes()


@pytest.mark.parametrize("name", [name for name in PAIRS if "scheduled" not in name])
def test_an_optimizer_is_made_again_from_its_description(name):
    optimizer, _ = PAIRS[name]
    assert optimizer_named(**describe_optimizer(optimizer)) == optimizer


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        ("sgd", {"lr": 0}),
        ("sgd", {"lr": -1.0}),
        ("sgd", {"lr": float("nan")}),
        ("sgd", {"lr": float("inf")}),
        ("sgd", {"lr": "0.1"}),
        ("sgd", {"lr": 1e-60}),
        ("momentum", {"lr": 1, "beta": 1.0}),
        ("momentum", {"lr": 1, "beta": -0.1}),
        ("momentum", {"lr": 1, "beta": 1 - 1e-12}),
        ("adagrad", {"lr": 1, "eps": 0}),
        ("adagrad", {"lr": 1, "initial": -1}),
        ("adam", {"lr": 0}),
        ("adam", {"lr": 1, "b1": 1}),
        ("adam", {"lr": 1, "b2": 0}),
        ("adam", {"lr": 1, "eps": 0}),
        ("yogi", {"lr": 1, "initial": float("nan")}),
    ],
)
def test_settings_out_of_range_are_refused(kind, wrong):
    with pytest.raises(InputError, match=f"setting {list(wrong)[-1]} is out of range"):
        optimizer_named(kind, **wrong)


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(InputError, match=r"'adamw'.*sgd, momentum, adagrad, adam, yogi"):
        optimizer_named("adamw", lr=1)


def test_the_usual_horizons_stay_short():
    """0.9 / sqrt(0.999) to the 227th is below 2^-26 (1 - 0.9004) sqrt(0.001)."""
    assert Adam(0.1).horizon == 227
    assert Adam(0.1, 0.9, 0.99).horizon < 230
    assert Yogi(0.1).horizon < 230
    assert Momentum(0.1).horizon < 200
    assert SGD(0.1).horizon == Adagrad(0.1).horizon == 0
