"""Sets up EMNIST, one client per writer: two hidden layers, the CNN (section 5.3), or experts.

Clients select neurons of the first hidden layer, filters of the second convolution, or whole
experts of a mixture (sections 2.4, 3.1).

The mixture is not an experiment of the paper: coarse keys that a client reads off its own data. The
characters are dealt to the experts in blocks, in the order digits, capitals, small letters; a
client counts the experts of the characters it wrote. Whatever it selects, it trains on all of its
images, and the gate settles who answers for what, among experts that meet in some client: two that
no client holds together are never compared, and each may answer for the other. Where most writers
write digits, "top" sends nearly all of them to the first two experts, and the rest stay close to
untrained.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache

import numpy as np

from keyhole.arrays import Array
from keyhole.data.federated import Column, Dataset, FederatedData, draw_pool, hold_out
from keyhole.errors import InputError
from keyhole.experiments.specs import DEFAULTS
from keyhole.experiments.task import Metrics, TaskKind, TaskParts
from keyhole.keys.choice import KeyCounts
from keyhole.models.cnn import cnn
from keyhole.models.dense import two_layer
from keyhole.models.mixture import mixture
from keyhole.models.model import Model
from keyhole.rounds.evaluate import accuracy, predictor
from keyhole.server.state import ServerState

CLASSES = 62
HELD_OUT = 0.2  # of the writers, for validation (section 5.1)
MAX_EVALUATED = 100_000  # all of EMNIST's 77,483


def writers_task(dataset: Dataset, model: Model, is_tuning: bool, ink: int = 0) -> TaskParts:
    """Returns a task on characters.

    Writers are the same in training and test, with other images. For tuning, a fifth of the writers
    is set aside for validation, and training sees the rest alone.

    Args:
        model: takes "pixels" and "label".
        is_tuning: whether to set writers aside.
        ink: the value of a pixel full of ink. 0, with paper at 1, is the paper's (as in TensorFlow
            Federated's EMNIST); 1, with paper at 0, learns in a fraction of the rounds.
    """
    if ink not in (0, 1):
        raise InputError(f"no such ink: got {ink}; expected 0 or 1; choose one")
    train, spaces = dataset.splits["train"], model.layout.spaces
    splits = {"test": dataset.splits["test"]}
    if is_tuning:
        train, splits["validation"] = hold_out(train, HELD_OUT, np.random.default_rng(1))
    largest = predictor(model, lambda logits: logits.argmax(axis=1))
    return TaskParts(
        model=model,
        clients=len(train),
        data=lambda client: _examples(train.client(client), ink),
        count_keys=lambda _: {space.name: KeyCounts.none(space) for space in spaces},
        localize=lambda data, _: data,  # pixels name no keys
        metrics={name: _accuracy_on(split, largest, ink) for name, split in splits.items()},
    )


def _examples(columns: Mapping[str, Column], ink: int) -> dict[str, Array]:
    """Pixels from 0 to 1, and labels, as the models take them."""
    pixels, label = np.asarray(columns["pixels"]), np.asarray(columns["label"])
    pixels = 255 - pixels if ink else pixels
    return {"pixels": pixels.astype(np.float32) / np.float32(255), "label": label.astype(np.int32)}


def _accuracy_on(split: FederatedData, predict: Callable[..., Array], ink: int) -> Metrics:
    @cache
    def pool() -> dict[str, Array]:
        return _examples(draw_pool(split, MAX_EVALUATED, np.random.default_rng(0)), ink)

    def metrics(state: ServerState) -> dict[str, float]:
        predicted = predict(state.model(), {"pixels": pool()["pixels"]})
        return {"accuracy": accuracy(predicted, pool()["label"])}

    return metrics


def _make_2nn(dataset: Dataset, sizes: Mapping[str, int], is_tuning: bool = False) -> TaskParts:
    model = two_layer(neurons=sizes["neurons"], hidden=sizes["hidden"], classes=CLASSES)
    return writers_task(dataset, model, is_tuning, sizes["ink"])


EMNIST_2NN = TaskKind(
    name="emnist_2nn",
    about="Recognise handwritten characters with dense layers; a key is a neuron of the first.",
    kind="writers",
    defaults=DEFAULTS["emnist_2nn"],
    metric="accuracy",
    splits=("test",),
    make=_make_2nn,
)


def _make_cnn(dataset: Dataset, sizes: Mapping[str, int], is_tuning: bool = False) -> TaskParts:
    model = cnn(filters=(32, sizes["filters"]), hidden=sizes["hidden"], classes=CLASSES)
    return writers_task(dataset, model, is_tuning, sizes["ink"])


EMNIST_CNN = TaskKind(
    name="emnist_cnn",
    about="Recognise handwritten characters with a CNN; a key is a filter of its second layer.",
    kind="writers",
    defaults=DEFAULTS["emnist_cnn"],
    metric="accuracy",
    splits=("test",),
    make=_make_cnn,
)


def expert_of(label: Array, experts: int) -> Array:
    """Returns the expert, int64, that each character is dealt to: neighbours in the alphabet share
    one, and of 62 characters each of up to 62 experts has one at least.

    >>> expert_of(np.array([0, 7, 8, 35, 36, 61]), experts=8).tolist()
    [0, 0, 1, 4, 4, 7]
    """
    return label.astype(np.int64) * experts // CLASSES


def _make_experts(dataset: Dataset, sizes: Mapping[str, int], is_tuning: bool = False) -> TaskParts:
    if sizes["experts"] > CLASSES:
        raise InputError(
            f"an expert would have no character: got {sizes['experts']} experts; expected "
            f"1..{CLASSES}; ask for fewer experts"
        )
    layers = {name: sizes[name] for name in ("experts", "features", "hidden")}
    model = mixture(classes=CLASSES, **layers)
    (space,) = model.layout.spaces

    def count_keys(examples: Mapping[str, Array]) -> dict[str, KeyCounts]:
        return {"expert": KeyCounts.of(space, expert_of(examples["label"], space.num_keys))}

    return replace(writers_task(dataset, model, is_tuning, sizes["ink"]), count_keys=count_keys)


EXPERTS = TaskKind(
    name="experts",
    about="Recognise handwritten characters with a mixture of experts; a key is a whole expert.",
    kind="writers",
    defaults=DEFAULTS["experts"],
    metric="accuracy",
    splits=("test",),
    make=_make_experts,
)
