"""Local training: equal to a plain NumPy loop, untouched by padding, rarely compiled."""

import warnings
from dataclasses import replace
from functools import cache
from math import inf, nan

import numpy as np
import pytest

from keyhole import tree
from keyhole.errors import InputError, ShapeError
from keyhole.models.client_update import ClientUpdate
from keyhole.models.dense import two_layer
from keyhole.models.local_training import LocalSgd, draw_batches, draw_examples
from keyhole.models.logistic import tag_regression
from keyhole.models.model import Model
from keyhole.models.transformer import TransformerSizes, transformer
from keyhole.sampling import generator
from tests.helpers import assert_trees_close, assert_trees_equal, with_slow

MODEL = two_layer(pixels=6, neurons=9, hidden=5, classes=3)
(NEURON,) = MODEL.layout.spaces
PLAIN = ClientUpdate(0.1, batch_size=4)


@cache
def local_sgd(settings=PLAIN):
    """Compiled once for all tests that train with these settings."""
    return LocalSgd(MODEL, settings)


def trainer(settings=PLAIN):
    return lambda *client: local_sgd(settings)(*client).update


def images(seed, n):
    rng = np.random.default_rng(seed)
    return {
        "pixels": rng.standard_normal((n, 6)).astype(np.float32),
        "label": rng.integers(0, 3, n).astype(np.int32),
    }


def slices_of(m, seed=0):
    rng = np.random.default_rng(seed)
    model = tree.map_leaves(
        lambda leaf: rng.standard_normal(leaf.shape).astype(np.float32), MODEL.init(0)
    )
    return MODEL.layout.select(model, NEURON.keys(np.arange(m)))


def by_hand(settings, slices, data, rng):
    """The twin: the same steps with derivatives written out, in float64 NumPy."""
    w = tree.map_leaves(np.float64, slices)
    velocity = tree.map_leaves(np.zeros_like, w)
    for batch in draw_batches(settings, len(data["label"]), rng):
        chosen = batch[batch >= 0]
        grads = gradient_by_hand(w, data["pixels"][chosen], data["label"][chosen])
        norm = np.sqrt(sum(np.sum(g * g) for g in tree.flatten(grads).values()))
        scale = min(1.0, settings.clip_norm / norm)
        pull = tree.map_leaves(lambda a, y: settings.proximal * (a - y), w, slices)
        velocity = tree.map_leaves(
            lambda v, g, p, scale=scale: settings.momentum * v + scale * g + p,
            velocity,
            grads,
            pull,
        )
        w = tree.map_leaves(lambda a, v: a - settings.client_lr * v, w, velocity)
    return tree.map_leaves(np.subtract, slices, w)


def gradient_by_hand(w, x, labels):
    (w1, b1), (w2, b2), (w3, b3) = (
        (w[name]["kernel"], w[name]["bias"]) for name in ("dense1", "dense2", "dense3")
    )
    h1 = np.maximum(x @ w1 + b1, 0)
    h2 = np.maximum(h1 @ w2 + b2, 0)
    odds = np.exp(h2 @ w3 + b3)
    d3 = (odds / odds.sum(axis=1, keepdims=True) - np.eye(3)[labels]) / len(x)
    d2 = (d3 @ w3.T) * (h2 > 0)
    d1 = (d2 @ w2.T) * (h1 > 0)
    return {
        "dense1": {"kernel": x.T @ d1, "bias": d1.sum(axis=0)},
        "dense2": {"kernel": h1.T @ d2, "bias": d2.sum(axis=0)},
        "dense3": {"kernel": h2.T @ d3, "bias": d3.sum(axis=0)},
    }


@pytest.mark.parametrize(
    "settings",
    [
        PLAIN,
        pytest.param(ClientUpdate(0.1, batch_size=4, epochs=3), marks=pytest.mark.slow),
        pytest.param(ClientUpdate(0.1, batch_size=4, momentum=0.9), marks=pytest.mark.slow),
        pytest.param(ClientUpdate(0.1, batch_size=4, proximal=0.5), marks=pytest.mark.slow),
        pytest.param(ClientUpdate(0.1, batch_size=4, clip_norm=0.3), marks=pytest.mark.slow),
        ClientUpdate(0.05, 2, 3, momentum=0.5, proximal=0.1, clip_norm=1.0),
    ],
    ids=["plain", "epochs", "momentum", "proximal", "clip", "all"],
)
def test_equals_a_plain_loop(settings):
    slices, data = slices_of(5), images(1, 10)
    found = trainer(settings)(slices, data, generator(0, 1, 2))
    expected = by_hand(settings, slices, data, generator(0, 1, 2))
    assert_trees_close(found, expected, rtol=1e-3, atol=1e-5)
    assert {leaf.dtype for leaf in tree.flatten(found).values()} == {np.dtype(np.float32)}


