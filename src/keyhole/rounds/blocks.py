"""Adds up what clients bring in blocks, as they bring it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from keyhole.errors import InputError
from keyhole.primitives.layout import KeysBySpace, Layout
from keyhole.primitives.report import Report
from keyhole.rounds.clients import ClientJob, Clients, Jobs, is_nothing
from keyhole.server.inputs import InputBound, TakenUpdate
from keyhole.server.row_sums import BLOCK, BlockAdder, BlockSum, sum_overflow


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
