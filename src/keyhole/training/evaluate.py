"""Evaluation: what a model predicts on many examples, in compiled batches of one shape."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from keyhole.models.model import Batch, Model
from keyhole.training.threads import count_cores
from keyhole.types import Array, Tree

__all__ = ["predictor"]


def predictor(
    model: Model, reduce: Callable[[Any], Any], batch_size: int = 256
) -> Callable[[Tree, Batch], Array]:
    """Returns `(parameters, examples) -> outputs`, compiled once for a model.

    Args:
        model: whose `predict` is asked.
        reduce: `outputs of a batch -> what is kept of them`, such as the place of the largest.
        batch_size: examples at once; the last batch is filled up and cut again.

    >>> from keyhole.models.dense import two_layer
    >>> model = two_layer(pixels=4, neurons=6, hidden=3, classes=2)
    >>> predict = predictor(model, lambda logits: logits.argmax(axis=1), batch_size=4)
    >>> predict(model.init(0), {"pixels": np.ones((5, 4), np.float32)}).shape
    (5,)
    """
    compiled = jax.jit(lambda params, batch: reduce(model.predict(params, batch)))

    def predict(params: Tree, examples: Batch) -> Array:
        count = min(map(len, examples.values()))
        on_device = jax.device_put(params)

        def outputs(start: int) -> Array:
            return np.asarray(compiled(on_device, _rows(examples, start, batch_size)))

        with ThreadPoolExecutor(count_cores()) as pool:
            return np.concatenate(list(pool.map(outputs, range(0, count, batch_size))))[:count]

    return predict


def _rows(examples: Batch, start: int, batch_size: int) -> Batch:
    """`batch_size` rows from `start` on; beyond the last, the last once more."""
    count = min(map(len, examples.values()))
    at = np.minimum(np.arange(start, start + batch_size), count - 1)
    return {name: np.asarray(array)[at] for name, array in examples.items()}