@pytest.mark.parametrize(
    "limit",
    with_slow(
        [{"momentum": 0.0}, {"proximal": 0.0}, {"clip_norm": inf}, {"clip_norm": 1e9}],
        fast=[{"clip_norm": 1e9}],
    ),
    ids=["no momentum", "no proximal term", "clip at infinity", "clip never reached"],
)
def test_limit_cases_are_plain_sgd(limit):
    slices, data = slices_of(5), images(1, 10)
    plain = trainer()(slices, data, generator(0))
    limited = LocalSgd(MODEL, replace(PLAIN, **limit))(slices, data, generator(0)).update
    if limit == {"clip_norm": 1e9}:  # scales by 1
        assert_trees_close(limited, plain)
    else:
        assert_trees_equal(limited, plain)


ONE_CLIPPED_STEP = ClientUpdate(0.5, batch_size=10, clip_norm=0.01)


def test_clipping_bounds_a_step():
    update = trainer(ONE_CLIPPED_STEP)(slices_of(5), images(1, 10), generator(0))
    norm = np.sqrt(sum(np.sum(u * u) for u in tree.flatten(update).values()))
    assert norm == pytest.approx(0.5 * 0.01, rel=1e-3)


@pytest.mark.parametrize(
    "slots",
    with_slow([{}, {"neuron": [5]}, {"neuron": [6, 8]}, {"neuron": [2]}], fast=[{}]),
)
def test_padded_slots_do_not_change_the_update(slots):
    slices, data, settings = slices_of(5), images(1, 10), ClientUpdate(0.1, momentum=0.5)
    exact = LocalSgd(MODEL, settings, {"neuron": [5]})(slices, data, generator(0))
    found = LocalSgd(MODEL, settings, slots)(slices, data, generator(0))
    assert found.metrics["loss"] == pytest.approx(exact.metrics["loss"], rel=1e-5)
    assert_trees_close(found.update, exact.update)
    MODEL.layout.check(found.update, {"neuron": NEURON.keys(np.arange(5))})


def test_padded_examples_do_not_change_the_update(monkeypatch):
    """The same client in a larger shape: to the byte, since the loop never reaches the padding."""
    slices, data = slices_of(5), images(1, 10)
    expected = trainer()(slices, data, generator(0))
    monkeypatch.setattr("keyhole.models.local_training.MIN_BATCHES", 64)
    assert_trees_equal(LocalSgd(MODEL, PLAIN)(slices, data, generator(0)).update, expected)


@pytest.mark.slow
def test_padded_words_have_no_share_in_a_softmax():
    sizes = TransformerSizes(words=40, embedding=4, width=6, heads=2, neurons=4)
    model = transformer(sizes)
    word, neuron = model.layout.spaces
    keys = (word.keys(np.arange(11)), neuron.keys([3, 1]))
    slices = model.layout.select(model.init(0), keys)
    data = {"tokens": np.random.default_rng(0).integers(0, 11, (6, 5)).astype(np.int32)}
    settings = ClientUpdate(0.5, batch_size=4)
    exact = LocalSgd(model, settings, {"word": [11], "neuron": [2]})(slices, data, generator(0))
    padded = LocalSgd(model, settings, {"word": [16], "neuron": [3]})(slices, data, generator(0))
    assert_trees_close(padded.update, exact.update, rtol=1e-4)


@pytest.mark.parametrize(
    ("most", "compiled"), [(81, 3), pytest.param(151, 6, marks=pytest.mark.slow)]
)
def test_ragged_clients_compile_a_handful_of_functions(most, compiled):
    """3 to 9 keys fill 4 or 8 slots or all 9; 1 to 150 examples fill 8 or 16 batches of 10, and up
    to 80 always 8."""
    train = LocalSgd(MODEL, ClientUpdate(0.1, epochs=2, batch_size=10))
    rng = np.random.default_rng(0)
    for m, n in zip(rng.integers(3, 10, 60), rng.integers(1, most, 60), strict=True):
        train(slices_of(m), images(m, n), generator(0))
    assert train.compilations == compiled
    train(slices_of(4), images(0, 33), generator(0))
    assert train.compilations == compiled


def test_the_order_of_examples_is_a_function_of_place_alone():
    train, slices, data = trainer(), slices_of(5), images(1, 10)
    once, again = (train(slices, data, generator(7, 1, 2)) for _ in range(2))
    assert_trees_equal(once, again)
    other = train(slices, data, generator(7, 1, 3))
    assert (other["dense1"]["kernel"] != once["dense1"]["kernel"]).any()


def test_every_epoch_visits_every_example_once():
    settings = ClientUpdate(0.1, epochs=3, batch_size=4)
    epochs = draw_batches(settings, 10, generator(0)).reshape(3, -1)
    for epoch in epochs:
        assert sorted(epoch) == [-1, -1, *range(10)]
    assert (epochs[0] != epochs[1]).any()


