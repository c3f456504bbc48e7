"""The mixture of experts: the loss in plain NumPy, and the laws of a model that is cut."""

import jax
import numpy as np
import pytest

from keyhole import tree
from keyhole.models.client_update import ClientUpdate
from keyhole.models.local_training import LocalSgd
from keyhole.models.mixture import mixture
from keyhole.primitives.coding import resize_submodel, slot_masks
from keyhole.sampling import generator
from tests.helpers import assert_trees_close, assert_trees_equal

MODEL = mixture(pixels=6, features=4, experts=5, hidden=3, classes=4)
(EXPERT,) = MODEL.layout.spaces


def loss_of(params, batch, mask, slots=None):
    return MODEL.loss(MODEL.hide_padding(params, slots) if slots else params, batch, mask)


GRAD = jax.jit(jax.value_and_grad(loss_of))
PREDICT = jax.jit(MODEL.predict)


def random_params(seed=0):
    rng = np.random.default_rng(seed)
    return tree.map_leaves(
        lambda leaf: rng.standard_normal(leaf.shape).astype(np.float32), MODEL.init(0)
    )


def examples(n=4, seed=1):
    rng = np.random.default_rng(seed)
    label = rng.integers(0, 4, n).astype(np.int32)
    return {"pixels": rng.random((n, 6), np.float32), "label": label}


def softmax(scores):
    odds = np.exp(scores - scores.max())
    return odds / odds.sum()


def probabilities_by_hand(params, pixels):
    """One example, expert by expert, in float64."""
    p = tree.map_leaves(lambda leaf: leaf.astype(np.float64), params)
    h = np.maximum(pixels @ p["trunk"]["kernel"] + p["trunk"]["bias"], 0)
    gate = softmax(h @ p["gate"]["kernel"] + p["gate"]["bias"])
    total = np.zeros(4)
    for k, weight in enumerate(gate):
        inner = np.maximum(h @ p["inner"]["kernel"][k] + p["inner"]["bias"][k], 0)
        total += weight * softmax(inner @ p["outer"]["kernel"][k] + p["outer"]["bias"][k])
    return total


def loss_by_hand(params, batch):
    pairs = zip(batch["pixels"], batch["label"], strict=True)
    return np.mean([-np.log(probabilities_by_hand(params, x)[label]) for x, label in pairs])


def test_an_expert_is_two_layers_and_a_column_of_the_gate():
    layout = mixture(pixels=784, features=32, experts=8, hidden=128, classes=62).layout
    trunk = 784 * 32 + 32
    expert = (32 * 128 + 128) + (128 * 62 + 62) + (32 + 1)
    for m in (1, 2, 4, 8):
        assert layout.client_size(expert=m) == trunk + m * expert
    assert layout.server_size == trunk + 8 * expert


def test_loss_and_predictions_are_those_by_hand():
    params, batch = random_params(), examples()
    assert float(GRAD(params, batch, np.ones(4, bool))[0]) == pytest.approx(
        loss_by_hand(params, batch), rel=1e-5
    )
    found = np.exp(PREDICT(params, batch))
    expected = [probabilities_by_hand(params, x) for x in batch["pixels"]]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


def test_gradients_are_the_slopes_of_the_loss_by_hand():
    params, batch, size = random_params(), examples(), 1e-5
    _, grads = GRAD(params, batch, np.ones(4, bool))
    towards = random_params(seed=5)

    def at(t):
        return loss_by_hand(
            tree.map_leaves(lambda w, d: w.astype(np.float64) + t * d, params, towards), batch
        )

    pairs = zip(tree.flatten(grads).values(), tree.flatten(towards).values(), strict=True)
    expected = sum(float(np.sum(np.asarray(g) * d)) for g, d in pairs)
    assert (at(size) - at(-size)) / (2 * size) == pytest.approx(expected, rel=1e-3)


def test_masked_examples_change_nothing():
    params, batch = random_params(), examples()
    first = {name: array[:2] for name, array in batch.items()}
    found = GRAD(params, batch, np.arange(4) < 2)
    expected = GRAD(params, first, np.ones(2, bool))
    assert float(found[0]) == pytest.approx(float(expected[0]), rel=1e-5)
    assert_trees_close(found[1], expected[1], rtol=1e-4, atol=1e-6)


def test_all_keys_in_another_order_are_the_whole_model():
    params, batch = random_params(), examples()
    submodel = MODEL.layout.select(params, EXPERT.keys([3, 0, 4, 1, 2]))
    np.testing.assert_allclose(
        PREDICT(submodel, batch), PREDICT(params, batch), rtol=1e-4, atol=1e-5
    )


def test_an_expert_alone_answers_whatever_the_gate_says():
    params, batch = random_params(), examples()
    alone = MODEL.layout.select(params, EXPERT.keys([2]))
    _, grads = GRAD(alone, batch, np.ones(4, bool))
    assert not np.any(grads["gate"]["kernel"])
    assert not np.any(grads["gate"]["bias"])


def test_padded_experts_have_no_weight_and_stay_zero():
    batch, mask, sub = examples(), np.ones(4, bool), random_params()
    padded = resize_submodel(MODEL.layout, sub, {"expert": 7})
    slots = slot_masks({"expert": 5}, {"expert": 7})
    loss, grads = GRAD(padded, batch, mask, slots)
    expected, expected_grads = GRAD(sub, batch, mask)
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    unpadded = resize_submodel(MODEL.layout, jax.tree.map(np.asarray, grads), {"expert": 5})
    assert_trees_close(unpadded, expected_grads, rtol=1e-4, atol=1e-6)
    assert_trees_equal(resize_submodel(MODEL.layout, unpadded, {"expert": 7}), grads)


@pytest.mark.slow
def test_a_padded_client_sends_the_update_of_the_bare_one():
    sub = MODEL.layout.select(random_params(), EXPERT.keys([4, 1, 3]))
    settings = ClientUpdate(client_lr=0.1, batch_size=2)
    bare, padded = (
        LocalSgd(MODEL, settings, {"expert": slots})(sub, examples(), generator(0)).update
        for slots in ([3], [4])
    )
    assert_trees_close(padded, bare, rtol=1e-4, atol=1e-6)


def test_init_is_a_function_of_the_seed_and_no_two_experts_are_alike():
    assert_trees_equal(MODEL.init(3), MODEL.init(3))
    kernel = MODEL.init(3)["inner"]["kernel"]
    assert len(np.unique(kernel.reshape(5, -1), axis=0)) == 5
