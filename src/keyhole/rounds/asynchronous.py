"""Runs asynchronous rounds: the server steps whenever enough updates have arrived, however old.

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
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from keyhole import tree
from keyhole.aggregation.base import ClientResult, SumResult
from keyhole.delivery.base import Cost
from keyhole.errors import InputError
from keyhole.primitives.layout import Layout
from keyhole.primitives.report import Report
from keyhole.rounds.adding import add_up, agreed, nothing_summed
from keyhole.rounds.clients import Clients
from keyhole.rounds.machine import Buffering, StreamMachine, Terms, WhyStep
from keyhole.rounds.record import RoundRecord
from keyhole.rounds.round import (
    Executor,
    Made,
    choose,
    deliver,
    open_round,
    record_results,
    refused_whole,
    states_of,
    train,
    with_frozen,
)
from keyhole.rounds.spec import RunParts
from keyhole.sampling import ClientStream, Stream, generator
from keyhole.server.inputs import weighted
from keyhole.server.state import ServerState

_APART = ("keys", "update", "report")  # of a result under way, beside its plain numbers


@dataclass
class AsyncRound:
    """Clients that have ended, in their order, and which of their updates count."""

    ended: list[ClientResult] = field(default_factory=list)
    costs: list[Cost] = field(default_factory=list)
    is_of_devices: bool = False  # whose reports may differ
    incidents: list[str] = field(default_factory=list)
    _stale: list[int] = field(default_factory=list)
    _added: list[tuple[ClientResult, int]] = field(default_factory=list)

    def busy(self, at_work: Iterable[int]) -> set[int]:
        """Returns who cannot start in this round: those at work, and those who had their part in
        it."""
        return {*at_work, *(result.client for result in self.ended)}

    def end(self, result: ClientResult, staleness: int | None) -> None:
        """A client has ended; its update, if it sent one, is so old, or too old to count."""
        self.ended.append(result)
        if staleness is not None:
            self._added.append((result, staleness))
        elif result.outcome == "sent":
            self._stale.append(result.client)

    def close(self, t: int, step: int, why: WhyStep, layout: Layout, parts: RunParts) -> Made:
        """Returns the sum, each update weighed by its age, or None where the goal was not reached;
        and the record.
        """
        is_step = why == "goal"
        summed = self._sum(t, layout, parts) if is_step else nothing_summed(parts)
        record = RoundRecord(
            round=t,
            step=step + is_step,
            closed=why,
            stale=self._stale,
            staleness=[age for _, age in self._added] if is_step else [],
            incidents=[*self.incidents, *refused_whole(self.ended)],
            input_bound=parts.input_bound,
            total_weight=summed.reported.weight,
            client_metrics=summed.reported.metrics,
            **record_results(self.ended, self.costs, summed),
        )
        return summed.rows, record

    def _sum(self, t: int, layout: Layout, parts: RunParts) -> SumResult:
        assert parts.buffering is not None
        weight = parts.buffering.weight
        weighed = [
            replace(result, update=weighted(result.update, weight(age)))
            for result, age in self._added
        ]
        results = agreed(weighed) if self.is_of_devices else weighed
        any_number = replace(parts.cohorts, min_updates=0)  # the goal has been reached
        return add_up(t, results, layout, replace(parts, cohorts=any_number))

    @property
    def added(self) -> list[ClientResult]:
        """The results of those whose updates count."""
        return [result for result, _ in self._added]


@dataclass(order=True, frozen=True)
class InFlight:
    """A client at work: when it ends, the step it started at, and what it will hand in."""

    finish: float
    order: int
    version: int = field(compare=False)
    result: ClientResult = field(compare=False)


@dataclass
class Buffered:
    """Asynchronous rounds of one run: each round is one server step."""

    buffering: Buffering
    _now: float = 0.0
    _drawn: int = 0  # of the stream of clients
    _started: int = 0
    _in_flight: list[InFlight] = field(default_factory=list, repr=False)

    def prepare(self, parts: RunParts, directory: Path | None) -> RunParts:
        """Leaves the parts as they are: clients come from the seed."""
        return parts

    def next(
        self, t: int, state: ServerState, clients: Clients, parts: RunParts, execute: Executor
    ) -> Made:
        """Lets time pass until a step is due; see `run_round` for the arguments."""
        machine = StreamMachine(self.buffering, state.steps, len(self._in_flight))
        this = AsyncRound()
        stream = ClientStream(parts.cohorts, parts.draw_cohort, self._drawn)
        while machine.closed is None:
            # Clients that end at the same time all end before the next ones start.
            if not self._in_flight or self._in_flight[0].finish > self._now:
                busy = this.busy(flight.result.client for flight in self._in_flight)
                asked = stream.take(machine.vacant, busy)
                self._start(t, asked, state, clients, parts, execute, this)
                machine.start(len(asked))
            if machine.closed is None:
                flight = heapq.heappop(self._in_flight)
                self._now = flight.finish
                has_sent = flight.result.outcome == "sent"
                this.end(flight.result, machine.end(flight.version, has_sent))
        self._drawn = stream.drawn
        why, steps = machine.closed, state.steps
        clients.states.offer(states_of(this.added))
        return this.close(t, steps, why, state.layout, parts)

    def dump(self) -> bytes:
        """Returns what is under way, to be stored with a step."""
        arrays: dict[str, Any] = {}
        flights = []
        for i, flight in enumerate(self._in_flight):
            result = flight.result
            arrays |= {f"{i}/keys/{name}": z.array for name, z in result.keys.items()}
            if result.update is not None:
                arrays |= {f"{i}/update/{p}": a for p, a in tree.flatten(result.update).items()}
            about = {n: v for n, v in vars(result).items() if n not in _APART}
            if (report := result.report) is not None:
                about["told"] = [report.weight, dict(report.metrics)]
                if report.state is not None:
                    arrays[f"{i}/state"] = np.frombuffer(report.state, np.uint8)
            flights.append([flight.finish, flight.order, flight.version, about])
        counts = {"now": self._now, "drawn": self._drawn, "started": self._started}
        text = json.dumps({**counts, "flights": flights})
        buffer = io.BytesIO()
        np.savez(buffer, about=np.frombuffer(text.encode(), np.uint8), **arrays)
        return buffer.getvalue()

    def load(self, data: bytes, layout: Layout) -> None:
        """Goes on from what `dump` returned; nothing is under way if it returned nothing."""
        if not data:
            return
        if not zipfile.is_zipfile(io.BytesIO(data)):
            raise InputError(
                "the run has devices at work: got clients in process; expected the devices of the "
                "run; go on as it was started"
            )
        with np.load(io.BytesIO(data), allow_pickle=False) as file:
            arrays = dict(file)
        about = json.loads(arrays.pop("about").tobytes())
        self._now, self._drawn, self._started = (about[n] for n in ("now", "drawn", "started"))
        self._in_flight = [
            InFlight(finish, order, version, _restore(layout, result, f"{i}/", arrays))
            for i, (finish, order, version, result) in enumerate(about["flights"])
        ]

    def _start(
        self,
        t: int,
        asked: Sequence[int],
        state: ServerState,
        clients: Clients,
        parts: RunParts,
        execute: Executor,
        this: AsyncRound,
    ) -> None:
        """Starts clients in round t, on the slices of the step that it follows."""
        if not asked:
            return
        machine = open_round(t, asked, parts, Terms(goal=len(asked)))
        keys = choose(clients, asked, t, state.layout, parts, execute)
        slices = deliver(state, keys, machine, parts)
        started = train(clients, slices, t, machine, parts, execute)
        for result in with_frozen(clients, started.each, parts.delivery.about):
            rng = generator(parts.seed, parts.trial, Stream.DURATION, t, result.client)
            finish = self._now + self.buffering.draw_duration(rng)
            heapq.heappush(self._in_flight, InFlight(finish, self._started, state.steps, result))
            self._started += 1
        this.costs.append(started.cost)
        this.incidents += started.incidents


def _restore(
    layout: Layout, about: Mapping[str, Any], prefix: str, arrays: Mapping[str, Any]
) -> ClientResult:
    """A result from its parts."""
    own = {n.removeprefix(prefix): a for n, a in arrays.items() if n.startswith(prefix)}
    keys = {space.name: space.keys(own[f"keys/{space.name}"]) for space in layout.spaces}
    leaves = {n.removeprefix("update/"): a for n, a in own.items() if n.startswith("update/")}
    update = tree.unflatten(layout.structure, leaves) if leaves else None
    told, report = dict(about), None
    if "told" in told:
        state = own["state"].tobytes() if "state" in own else None
        weight, metrics = told.pop("told")
        report = Report(None, weight, metrics, state)
    return ClientResult(keys=keys, update=update, report=report, **told)
