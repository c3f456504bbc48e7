"""The four models of the paper: sizes to the digit, and the laws of a model that is cut."""

from functools import cache

import jax
import numpy as np
import pytest

from keyhole import tree
from keyhole.models.cnn import cnn
from keyhole.models.dense import two_layer
from keyhole.models.logistic import tag_regression
from keyhole.models.transformer import TransformerSizes, transformer
from keyhole.primitives.coding import resize_submodel, slot_masks
from tests.helpers import assert_trees_close, assert_trees_equal, with_slow

SMALL = TransformerSizes(words=11, embedding=6, width=8, heads=2, neurons=5)

MODELS = {
    "two_layer": two_layer(pixels=6, neurons=7, hidden=5, classes=4),
    "cnn": cnn(side=8, filters=(2, 5), hidden=6, classes=4),
    "tag_regression": tag_regression(words=9, tags=4),
    "transformer": transformer(SMALL),
    "tied transformer": transformer(SMALL, is_tied=True),
}

UNTIED = sorted(
    MODELS.keys() - {"tied transformer"}
)  # where a second compilation tells nothing new


def batch_of(name, rng, n=4, words=3):
    """Examples that use the first `words` words only, so that they fit any sub-model."""
    label = rng.integers(0, 4, n).astype(np.int32)
    if name == "two_layer":
        return {"pixels": rng.random((n, 6), np.float32), "label": label}
    if name == "cnn":
        return {"pixels": rng.random((n, 8, 8), np.float32), "label": label}
    if name == "tag_regression":
        tags = rng.integers(0, 2, (n, 4)).astype(np.float32)
        return {"words": rng.integers(-1, words, (n, 3)).astype(np.int32), "tags": tags}
    return {"tokens": rng.integers(1, words, (n, 5)).astype(np.int32)}


def random_params(model, seed=0):
    """Parameters without zeros, so that nothing is hidden by how a model is initialised."""
    rng = np.random.default_rng(seed)
    return tree.map_leaves(
        lambda leaf: rng.standard_normal(leaf.shape).astype(np.float32), model.init(0)
    )


def grad(model, params, batch, mask, slots=None):
    value, grads = compiled_grad(model)(params, batch, mask, slots)
    return float(value), jax.tree.map(np.asarray, grads)


@cache
def compiled_grad(model):
    def loss(params, batch, mask, slots):
        shown = model.hide_padding(params, slots) if model.hide_padding and slots else params
        return model.loss(shown, batch, mask)

    return jax.jit(jax.value_and_grad(loss))


# Tables 2 and 3 of the paper print the ratios; the sizes behind them are counted layer by layer.
@pytest.mark.parametrize(
    ("model", "server_size", "fixed", "per_key", "ratios"),
    [
        (cnn(), 1_690_046, 33_150, 25_889, {4: 0.08, 8: 0.14, 16: 0.26, 32: 0.51}),
        (two_layer(), 209_662, 12_662, 985, {10: 0.11, 50: 0.30, 100: 0.53}),
        (tag_regression(), 5_000_500, 500, 500, {100: 0.01, 1000: 0.10}),
    ],
    ids=["cnn", "two_layer", "tag_regression"],
)
def test_sizes_are_the_papers(model, server_size, fixed, per_key, ratios):
    layout = model.layout
    (space,) = layout.spaces
    assert layout.server_size == server_size == fixed + per_key * space.num_keys
    for m, ratio in ratios.items():
        assert layout.client_size(**{space.name: m}) == fixed + per_key * m
        assert round(layout.client_size(**{space.name: m}) / server_size, 2) == ratio


@pytest.mark.parametrize(("is_tied", "size"), [(False, 5_182_068), (True, 4_211_680)])
def test_transformer_sizes(is_tied, size):
    layout = transformer(is_tied=is_tied).layout
    assert layout.server_size == size
    # A word: a row of 96, and untied a column of 96 and a bias. A neuron: 512 in, a bias, 512 out.
    smaller = layout.client_size(word=1000, neuron=1024)
    per_word = 96 if is_tied else 96 + 96 + 1
    assert size - smaller == 9004 * per_word + 1024 * (512 + 1 + 512)


@pytest.mark.parametrize("name", MODELS)
def test_init_is_float32_and_a_function_of_the_seed(name):
    model = MODELS[name]
    assert_trees_equal(model.init(3), model.init(3))
    assert {leaf.dtype for leaf in tree.flatten(model.init(3)).values()} == {np.dtype(np.float32)}
    if name != "tag_regression":  # convex: starts at zero
        pairs = zip(*(tree.flatten(model.init(seed)).values() for seed in (3, 4)), strict=True)
        assert any((a != b).any() for a, b in pairs)


