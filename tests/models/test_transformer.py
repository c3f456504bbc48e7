"""The transformer beside a plain NumPy forward pass, and what it may look at."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from keyhole import tree
from keyhole.keys.choice import KeyContext, KeyCounts
from keyhole.keys.structured import always, sampled_correction, top, with_negatives
from keyhole.models.transformer import TransformerSizes, transformer
from tests.helpers import with_slow

SIZES = TransformerSizes(words=9, embedding=4, width=6, heads=2, neurons=5)
MODELS = {is_tied: transformer(SIZES, is_tied=is_tied) for is_tied in (False, True)}


PREDICT = {is_tied: jax.jit(model.predict) for is_tied, model in MODELS.items()}
LOSS = {is_tied: jax.jit(model.loss) for is_tied, model in MODELS.items()}


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


@pytest.mark.parametrize("is_tied", with_slow([False, True], fast=[False]))
def test_logits_equal_a_plain_forward_pass(is_tied):
    params = params_of(MODELS[is_tied])
    tokens = np.array([[3, 1, 8, 2], [5, 5, 0, 0]], np.int32)
    found = PREDICT[is_tied](params, {"tokens": tokens})
    expected = [by_hand(params, sentence, SIZES.heads) for sentence in tokens]
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)


def test_a_place_does_not_see_what_comes_later():
    params = params_of(MODELS[False])
    tokens = np.array([[3, 1, 8, 2], [5, 5, 0, 0]], np.int32)
    changed = np.array([[3, 1, 7, 4], [5, 5, 1, 2]], np.int32)
    before, after = (PREDICT[False](params, {"tokens": t}) for t in (tokens, changed))
    np.testing.assert_array_equal(before[:, :2], after[:, :2])
    assert (np.asarray(before[:, 2:]) != np.asarray(after[:, 2:])).any()


@pytest.mark.parametrize("token", [-1, 9])
def test_a_token_that_is_no_word_shows_as_nan(token):
    params = params_of(MODELS[False])
    assert np.isnan(PREDICT[False](params, {"tokens": jnp.array([[token]])})).all()


TEXT = np.array([[7, 3, 20, 41], [33, 12, 3, 0]], np.int32)
BOTH = np.ones(2, bool)


def correction_of(own, correction):
    return {"own": np.full(2, own, np.int32), "correction": np.full(2, correction, np.float32)}


def test_padding_tokens_are_no_targets():
    params, short = params_of(MODELS[False]), TEXT % 9
    long = np.pad(short, ((0, 0), (0, 2)))
    losses = [float(LOSS[False](params, {"tokens": tokens}, BOTH)) for tokens in (short, long)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("own", [0, 4, 9])
@pytest.mark.parametrize("is_tied", with_slow([False, True], fast=[False]))
def test_no_correction_is_the_plain_loss_to_the_byte(is_tied, own):
    params, batch = params_of(MODELS[is_tied]), {"tokens": TEXT % 9}
    plain, corrected = (
        np.asarray(LOSS[is_tied](params, b, BOTH))
        for b in (batch, {**batch, **correction_of(own, 0.0)})
    )
    assert plain.tobytes() == corrected.tobytes()


def test_a_correction_by_log_2_counts_a_word_twice():
    """Doubling the weight of the last word in the softmax is one more word with the same logit."""
    params = params_of(MODELS[False])
    twice = {**params, "embedding": np.append(params["embedding"], np.zeros((1, 4)), axis=0)}
    twice["output"] = {n: np.append(a, a[-1:], axis=0) for n, a in params["output"].items()}
    twice = tree.map_leaves(np.float32, twice)
    batch = {"tokens": TEXT % 8}
    corrected = LOSS[False](params, {**batch, **correction_of(8, np.log(2))}, BOTH)
    assert corrected == pytest.approx(float(LOSS[False](twice, batch, BOTH)), rel=1e-6)


def test_padded_words_stay_hidden_under_a_correction():
    model, params = MODELS[False], params_of(MODELS[False])
    batch = {"tokens": TEXT % 6, **correction_of(4, 2.0)}
    few = {**params, "output": {n: a[:7] for n, a in params["output"].items()}}
    padded = model.hide_padding(params, {"word": jnp.arange(9) < 7})
    few_words, padded_words = (LOSS[False](p, batch, BOTH) for p in (few, padded))
    assert few_words == pytest.approx(float(padded_words), rel=1e-6)


def sampled_gradients(model, params, draws, share):
    """Gradients by all words of a client that holds its 7 own words and 20 random ones, with the
    correction and without."""
    space, generator = model.layout.spaces[0], np.random.default_rng(1)
    counts, choose = KeyCounts.of(space, TEXT.ravel()), with_negatives(always([0], top), share)
    keys = np.array([choose(KeyContext(counts, 27, generator)) for _ in range(draws)])
    own, correction = sampled_correction(space.keys(keys[0]), counts, share, first=[0])
    place = {key: i for i, key in enumerate(keys[0, :own].tolist())}
    tokens = np.array([[place[word] for word in line] for line in TEXT.tolist()], np.int32)

    def loss(p, z, batch):
        output = {name: leaf[z] for name, leaf in p["output"].items()}
        return model.loss({**p, "embedding": p["embedding"][z], "output": output}, batch, BOTH)

    gradients = jax.jit(jax.vmap(jax.grad(loss), in_axes=(None, 0, None)))
    for added in (correction, 0.0):
        found = gradients(params, keys, {"tokens": tokens, **correction_of(own, added)})
        yield np.concatenate([leaf.reshape(draws, -1) for leaf in jax.tree.leaves(found)], axis=1)


@pytest.mark.slow
def test_corrected_gradients_average_to_those_of_all_words():
    """193 words are not the client's; 20 random ones stand for them. Logits differ by 0.2 or so,
    as early in training, where the bias of order 1 / s is below the error of the mean."""
    model, draws = transformer(TransformerSizes(200, 4, 6, 2, 5)), 500
    params = tree.map_leaves(lambda leaf: leaf * np.float32(0.1), params_of(model))
    params["output"]["kernel"] *= np.float32(10)
    whole = jax.jit(jax.grad(model.loss))(params, {"tokens": TEXT}, BOTH)
    whole = np.concatenate([leaf.ravel() for leaf in jax.tree.leaves(whole)])
    corrected, plain = (
        np.linalg.norm(found.mean(axis=0) - whole) * draws**0.5 / np.linalg.norm(found.std(axis=0))
        for found in sampled_gradients(model, params, draws, 20 / 27)
    )
    assert corrected < 3  # in errors of the mean
    assert plain > 10