def test_a_client_with_too_many_examples_draws_from_them():
    data = {"x": np.arange(50), "y": 10 * np.arange(50)}
    drawn = draw_examples(ClientUpdate(0.1, max_examples=8), data, generator(0))
    assert len(set(drawn["x"])) == 8
    np.testing.assert_array_equal(drawn["y"], 10 * drawn["x"])
    all_of_them = draw_examples(ClientUpdate(0.1, max_examples=50), data, generator(0))
    assert all_of_them is data


def test_steps_without_examples_hold_no_number_that_jax_warns_of(monkeypatch):
    """It casts float64, what is never read, too."""

    def full_of_large_numbers(shape, dtype):
        return np.full(shape, 1e300 if dtype == np.float64 else 7, dtype)

    monkeypatch.setattr("keyhole.models.local_training.empty_on_line", full_of_large_numbers)
    model = Model(
        init=lambda seed: {"w": np.zeros(4, np.float32)},
        loss=lambda params, batch, mask: params["w"].mean(),
        predict=lambda params, batch: params["w"],
        cuts=(),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LocalSgd(model, ClientUpdate(0.5))(model.init(0), {"x": np.zeros(3)}, generator(0))


def test_an_update_is_start_minus_end():
    """One step on the mean of w: its derivative is 1 / size, so the update is client_lr / size."""
    model = Model(
        init=lambda seed: {"w": np.zeros(4, np.float32)},
        loss=lambda params, batch, mask: params["w"].mean(),
        predict=lambda params, batch: params["w"],
        cuts=(),
    )
    report = LocalSgd(model, ClientUpdate(0.5))(model.init(0), {"x": np.zeros(3)}, generator(0))
    assert report.update["w"].tolist() == [0.125] * 4


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(ClientUpdate(0.1), marks=pytest.mark.slow),
        ONE_CLIPPED_STEP,
    ],
)
def test_a_nan_loss_is_not_hidden(settings):
    data = images(1, 10)
    data["pixels"][3] = nan
    update = trainer(settings)(slices_of(5), data, generator(0))
    assert np.isnan(update["dense3"]["bias"]).all()


def test_the_tag_model_takes_its_sparse_way_and_both_agree():
    model, rng = tag_regression(words=20, tags=4), np.random.default_rng(0)
    (word,) = model.layout.spaces
    slices = model.layout.select(model.init(0), word.keys(np.arange(12)))
    data = {
        "words": rng.integers(-1, 12, (10, 3)).astype(np.int32),
        "tags": rng.integers(0, 2, (10, 4)).astype(np.float32),
    }
    plain = LocalSgd(model, ClientUpdate(0.1, batch_size=4))
    compiled = LocalSgd(model, ClientUpdate(0.1, batch_size=4, clip_norm=1e9))
    one, other = (train(slices, data, generator(0)) for train in (plain, compiled))
    assert_trees_close(one.update, other.update)
    assert one.metrics["loss"] == pytest.approx(other.metrics["loss"], rel=1e-5)
    assert (plain.compilations, compiled.compilations) == (0, 1)


def test_a_loss_that_is_no_number_is_an_error():
    model = Model(
        init=lambda seed: {"w": np.zeros(4, np.float32)},
        loss=lambda params, batch, mask: params["w"],
        predict=lambda params, batch: params["w"],
        cuts=(),
    )
    with pytest.raises(ShapeError, match=r"no number: got an array of shape \(4,\)"):
        LocalSgd(model, ClientUpdate(0.5))(model.init(0), {"x": np.zeros(3)}, generator(0))


def test_no_examples_is_an_error():
    with pytest.raises(InputError, match="a client has no examples: got 0; expected 1 or more"):
        LocalSgd(MODEL, ClientUpdate(0.1))(slices_of(5), images(1, 0), generator(0))


def test_arrays_of_unequal_length_are_an_error():
    data = {**images(1, 4), "label": np.zeros(3, np.int32)}
    with pytest.raises(ShapeError, match="label: 3, pixels: 4"):
        LocalSgd(MODEL, ClientUpdate(0.1))(slices_of(5), data, generator(0))


@pytest.mark.parametrize(
    "wrong",
    [
        {"client_lr": 0.0},
        {"client_lr": -1.0},
        {"client_lr": nan},
        {"client_lr": inf},
        {"epochs": 0},
        {"epochs": 1.5},
        {"batch_size": 0},
        {"momentum": 1.0},
        {"momentum": -0.1},
        {"proximal": -1.0},
        {"proximal": nan},
        {"clip_norm": 0.0},
        {"clip_norm": nan},
        {"max_examples": 0},
    ],
    ids=str,
)
def test_settings_outside_their_range_are_refused(wrong):
    (name,) = wrong
    with pytest.raises(InputError, match=f"{name} is out of range: got"):
        ClientUpdate(**{"client_lr": 0.1, **wrong})
