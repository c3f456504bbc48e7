"""Matrix factorisation: the loss in plain NumPy, and a user that is fitted on the device."""

import jax
import numpy as np
import pytest

from keyhole.models.client_update import ClientUpdate
from keyhole.models.factorization import factorization
from keyhole.models.local_training import LocalSgd
from keyhole.primitives.coding import resize_submodel
from tests.helpers import assert_trees_close, assert_trees_equal

MODEL = factorization(movies=12, factors=3)
(MOVIE,) = MODEL.layout.spaces
GRAD = jax.jit(jax.value_and_grad(MODEL.loss))


def params_of(movies=12, seed=0):
    rng = np.random.default_rng(seed)
    return {
        "factors": rng.standard_normal((movies, 3)).astype(np.float32),
        "bias": rng.standard_normal(movies).astype(np.float32),
    }


def ratings(movie, seed=1):
    rng = np.random.default_rng(seed)
    stars = rng.integers(1, 11, len(movie)).astype(np.float32) / 2
    return {"movie": np.asarray(movie, np.int32), "stars": stars}


def by_hand(params, batch):
    """The twin, in float64: level and taste by least squares on rows that stand for the ridge."""
    q, c = (params[name][batch["movie"]].astype(np.float64) for name in ("factors", "bias"))
    columns = np.column_stack([np.ones(len(q)), q])
    ridge = np.diag(np.sqrt([4.0, 20.0, 20.0, 20.0]))
    target = np.append(batch["stars"] - 3.5 - c, np.zeros(4))
    user, *_ = np.linalg.lstsq(np.vstack([columns, ridge]), target)
    errors = batch["stars"] - 3.5 - c - columns @ user
    loss = errors @ errors + np.sum((ridge @ user) ** 2) + 0.1 * (np.sum(q**2) + c @ c)
    grads = {"factors": np.zeros((len(params["bias"]), 3)), "bias": np.zeros(len(params["bias"]))}
    np.add.at(grads["factors"], batch["movie"], -2 * errors[:, None] * user[1:] + 0.2 * q)
    np.add.at(grads["bias"], batch["movie"], -2 * errors + 0.2 * c)
    return loss, grads


def test_a_movie_is_its_vector_and_its_bias_and_there_is_nothing_else():
    layout = factorization(movies=9742, factors=8).layout
    assert layout.server_size == 9742 * (8 + 1)
    assert layout.client_size(movie=100) == 100 * (8 + 1)


def test_loss_and_gradient_are_those_by_hand():
    params, batch = params_of(), ratings([3, 0, 7, 11, 5])
    loss, grads = GRAD(params, batch, np.ones(5, bool))
    expected, expected_grads = by_hand(params, batch)
    assert float(loss) == pytest.approx(expected, rel=1e-4)
    assert_trees_close(grads, expected_grads, rtol=1e-3, atol=1e-4)


def test_gradients_at_a_fixed_taste_are_the_slopes_of_the_whole_loss():
    """The taste moves with the movies, but at its minimum that costs nothing."""
    params, batch = params_of(), ratings([3, 0, 7, 11, 5])
    _, grads = by_hand(params, batch)
    towards, size = params_of(seed=3), 1e-3

    def at(t):
        return by_hand({n: w.astype(np.float64) + t * towards[n] for n, w in params.items()}, batch)

    slope = (at(size)[0] - at(-size)[0]) / (2 * size)
    assert slope == pytest.approx(sum(np.sum(grads[n] * towards[n]) for n in grads), rel=1e-3)


@pytest.mark.parametrize("how", ["masked", "of a movie that is not held"])
def test_what_does_not_count_changes_nothing(how):
    params, batch = params_of(), ratings([3, 0, 7, 11, 5])
    movie = batch["movie"].copy()
    if how != "masked":
        movie[3:] = -1
    mask = np.arange(5) < (3 if how == "masked" else 5)
    loss, grads = GRAD(params, {**batch, "movie": movie}, mask)
    expected, expected_grads = by_hand(params, {name: a[:3] for name, a in batch.items()})
    assert float(loss) == pytest.approx(expected, rel=1e-4)
    assert_trees_close(grads, expected_grads, rtol=1e-3, atol=1e-4)


def test_a_client_without_a_rating_that_counts_stays_where_it_is():
    loss, grads = GRAD(params_of(), ratings([3, 0, 7, 11, 5]), np.zeros(5, bool))
    assert float(loss) == 0
    assert all(not np.any(g) for g in grads.values())


def test_all_keys_in_another_order_predict_the_same():
    params, batch = params_of(), ratings([3, 0, 7, 11, 5])
    order = np.random.default_rng(2).permutation(12)
    own = {**batch, "movie": np.argsort(order)[batch["movie"]].astype(np.int32)}
    known = {"is_known": np.arange(5) < 3}
    whole = MODEL.predict(params, {**batch, **known})
    submodel = MODEL.layout.select(params, MOVIE.keys(order))
    np.testing.assert_allclose(
        MODEL.predict(submodel, {**own, **known}), whole, rtol=1e-4, atol=1e-4
    )


def test_a_prediction_does_not_see_the_ratings_it_is_asked_for():
    batch = {**ratings([3, 0, 7, 11, 5]), "is_known": np.arange(5) < 3}
    other = {**batch, "stars": np.where(batch["is_known"], batch["stars"], 0.5).astype(np.float32)}
    predicted = np.asarray(MODEL.predict(params_of(), batch))
    np.testing.assert_array_equal(MODEL.predict(params_of(), other), predicted)


def test_a_movie_beyond_those_held_is_not_taken_for_the_last():
    batch = {**ratings([3, 12]), "is_known": np.array([True, False])}
    assert np.isnan(MODEL.predict(params_of(), batch)).tolist() == [False, True]


@pytest.mark.slow
def test_a_padded_client_sends_the_update_of_the_bare_one():
    keys = MOVIE.keys([7, 2, 9, 4, 11])
    sub, data = MODEL.layout.select(params_of(), keys), ratings([0, 4, 2, 1])
    settings = ClientUpdate(client_lr=0.1, batch_size=8)
    bare, padded = (
        LocalSgd(MODEL, settings, {"movie": slots})(sub, data, np.random.default_rng(0)).update
        for slots in ([5], [])  # five slots, or eight
    )
    assert_trees_close(padded, bare)
    _, grads = by_hand(sub, data)
    assert_trees_close(bare, {n: 0.1 * g for n, g in grads.items()}, rtol=1e-3, atol=1e-4)
    assert not np.any(bare["bias"][3])  # rated by nobody here
    assert_trees_equal(resize_submodel(MODEL.layout, bare, {"movie": 5}), bare)
