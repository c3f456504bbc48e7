"""The transformer beside a plain NumPy forward pass, and what it may look at."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from keyhole import tree
from keyhole.models.transformer import TransformerSizes, transformer

SIZES = TransformerSizes(words=9, embedding=4, width=6, heads=2, neurons=5)
MODELS = {is_tied: transformer(SIZES, is_tied=is_tied) for is_tied in (False, True)}


PREDICT = {is_tied: jax.jit(model.predict) for is_tied, model in MODELS.items()}


def params_of(model, seed=0):
    rng = np.random.default_rng(seed)
    return tree.map_leaves(
        lambda leaf: rng.standard_normal(leaf.shape).astype(np.float32), model.init(0)
    )


def by_hand(p, sentence, heads):
    """Logits of one sentence, in float64, place by place and head by head."""
    size = p["embedding"].shape[1]

    def dense(layer, x):
        return x @ layer["kernel"] + layer["bias"]

    def norm(layer, x):
        return (x - x.mean()) / np.sqrt(x.var() + 1e-6) * layer["scale"] + layer["bias"]

    xs = []
    for place, token in enumerate(sentence):
        angles = [place / 10_000 ** (2 * i / size) for i in range(size // 2)]
        position = np.concatenate([np.sin(angles), np.cos(angles)])
        xs.append(dense(p["widen"], p["embedding"][token] * np.sqrt(size) + position))
    width, logits = len(xs[0]), []
    q, k, v = ([dense(p["attention"][n], x) for x in xs] for n in ("query", "key", "value"))
    for place, embedded in enumerate(xs):
        mixed = []
        for h in np.split(np.arange(width), heads):
            scores = [q[place][h] @ k[j][h] / np.sqrt(len(h)) for j in range(place + 1)]
            weights = np.exp(scores) / np.sum(np.exp(scores))
            mixed.append(sum(w * v[j][h] for j, w in enumerate(weights)))
        x = norm(p["norm1"], embedded + dense(p["attention"]["output"], np.concatenate(mixed)))
        x = norm(p["norm2"], x + dense(p["ffn_out"], np.maximum(dense(p["ffn_in"], x), 0)))
        output = p.get("output", {"kernel": p["embedding"], "bias": 0.0})
        logits.append(output["kernel"] @ dense(p["narrow"], x) + output["bias"])
    return np.array(logits)


@pytest.mark.parametrize("is_tied", [False, True])
def test_logits_equal_a_plain_forward_pass(is_tied):
    params = params_of(MODELS[is_tied])
    tokens = np.array([[3, 1, 8, 2], [5, 5, 0, 0]], np.int32)
    found = PREDICT[is_tied](params, {"tokens": tokens})
    expected = [by_hand(params, sentence, SIZES.heads) for sentence in tokens]
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)


def test_a_place_does_not_see_what_comes_later():
    params = params_of(MODELS[False])
    tokens = np.array([[3, 1, 8, 2]], np.int32)
    changed = np.array([[3, 1, 7, 4]], np.int32)
    before, after = (PREDICT[False](params, {"tokens": t}) for t in (tokens, changed))
    np.testing.assert_array_equal(before[:, :2], after[:, :2])
    assert (np.asarray(before[:, 2:]) != np.asarray(after[:, 2:])).any()


def test_padding_tokens_are_no_targets():
    model, params = MODELS[False], params_of(MODELS[False])
    short = {"tokens": jnp.array([[3, 1, 8]])}
    long = {"tokens": jnp.array([[3, 1, 8, 0, 0]])}
    mask = jnp.array([True])
    losses = [float(jax.jit(model.loss)(params, batch, mask)) for batch in (short, long)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("token", [-1, 9])
def test_a_token_that_is_no_word_shows_as_nan(token):
    params = params_of(MODELS[False])
    assert np.isnan(PREDICT[False](params, {"tokens": jnp.array([[token]])})).all()
