"""Adds up what clients brought in a round: updates by the run's aggregation, and their reports.

Weights and metrics of clients whose updates arrive in the clear are read from their reports. Where
a sum hides updates, they carry the weight, and the metrics that the run names; see `Carried`. Where
privacy is promised no report is read: an update is divided by the planned cohort, after it was
multiplied by its share of the max weight.

Sums in the clear are made in blocks, as clients bring what they have: `add_in_blocks`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf, nan

import numpy as np

from keyhole.aggregation.base import (
    ClientResult,
    SumRequest,
    SumResult,
    about_of,
    added,
    withheld,
)
from keyhole.aggregation.privacy.mechanism import PrivateSum
from keyhole.errors import InputError
from keyhole.parts import running
from keyhole.primitives.deselect import divide
from keyhole.primitives.layout import KeysBySpace, Layout
from keyhole.primitives.report import Report, Reported, metric_names, summarize
from keyhole.rounds.carried import Carried
from keyhole.rounds.clients import ClientJob, Clients, Jobs, is_nothing
from keyhole.rounds.machine import terms_of
from keyhole.rounds.spec import RunParts
from keyhole.server.inputs import InputBound, TakenUpdate
from keyhole.server.row_sums import BLOCK, BlockAdder, BlockSum, RowUpdate, sum_overflow


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
        total = added(add, request)
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


def take(bound: InputBound, keys: KeysBySpace, report: Report) -> TakenUpdate:
    """Returns what is added up of what a client brought; of one without examples, nothing."""
    if is_nothing(report.update):
        return TakenUpdate(None)
    return bound.take(report.update, keys, report.weight)


def add_up_jobs(
    clients: Clients,
    jobs: Iterable[ClientJob],
    layout: Layout,
    before: Callable[[], BlockSum | None] | None = None,
) -> BlockSum:
    """Runs jobs of one block and adds up what they bring: the work of an engine's worker.

    Args:
        jobs: at most `BLOCK`, or some of them; of `Jobs`, one at a time is made.
        before: called once they have run; returns the sum of those before them in the block. None
            where they are the first, whose updates are added as they come.
    """
    given = jobs if isinstance(jobs, Jobs) else list(jobs)
    keys = list(given.keys.values()) if isinstance(given, Jobs) else [job.keys for job in given]
    brought = (_Brought.of(job.bound, job.keys, job.run(clients)) for job in given)
    if before is None:
        return _add_block(brought, keys, layout)
    held = list(brought)
    return _add_block(held, keys, layout, before())


def add_in_blocks(jobs: Jobs, reports: Iterable[Report], layout: Layout) -> Iterator[BlockSum]:
    """Yields the sum of each block of reports; no updates are held but those that clients have just
    brought."""
    coming, of_job = iter(reports), partial(_Brought.of, jobs.bound)
    for start in range(0, len(jobs), BLOCK):
        keys = list(jobs.keys.values())[start : start + BLOCK]
        # A loop of our own would hold on to one update while it waits for the next.
        yield _add_block(map(of_job, keys, coming), keys, layout)


@dataclass(frozen=True)
class _Brought:
    """What one client of a block brought."""

    taken: TakenUpdate
    is_empty: bool
    told: Report | None
    is_sent: bool

    @staticmethod
    def of(bound: InputBound, keys: KeysBySpace, report: Report) -> _Brought:
        taken, is_empty = take(bound, keys, report), is_nothing(report.update)
        return _Brought(taken, is_empty, report.beside, taken.update is not None)

    @property
    def without_update(self) -> _Brought:
        taken = TakenUpdate(None, self.taken.norm, self.taken.is_above)
        return _Brought(taken, self.is_empty, self.told, self.is_sent)


def _add_block(
    brought: Iterable[_Brought],
    keys: Sequence[KeysBySpace],
    layout: Layout,
    before: BlockSum | None = None,
) -> BlockSum:
    """Adds up what clients of one block bring; those without a usable update are left out."""
    adder, noted = BlockAdder(layout, keys, before), list[_Brought]()
    for each in brought:
        if each.is_sent:
            adder.add(len(noted), each.taken.update)
        noted.append(each.without_update)
        del each  # no update is held while the next client trains; `enumerate` would hold it, too
    if len(noted) != len(keys):
        raise InputError(
            f"clients of a block brought too little: got {len(noted)} reports; expected "
            f"{len(keys)}; let the executor return one report for each job"
        )
    if not adder.is_finite():
        raise sum_overflow(np.dtype(np.float32))
    return _with_notes(adder.total(), noted, before)


def _with_notes(summed: BlockSum, noted: Sequence[_Brought], before: BlockSum | None) -> BlockSum:
    """The sum of a block with what is known of its clients beside."""
    first = 0 if before is None else before.clients + len(before.refused) + len(before.empty)

    def places(which: Callable[[_Brought], bool]) -> tuple[int, ...]:
        return tuple(first + at for at, each in enumerate(noted) if which(each))

    norms = (each.taken.norm for each in noted if each.is_sent)
    told = ((first + at, each.told) for at, each in enumerate(noted))
    return replace(
        summed,
        refused=summed.refused + places(lambda each: not each.is_sent and not each.is_empty),
        empty=summed.empty + places(lambda each: each.is_empty),
        above=summed.above + places(lambda each: each.taken.is_above),
        norms=summed.norms + tuple(norm for norm in norms if norm is not None),
        told=summed.told + tuple((at, report) for at, report in told if report is not None),
    )
