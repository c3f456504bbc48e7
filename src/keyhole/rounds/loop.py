"""Makes rounds in order, durable and resumable; a signal stops a run without losing a round.

A run directory holds `plan.json`, which says what the run is made of, `records.jsonl` and `state/`,
the store of the server's state; `clients/` holds what clients keep between rounds. A round is in
the store before it counts, and its record with it, so a run that is killed at any moment goes on
from the last durable round and ends with the bytes of a run that was never killed. Metrics are a
function of the state: where the last ones were lost, they are computed again.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, ClassVar, Protocol, SupportsFloat

from keyhole.errors import CohortError, InputError, StorageError
from keyhole.files import sync_file
from keyhole.identity import identity_of
from keyhole.parts import running
from keyhole.primitives.layout import Layout
from keyhole.rounds.account import Attendance
from keyhole.rounds.asynchronous import Buffered
from keyhole.rounds.best import BestModel
from keyhole.rounds.clients import Clients
from keyhole.rounds.norms import KeptNorms
from keyhole.rounds.record import (
    RoundRecord,
    append_records,
    decode_records,
    encode_records,
    read_records,
    write_records,
)
from keyhole.rounds.round import Executor, Made, in_process, run_round
from keyhole.rounds.spec import RunParts
from keyhole.sampling import check_count
from keyhole.server.client_states import ClientStates
from keyhole.server.row_sums import RowUpdate
from keyhole.server.state import ServerState
from keyhole.server.store import Store, create_store, recover

_PATIENCE = 3  # rounds without a usable update, or without a key, before the run ends
_RECORDS, _PLAN, _STATE = "records.jsonl", "plan.json", "state"
_CLIENTS, _FROZEN = "clients", "frozen"


@dataclass(frozen=True)
class Evaluation:
    """When and how a run is evaluated.

    Args:
        metrics: `state -> {name: value}`.
        every: every this many rounds.

    Raises:
        InputError: `every` is below 1.
    """

    metrics: Callable[[ServerState], Mapping[str, SupportsFloat]]
    every: int = 1

    def __post_init__(self) -> None:
        check_count("every", self.every, 1)

    def is_due(self, t: int) -> bool:
        """Returns whether round t is evaluated; it does not depend on how many rounds there will
        be."""
        return (t + 1) % self.every == 0

    def of(self, state: ServerState) -> dict[str, float]:
        """Returns the metrics of a state, as plain numbers.

        Raises:
            InputError: `metrics` has returned something else than names and numbers.
        """
        with running("computing metrics", " after server step {0.steps}", state):
            found = self.metrics(state)
        if not isinstance(found, Mapping):
            raise InputError(
                f"metrics has returned no names: got a {type(found).__name__}; expected a dict of "
                'name and number; return {"accuracy": value}'
            )
        return {name: metric_number(name, value) for name, value in found.items()}


def metric_number(name: str, value: Any) -> float:
    """Returns what a metric came to as a plain number; raises InputError where it is none."""
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        shape = getattr(value, "shape", None)
        got = f"an array of shape {shape}" if shape else f"a {type(value).__name__}"
        raise InputError(
            f"metric {name!r} is no number: got {got}; expected one number for all examples; "
            "return a float, such as a mean (docs/own-metric.md)"
        ) from error


class Rounds(Protocol):
    """What makes a run's rounds: `Synchronous`, or `Buffered` for asynchronous ones."""

    def prepare(self, parts: RunParts, directory: Path | None) -> RunParts:
        """Returns the parts with the draws of these rounds, before anything is checked or written.

        Args:
            directory: of the run, where a secret can be kept; None where it is kept in memory only.
        """
        ...

    def next(
        self, t: int, state: ServerState, clients: Clients, parts: RunParts, execute: Executor
    ) -> Made:
        """Returns the update of round t, or None if nobody was left, and its record."""
        ...

    def dump(self) -> bytes:
        """Returns what is under way between two rounds."""
        ...

    def load(self, data: bytes, layout: Layout) -> None:
        """Goes on from what `dump` returned."""
        ...


def tells_facts(kind: Rounds) -> bool:
    """Whether clients of such rounds are told what choices of keys need: norms of updates, where
    the rounds are synchronous, and how many clients have each key."""
    return getattr(kind, "tells_facts", False)


