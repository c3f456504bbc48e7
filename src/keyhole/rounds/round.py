"""Visits: what one client does in a round, from its keys to its update, and how it may fail.

Synchronous and asynchronous rounds are made of the same visits; they differ in when an update
counts.

Synchronous rounds: Algorithm 2 with dropouts, over-selection, budgets and costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from math import inf
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np

from keyhole.aggregation.base import Contribution, SumRequest, SumResult, withheld
from keyhole.aggregation.plain import PLAIN
from keyhole.aggregation.privacy.mechanism import PrivateSum
from keyhole.arrays import ClientId, KeyArray, Tree
from keyhole.delivery.base import Cost
from keyhole.primitives.keyspace import Keys, key_bytes
from keyhole.primitives.layout import ClientKeys, Layout
from keyhole.primitives.placement import ClientValue, observe
from keyhole.rounds.clients import Choosing, Clients, Job, Jobs, choose_all, is_nothing
from keyhole.rounds.machine import Answered, Dropped, Reached, Refused, RoundMachine, Terms, Why
from keyhole.rounds.record import RoundRecord
from keyhole.rounds.spec import Plan
from keyhole.sampling import Cohorts, Fate, Place, sample_cohort, sample_dropouts
from keyhole.server.row_sums import (
    BLOCK,
    BlockSum,
    RowUpdate,
    pair_up,
    sum_block,
    usable,
)
from keyhole.server.state import ServerState

Executor: TypeAlias = Callable[[Clients, Sequence[Job]], Iterable[Tree]]
"""Where jobs run: `(clients, jobs) -> updates` in the order of the jobs. A job is made, and its
sub-model selected, each time that it is taken out of `jobs`."""


@runtime_checkable
class Engine(Protocol):
    """An executor whose clients choose keys and are added up where they train, and that tells what
    went wrong there."""

    def choose(
        self, clients: Clients, asked: Sequence[int], t: int, layout: Layout, choosing: Choosing
    ) -> Iterable[ClientKeys]:
        """What `choose_all` returns."""
        ...

    def __call__(self, clients: Clients, jobs: Sequence[Job]) -> Iterable[Tree]:
        """Runs jobs; returns their updates in order."""
        ...

    def add_up(self, clients: Clients, jobs: Sequence[Job], layout: Layout) -> Iterable[BlockSum]:
        """Runs jobs; returns what `pair_up` leaves of what `add_up_jobs` returns for each `BLOCK`
        of them, in order."""
        ...

    def incidents(self) -> list[str]:
        """What went wrong since this was last asked, though nothing is lost: a sentence each."""
        ...


def in_process(clients: Clients, jobs: Sequence[Job]) -> Iterable[Tree]:
    """Runs jobs one after the other in this process."""
    return (job.run(clients) for job in jobs)


@dataclass(frozen=True)
class Visit:
    """What became of one client.

    Args:
        client: its number.
        fate: how it ended.
        keys: what its sub-model holds, by key space.
        update: what it sent, if it did.
        size: numbers in its sub-model; 0 if it received none.
        bytes_down: what it received.
        bytes_up: what it sent to select.
        update_bytes: what it sent to have its update added.
        unplaced_keys: how many keys it chose and trained without, because a private way had no
            place for them in its query.
    """

    client: int
    fate: Fate
    keys: Mapping[str, Keys]
    update: Tree
    size: int
    bytes_down: int
    bytes_up: int
    update_bytes: int = 0
    unplaced_keys: int = 0


@dataclass(frozen=True)
class Visited:
    """What a cohort brought.

    Args:
        visits: of each client asked, in order.
        cost: of the delivery.
        closed: why no more were waited for.
        blocks: the updates, added up where clients were trained; None where visits have them.
        incidents: what went wrong beside the clients.
    """

    visits: list[Visit]
    cost: Cost
    closed: Why
    blocks: tuple[BlockSum, ...] | None = None
    incidents: list[str] = field(default_factory=list)


def visit_clients(
    t: int,
    asked: Sequence[int],
    state: ServerState,
    clients: Clients,
    plan: Plan,
    execute: Executor,
    terms: Terms,
    in_blocks: bool = False,
) -> Visited:
    """Lets clients choose keys, receive slices and train, until the round closes.

    Args:
        t: the round, from which all randomness of its clients derives; of asynchronous rounds, the
            one in which they start.
        asked: the clients, in order; they answer in this order.
        state: what the server holds; read only.
        clients: the population.
        plan: of the run.
        execute: where clients train; the result does not depend on it.
        terms: when the round closes; clients that would answer later do not train.
        in_blocks: whether updates are added up at once, and kept no longer.
    """
    machine = RoundMachine(terms, asked)
    _drop_out(machine, t, asked, plan)
    choose = execute.choose if isinstance(execute, Engine) else choose_all
    keys_of_all = choose(clients, asked, t, state.layout, plan.choosing)
    chosen = dict(zip(asked, keys_of_all, strict=True))
    lost = machine.fates
    reached: dict[ClientId, ClientKeys] = {
        c: z for c, z in chosen.items() if lost.get(c) != "lost_before"
    }
    delivered = plan.deliver(state, ClientValue(asked, reached))
    submodels, placed = observe(delivered.submodels), observe(delivered.keys)
    received = {c: placed.get(c, z) for c, z in chosen.items()}
    work = _Work(execute, clients, state.layout, in_blocks)
    waiting = [c for c in asked if c not in lost]
    while machine.closed is None:
        wave, waiting = waiting[: machine.missing], waiting[machine.missing :]
        own = {client: received[client] for client in wave}
        jobs = Jobs((plan.seed, plan.trial, t), own, submodels.__getitem__, delivered.source)
        for client, fate in zip(wave, work.do(jobs), strict=True):
            is_sent, is_empty = fate == "sent", fate == "empty"
            machine.handle(Answered(client) if is_sent else Refused(client, is_empty=is_empty))
    fates = machine.fates
    visits = []
    for client in asked:
        keys, update = state.layout.keys_by_space(received[client]), work.updates.get(client)
        visit = visit_of(client, fates[client], keys, update, state.layout, delivered.cost)
        if received[client] is not chosen[client]:
            wanted = state.layout.keys_by_space(chosen[client])
            visit = replace(visit, unplaced_keys=_count(wanted) - _count(keys))
        visits.append(visit)
    blocks = tuple(work.blocks) if in_blocks else None
    return Visited(visits, delivered.cost, machine.closed, blocks, work.incidents)


def _drop_out(machine: RoundMachine, t: int, asked: Sequence[int], plan: Plan) -> None:
    """Tells the machine who drops out, and where; each client's fate is its own."""
    run = plan.seed, plan.trial
    before = sample_dropouts(asked, plan.cohorts.lost_before, *run, Place.LOST_BEFORE, t)
    gone = set(before)
    left = [client for client in asked if client not in gone]
    after = sample_dropouts(left, plan.cohorts.lost_after, *run, Place.LOST_AFTER, t)
    for client in before:
        machine.handle(Dropped(client))
    for client in after:
        machine.handle(Reached(client))
        machine.handle(Dropped(client))


