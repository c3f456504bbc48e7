"""What the two EMNIST tasks share: handwritten characters, one client per writer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np

from keyhole.data.federated import Column, Dataset, FederatedData, draw_pool, hold_out
from keyhole.errors import InputError
from keyhole.keys.counts import KeyCounts
from keyhole.models.model import Model
from keyhole.primitives.layout import ClientKeys
from keyhole.server.state import ServerState
from keyhole.tasks.task import Metrics, Task
from keyhole.training.evaluate import predictor
from keyhole.training.metrics import accuracy
from keyhole.types import Array

__all__ = ["CLASSES", "HELD_OUT", "writers_task"]

CLASSES = 62
HELD_OUT = 0.2  # of the writers, for validation (section 5.1)
MOST_EVALUATED = 100_000  # all of EMNIST's 77,483


def writers_task(dataset: Dataset, model: Model, is_tuning: bool, ink: int = 0) -> Task:
    """Returns a task on characters.

    Writers are the same in training and test, with other images. For tuning, a fifth of the writers
    is set aside for validation, and training sees the rest alone.

    Args:
        dataset: of writers.
        model: takes "pixels" and "label".
        is_tuning: whether to set writers aside.
        ink: the value of a pixel full of ink. 0, with paper at 1, is the paper's (as in TensorFlow
            Federated's EMNIST); 1, with paper at 0, learns in a fraction of the rounds.

    Raises:
        InputError: ink is neither.
    """
    if ink not in (0, 1):
        raise InputError("no such ink", got=ink, allowed="0 or 1", fix="choose one")
    train, spaces = dataset.splits["train"], model.layout.spaces
    splits = {"test": dataset.splits["test"]}
    if is_tuning:
        train, splits["validation"] = hold_out(train, HELD_OUT, np.random.default_rng(1))
    largest = predictor(model, lambda logits: logits.argmax(axis=1))
    return Task(
        model=model,
        clients=len(train),
        data=lambda client: _examples(train.client(client), ink),
        count_keys=lambda _: {space.name: KeyCounts.none(space) for space in spaces},
        localize=_as_they_are,
        metrics={name: _accuracy_on(split, largest, ink) for name, split in splits.items()},
    )


def _examples(columns: Mapping[str, Column], ink: int) -> dict[str, Array]:
    """Pixels from 0 to 1, and labels, as the models take them."""
    pixels, label = np.asarray(columns["pixels"]), np.asarray(columns["label"])
    pixels = 255 - pixels if ink else pixels
    return {"pixels": pixels.astype(np.float32) / np.float32(255), "label": label.astype(np.int32)}


def _as_they_are(data: Any, _: ClientKeys) -> Any:
    """Pixels name no keys."""
    return data


def _accuracy_on(split: FederatedData, predict: Callable[..., Array], ink: int) -> Metrics:
    @cache
    def pool() -> dict[str, Array]:
        return _examples(draw_pool(split, MOST_EVALUATED, np.random.default_rng(0)), ink)

    def metrics(state: ServerState) -> dict[str, float]:
        predicted = predict(state.model(), {"pixels": pool()["pixels"]})
        return {"accuracy": accuracy(predicted, pool()["label"])}

    return metrics
