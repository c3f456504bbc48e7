"""Adds up what clients brought in a round: updates by the run's aggregation, and their reports.

Weights and metrics of clients whose updates arrive in the clear are read from their reports. Where
a sum hides updates, they carry the weight, and the metrics that the run names; see `Carried`. Where
privacy is promised no report is read: an update is divided by the planned cohort, after it was
multiplied by its share of the max weight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import inf, nan

from keyhole.aggregation.base import ClientResult, SumRequest, SumResult, about_of, withheld
from keyhole.aggregation.privacy.mechanism import PrivateSum
from keyhole.errors import InputError
from keyhole.parts import running
from keyhole.primitives.deselect import divide
from keyhole.primitives.layout import Layout
from keyhole.primitives.report import Report, Reported, metric_names, summarize
from keyhole.rounds.carried import Carried
from keyhole.rounds.machine import terms_of
from keyhole.rounds.spec import RunParts
from keyhole.server.row_sums import BlockSum, RowUpdate


def add_up(
    t: int,
    results: Sequence[ClientResult],
    layout: Layout,
    parts: RunParts,
    blocks: tuple[BlockSum, ...] | None = None,
) -> SumResult:
    """Hands what clients brought to the run's aggregation; too few make no sum."""
    request = SumRequest(
        layout,
        results,
        parts.divisor,
        parts.keys_per_client,
        (parts.seed, parts.trial, t),
        blocks=blocks,
        goal=terms_of(parts.cohorts, [result.client for result in results]).goal,
    )
    if len(request.sent) < parts.cohorts.min_updates:
        return withheld(len(request.sent), parts.cohorts.min_updates, {})
    if parts.privacy is not None:
        return _add(request, parts)
    if about_of(parts.aggregate).is_in_clear:
        reported = summarize(_reports_of(request), parts.is_weighted)
        return weighed(_add(request, parts), reported, parts)
    return _add_carried(request, parts, parts.carried)


def _add_carried(request: SumRequest, parts: RunParts, carried: Carried) -> SumResult:
    """The sum of updates that carry numbers of their reports."""
    round = request.seed_path[-1]
    results = [
        one
        if one.update is None
        else replace(
            one, update=carried.put(one.update, one.report, f"client {one.client} in round {round}")
        )
        for one in request.results
    ]
    wide = carried.layout(request.layout)
    total = _add(replace(request, layout=wide, results=results), parts)
    if total.rows is None:
        return total
    rows, reported = carried.split(request.layout, total.rows)
    return weighed(replace(total, rows=rows), reported, parts)


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
