"""Visits: what one client does in a round, from its keys to its update, and how it may fail.

Synchronous and asynchronous rounds are made of the same visits; they differ in when an update
counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from keyhole.delivery.cost import Cost
from keyhole.delivery.demand import key_bytes
from keyhole.errors import InputError
from keyhole.keys.budget import assign_device, keys_within
from keyhole.primitives.keyspace import Keys
from keyhole.primitives.layout import ClientKeys, Layout
from keyhole.primitives.placement import ClientValue, observe
from keyhole.server.state import ServerState
from keyhole.server.updates import usable
from keyhole.training.clients import Clients, Job
from keyhole.training.cohort import sample_dropouts
from keyhole.training.fate import Fate
from keyhole.training.plan import Plan
from keyhole.training.randomness import Place, generator
from keyhole.types import ClientId, Tree

__all__ = ["Executor", "Visit", "choose_keys", "in_process", "visit_clients", "visit_of"]

Executor: TypeAlias = Callable[[Clients, Sequence[Job]], Iterable[Tree]]
"""Where jobs run: `(clients, jobs) -> updates` in the order of the jobs."""


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


def visit_clients(
    t: int,
    asked: Sequence[int],
    state: ServerState,
    clients: Clients,
    plan: Plan,
    execute: Executor,
    most: int | None = None,
) -> tuple[list[Visit], Cost]:
    """Lets clients choose keys, receive slices and train.

    Args:
        t: the round, from which all randomness of its clients derives; of asynchronous rounds, the
            place of their cohort in the stream of cohorts.
        asked: the clients, in order.
        state: what the server holds; read only.
        clients: the population.
        plan: of the run.
        execute: where clients train; the result does not depend on it.
        most: how many updates are waited for; clients that answer later are late.

    Returns:
        A visit for each client asked, in order, and what the delivery cost.
    """
    fates = _fates(t, asked, plan, most)
    chosen = {c: choose_keys(c, t, state.layout, clients, plan) for c in asked}
    reached: dict[ClientId, ClientKeys] = {
        c: z for c, z in chosen.items() if fates[c] != "lost_before"
    }
    delivered = plan.deliver(state, ClientValue(asked, reached))
    submodels = observe(delivered.submodels)
    received = {c: observe(delivered.keys).get(c, z) for c, z in chosen.items()}
    training = [client for client in asked if fates[client] == "sent"]
    jobs = [Job.of(plan.seed, plan.trial, t, c, received[c], submodels[c]) for c in training]
    updates = dict(zip(training, execute(clients, jobs), strict=True))
    visits = []
    for client in asked:
        keys, update = state.layout.keys_by_space(received[client]), updates.get(client)
        fate: Fate = fates[client]
        if fate == "sent" and (update := usable(update)) is None:
            fate = "refused"
        visit = visit_of(client, fate, keys, update, state.layout, delivered.cost)
        wanted = state.layout.keys_by_space(chosen[client])
        visits.append(replace(visit, unplaced_keys=_count(wanted) - _count(keys)))
    return visits, delivered.cost


def _count(keys: Mapping[str, Keys]) -> int:
    return sum(len(z) for z in keys.values())


def _fates(t: int, asked: Sequence[int], plan: Plan, most: int | None) -> dict[int, Fate]:
    """Who drops out where, and who is too late; the rest will send."""
    fates: dict[int, Fate] = dict.fromkeys(asked, "sent")
    run = plan.seed, plan.trial
    before = sample_dropouts(asked, plan.cohorts.lost_before, *run, Place.LOST_BEFORE, t)
    fates |= dict.fromkeys(before, "lost_before")
    left = [client for client in asked if fates[client] == "sent"]
    after = sample_dropouts(left, plan.cohorts.lost_after, *run, Place.LOST_AFTER, t)
    fates |= dict.fromkeys(after, "lost_after")
    if most is not None:
        left = [client for client in asked if fates[client] == "sent"]
        fates |= dict.fromkeys(left[most:], "late")
    return fates


def choose_keys(client: int, t: int, layout: Layout, clients: Clients, plan: Plan) -> ClientKeys:
    """What a client chooses in round t, within its budget."""
    most = dict(plan.keys_per_client)
    if plan.devices:
        rng = generator(plan.seed, plan.trial, Place.DEVICE, client)
        fits = keys_within(layout, assign_device(plan.devices, rng).model_bytes)
        most = {name: min(m, fits[name]) for name, m in most.items()}
    place = (Place.ROUND_KEYS, t) if plan.shared_keys else (Place.KEYS, t, client)
    rng = generator(plan.seed, plan.trial, *place)
    keys = clients.choose(clients.data(client), most, rng)
    for name, z in layout.keys_by_space(keys).items():
        if len(z) > most[name]:
            raise InputError(
                f"a client chose more keys of {name!r} than it may hold",
                got=len(z),
                allowed=f"{most[name]} or fewer",
                fix="let choose return at most the number it is given",
            )
    return keys


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
