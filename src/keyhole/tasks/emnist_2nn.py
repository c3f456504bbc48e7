"""EMNIST with two hidden layers: clients select neurons of the first (section 5.3)."""

from __future__ import annotations

from collections.abc import Mapping

from keyhole.data.federated import Dataset
from keyhole.models.dense import two_layer
from keyhole.tasks.task import Settings, Task, TaskKind
from keyhole.tasks.writers import CLASSES, writers_task

__all__ = ["EMNIST_2NN"]


def _make(dataset: Dataset, sizes: Mapping[str, int], is_tuning: bool = False) -> Task:
    model = two_layer(neurons=sizes["neurons"], hidden=sizes["hidden"], classes=CLASSES)
    return writers_task(dataset, model, is_tuning, sizes["ink"])


EMNIST_2NN = TaskKind(
    name="emnist_2nn",
    about="Recognise handwritten characters with dense layers; a key is a neuron of the first.",
    kind="writers",
    sizes={"neurons": 200, "hidden": 200, "ink": 0},
    settings=Settings("FedAvg", client_lr=0.1, server_lr=1.0, batch_size=20),
    keys={"neuron": "independent"},
    keys_per_client={"neuron": 100},
    metric="accuracy",
    splits=("test",),
    make=_make,
)
