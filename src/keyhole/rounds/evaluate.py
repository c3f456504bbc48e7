"""Computes what a model predicts on many examples, and the metrics of the paper's tasks.

Predictions are made in compiled batches of one shape; metrics are on NumPy arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np

from keyhole.arrays import Array, Tree
from keyhole.models.client_update import Batch
from keyhole.models.model import Model
from keyhole.rounds.cores import map_on_cores
from keyhole.rounds.workers import count_cores


def accuracy(predicted: Array, label: Array) -> float:
    """Returns the share of examples whose prediction is right; NaN where there is no example.

    >>> accuracy(np.array([1, 2, 3, 4]), np.array([1, 2, 0, 0]))
    0.5
    """
    return float(np.mean(predicted == label)) if len(label) else float("nan")


def recall_at(k: int, scores: Array, example: Array, tag: Array) -> float:
    """Returns the share of all true tags that are among the k best of their example (micro recall).

    Of tags with equal scores the one of the smaller number comes first, as in TensorFlow's top_k.

    Args:
        k: how many tags are named for each example.
        scores: (n, tags).
        example: int (pairs,), the example of each true tag.
        tag: int (pairs,), the tag itself; each pair once.

    Returns:
        The share; NaN where there is no true tag or a score is NaN, as after divergence.

    The first example has its tag 2 in second place; the other's tag 1 ties with 0, which wins.

    >>> scores = np.array([[0.1, 0.9, 0.5], [0.7, 0.7, 0.0]])
    >>> recall_at(1, scores, np.array([0, 0, 1]), np.array([1, 2, 1]))
    0.3333333333333333
    """
    if not len(tag) or np.isnan(scores).any():
        return float("nan")
    others, own = scores[example], scores[example, tag][:, None]
    is_before = np.arange(scores.shape[1])[None, :] < tag[:, None]
    places = np.sum((others > own) | ((others == own) & is_before), axis=1)
    return float(np.mean(places < k))


def masked_accuracies(
    predicted: Array, target: Array, masks: Mapping[str, Array]
) -> dict[str, float]:
    """Accuracy over the targets that each mask leaves.

    Args:
        masks: name -> the targets that do not count.

    >>> target = np.array([[5, 9, 0], [5, 5, 9]])
    >>> predicted = np.array([[5, 9, 0], [5, 7, 7]])
    >>> masked_accuracies(predicted, target, {"no_pad": np.array([0])})
    {'no_pad': 0.6}
    """
    counted = {name: ~np.isin(target, tokens) for name, tokens in masks.items()}
    return {name: accuracy(predicted[at], target[at]) for name, at in counted.items()}


def predictor(
    model: Model, reduce: Callable[[Any], Any], batch_size: int = 256
) -> Callable[[Tree, Batch], Array]:
    """Returns `(parameters, examples) -> outputs`, compiled once for a model.

    Args:
        reduce: `outputs of a batch -> what is kept of them`, such as the place of the largest.
        batch_size: examples at once; the last batch is filled up and cut again.

    >>> from keyhole.models.dense import two_layer
    >>> model = two_layer(pixels=4, neurons=6, hidden=3, classes=2)
    >>> predict = predictor(model, lambda logits: logits.argmax(axis=1), batch_size=4)
    >>> predict(model.init(0), {"pixels": np.ones((5, 4), np.float32)}).shape
    (5,)
    """

    @cache
    def compiled() -> Callable[[Tree, Batch], Any]:
        import jax

        return jax.jit(lambda params, batch: reduce(model.predict(params, batch)))

    def predict(params: Tree, examples: Batch) -> Array:
        import jax  # a device predicts nothing
        from jax.extend.backend import get_default_device

        count = min(map(len, examples.values()))
        held = cache(lambda device: jax.device_put(params, device))

        def outputs(start: int) -> Array:
            on_core = held(get_default_device())
            return np.asarray(compiled()(on_core, _rows(examples, start, batch_size)))

        starts = range(0, count, batch_size)
        return np.concatenate([*map_on_cores(outputs, starts, count_cores())])[:count]

    return predict


def _rows(examples: Batch, start: int, batch_size: int) -> Batch:
    """`batch_size` rows from `start` on; beyond the last, the last is repeated."""
    count = min(map(len, examples.values()))
    at = np.minimum(np.arange(start, start + batch_size), count - 1)
    return {name: np.asarray(array)[at] for name, array in examples.items()}
