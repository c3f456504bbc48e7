"""EMNIST with the CNN: clients select filters of the second convolution (section 5.3)."""

from __future__ import annotations

from collections.abc import Mapping

from keyhole.data.federated import Dataset
from keyhole.models.cnn import cnn
from keyhole.tasks.task import Settings, Task, TaskKind
from keyhole.tasks.writers import CLASSES, writers_task

__all__ = ["EMNIST_CNN"]


def _make(dataset: Dataset, sizes: Mapping[str, int], is_tuning: bool = False) -> Task:
    model = cnn(filters=(32, sizes["filters"]), hidden=sizes["hidden"], classes=CLASSES)
    return writers_task(dataset, model, is_tuning, sizes["ink"])


EMNIST_CNN = TaskKind(
    name="emnist_cnn",
    about="Recognise handwritten characters with a CNN; a key is a filter of its second layer.",
    kind="writers",
    sizes={"filters": 64, "hidden": 512, "ink": 0},
    settings=Settings("FedAvg", client_lr=0.1, server_lr=1.0, batch_size=20),
    keys={"filter": "independent"},
    keys_per_client={"filter": 16},
    metric="accuracy",
    splits=("test",),
    make=_make,
)