class Synchronous:
    """Synchronous rounds of a run: nothing is under way between them but the norms of the last
    updates, where a choice of keys reads them."""

    tells_facts: ClassVar[bool] = True

    def __init__(self) -> None:
        self._norms = KeptNorms()

    def prepare(self, parts: RunParts, directory: Path | None) -> RunParts:
        """Leaves the parts as they are: cohorts come from the seed."""
        if parts.cohorts.sampling == "check-in":
            raise InputError(
                "no device can check in here: got check-in sampling in a run without a service; "
                "expected rounds that are published for devices; train with --devices DIR, or "
                "devices=DIR in kh.train, or choose another --sampling"
            )
        return parts

    def next(
        self, t: int, state: ServerState, clients: Clients, parts: RunParts, execute: Executor
    ) -> Made:
        """Runs round t; see `run_round`."""
        updates, record = run_round(t, state, clients, self._norms.told(parts), execute)
        self._norms.follow(parts, state.layout, updates)
        return updates, record

    def dump(self) -> bytes:
        """Returns the norms, if there are any."""
        return self._norms.dump()

    def load(self, data: bytes, layout: Layout) -> None:
        """Goes on from what `dump` returned."""
        self._norms.load(data)


@dataclass
class Run:
    """A run under way. Made by `start_run` or `resume_run`.

    Args:
        state: the server's.
        clients: the population.
        parts: what stays the same in every round.
        kind: synchronous or asynchronous rounds, as `parts` has it.
        records: of the rounds that have been made.
        directory: where the run is kept; None keeps it in memory only.
        store: of the state, in that directory.
        notes: what was found amiss when the run was resumed, each as a sentence.
        described: what `describe_run` says of it, where it is kept.
        best: keeps the best model beside the last, and may end the run early; None does neither.
    """

    state: ServerState
    clients: Clients
    parts: RunParts
    kind: Rounds = field(default_factory=Synchronous)
    records: list[RoundRecord] = field(default_factory=list)
    directory: Path | None = None
    store: Store | None = None
    notes: tuple[str, ...] = ()
    described: Mapping[str, str] = field(default_factory=dict)
    best: BestModel | None = None

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
            snapshot_every: a snapshot every this many rounds; the last round makes one, too.
            stop: once set, the round under way is finished and stored, and is the last.

        Raises:
            BudgetError: the next round would spend more privacy than there is; it did not start.
            InputError: a round broke the run's promise about a client; it was not applied.
            StorageError: a round could not be stored; it was not applied.
            CohortError: no client's update could be used, or none chose a key, in several rounds
                in a row.
        """
        check_count("snapshot_every", snapshot_every, 1)
        self._complete_last(evaluation)
        attendance = Attendance(self.parts.privacy, self.parts.cohorts, self.records)
        for t in range(self.next_round, until if not self.is_over else 0):
            updates, record = self.kind.next(t, self.state, self.clients, self.parts, execute)
            attendance.admit(record)
            if updates is not None:
                with running("step of the optimizer", " in round {}", t):
                    self._commit(updates, record)
            del updates  # as large as all that clients chose
            self.records.append(record)  # from here on the round has been made
            is_measured = evaluation is not None and evaluation.is_due(t)
            is_best = evaluation is not None and is_measured and self._measure(evaluation)
            if self.directory is not None:
                append_records(self.directory / _RECORDS, self.records[-1:])
                if is_best:  # no power cut may lose which round it is
                    sync_file(self.directory / _RECORDS)
            is_over = is_measured and self.is_over
            is_last = t + 1 == until or is_over or (stop is not None and stop.is_set())
            if is_last or (t + 1) % snapshot_every == 0:
                self._snapshot()
            yield self.records[-1]
            self._check_usable()
            if is_last:
                return

    @property
    def next_round(self) -> int:
        """The number of the next round."""
        return self.records[-1].round + 1 if self.records else 0

    @property
    def is_over(self) -> bool:
        """Whether the run ends here, however many rounds were asked for."""
        return self.best is not None and self.best.goal.is_over(self.records)

    def close(self) -> None:
        """Lets another process open the run; nothing is lost without it."""
        if self.store is not None:
            self.store.close()

    def _commit(self, updates: tuple[RowUpdate, ...], record: RoundRecord) -> None:
        states, frozen = self.clients.states, self.clients.frozen
        states.write(record.round)
        if frozen is not None:
            frozen.write(record.round)
        if self.store is None:
            self.state.step(updates)
        else:
            metadata = self._metadata([*self._skipped(), record])
            self.store.commit(self.state, updates, metadata)
        states.commit(record.round)
        if frozen is not None:
            frozen.commit(record.round)

    def _metadata(self, records: list[RoundRecord]) -> bytes:
        """What is stored with a step: description and records, which hold no NUL, and what is
        under way."""
        described = json.dumps(self.described).encode()
        return b"\0".join([described, encode_records(records), self.kind.dump()])

    def _skipped(self) -> list[RoundRecord]:
        """The rounds since the last step, which the store does not know of."""
        return list(takewhile(lambda record: record.is_skipped, reversed(self.records)))[::-1]

    def _check_usable(self) -> None:
        """Raises CohortError where nothing has been learned for a while, and nothing will be."""
        last = self.records[-_PATIENCE:]
        if len(last) < _PATIENCE:
            return
        if all(record.is_keyless for record in last):
            raise CohortError(
                f"no client chose a key in {_PATIENCE} rounds in a row: got "
                f"{sum(len(record.empty) for record in last)} clients with nothing to train on; "
                "expected keys of their own data, or drawn ones; look at what the choice of keys "
                "returns, and at which column of the data names keys"
            )
        if all(record.is_refused for record in last):
            raise CohortError(
                f"no update could be used in {_PATIENCE} rounds in a row: got "
                f"{sum(len(record.refused) for record in last)} that held NaN or infinity; "
                "expected finite updates, shaped as the sub-models; lower the client's learning "
                "rate, or look at what train returns"
            )

    def _snapshot(self) -> None:
        if self.store is not None:
            self.store.snapshot(self.state, self._metadata(self.records[-1:]))

    def _measure(self, evaluation: Evaluation) -> bool:
        """Puts metrics into the last record; returns whether its model is the best, and kept."""
        self.records[-1] = replace(self.records[-1], metrics=evaluation.of(self.state))
        return self.best is not None and self.best.offer(self.state, self.records)

    def _complete_last(self, evaluation: Evaluation | None) -> None:
        """Computes the metrics that were lost if the run was killed before it had written them."""
        if self.records and evaluation is not None:
            last = self.records[-1]
            if evaluation.is_due(last.round) and not last.metrics:
                self._measure(evaluation)
                if self.directory is not None:
                    write_records(self.directory / _RECORDS, self.records)


def start_run(
    state: ServerState,
    clients: Clients,
    parts: RunParts,
    directory: Path | str | None = None,
    kind: Rounds | None = None,
) -> Run:
    """Starts a run.

    Args:
        state: where training starts.
        clients: the population.
        parts: what stays the same in every round.
        directory: where to keep the run; must hold none yet. None keeps it in memory only.
        kind: what makes the rounds; None lets `parts` decide.

    Raises:
        InputError: `parts` does not fit the model or the population.
        StorageError: the directory holds a run already, or cannot be written.
    """
    kind, directory = kind or _rounds_of(parts), None if directory is None else Path(directory)
    parts = kind.prepare(parts, directory)
    _check(state, clients, parts, kind)
    clients = _keeping(clients, directory, -1)
    if directory is None:
        return Run(state, clients, parts, kind)
    described = describe_run(state, clients, parts, kind)
    store = create_store(directory / _STATE, state, json.dumps(described).encode() + b"\0")
    write_records(directory / _RECORDS, [])
    (directory / _PLAN).write_text(json.dumps(described, indent=1) + "\n")
    return Run(state, clients, parts, kind, directory=directory, store=store, described=described)


def resume_run(
    state: ServerState,
    clients: Clients,
    parts: RunParts,
    directory: Path | str,
    kind: Rounds | None = None,
) -> Run:
    """Opens a run that was stopped or killed, at its last durable round.

    Args:
        state: as it was passed to `start_run`; its layout and optimizer are used, and its shards
            if it has some: they take the stored rows.
        clients: the same population, with the same functions; their data are not compared.
        parts: the same parts.
        directory: of the run.
        kind: what makes the rounds; None lets `parts` decide.

    Raises:
        InputError: a part, the optimizer, or how clients choose, localize or train is not what
            the run was started with.
        StorageError: no run is there, or its files are damaged beyond the last round.
    """
    kind, directory = kind or _rounds_of(parts), Path(directory)
    parts = kind.prepare(parts, directory)
    _check(state, clients, parts, kind)
    described = describe_run(state, clients, parts, kind)
    found = recover(
        directory / _STATE,
        state.layout,
        threads=state.threads,
        into=state.tables,
        optimizer=state.optimizer,
    )
    try:
        stored = _load(found.metadata, described, kind, state.layout)
        records, notes = _merge(read_records(directory / _RECORDS), stored)
        durable = stored[-1].round if stored else -1
        clients = _keeping(clients, directory, durable)
        write_records(directory / _RECORDS, records)  # nothing is refused from here on
    except BaseException:
        found.store.close()
        raise
    notes = (*found.notes, *notes)
    store = found.store
    return Run(found.state, clients, parts, kind, records, directory, store, notes, described)


def _keeping(clients: Clients, directory: Path | None, last: int) -> Clients:
    """Clients that keep what is theirs between rounds with a run, as it was after round `last`."""
    states = ClientStates(directory and directory / _CLIENTS, last)
    frozen = clients.frozen and clients.frozen.kept_in(directory and directory / _FROZEN, last)
    return replace(clients, states=states, frozen=frozen)


def describe_run(
    state: ServerState, clients: Clients, parts: RunParts, kind: Rounds
) -> dict[str, str]:
    """Returns what a run is made of, as text; a run goes on where all of it is the same.

    Data are not read for it: they may be larger than memory.

    Raises:
        InputError: a part has no identity; see `identity_of`.
    """
    own = {name: getattr(clients, name) for name in ("choose", "localize", "train")}
    own |= {"optimizer": state.optimizer}
    if type(kind).__module__.partition(".")[0] != "keyhole":  # ours give the same bytes
        own["kind"] = kind
    told = {name: identity_of(part) for name, part in own.items()}
    if clients.frozen is not None:
        told["frozen"] = clients.frozen.leaves.digest
    return parts.describe() | told


def _rounds_of(parts: RunParts) -> Rounds:
    return Synchronous() if parts.buffering is None else Buffered(parts.buffering)


def _load(
    metadata: bytes, given: Mapping[str, str], kind: Rounds, layout: Layout
) -> list[RoundRecord]:
    """Lets `kind` go on from what is stored with the last step; returns its records."""
    try:
        lines, under_way = _unpack(metadata, given)
        kind.load(under_way, layout)
        return decode_records(lines)
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise StorageError(
            f"the last step does not say how the run goes on: got {error!r}; expected what "
            "training stores beside each step; restore the state from a copy, or start a new run"
        ) from error


def _unpack(metadata: bytes, given: Mapping[str, str]) -> tuple[bytes, bytes]:
    """Records and what is under way, from what is stored with a step; checks what the run is made
    of."""
    described, _, rest = metadata.partition(b"\0")
    known = json.loads(described)
    for name in sorted(known.keys() | given):
        if known.get(name) != given.get(name):
            raise InputError(
                f"the run was started with another {name}: got {given.get(name)}; expected "
                f"{known.get(name)}; resume with what it was started with, or start a new run"
            )
    lines, _, under_way = rest.partition(b"\0")
    return lines, under_way


def _merge(
    kept: list[RoundRecord], stored: list[RoundRecord]
) -> tuple[list[RoundRecord], tuple[str, ...]]:
    """All durable records by round; those of the store fill in what the file lost."""
    durable = stored[-1].round if stored else -1
    merged = {r.round: r for r in stored} | {r.round: r for r in kept if 0 <= r.round <= durable}
    lost = durable + 1 - len(merged)
    note = f"{_RECORDS}: the records of {lost} rounds are lost; the rounds themselves are not"
    return [merged[t] for t in sorted(merged)], (note,) if lost else ()


def _check(state: ServerState, clients: Clients, parts: RunParts, kind: Rounds) -> None:
    parts.check(state.layout)
    is_kept = tells_facts(kind) and parts.buffering is None
    if parts.norms is not None and not is_kept:
        raise InputError(
            "these rounds keep no norms of updates, which a choice of keys needs: got "
            f"{type(kind).__name__} rounds; expected synchronous ones; choose keys another way"
        )
    if parts.cohorts.population != clients.count:
        raise InputError(
            f"cohorts are sampled from another population: got {parts.cohorts.population}; "
            f"expected {clients.count}; let Cohorts.population be the number of clients"
        )
