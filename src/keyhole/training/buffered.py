"""Asynchronous rounds: the server steps whenever enough updates have arrived, however old.

Buffered aggregation after Nguyen et al., Federated Learning with Buffered Asynchronous Aggregation
(2022), on versioned slices: a client trains on the slices of the step at which it started, and its
update counts less, or not at all, the more steps were made since. Time is simulated: a client takes
as long as its drawn duration. With no delay and as many clients at work as a step waits for, this
is the synchronous round.
"""

from __future__ import annotations

import heapq
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from keyhole import tree
from keyhole.delivery.cost import Cost
from keyhole.errors import InputError
from keyhole.primitives.layout import Layout
from keyhole.server.aggregation import sum_updates
from keyhole.server.state import ServerState
from keyhole.server.updates import RowUpdate
from keyhole.training.buffering import Buffering
from keyhole.training.clients import Clients
from keyhole.training.cohort import sample_cohort
from keyhole.training.plan import Plan
from keyhole.training.randomness import Place, generator
from keyhole.training.record import RoundRecord
from keyhole.training.round import record_visits
from keyhole.training.visit import Executor, Visit, visit_clients
from keyhole.types import Tree

__all__ = ["Buffered"]


_PATIENCE = 100  # clients per update waited for, before a round counts as one with nobody left


@dataclass(order=True, frozen=True)
class _Flight:
    """A client at work: when it ends, the step it started at, and what it will hand in."""

    finish: float
    order: int
    version: int = field(compare=False)
    visit: Visit = field(compare=False)


@dataclass
class Buffered:
    """Asynchronous rounds of one run: each round is one server step.

    Args:
        buffering: how they go.
    """

    buffering: Buffering
    _now: float = 0.0
    _drawn: int = 0
    _flights: list[_Flight] = field(default_factory=list, repr=False)

    def next(
        self, t: int, state: ServerState, clients: Clients, plan: Plan, execute: Executor
    ) -> tuple[tuple[RowUpdate, ...] | None, RoundRecord]:
        """Lets time pass until a step is due; see `run_round` for the arguments."""
        ended: list[Visit] = []
        stale: list[_Flight] = []
        added: list[_Flight] = []
        costs: list[Cost] = []
        _check_sampling(plan)
        while len(added) < self.buffering.goal:
            if len(ended) >= _PATIENCE * self.buffering.goal:
                return None, _record(t, state.steps, ended, stale, [], costs)
            # Clients that end at the same time all end before the next ones start.
            if not self._flights or self._flights[0].finish > self._now:
                costs += self._fill(state, clients, plan, execute)
            flight = heapq.heappop(self._flights)
            self._now = flight.finish
            ended.append(flight.visit)
            if flight.visit.fate == "sent":
                is_fresh = state.steps - flight.version <= self.buffering.most_staleness
                (added if is_fresh else stale).append(flight)
        ages = [state.steps - flight.version for flight in added]
        updates = [
            _scale(f.visit.update, self.buffering.weight(age))
            for f, age in zip(added, ages, strict=True)
        ]
        record = _record(t, state.steps + 1, ended, stale, ages, costs)
        keys = [flight.visit.keys for flight in added]
        return sum_updates(state.layout, updates, keys, plan.over), record

    def dump(self) -> bytes:
        """What is under way, to be stored with a step."""
        arrays: dict[str, Any] = {}
        flights = []
        for i, flight in enumerate(self._flights):
            visit = flight.visit
            arrays |= {f"{i}/keys/{name}": z.array for name, z in visit.keys.items()}
            if visit.update is not None:
                arrays |= {f"{i}/update/{p}": a for p, a in tree.flatten(visit.update).items()}
            about = {n: v for n, v in vars(visit).items() if n not in ("keys", "update")}
            flights.append([flight.finish, flight.order, flight.version, about])
        text = json.dumps({"now": self._now, "drawn": self._drawn, "flights": flights})
        buffer = io.BytesIO()
        np.savez(buffer, about=np.frombuffer(text.encode(), np.uint8), **arrays)
        return buffer.getvalue()

    def load(self, data: bytes, layout: Layout) -> None:
        """Goes on from what `dump` returned; nothing is under way if it returned nothing."""
        if not data:
            return
        with np.load(io.BytesIO(data), allow_pickle=False) as file:
            arrays = dict(file)
        about = json.loads(arrays.pop("about").tobytes())
        self._now, self._drawn = about["now"], about["drawn"]
        self._flights = [
            _Flight(finish, order, version, _restore(layout, visit, f"{i}/", arrays))
            for i, (finish, order, version, visit) in enumerate(about["flights"])
        ]

    def _fill(
        self, state: ServerState, clients: Clients, plan: Plan, execute: Executor
    ) -> list[Cost]:
        """Starts clients from the stream of cohorts until enough are at work."""
        costs = []
        while (free := self.buffering.concurrency - len(self._flights)) > 0:
            t, start = divmod(self._drawn, plan.cohorts.asked)
            asked = sample_cohort(plan.cohorts, plan.seed, plan.trial, t)[start : start + free]
            visits, cost = visit_clients(t, asked, state, clients, plan, execute)
            for visit in visits:
                rng = generator(plan.seed, plan.trial, Place.DURATION, t, visit.client)
                finish = self._now + self.buffering.draw_duration(rng)
                heapq.heappush(self._flights, _Flight(finish, self._drawn, state.steps, visit))
                self._drawn += 1
            costs.append(cost)
        return costs


def _record(
    t: int,
    step: int,
    ended: list[Visit],
    stale: list[_Flight],
    ages: list[int],
    costs: list[Cost],
) -> RoundRecord:
    return RoundRecord(
        round=t,
        step=step,
        stale=[flight.visit.client for flight in stale],
        staleness=ages,
        **record_visits(ended, costs),
    )


def _check_sampling(plan: Plan) -> None:
    if plan.cohorts.sampling != "fixed":
        raise InputError(
            "asynchronous rounds take clients one after the other",
            got=f"{plan.cohorts.sampling} sampling",
            allowed="fixed",
            fix="use Synchronous rounds for Poisson sampling",
        )


def _scale(update: Tree, weight: float) -> Tree:
    if weight == 1:
        return update
    return tree.map_leaves(lambda leaf: leaf * np.asarray(weight, leaf.dtype), update)


def _restore(
    layout: Layout, about: Mapping[str, Any], prefix: str, arrays: Mapping[str, Any]
) -> Visit:
    """A visit from its parts."""
    own = {n.removeprefix(prefix): a for n, a in arrays.items() if n.startswith(prefix)}
    keys = {space.name: space.keys(own[f"keys/{space.name}"]) for space in layout.spaces}
    leaves = {n.removeprefix("update/"): a for n, a in own.items() if n.startswith("update/")}
    update = tree.unflatten(layout.structure, leaves) if leaves else None
    return Visit(keys=keys, update=update, **about)
