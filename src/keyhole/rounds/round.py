"""Runs rounds of Algorithm 2, with dropouts, over-selection, budgets and costs.

`run_round` is the algorithm, and its lines are functions of this module. Asynchronous rounds and
rounds of a service call the same functions: they differ in where clients train and in when an
update counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias, runtime_checkable

from keyhole.aggregation.base import ClientResult, SumResult
from keyhole.arrays import KeyArray, Tree
from keyhole.delivery.base import Cost, DeliveryAbout
from keyhole.parts import running
from keyhole.primitives.keyspace import distinct_keys, key_bytes
from keyhole.primitives.layout import KeysBySpace, Layout, RowSource
from keyhole.primitives.report import Report
from keyhole.rounds.adding import add_in_blocks, add_up, take
from keyhole.rounds.clients import ClientJob, Clients, DataOnce, Jobs, choose_all, is_nothing
from keyhole.rounds.machine import (
    Answered,
    Dropped,
    Reached,
    Refused,
    RoundMachine,
    Terms,
    Why,
    terms_of,
)
from keyhole.rounds.record import RoundRecord
from keyhole.rounds.spec import RunParts
from keyhole.sampling import Outcome, Stream, sample_dropouts
from keyhole.server.inputs import TakenUpdate
from keyhole.server.row_sums import BLOCK, BlockSum, RowUpdate, pair_up
from keyhole.server.state import ServerState

Executor: TypeAlias = Callable[[Clients, Sequence[ClientJob]], Iterable[Any]]
"""Where jobs run: `(clients, jobs) -> reports` in the order of the jobs: what `job.run` returns, or
bare updates. A job is made, and its sub-model selected, each time that it is taken out of
`jobs`."""

Made: TypeAlias = tuple[tuple[RowUpdate, ...] | None, RoundRecord]
"""What is made of a round: its mean update, None where there is no step, and its record."""


@runtime_checkable
class Engine(Protocol):
    """An executor whose clients choose keys and are added up where they train, and that tells what
    went wrong there."""

    def choose(
        self, clients: Clients, asked: Sequence[int], t: int, layout: Layout, run: RunParts
    ) -> Iterable[KeysBySpace]:
        """What `choose_all` returns."""
        ...

    def __call__(self, clients: Clients, jobs: Sequence[ClientJob]) -> Iterable[Any]:
        """Runs jobs; returns their reports in order."""
        ...

    def add_up(
        self, clients: Clients, jobs: Sequence[ClientJob], layout: Layout
    ) -> Iterable[BlockSum]:
        """Runs jobs; returns what `pair_up` leaves of what `add_up_jobs` returns for each `BLOCK`
        of them, in order."""
        ...

    def incidents(self) -> list[str]:
        """What went wrong since this was last asked, though nothing is lost: a sentence each."""
        ...


def in_process(clients: Clients, jobs: Sequence[ClientJob]) -> Iterable[Report]:
    """Runs jobs one after the other in this process."""
    return (job.run(clients) for job in jobs)


def run_round(
    t: int, state: ServerState, clients: Clients, parts: RunParts, execute: Executor = in_process
) -> Made:
    """Runs round t of Algorithm 2 up to the server step, which it leaves to the caller.

    Args:
        t: the round, from 0.
        state: what the server holds; read only.
        execute: where clients train; the result does not depend on it.

    Returns:
        The mean update, or None if nobody was left; and the record, whose `step` counts the step
        that the caller is about to make.
    """
    check_budget(t, state, parts)
    asked = parts.draw_cohort(t)
    machine = open_round(t, asked, parts, terms_of(parts.cohorts, asked))
    choosing, training = _with_data_once(clients, execute)
    keys = choose(choosing, asked, t, state.layout, parts, execute)  # z
    slices = deliver(state, keys, machine, parts)  # psi
    results = train(training, slices, t, machine, parts, execute, parts.adds_in_blocks)  # u
    results = replace(results, each=with_frozen(clients, results.each, parts.delivery.about))
    total = add_up(t, results.each, state.layout, parts, results.blocks)  # phi
    clients.states.offer(states_of(results.each))
    return total.rows, record_round(t, state, parts, results, total)


def _with_data_once(clients: Clients, execute: Executor) -> tuple[Clients, Clients]:
    """Clients that choose and clients that train: the same data for both, where both are here."""
    if isinstance(execute, Engine):
        return clients, clients
    once = DataOnce(clients)
    return once.choosing, once.training


def check_budget(t: int, state: ServerState, parts: RunParts) -> None:
    """Raises BudgetError where round t would spend more privacy than there is."""
    account = parts.account(state.layout)
    if account is not None:
        account.check(t)


def open_round(t: int, asked: Sequence[int], parts: RunParts, terms: Terms) -> RoundMachine:
    """Opens round t, and tells it who drops out and where; that depends on the client alone."""
    machine, run = RoundMachine(terms, asked), (parts.seed, parts.trial)
    before = sample_dropouts(asked, parts.cohorts.lost_before, *run, Stream.LOST_BEFORE, t)
    gone = set(before)
    left = [client for client in asked if client not in gone]
    after = sample_dropouts(left, parts.cohorts.lost_after, *run, Stream.LOST_AFTER, t)
    for client in before:
        machine.handle(Dropped(client))
    for client in after:
        machine.handle(Reached(client))
        machine.handle(Dropped(client))
    return machine


def choose(
    clients: Clients,
    asked: Sequence[int],
    t: int,
    layout: Layout,
    parts: RunParts,
    execute: Executor = in_process,
) -> dict[int, KeysBySpace]:
    """Lets clients choose keys in round t, where they train."""
    choose_each = execute.choose if isinstance(execute, Engine) else choose_all
    return dict(zip(asked, choose_each(clients, asked, t, layout, parts), strict=True))


@dataclass(frozen=True)
class CohortSlices:
    """Holds what a cohort was given to train on, by client."""

    layout: Layout
    chosen: Mapping[int, KeysBySpace]
    keys: Mapping[int, KeysBySpace]  # that sub-models hold: a private delivery may place fewer
    submodels: Mapping[int, Tree]  # those lost before have none
    cost: Cost
    source: RowSource | None  # of the rows, where they can be selected elsewhere


def deliver(
    state: ServerState, keys: Mapping[int, KeysBySpace], machine: RoundMachine, parts: RunParts
) -> CohortSlices:
    """Delivers slices to all clients that are not lost before."""
    lost = machine.outcomes
    reached = {c: z for c, z in keys.items() if lost.get(c) != "lost_before"}
    with running("deliver", " after server step {0.steps}", state):
        found = parts.delivery.deliver(state, reached)
    received = {**keys, **found.keys}
    return CohortSlices(state.layout, keys, received, found.submodels, found.cost, found.source)


@dataclass(frozen=True)
class CohortResults:
    """Holds what a cohort brought."""

    each: list[ClientResult]  # of each client asked, in order
    cost: Cost
    closed: Why
    blocks: tuple[BlockSum, ...] | None = None  # updates, where they were added up at once
    incidents: list[str] = field(default_factory=list)
    are_maxima: bool = False  # bytes and sizes; see `RoundRecord`


def train(
    clients: Clients,
    slices: CohortSlices,
    t: int,
    machine: RoundMachine,
    parts: RunParts,
    execute: Executor = in_process,
    in_blocks: bool = False,
) -> CohortResults:
    """Lets clients train until the round closes; they answer in the order asked.

    Args:
        t: the round, from which all randomness of its clients derives; of asynchronous rounds, the
            one in which they start.
        machine: says when the round closes; clients that would answer later do not train.
        execute: where clients train; the result does not depend on it.
        in_blocks: whether updates are added up at once, and kept no longer.
    """
    work = _Work(execute, clients, slices.layout, in_blocks)
    lost = machine.outcomes  # a new dict each time
    waiting = [c for c in machine.asked if c not in lost]
    while machine.closed is None:
        wave, waiting = waiting[: machine.missing], waiting[machine.missing :]
        own = {client: slices.keys[client] for client in wave}
        place = parts.seed, parts.trial, t
        held = slices.submodels.__getitem__, slices.source, parts.bound, clients.states.get
        jobs = Jobs(place, own, *held)
        for client, outcome in zip(wave, work.do(jobs), strict=True):
            is_sent, is_empty = outcome == "sent", outcome == "empty"
            machine.handle(Answered(client) if is_sent else Refused(client, is_empty=is_empty))
    each = [_result(client, outcome, slices, work) for client, outcome in machine.outcomes.items()]
    blocks = tuple(work.blocks) if in_blocks else None
    return CohortResults(each, slices.cost, machine.closed, blocks, work.incidents)


def _result(client: int, outcome: Outcome, slices: CohortSlices, work: _Work) -> ClientResult:
    taken, report = work.taken.get(client, _NOTHING_TAKEN), work.told.get(client)
    keys, wanted = slices.keys[client], slices.chosen[client]
    unplaced = sum(map(len, wanted.values())) - sum(map(len, keys.values()))
    result = result_of(client, outcome, keys, taken, slices.layout, slices.cost)
    return replace(result, unplaced_keys=unplaced, report=report)


def states_of(results: Iterable[ClientResult]) -> dict[int, bytes]:
    """Returns what clients whose updates count are to keep, packed."""
    told = ((result.client, result.report) for result in results if result.outcome == "sent")
    return {c: report.state for c, report in told if report is not None and report.state}


@dataclass
class _Work:
    """Training of one cohort: what was brought so far, as updates or as sums of blocks."""

    execute: Executor
    clients: Clients
    layout: Layout
    in_blocks: bool
    taken: dict[int, TakenUpdate] = field(default_factory=dict)  # without updates, where in blocks
    told: dict[int, Report] = field(default_factory=dict)  # beside updates
    blocks: list[BlockSum] = field(default_factory=list)
    incidents: list[str] = field(default_factory=list)

    def do(self, jobs: Jobs) -> list[Outcome]:
        """Runs jobs; returns of each whether its update can be added up, or there is none."""
        done = self._add_up(jobs) if self.in_blocks else self._bring(jobs)
        if isinstance(self.execute, Engine):
            self.incidents += self.execute.incidents()
        return done

    def _bring(self, jobs: Jobs) -> list[Outcome]:
        outcomes: list[Outcome] = []
        reports = map(Report.of, self.execute(self.clients, jobs))
        for (client, keys), report in zip(jobs.keys.items(), reports, strict=True):
            taken = self.taken[client] = take(jobs.bound, keys, report)
            without: Outcome = "empty" if is_nothing(report.update) else "refused"
            outcomes.append(without if taken.update is None else "sent")
            if (told := report.beside) is not None:
                self.told[client] = told
        return outcomes

    def _add_up(self, jobs: Jobs) -> list[Outcome]:
        if isinstance(self.execute, Engine):
            blocks = list(self.execute.add_up(self.clients, jobs, self.layout))
        else:
            reports = map(Report.of, self.execute(self.clients, jobs))
            blocks = pair_up(add_in_blocks(jobs, reports, self.layout))
        self.blocks += blocks
        outcomes: list[Outcome] = ["sent"] * len(jobs)
        start = 0
        for block in blocks:
            for place in block.refused:
                outcomes[start + place] = "refused"
            for place in block.empty:
                outcomes[start + place] = "empty"
            start += BLOCK * block.span
        self._note_more(list(jobs.keys), outcomes, blocks)
        return outcomes

    def _note_more(
        self, clients: Sequence[int], outcomes: Sequence[Outcome], blocks: Sequence[BlockSum]
    ) -> None:
        """Keeps what is known of updates that were added up where they were made."""
        sent = [c for c, outcome in zip(clients, outcomes, strict=True) if outcome == "sent"]
        if norms := [norm for block in blocks for norm in block.norms]:
            self.taken |= {c: TakenUpdate(None, n) for c, n in zip(sent, norms, strict=True)}
        start = 0
        for block in blocks:
            for client in (clients[start + place] for place in block.above):
                self.taken[client] = replace(self.taken.get(client, _NOTHING_TAKEN), is_above=True)
            self.told |= {clients[start + place]: report for place, report in block.told}
            start += BLOCK * block.span


_NOTHING_TAKEN = TakenUpdate(None)


def result_of(
    client: int,
    outcome: Outcome,
    keys: KeysBySpace,
    taken: TakenUpdate,
    layout: Layout,
    cost: Cost,
) -> ClientResult:
    """Returns the result of a client that chose `keys`, with what they and a plain update weigh."""
    counts = {name: len(z) for name, z in keys.items()}
    has_sent = outcome in ("sent", "late", "refused")
    sent = key_bytes(keys.values()) + layout.client_bytes(**counts) if has_sent else 0
    return ClientResult(
        client=client,
        outcome=outcome,
        keys=keys,
        update=taken.update,
        norm=taken.norm,
        is_above_norm=taken.is_above,
        size=0 if outcome == "lost_before" else layout.client_size(**counts),
        bytes_down=cost.bytes_down.get(client, 0),
        bytes_up=cost.bytes_up.get(client, 0),
        update_bytes=sent,
    )


def with_frozen(
    clients: Clients,
    results: Sequence[ClientResult],
    about: DeliveryAbout,
    *,
    is_hidden: bool = False,
) -> list[ClientResult]:
    """Returns results with the bytes of frozen leaves that clients received beside their slices.

    Args:
        about: how slices are delivered.
        is_hidden: whether nobody here knows which: whole tables are their max.
    """
    if clients.frozen is None:
        return list(results)
    whole = is_hidden or about.is_private or about.route != "slices"
    how = {"whole": whole, "proofs": about.is_bound}
    return [
        replace(r, bytes_down=r.bytes_down + clients.frozen.charge(r.client, r.keys, **how))
        if r.bytes_down
        else r
        for r in results
    ]


def record_round(
    t: int, state: ServerState, parts: RunParts, results: CohortResults, summed: SumResult
) -> RoundRecord:
    """Returns the record of a synchronous round, whose sum is yet to be applied."""
    each = [
        replace(
            result,
            bytes_down=result.bytes_down + summed.bytes_down.get(result.client, 0),
            update_bytes=summed.bytes_up.get(result.client, 0),
        )
        for result in results.each
    ]
    has_step = summed.rows is not None
    added = sum(result.outcome == "sent" for result in each) if has_step else 0
    account, asked = parts.account(state.layout), tuple(result.client for result in each)
    return RoundRecord(
        round=t,
        step=state.steps + has_step,
        staleness=[0] * added,
        closed=results.closed,
        incidents=[*results.incidents, *refused_whole(each)],
        **record_results(each, [results.cost], summed),
        not_opened=summed.error,
        are_maxima=results.are_maxima,
        input_bound=parts.input_bound,
        total_weight=summed.reported.weight,
        client_metrics=summed.reported.metrics,
        privacy={} if account is None else account.describe(t, asked, added),
    )


def refused_whole(results: Sequence[ClientResult]) -> list[str]:
    """Says so where clients answered and the update of none could be used."""
    refused = sum(result.outcome == "refused" for result in results)
    above = sum(result.is_above_norm for result in results if result.outcome == "refused")
    if not refused or any(result.outcome in ("sent", "late") for result in results):
        return []
    if above:
        return [f"{refused} updates came, {above} of them above the max norm: none was added"]
    return [f"{refused} updates, all that came, held NaN, infinity or nothing: none was added"]


def _count_distinct(results: Sequence[ClientResult]) -> int:
    """How many different keys reached a client, over all key spaces."""
    reached: dict[str, list[KeyArray]] = {}
    for result in results:
        if result.outcome != "lost_before":
            for name, z in result.keys.items():
                reached.setdefault(name, []).append(z.array)
    return sum(len(distinct_keys(arrays)) for arrays in reached.values())


def record_results(
    results: Sequence[ClientResult], costs: Sequence[Cost], summed: SumResult
) -> dict[str, Any]:
    """What results, deliveries and a sum put into the record of a round."""

    def those(outcome: str) -> list[int]:
        return [result.client for result in results if result.outcome == outcome]

    ended = "lost_before", "lost_after", "late", "refused", "empty"
    return {
        "clients": [result.client for result in results],
        **{outcome: those(outcome) for outcome in ended},
        "bytes_down": [result.bytes_down for result in results],
        "bytes_up": [result.bytes_up + result.update_bytes for result in results],
        "client_sizes": [result.size for result in results],
        "select_calls": sum(cost.select_calls for cost in costs),
        "cache_hits": sum(cost.cache_hits for cost in costs),
        "distinct_keys": _count_distinct(results),
        "above_norm": sum(result.is_above_norm for result in results),
        "outliers": summed.outliers,
        "unplaced_keys": sum(result.unplaced_keys for result in results) + summed.unplaced_keys,
        "dropped_rows": summed.dropped_rows,
        "seen_by": {p: str(learned) for p, learned in costs[-1].leaks.items()} if costs else {},
        "seen_in_sum": dict(summed.seen_by),
    }
