"""Sets up handwriting with a mixture of experts: a key is a whole expert (sections 2.4, 3.1).

Not an experiment of the paper: coarse keys that a client reads off its own data. The characters are
dealt to the experts in blocks, in the order digits, capitals, small letters; a client counts the
experts of the characters it wrote. Whatever it selects, it trains on all of its images, and the
gate settles who answers for what, among experts that meet in some client: two that no client holds
together are never compared, and each may answer for the other. Where most writers write digits,
"top" sends nearly all of them to the first two experts, and the rest stay close to untrained.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from keyhole.arrays import Array
from keyhole.data.federated import Dataset
from keyhole.errors import InputError
from keyhole.experiments.emnist import CLASSES, writers_task
from keyhole.experiments.specs import DEFAULTS
from keyhole.experiments.task import Task, TaskKind
from keyhole.keys.choice import KeyCounts
from keyhole.models.mixture import mixture


def expert_of(label: Array, experts: int) -> Array:
    """The expert that a character is dealt to: neighbours in the alphabet share one.

    Args:
        label: int, any shape, below 62.
        experts: from 1 to 62.

    Returns:
        int64, the same shape, each expert at least once.

    >>> expert_of(np.array([0, 7, 8, 35, 36, 61]), experts=8).tolist()
    [0, 0, 1, 4, 4, 7]
    """
    return label.astype(np.int64) * experts // CLASSES


def _make(dataset: Dataset, sizes: Mapping[str, int], is_tuning: bool = False) -> Task:
    _check_experts(sizes["experts"])
    layers = {name: sizes[name] for name in ("experts", "features", "hidden")}
    model = mixture(classes=CLASSES, **layers)
    (space,) = model.layout.spaces

    def count_keys(examples: Mapping[str, Array]) -> dict[str, KeyCounts]:
        return {"expert": KeyCounts.of(space, expert_of(examples["label"], space.num_keys))}

    return replace(writers_task(dataset, model, is_tuning, sizes["ink"]), count_keys=count_keys)


def _check_experts(experts: int) -> None:
    if experts > CLASSES:
        raise InputError(
            f"an expert would have no character: got {experts} experts; expected 1..{CLASSES}; ask "
            "for fewer experts"
        )


EXPERTS = TaskKind(
    name="experts",
    about="Recognise handwritten characters with a mixture of experts; a key is a whole expert.",
    kind="writers",
    defaults=DEFAULTS["experts"],
    metric="accuracy",
    splits=("test",),
    make=_make,
)
