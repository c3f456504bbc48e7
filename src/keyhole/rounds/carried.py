"""Lets updates carry their clients' reports where a sum hides them: numbers more of the part that
everyone receives.

Hidden from who opens the sum: the weight and the metrics of one client. Not hidden: the weight of
all, and of each metric that the run names, its weighted mean. A sum takes numbers up to a largest
one, its unit; a share of a weight, and a share of the max of a metric, are carried as that share of
the unit, so that none is cut off and all are as precise as the sum can be.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf, isfinite

import numpy as np

from keyhole import tree
from keyhole.arrays import Array, Tree
from keyhole.errors import InputError
from keyhole.primitives.keyspace import Product
from keyhole.primitives.layout import Field, Layout, Part
from keyhole.primitives.report import MetricOfClients, Report, Reported
from keyhole.server.row_sums import RowUpdate

_MODEL, _REPORT = "model", "report"  # of an update that carries its report


@dataclass(frozen=True)
class Carried:
    """Which numbers of their reports clients add to their updates.

    Args:
        has_weights: whether the weight of all is asked for.
        metrics: name -> the largest value, either sign, that counts; a larger one counts as that.
        unit: the largest number that the sum takes; infinity for none.

    >>> from keyhole import Cut, KeySpace, Layout
    >>> layout = Layout.of({"w": np.zeros((9, 2))}, Cut(KeySpace("word", 9), {"w": 0}))
    >>> carried = Carried(True, {"loss": 100.0}, unit=16.0)
    >>> carried.layout(layout).client_size(word=4) - layout.client_size(word=4)
    3
    """

    has_weights: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    unit: float = inf

    @property
    def size(self) -> int:
        """How many numbers an update carries."""
        return 1 + 2 * len(self.metrics) if self.has_weights or self.metrics else 0

    def layout(self, layout: Layout) -> Layout:
        """Returns the layout of updates that carry these numbers, which everyone sends."""
        if not self.size:
            return layout
        told = Field(_REPORT, (self.size,), np.dtype(np.float32), ())
        parts = [
            Part(part.product, tuple(replace(f, path=_below(f.path)) for f in part.fields))
            for part in layout.parts
        ]
        if parts and not parts[0].product.factors:
            parts[0] = Part(parts[0].product, (*parts[0].fields, told))
        else:
            parts.insert(0, Part(Product(()), (told,)))
        named = {_MODEL: layout.structure, _REPORT: _REPORT}
        structure = tree.unflatten(named, {path: path for path in tree.flatten(named)})
        return Layout(structure, layout.spaces, tuple(parts))

    def put(self, update: Tree, report: Report | None, who: str) -> Tree:
        """Returns the update with the numbers of its report.

        Args:
            who: whose it is, for errors, such as "client 3 in round 5".

        Raises:
            InputError: the report has no metric of a name that is asked for.
        """
        if not self.size:
            return update
        return {_MODEL: update, _REPORT: self._numbers(report or Report(None), who)}

    def _numbers(self, report: Report, who: str) -> Array:
        """The weight, and of each metric its product with it and the weight again: one that is no
        finite number counts nowhere."""
        weight = (1.0 if report.weight is None else report.weight) * self._unit
        found = [weight]
        for name, max_value in self.metrics.items():
            value = report.metrics.get(name)
            if value is None:
                raise InputError(
                    f"{who} reports no metric {name!r}, which the run adds up: got "
                    f"{', '.join(sorted(report.metrics)) or 'none'}; expected "
                    f"{', '.join(self.metrics)}; report it, NaN where a client cannot tell, or "
                    "leave it out of sum_metrics"
                )
            is_known = isfinite(value)
            share = min(max(value / max_value, -1.0), 1.0) if is_known else 0.0
            found += [weight * share, weight * is_known]
        return np.array(found, np.float32)

    def split(
        self, layout: Layout, rows: tuple[RowUpdate, ...]
    ) -> tuple[tuple[RowUpdate, ...], Reported]:
        """Returns the rows of the model alone, and what their clients reported together.

        Args:
            layout: of the model, without these numbers.
        """
        if not self.size:
            return rows, Reported()
        everyone = rows[0]
        told = everyone.rows[0, -self.size :] if len(everyone.keys) else np.zeros(self.size)
        means = {
            name: MetricOfClients(max_value * float(told[1 + 2 * i]) / float(told[2 + 2 * i]))
            for i, (name, max_value) in enumerate(self.metrics.items())
            if told[2 + 2 * i] > 0
        }
        weight = float(told[0]) / self._unit if self.has_weights else None
        if len(rows) > len(layout.parts):
            return rows[1:], Reported(weight, means)
        own = np.ascontiguousarray(everyone.rows[:, : -self.size])
        return (RowUpdate(everyone.keys, own), *rows[1:]), Reported(weight, means)

    @property
    def _unit(self) -> float:
        return self.unit if self.unit < inf else 1.0


def _below(path: str) -> str:
    return _MODEL if path == tree.ROOT else f"{_MODEL}/{path}"
