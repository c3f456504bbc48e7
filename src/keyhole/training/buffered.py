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
from typing import Any, Literal

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
from keyhole.training.round_machine import Terms
from keyhole.training.stream_machine import CountIn, Ended, LeaveOut, Step, StreamMachine
from keyhole.training.visit import Executor, Visit, visit_clients
from keyhole.types import Tree

__all__ = ["Buffered"]


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
        _check_sampling(plan)
        machine = StreamMachine(self.buffering, state.steps, len(self._flights))
        passed = _Passed()
        why = None
        while why is None:
            # Clients that end at the same time all end before the next ones start.
            if not self._flights or self._flights[0].finish > self._now:
                self._start(machine.fill().clients, state, clients, plan, execute, passed)
            flight = heapq.heappop(self._flights)
            self._now = flight.finish
            has_sent = flight.visit.fate == "sent"
            for command in machine.handle(Ended(flight.version, has_sent)):
                if isinstance(command, Step):
                    why = command.why
                else:
                    passed.end(flight, command)
        if why != "goal":
            return None, passed.record(t, state.steps, why)
        updates = [
            _scale(flight.visit.update, self.buffering.weight(age)) for flight, age in passed.added
        ]
        keys = [flight.visit.keys for flight, _ in passed.added]
        rows = sum_updates(state.layout, updates, keys, plan.over)
        return rows, passed.record(t, state.steps + 1, why)

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

    def _start(
        self,
        count: int,
        state: ServerState,
        clients: Clients,
        plan: Plan,
        execute: Executor,
        passed: _Passed,
    ) -> None:
        """Starts so many clients from the stream of cohorts."""
        until = self._drawn + count
        while self._drawn < until:
            t, start = divmod(self._drawn, plan.cohorts.asked)
            cohort = sample_cohort(plan.cohorts, plan.seed, plan.trial, t)
            asked = cohort[start : start + until - self._drawn]
            terms = Terms(goal=len(asked))
            visited = visit_clients(t, asked, state, clients, plan, execute, terms)
            for visit in visited.visits:
                rng = generator(plan.seed, plan.trial, Place.DURATION, t, visit.client)
                finish = self._now + self.buffering.draw_duration(rng)
                heapq.heappush(self._flights, _Flight(finish, self._drawn, state.steps, visit))
                self._drawn += 1
            passed.costs.append(visited.cost)
            passed.incidents += visited.incidents


@dataclass
class _Passed:
    """What has happened in the round under way."""

    ended: list[Visit] = field(default_factory=list)
    stale: list[int] = field(default_factory=list)
    added: list[tuple[_Flight, int]] = field(default_factory=list)
    costs: list[Cost] = field(default_factory=list)
    incidents: list[str] = field(default_factory=list)

    def end(self, flight: _Flight, command: CountIn | LeaveOut) -> None:
        """A client has ended, and its update counts or does not."""
        self.ended.append(flight.visit)
        if isinstance(command, CountIn):
            self.added.append((flight, command.staleness))
        elif command.is_stale:
            self.stale.append(flight.visit.client)

    def record(self, t: int, step: int, why: Literal["goal", "everyone"]) -> RoundRecord:
        """The round on record; updates are on it if they made a step."""
        return RoundRecord(
            round=t,
            step=step,
            closed=why,
            stale=self.stale,
            staleness=[age for _, age in self.added] if why == "goal" else [],
            incidents=self.incidents,
            **record_visits(self.ended, self.costs),
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
