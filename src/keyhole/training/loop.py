"""The loop: rounds in order, durable, resumable, stopped by a signal without losing a round.

A run directory holds `records.jsonl` and `state/`, the store of the server's state. A round is in
the store before it counts, and its record with it, so a run that is killed at any moment goes on
from the last durable round and ends with the bytes of a run that was never killed. Metrics are a
function of the state: where the last ones were lost, they are computed again.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from keyhole.errors import InputError
from keyhole.primitives.layout import Layout
from keyhole.server.state import ServerState
from keyhole.server.store import Store, create_store, recover
from keyhole.server.updates import RowUpdate
from keyhole.training.clients import Clients
from keyhole.training.plan import Plan
from keyhole.training.record import RoundRecord, decode_records, encode_records, read_records
from keyhole.training.round import Synchronous
from keyhole.training.visit import Executor, in_process

__all__ = ["Evaluation", "Rounds", "Run", "resume_run", "start_run", "stop_on_signals"]

_RECORDS, _STATE = "records.jsonl", "state"


@dataclass(frozen=True)
class Evaluation:
    """When and how a run is evaluated.

    Args:
        metrics: `state -> {name: value}`.
        every: after every so many rounds, and after the last.
    """

    metrics: Callable[[ServerState], dict[str, float]]
    every: int = 1

    def is_due(self, t: int, until: int) -> bool:
        """Whether round t of `until` is evaluated."""
        return (t + 1) % self.every == 0 or t + 1 == until


class Rounds(Protocol):
    """What makes a run's rounds: `Synchronous`, or `Buffered` for asynchronous ones."""

    def next(
        self, t: int, state: ServerState, clients: Clients, plan: Plan, execute: Executor
    ) -> tuple[tuple[RowUpdate, ...] | None, RoundRecord]:
        """Returns the update of round t, or None if nobody was left, and its record."""
        ...

    def dump(self) -> bytes:
        """What is under way between two rounds."""
        ...

    def load(self, data: bytes, layout: Layout) -> None:
        """Goes on from what `dump` returned."""
        ...


@dataclass
class Run:
    """A run under way. Made by `start_run` or `resume_run`.

    Args:
        state: the server's.
        clients: the population.
        plan: what stays the same in every round.
        kind: synchronous or asynchronous rounds.
        records: of the rounds that have been made.
        directory: where the run is kept; None keeps it in memory only.
        store: of the state, in that directory.
        notes: what was found amiss when the run was resumed, each as a sentence.
    """

    state: ServerState
    clients: Clients
    plan: Plan
    kind: Rounds = field(default_factory=Synchronous)
    records: list[RoundRecord] = field(default_factory=list)
    directory: Path | None = None
    store: Store | None = None
    notes: tuple[str, ...] = ()

    def rounds(
        self,
        until: int,
        *,
        execute: Executor = in_process,
        evaluation: Evaluation | None = None,
        snapshot_every: int = 50,
        stop: threading.Event | None = None,
    ) -> Iterator[RoundRecord]:
        """Makes rounds until the run has `until` of them; yields the record of each.

        Args:
            until: how many rounds the run has in the end, those already made included.
            execute: where clients train.
            evaluation: when to compute metrics, and which.
            snapshot_every: a snapshot after every so many rounds; the last round makes one, too.
            stop: once set, the round under way is finished and stored, and is the last.

        Raises:
            StorageError: a round could not be stored; it was not applied.
        """
        self._complete_last(until, evaluation)
        for t in range(len(self.records), until):
            updates, record = self.kind.next(t, self.state, self.clients, self.plan, execute)
            if updates is not None:
                self._commit(updates, record)
            if evaluation is not None and evaluation.is_due(t, until):
                record = replace(record, metrics=evaluation.metrics(self.state))
            self._keep(record)
            is_last = t + 1 == until or (stop is not None and stop.is_set())
            if is_last or (t + 1) % snapshot_every == 0:
                self._snapshot()
            yield record
            if is_last:
                return

    def close(self) -> None:
        """Lets another process open the run; nothing is lost without it."""
        if self.store is not None:
            self.store.close()

    def _commit(self, updates: tuple[RowUpdate, ...], record: RoundRecord) -> None:
        if self.store is None:
            self.state.step(updates)
        else:
            metadata = self._metadata([*self._skipped(), record])
            self.store.commit(self.state, updates, metadata)

    def _metadata(self, records: list[RoundRecord]) -> bytes:
        """What is stored with a step: records, which hold no NUL, and what is under way."""
        return encode_records(records) + b"\0" + self.kind.dump()

    def _skipped(self) -> list[RoundRecord]:
        """The rounds since the last step, which the store does not know of."""
        count = 0
        while count < len(self.records) and self.records[-1 - count].is_skipped:
            count += 1
        return self.records[len(self.records) - count :]

    def _keep(self, record: RoundRecord) -> None:
        self.records.append(record)
        if self.directory is not None:
            with (self.directory / _RECORDS).open("ab") as file:
                file.write(encode_records([record]))

    def _snapshot(self) -> None:
        if self.store is not None:
            self.store.snapshot(self.state, self._metadata(self.records[-1:]))

    def _complete_last(self, until: int, evaluation: Evaluation | None) -> None:
        """Computes the metrics that were lost if the run was killed before it had written them."""
        if self.records and evaluation is not None:
            last = self.records[-1]
            if evaluation.is_due(last.round, until) and not last.metrics:
                self.records[-1] = replace(last, metrics=evaluation.metrics(self.state))
                if self.directory is not None:
                    (self.directory / _RECORDS).write_bytes(encode_records(self.records))