@dataclass
class _Work:
    """Training of one cohort: what was brought so far, as updates or as sums of blocks."""

    execute: Executor
    clients: Clients
    layout: Layout
    in_blocks: bool
    updates: dict[int, Tree] = field(default_factory=dict)
    blocks: list[BlockSum] = field(default_factory=list)
    incidents: list[str] = field(default_factory=list)

    def do(self, jobs: Jobs) -> list[Fate]:
        """Runs jobs; returns of each whether its update can be added up, or there is none."""
        done = self._add_up(jobs) if self.in_blocks else self._bring(jobs)
        if isinstance(self.execute, Engine):
            self.incidents += self.execute.incidents()
        return done

    def _bring(self, jobs: Jobs) -> list[Fate]:
        fates: list[Fate] = []
        for client, update in zip(jobs.keys, self.execute(self.clients, jobs), strict=True):
            found = None if is_nothing(update) else usable(update)
            self.updates[client] = found
            without: Fate = "empty" if is_nothing(update) else "refused"
            fates.append(without if found is None else "sent")
        return fates

    def _add_up(self, jobs: Jobs) -> list[Fate]:
        if isinstance(self.execute, Engine):
            blocks = list(self.execute.add_up(self.clients, jobs, self.layout))
        else:
            updates = self.execute(self.clients, jobs)
            blocks = pair_up(_in_blocks(list(jobs.keys.values()), updates, self.layout))
        self.blocks += blocks
        fates: list[Fate] = ["sent"] * len(jobs)
        start = 0
        for block in blocks:
            for place in block.refused:
                fates[start + place] = "refused"
            for place in block.empty:
                fates[start + place] = "empty"
            start += BLOCK * block.span
        return fates