@pytest.mark.parametrize("name", UNTIED)
def test_masked_examples_change_nothing(name):
    model, rng = MODELS[name], np.random.default_rng(1)
    params, batch = random_params(model), batch_of(name, rng)
    mask = np.array([True, False, True, False])
    other = {
        key: np.where(mask.reshape(-1, *[1] * (a.ndim - 1)), a, a[::-1]) for key, a in batch.items()
    }
    loss, grads = grad(model, params, batch, mask)
    other_loss, other_grads = grad(model, params, other, mask)
    assert loss == other_loss
    assert_trees_equal(grads, other_grads)


@pytest.mark.parametrize("name", UNTIED)
def test_the_loss_is_a_mean_over_examples(name):
    model, rng = MODELS[name], np.random.default_rng(1)
    params, batch = random_params(model), batch_of(name, rng)
    alone = [grad(model, params, batch, np.arange(4) == i)[0] for i in range(4)]
    assert grad(model, params, batch, np.ones(4, bool))[0] == pytest.approx(
        np.mean(alone), rel=1e-5
    )
    assert grad(model, params, batch, np.arange(4) < 3)[0] == pytest.approx(
        np.mean(alone[:3]), rel=1e-5
    )
    assert grad(model, params, batch, np.zeros(4, bool))[0] == 0


@pytest.mark.parametrize("name", with_slow(MODELS, fast=UNTIED))
def test_padded_slots_change_nothing_and_stay_zero(name):
    """All keys and three slots more: for the shape without them other tests compile the loss."""
    model, rng = MODELS[name], np.random.default_rng(2)
    counts = {space.name: space.num_keys for space in model.layout.spaces}
    sizes = {space: count + 3 for space, count in counts.items()}
    sub = random_params(model)
    batch, mask = batch_of(name, rng), np.ones(4, bool)
    padded = resize_submodel(model.layout, sub, sizes)
    slots = slot_masks(counts, sizes)
    loss, grads = grad(model, padded, batch, mask, slots)
    expected, expected_grads = grad(model, sub, batch, mask)
    assert loss == pytest.approx(expected, rel=1e-5)
    unpadded = resize_submodel(model.layout, grads, counts)
    assert_trees_close(unpadded, expected_grads, rtol=1e-4, atol=1e-5)
    assert_trees_equal(resize_submodel(model.layout, unpadded, sizes), grads)


@pytest.mark.parametrize("name", UNTIED)
def test_all_keys_in_another_order_predict_the_same(name):
    """Neurons, filters and words are interchangeable: only the order of a client's keys differs."""
    model, rng = MODELS[name], np.random.default_rng(3)
    params = random_params(model)
    order = {space.name: rng.permutation(space.num_keys) for space in model.layout.spaces}
    sub = model.layout.select(params, [s.keys(order[s.name]) for s in model.layout.spaces])
    batch = own = batch_of(name, rng)
    for key in batch.keys() & {"words", "tokens"}:
        place = np.argsort(order["word"]).astype(np.int32)
        own = {**own, key: np.where(batch[key] < 0, -1, place[batch[key]])}
    predict = jax.jit(model.predict)
    predicted, own_predicted = (np.asarray(predict(*a)) for a in ((params, batch), (sub, own)))
    if "transformer" in name:
        own_predicted = own_predicted[..., np.argsort(order["word"])]
    np.testing.assert_allclose(own_predicted, predicted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", UNTIED)
def test_gradients_are_the_slopes_of_the_loss(name):
    """Along a random direction, in float32: the central difference agrees to its own error."""
    model, rng = MODELS[name], np.random.default_rng(4)
    params = tree.map_leaves(lambda leaf: leaf * np.float32(0.3), random_params(model, 4))
    batch, mask = batch_of(name, rng), np.ones(4, bool)
    _, grads = grad(model, params, batch, mask)
    direction = random_params(model, 5)
    size = 1e-3

    def at(t):
        moved = tree.map_leaves(lambda w, d: w + np.float32(t) * d, params, direction)
        return grad(model, moved, batch, mask)[0]

    slope = (at(size) - at(-size)) / (2 * size)
    pairs = zip(tree.flatten(grads).values(), tree.flatten(direction).values(), strict=True)
    expected = sum(float(np.sum(g * d)) for g, d in pairs)
    assert slope == pytest.approx(expected, rel=0.02, abs=0.02)
