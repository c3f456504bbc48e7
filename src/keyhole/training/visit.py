"""Visits: what one client does in a round, from its keys to its update, and how it may fail.

Synchronous and asynchronous rounds are made of the same visits; they differ in when an update
counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Protocol, TypeAlias, runtime_checkable

from keyhole.delivery.cost import Cost
from keyhole.delivery.demand import key_bytes
from keyhole.primitives.keyspace import Keys
from keyhole.primitives.layout import ClientKeys, Layout
from keyhole.primitives.placement import ClientValue, observe
from keyhole.server.aggregation import BLOCK, BlockSum, pair_up, sum_block
from keyhole.server.state import ServerState
from keyhole.server.updates import usable
from keyhole.training.clients import Choosing, Clients, choose_all
from keyhole.training.cohort import sample_dropouts
from keyhole.training.fate import Fate
from keyhole.training.jobs import Job, Jobs
from keyhole.training.plan import Plan
from keyhole.training.randomness import Place
from keyhole.training.round_machine import (
    Answered,
    Dropped,
    Reached,
    Refused,
    RoundMachine,
    Terms,
    Why,
)
from keyhole.types import ClientId, Tree

__all__ = [
    "Engine",
    "Executor",
    "Visit",
    "Visited",
    "add_up_jobs",
    "in_process",
    "visit_clients",
    "visit_of",
]

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
        for client, is_usable in zip(wave, work.do(jobs), strict=True):
            machine.handle(Answered(client) if is_usable else Refused(client))
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

    def do(self, jobs: Jobs) -> list[bool]:
        """Runs jobs; returns of each whether its update can be added up."""
        done = self._add_up(jobs) if self.in_blocks else self._bring(jobs)
        if isinstance(self.execute, Engine):
            self.incidents += self.execute.incidents()
        return done

    def _bring(self, jobs: Jobs) -> list[bool]:
        for client, update in zip(jobs.keys, self.execute(self.clients, jobs), strict=True):
            self.updates[client] = usable(update)
        return [self.updates[client] is not None for client in jobs.keys]

    def _add_up(self, jobs: Jobs) -> list[bool]:
        if isinstance(self.execute, Engine):
            blocks = list(self.execute.add_up(self.clients, jobs, self.layout))
        else:
            updates = self.execute(self.clients, jobs)
            blocks = pair_up(_in_blocks(list(jobs.keys.values()), updates, self.layout))
        self.blocks += blocks
        refused, start = set(), 0
        for block in blocks:
            refused |= {start + place for place in block.refused}
            start += BLOCK * block.span
        return [place not in refused for place in range(len(jobs))]


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
    brought = [(job.keys, usable(job.run(clients))) for job in jobs]
    return _add_block(brought, layout, before())


def _in_blocks(
    keys: Sequence[ClientKeys], updates: Iterable[Tree], layout: Layout
) -> Iterator[BlockSum]:
    """Adds up block after block; no more updates are held than one has."""
    pairs = zip(keys, updates, strict=True)
    for _ in range(0, len(keys), BLOCK):
        yield _add_block([(z, usable(update)) for z, update in islice(pairs, BLOCK)], layout)


def _add_block(
    brought: Sequence[tuple[ClientKeys, Tree | None]],
    layout: Layout,
    before: BlockSum | None = None,
) -> BlockSum:
    """Adds up what clients of one block brought; those without a usable update are left out."""
    sent = [(layout.keys_by_space(z), update) for z, update in brought if update is not None]
    summed = sum_block(layout, [update for _, update in sent], [z for z, _ in sent], before)
    first = 0 if before is None else before.clients + len(before.refused)
    refused = tuple(first + at for at, (_, update) in enumerate(brought) if update is None)
    return replace(summed, refused=summed.refused + refused)


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