def add_up_jobs(
    clients: Clients,
    jobs: Iterable[Job],
    layout: Layout,
    before: Callable[[], BlockSum | None] = lambda: None,
) -> BlockSum:
    """Runs jobs of one block and adds up what they bring: the work of an engine's worker.

    Args:
        clients: the population.
        jobs: at most `BLOCK`, or some of them.
        layout: the model and its cuts.
        before: called once they have run; returns the sum of those before them in the block, if
            they are not the first.
    """
    brought = [(job.keys, job.run(clients)) for job in jobs]
    return _add_block(brought, layout, before())


def _in_blocks(
    keys: Sequence[ClientKeys], updates: Iterable[Tree], layout: Layout
) -> Iterator[BlockSum]:
    """Adds up block after block; no more updates are held than one has."""
    pairs = zip(keys, updates, strict=True)
    for _ in range(0, len(keys), BLOCK):
        yield _add_block(list(islice(pairs, BLOCK)), layout)


def _add_block(
    brought: Sequence[tuple[ClientKeys, Tree]],
    layout: Layout,
    before: BlockSum | None = None,
) -> BlockSum:
    """Adds up what clients of one block brought; those without a usable update are left out."""
    empty = [at for at, (_, update) in enumerate(brought) if is_nothing(update)]
    found = [(layout.keys_by_space(z), usable(update)) for z, update in brought]
    refused = [at for at, (_, update) in enumerate(found) if update is None]
    sent = [pair for at, pair in enumerate(found) if at not in {*empty, *refused}]
    summed = sum_block(layout, [update for _, update in sent], [z for z, _ in sent], before)
    first = 0 if before is None else before.clients + len(before.refused) + len(before.empty)
    return replace(
        summed,
        refused=summed.refused + tuple(first + at for at in refused),
        empty=summed.empty + tuple(first + at for at in empty),
    )


def _count(keys: Mapping[str, Keys]) -> int:
    return sum(len(z) for z in keys.values())


def visit_of(
    client: int, fate: Fate, keys: Mapping[str, Keys], update: Tree, layout: Layout, cost: Cost
) -> Visit:
    """The visit of a client that chose `keys`, with what they and a plain update weigh."""
    counts = {name: len(z) for name, z in keys.items()}
    has_sent = fate in ("sent", "late", "refused")
    sent = key_bytes(keys.values()) + layout.client_bytes(**counts) if has_sent else 0
    return Visit(
        client=client,
        fate=fate,
        keys=keys,
        update=update,
        size=0 if fate == "lost_before" else layout.client_size(**counts),
        bytes_down=cost.bytes_down.get(client, 0),
        bytes_up=cost.bytes_up.get(client, 0),
        update_bytes=sent,
    )


def run_round(
    t: int, state: ServerState, clients: Clients, plan: Plan, execute: Executor = in_process
) -> tuple[tuple[RowUpdate, ...] | None, RoundRecord]:
    """Runs round t up to the server step, which it leaves to the caller.

    Args:
        t: the round, from 0.
        state: what the server holds; read only.
        clients: the population.
        plan: of the run.
        execute: where clients train; the result does not depend on it.

    Returns:
        The mean update, or None if nobody was left; and the record, whose `step` counts the step
        that the caller is about to make.
    """
    check_budget(t, state, plan)
    asked = sample_cohort(plan.cohorts, plan.seed, plan.trial, t)
    visited = visit_clients(
        t, asked, state, clients, plan, execute, terms_of(plan.cohorts, asked), plan.is_in_clear
    )
    summed = add_up(t, visited.visits, state.layout, plan, visited.blocks)
    return summed.rows, record_round(t, state, plan, visited, summed)


def check_budget(t: int, state: ServerState, plan: Plan) -> None:
    """Raises BudgetError where round t would spend more privacy than there is."""
    account = plan.account(state.layout)
    if account is not None:
        account.check(t)


def terms_of(cohorts: Cohorts, asked: Sequence[int], seconds: float = inf) -> Terms:
    """When a round with these clients closes: all of them are waited for unless more were asked
    than the round needs."""
    goal = min(cohorts.size, len(asked)) if cohorts.over_selection > 1 else len(asked)
    return Terms(goal, cohorts.min_updates, seconds)