def start_run(
    state: ServerState,
    clients: Clients,
    plan: Plan,
    directory: Path | str | None = None,
    kind: Rounds | None = None,
) -> Run:
    """Starts a run.

    Args:
        state: where training starts.
        clients: the population.
        plan: what stays the same in every round.
        directory: where to keep the run; must hold none yet. None keeps it in memory only.
        kind: of rounds; synchronous if not given.

    Raises:
        InputError: the plan does not fit the model or the population.
        StorageError: the directory holds a run already, or cannot be written.
    """
    _check(state, clients, plan)
    if directory is None:
        return Run(state, clients, plan, kind or Synchronous())
    directory = Path(directory)
    store = create_store(directory / _STATE, state)
    (directory / _RECORDS).write_bytes(b"")
    return Run(state, clients, plan, kind or Synchronous(), directory=directory, store=store)


def resume_run(
    state: ServerState,
    clients: Clients,
    plan: Plan,
    directory: Path | str,
    kind: Rounds | None = None,
) -> Run:
    """Opens a run that was stopped or killed, at its last durable round.

    Args:
        state: as it was passed to `start_run`; only its layout is used.
        clients: the same population.
        plan: the same plan.
        directory: of the run.
        kind: the same kind of rounds, fresh.

    Raises:
        StorageError: no run is there, or its files are damaged beyond the last round.
    """
    _check(state, clients, plan)
    directory = Path(directory)
    found = recover(directory / _STATE, state.layout, threads=state.threads)
    lines, _, under_way = found.metadata.partition(b"\0")
    stored = decode_records(lines)
    durable = stored[-1].round if stored else -1
    kept = {r.round: r for r in read_records(directory / _RECORDS) if r.round <= durable}
    records = _merge(kept, stored)
    (directory / _RECORDS).write_bytes(encode_records(records))
    kind = kind or Synchronous()
    kind.load(under_way, state.layout)
    return Run(found.state, clients, plan, kind, records, directory, found.store, found.notes)


@contextmanager
def stop_on_signals() -> Iterator[threading.Event]:
    """Turns the first SIGINT or SIGTERM into an event; a second one ends the process as usual."""
    stop = threading.Event()
    previous: dict[int, Any] = {}

    def ask(number: int, _: object) -> None:
        stop.set()
        signal.signal(number, previous[number])

    for asked in (signal.SIGINT, signal.SIGTERM):
        previous[asked] = signal.signal(asked, ask)
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _merge(kept: dict[int, RoundRecord], stored: list[RoundRecord]) -> list[RoundRecord]:
    """All records by round; those of the store fill in what the file lost."""
    merged = {r.round: r for r in stored} | kept
    return [merged[t] for t in sorted(merged)]


def _check(state: ServerState, clients: Clients, plan: Plan) -> None:
    plan.check(state.layout)
    if plan.cohorts.population != clients.count:
        raise InputError(
            "cohorts are sampled from another population",
            got=plan.cohorts.population,
            allowed=clients.count,
            fix="let Cohorts.population be the number of clients",
        )
