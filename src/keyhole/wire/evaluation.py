"""Says what devices send in a round that measures the model in place of training it.

An update is then a few numbers that everyone sends, and no key: the weight of a device's examples,
and of each metric its product with that weight and the weight again. They are added up as updates
are, in the clear or in shares, so a party that may open the sum learns the weighted means.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Annotated

import msgspec
import numpy as np

from keyhole.arrays import Array, Tree
from keyhole.errors import InputError
from keyhole.primitives.layout import Layout
from keyhole.primitives.report import METRIC_NAME

EVALUATION_SETTING = "evaluation"
_TOLD = "told"
_MAX_METRICS = 64


class Evaluates(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is measured in a round.

    Attributes:
        metrics: their names, in the order in which they are sent.
        max_examples: a device with more examples counts as if it had this many.
    """

    metrics: Annotated[
        list[Annotated[str, msgspec.Meta(pattern=METRIC_NAME)]],
        msgspec.Meta(min_length=1, max_length=_MAX_METRICS),
    ]
    max_examples: Annotated[int, msgspec.Meta(ge=1)]

    @property
    def layout(self) -> Layout:
        """That of what is sent."""
        return Layout.of({_TOLD: np.zeros(1 + 2 * len(self.metrics), np.float32)})

    def settings(self) -> dict[str, object]:
        """Returns what the settings of a manifest say of it."""
        return {EVALUATION_SETTING: msgspec.to_builtins(self)}

    def numbers(self, measured: Mapping[str, float], examples: int) -> Tree:
        """Returns what a device sends that has measured this on that number of examples; a metric
        that is missing or not finite does not count."""
        weight = min(examples, self.max_examples) / self.max_examples
        told = [weight]
        for name in self.metrics:
            value = measured.get(name, np.nan)
            told += [weight * value, weight] if isfinite(value) else [0.0, 0.0]
        return {_TOLD: np.array(told, np.float32)}

    def allows(self, told: Tree) -> bool:
        """Returns whether a device can have sent this: a share of the max examples, which counts
        in full or not at all for each metric. Metrics may be any number."""
        weight, pairs = told[_TOLD][0], told[_TOLD][1:].reshape(-1, 2)
        is_none = pairs[:, 1] == 0
        counts = (pairs[:, 1] == weight) | (is_none & (pairs[:, 0] == 0))
        return bool(0 <= weight <= 1 and counts.all())

    def means(self, total: Array) -> dict[str, float]:
        """Returns what the numbers of all devices, added up, come to: the mean of each metric that
        anybody could tell, weighted by examples."""
        sums = np.asarray(total, np.float64)[1:].reshape(-1, 2)
        pairs = zip(self.metrics, sums.tolist(), strict=True)
        return {name: product / weight for name, (product, weight) in pairs if weight > 0}


def evaluates_of(settings: Mapping[str, object]) -> Evaluates | None:
    """Returns what a round with these settings measures; None where it trains.

    Raises:
        InputError: the settings say something else.
    """
    if EVALUATION_SETTING not in settings:
        return None
    try:
        return msgspec.convert(settings[EVALUATION_SETTING], Evaluates)
    except msgspec.ValidationError as error:
        raise InputError(
            f"what a round measures cannot be read: got {error}; expected names of metrics and "
            "max_examples, as docs/wire.md describes them; check that both sides are of one version"
        ) from error


def sent_layout(settings: Mapping[str, object], layout: Layout | None) -> Layout | None:
    """Returns the layout of what devices send in a round, whose model has `layout`."""
    evaluates = evaluates_of(settings)
    return layout if evaluates is None else evaluates.layout