def add_up(
    t: int,
    visits: Sequence[Visit],
    layout: Layout,
    plan: Plan,
    blocks: tuple[BlockSum, ...] | None = None,
) -> SumResult:
    """Hands what clients brought to the plan's aggregation; too few make no sum."""
    sent = sum(visit.fate == "sent" for visit in visits)
    if sent < plan.cohorts.min_updates:
        return withheld(sent, plan.cohorts.min_updates, {})
    contributions = [Contribution(v.client, v.fate, v.keys, v.update) for v in visits]
    place = plan.seed, plan.trial, t
    request = SumRequest(
        layout, contributions, plan.over, plan.keys_per_client, place, blocks=blocks
    )
    if plan.privacy is not None:
        return PrivateSum(plan.aggregate, plan.privacy, plan.cohorts).add(request)
    return plan.aggregate.add(request)


def record_round(
    t: int, state: ServerState, plan: Plan, visited: Visited, summed: SumResult
) -> RoundRecord:
    """The record of a synchronous round whose sum is about to be applied, if there is one."""
    visits = [
        replace(
            visit,
            bytes_down=visit.bytes_down + summed.bytes_down.get(visit.client, 0),
            update_bytes=summed.bytes_up.get(visit.client, 0),
        )
        for visit in visited.visits
    ]
    has_step = summed.rows is not None
    added = sum(visit.fate == "sent" for visit in visits) if has_step else 0
    account, asked = plan.account(state.layout), tuple(visit.client for visit in visits)
    return RoundRecord(
        round=t,
        step=state.steps + has_step,
        staleness=[0] * added,
        closed=visited.closed,
        incidents=[*visited.incidents, *refused_whole(visits)],
        **record_visits(visits, [visited.cost], summed),
        not_opened=summed.error,
        privacy={} if account is None else account.describe(t, asked, added),
    )


class Synchronous:
    """Synchronous rounds of a run: nothing is under way between them."""

    def next(
        self, t: int, state: ServerState, clients: Clients, plan: Plan, execute: Executor
    ) -> tuple[tuple[RowUpdate, ...] | None, RoundRecord]:
        """Runs round t; see `run_round`."""
        return run_round(t, state, clients, plan, execute)

    def dump(self) -> bytes:
        """Nothing to store between rounds."""
        return b""

    def load(self, data: bytes, layout: Layout) -> None:
        """Nothing to restore."""


def refused_whole(visits: Sequence[Visit]) -> list[str]:
    """Says so where clients answered and the update of none could be used."""
    refused = sum(visit.fate == "refused" for visit in visits)
    if not refused or any(visit.fate in ("sent", "late") for visit in visits):
        return []
    return [f"{refused} updates, all that came, held NaN, infinity or nothing: none was added"]


def _count_distinct(visits: Sequence[Visit]) -> int:
    """How many different keys reached a client, over all key spaces."""
    reached: dict[str, list[KeyArray]] = {}
    for visit in visits:
        if visit.fate != "lost_before":
            for name, z in visit.keys.items():
                reached.setdefault(name, []).append(z.array)
    return sum(len(np.unique(np.concatenate(arrays))) for arrays in reached.values())


def record_visits(
    visits: Sequence[Visit],
    costs: Sequence[Cost],
    summed: SumResult | None = None,
) -> dict[str, Any]:
    """What visits, deliveries and a sum (None for a plain one) put into the record of a round."""

    def those(fate: str) -> list[int]:
        return [visit.client for visit in visits if visit.fate == fate]

    return {
        "clients": [visit.client for visit in visits],
        "lost_before": those("lost_before"),
        "lost_after": those("lost_after"),
        "late": those("late"),
        "refused": those("refused"),
        "empty": those("empty"),
        "bytes_down": [visit.bytes_down for visit in visits],
        "bytes_up": [visit.bytes_up + visit.update_bytes for visit in visits],
        "client_sizes": [visit.size for visit in visits],
        "select_calls": sum(cost.select_calls for cost in costs),
        "cache_hits": sum(cost.cache_hits for cost in costs),
        "distinct_keys": _count_distinct(visits),
        "unplaced_keys": sum(visit.unplaced_keys for visit in visits)
        + (0 if summed is None else summed.unplaced_keys),
        "seen_by": {p: str(learned) for p, learned in costs[-1].seen_by.items()} if costs else {},
        "seen_in_sum": dict(PLAIN.about.seen_by() if summed is None else summed.seen_by),
    }
