"""Matrix factorisation whose users stay at home: the server learns movies, a client its own taste.

The rating of a movie is the inner product of its vector with the user's. Of a user nothing is kept
but on the device, and there only while it trains: given the movies, the best taste is the solution
of a small linear system (partially local training).

Singhal et al., Federated Reconstruction: Partially Local Federated Learning, 2021.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from keyhole.arrays import Tree
from keyhole.models.client_update import Batch
from keyhole.models.model import Model
from keyhole.primitives.keyspace import KeySpace
from keyhole.primitives.layout import Cut

CENTRE = 3.5  # stars; levels of users and biases of movies take up what it leaves
INITIAL = 0.03  # deviation of a movie's factors before anybody rated it
LEVEL_RIDGE, TASTE_RIDGE = 4.0, 20.0  # a level is half believed after 4 ratings
MOVIE_RIDGE = 0.1  # for each rating of the movie


def factorization(movies: int, factors: int = 8) -> Model:
    r"""Returns biased matrix factorisation of ratings, in stars.

    Movie i has a vector $q_i$ and a bias $c_i$, a user a taste p and a level b. For one user,

    $\ell(q, c) = \min_{p, b} \sum_i (r_i - \hat r_i)^2 + \lambda |p|^2 + \lambda_b b^2
    + \mu \sum_i (|q_i|^2 + c_i^2), \quad \hat r_i = 3.5 + c_i + b + \langle q_i, p \rangle$,

    over the movies i that the user rated. The minimum is a linear system of factors + 1 unknowns.
    At a minimum, the derivative by the movies is that at fixed p and b. The loss is a sum, not a
    mean: all ratings count the same, and a movie that few have rated moves little.

    Taste and level never leave the device, but an update is not free of them: that of a movie is a
    multiple of p plus one of $q_i$, so the update of one client shows where its taste
    points. Aggregation that shows the server sums alone hides it.

    A batch holds the ratings of one user, all of them: "movie", int32 (n,), the place of the movie
    among the client's keys, -1 for a movie it does not hold, whose rating does not count; "stars",
    float32 (n,); and to predict "is_known", bool (n,), the ratings that taste and level are fitted
    to. Key k of "movie" selects vector and bias of movie k, and there is nothing else.

    >>> model = factorization(movies=9742)
    >>> model.layout.server_size, model.layout.client_size(movie=100)
    (87678, 900)
    """

    def init(seed: int) -> Tree:
        rng = np.random.Generator(np.random.Philox(seed))
        drawn = rng.standard_normal((movies, factors), np.float32)
        return {"factors": np.float32(INITIAL) * drawn, "bias": np.zeros(movies, np.float32)}

    cut = Cut(KeySpace("movie", movies), {"factors": 0, "bias": 0})
    return Model(init, _loss, _predict, (cut,))


def _predict(params: Tree, batch: Batch) -> jax.Array:
    """Stars, (n,), by the taste that fits the known ratings best."""
    vectors, bias, is_held = _rated(params, batch["movie"])
    user = _fit_user(vectors, batch["stars"] - bias, is_held & batch["is_known"])
    return bias + _with_level(vectors) @ user


def _loss(params: Tree, batch: Batch, mask: jax.Array) -> jax.Array:
    vectors, bias, is_held = _rated(params, batch["movie"])
    counts = mask & is_held
    # Fixed for the derivative, which is the same and cheaper than through the linear system.
    user = jax.lax.stop_gradient(_fit_user(vectors, batch["stars"] - bias, counts))
    errors = batch["stars"] - bias - _with_level(vectors) @ user
    sizes = jnp.sum(vectors**2, axis=1) + (bias - CENTRE) ** 2
    losses = errors**2 + MOVIE_RIDGE * sizes
    penalty = jnp.sum(_ridge(vectors.shape[1]) * user**2)
    return jnp.sum(jnp.where(counts, losses, 0.0)) + penalty


def _rated(params: Tree, movie: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Vectors (n, factors) and expected stars (n,) of movies, and which are held (n,)."""

    def rows(array: jax.Array) -> jax.Array:
        # A place beyond the client's movies shows as NaN; the default would be the last movie.
        at = jnp.asarray(array).at[jnp.maximum(movie, 0)]
        return at.get(mode="fill", fill_value=jnp.nan)

    is_held = movie >= 0
    vectors = jnp.where(is_held[:, None], rows(params["factors"]), 0.0)
    return vectors, CENTRE + jnp.where(is_held, rows(params["bias"]), 0.0), is_held


def _fit_user(vectors: jax.Array, residuals: jax.Array, counts: jax.Array) -> jax.Array:
    """Level and taste, (1 + factors,), that explain the residuals (n,) that count."""
    known = jnp.where(counts[:, None], _with_level(vectors), 0.0)
    normal = known.T @ known + jnp.diag(_ridge(vectors.shape[1]))
    return jnp.asarray(jnp.linalg.solve(normal, known.T @ jnp.where(counts, residuals, 0.0)))


def _with_level(vectors: jax.Array) -> jax.Array:
    """A column of ones before the vectors, (n, 1 + factors): the level is the taste for it."""
    return jnp.concatenate([jnp.ones((len(vectors), 1), vectors.dtype), vectors], axis=1)


def _ridge(factors: int) -> jax.Array:
    return jnp.array([LEVEL_RIDGE] + [TASTE_RIDGE] * factors, jnp.float32)
