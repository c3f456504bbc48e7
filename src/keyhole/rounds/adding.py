"""Adds up what clients brought in a round: updates by the run's aggregation, and their reports.

Weights and metrics of clients whose updates arrive in the clear are read from their reports. Where
a sum hides updates, they travel as numbers more of the part that everyone receives: the weight, and
of each metric its product with the weight and the weight again. Who opens the sum learns the total
weight and the weighted means, and nothing of one client. Where privacy is promised no report is
read: an update is divided by the planned cohort, after it was multiplied by its share of the max
weight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import inf, isfinite, nan

import numpy as np

from keyhole import tree
from keyhole.aggregation.base import ClientResult, SumRequest, SumResult, about_of, withheld
from keyhole.aggregation.privacy.mechanism import PrivateSum
from keyhole.arrays import Array, Tree
from keyhole.errors import InputError
from keyhole.parts import running
from keyhole.primitives.deselect import divide
from keyhole.primitives.keyspace import Product
from keyhole.primitives.layout import Field, Layout, Part
from keyhole.primitives.report import MetricOfClients, Report, Reported, metric_names, summarize
from keyhole.rounds.machine import terms_of
from keyhole.rounds.spec import RunParts
from keyhole.server.row_sums import BlockSum, RowUpdate

_MODEL, _REPORT = "model", "report"  # of an update that carries its report


def add_up(
    t: int,
    results: Sequence[ClientResult],
    layout: Layout,
    parts: RunParts,
    blocks: tuple[BlockSum, ...] | None = None,
) -> SumResult:
    """Hands what clients brought to the run's aggregation; too few make no sum."""
    sent = sum(result.outcome == "sent" for result in results)
    if sent < parts.cohorts.min_updates:
        return withheld(sent, parts.cohorts.min_updates, {})
    return sum_results(t, results, layout, parts, blocks)


def sum_results(
    t: int,
    results: Sequence[ClientResult],
    layout: Layout,
    parts: RunParts,
    blocks: tuple[BlockSum, ...] | None = None,
) -> SumResult:
    """Returns what the run's aggregation makes of results, however few."""
    request = SumRequest(
        layout,
        results,
        parts.divisor,
        parts.keys_per_client,
        (parts.seed, parts.trial, t),
        blocks=blocks,
        goal=terms_of(parts.cohorts, [result.client for result in results]).goal,
    )
    if parts.privacy is not None:
        return _add(request, parts)
    reports = _reports_of(request)
    if about_of(parts.aggregate).is_in_clear:
        return weighed(_add(request, parts), summarize(reports, parts.is_weighted), parts)
    if not parts.is_weighted and not metric_names(reports):
        return _add(request, parts)
    return _add_with_reports(request, parts, metric_names(reports))


def nothing_summed(parts: RunParts) -> SumResult:
    """Returns the sum of a round that makes no step."""
    return SumResult(None, {}, seen_by=about_of(parts.aggregate).seen_by())


def _add(request: SumRequest, parts: RunParts) -> SumResult:
    add = parts.aggregate.add
    if parts.privacy is not None:
        add = PrivateSum(parts.aggregate, parts.privacy, parts.cohorts).add
    with running("add of the sum", " in round {}", request.seed_path[-1]):
        total = add(request)
    # A sum of one's own need not repeat in every result what it declares.
    return total if total.seen_by else replace(total, seen_by=about_of(parts.aggregate).seen_by())


def _reports_of(request: SumRequest) -> list[Report]:
    """What the clients that count reported; raises InputError where their metrics differ."""
    reports = [one.report or Report(None) for one in request.sent]
    names = metric_names(reports)
    for one, report in zip(request.sent, reports, strict=True):
        if sorted(report.metrics) != names:
            raise InputError(
                f"client {one.client} reports other metrics in round {request.seed_path[-1]} than "
                f"those before it: got {', '.join(sorted(report.metrics)) or 'none'}; expected "
                f"{', '.join(names) or 'none'}; report the same names from every client, NaN for "
                "what one cannot tell"
            )
    return reports


def agreed(results: Sequence[ClientResult]) -> list[ClientResult]:
    """Returns results of devices, whose metrics have the names that most of them report: what one
    device says must not end a run. Others count as if they could not tell.

    A device that reports nothing is one that reports no names: where most are silent, no metric
    is recorded."""
    told = (one.report or Report(None) for one in results if one.outcome == "sent")
    named = Counter(tuple(sorted(report.metrics)) for report in told)
    names = min(named, key=lambda each: (-named[each], each), default=())

    def agree(one: ClientResult) -> ClientResult:
        report = one.report or Report(None)
        if one.outcome != "sent" or tuple(sorted(report.metrics)) == names:
            return one
        return replace(one, report=replace(report, metrics=dict.fromkeys(names, nan)))

    return [agree(one) for one in results]


def weighed(total: SumResult, reported: Reported, parts: RunParts) -> SumResult:
    """Returns the sum, divided by the weight of all where updates are weighted, with what was
    reported."""
    weight = reported.weight
    if total.rows is None or weight is None:
        return replace(total, reported=reported)
    if not weight > 0:
        error = InputError(
            f"the weights of a round add up to nothing: got {weight:g}; expected a sum above 0; "
            "report the number of examples as weight"
        )
        return replace(total, rows=None, error=str(error))
    rows = tuple(RowUpdate(u.keys, divide(u.rows, weight)) for u in total.rows)
    whole = weight * parts.max_weight if parts.max_weight < inf else weight
    return replace(total, rows=rows, reported=replace(reported, weight=whole))


def _add_with_reports(request: SumRequest, parts: RunParts, names: Sequence[str]) -> SumResult:
    """The sum of updates that carry their reports."""
    wide = with_report(request.layout, 1 + 2 * len(names))
    results = [
        one if one.update is None else replace(one, update=carrying(one.update, one.report, names))
        for one in request.results
    ]
    total = _add(replace(request, layout=wide, results=results), parts)
    if total.rows is None:
        return total
    told, rows = without_report(request.layout, wide, total.rows)
    means = {
        name: MetricOfClients(float(told[1 + 2 * i] / told[2 + 2 * i]))
        for i, name in enumerate(names)
        if told[2 + 2 * i] > 0
    }
    weight = float(told[0]) if parts.is_weighted else None
    return weighed(replace(total, rows=rows), Reported(weight, means), parts)


def carrying(update: Tree, report: Report | None, names: Sequence[str] = ()) -> Tree:
    """Returns an update of `with_report`: one that carries the weight of its report, and metrics of
    these names."""
    return {_MODEL: update, _REPORT: _numbers(report, names)}


def _numbers(report: Report | None, names: Sequence[str]) -> Array:
    """What a report adds: the weight, and of each metric its product with it and the weight."""
    report = report or Report(None)
    weight = 1.0 if report.weight is None else report.weight
    found = [weight]
    for name in names:
        value = report.metrics.get(name, inf)
        found += [weight * value, weight] if isfinite(value) else [0.0, 0.0]
    return np.array(found, np.float32)


def with_report(layout: Layout, size: int) -> Layout:
    """Returns the layout of updates that carry this many numbers more, which everyone sends."""
    told = Field(_REPORT, (size,), np.dtype(np.float32), ())
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


def _below(path: str) -> str:
    return _MODEL if path == tree.ROOT else f"{_MODEL}/{path}"


def without_report(
    layout: Layout, wide: Layout, rows: tuple[RowUpdate, ...]
) -> tuple[Array, tuple[RowUpdate, ...]]:
    """Returns the numbers that reports added up to, and the rows of the model alone."""
    size = wide.parts[0].fields[-1].shape[0]
    everyone = rows[0]
    told = everyone.rows[0, -size:] if len(everyone.keys) else np.zeros(size, np.float32)
    if len(wide.parts) > len(layout.parts):
        return told, rows[1:]
    own = np.ascontiguousarray(everyone.rows[:, :-size])
    return told, (RowUpdate(everyone.keys, own), *rows[1:])
