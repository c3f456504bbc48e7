"""Runs a `RunSpec` on a dataset, trial by trial, each in a directory that explains itself."""

from __future__ import annotations

import platform
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.metadata import version
from math import inf
from pathlib import Path
from typing import Any, TypeAlias, cast

from keyhole.aggregation import aggregation_named
from keyhole.aggregation.base import AGGREGATION, Aggregation, Rounding, about_of
from keyhole.aggregation.plain import PLAIN
from keyhole.aggregation.privacy.mechanism import Privacy
from keyhole.aggregation.robust import NormAlarm
from keyhole.arrays import Tree
from keyhole.data.at_devices import with_held_out
from keyhole.data.federated import Dataset
from keyhole.delivery import delivery_named
from keyhole.delivery.base import DELIVERY, Delivery
from keyhole.delivery.clear import Broadcast, OnDemand
from keyhole.delivery.popular import PopularShares, with_popular
from keyhole.errors import InputError
from keyhole.experiments import task_named
from keyhole.experiments.measuring import Measuring
from keyhole.experiments.specs import TASK, name_of
from keyhole.experiments.task import TaskKind, TaskParts, choices_of, localize_of
from keyhole.experiments.trial import (
    Result,
    Start,
    begin_trial,
    digest_of,
    read_result,
    read_seconds,
    start_over,
    too_few_rounds,
    write_result,
    write_seconds,
)
from keyhole.identity import Ref, identity_of
from keyhole.keys.choice import Choice, Fact, KeyUsers, choose_with, facts_of
from keyhole.keys.structured import CHOICE
from keyhole.models.local_training import trainer_of
from keyhole.parts import PartKind, own_name, resolve, running
from keyhole.planner.prices import check_model_worth
from keyhole.rounds.algorithms import Algorithm, algorithm_named, with_added, with_groups
from keyhole.rounds.best import BEST, BestModel, Goal
from keyhole.rounds.clients import Clients
from keyhole.rounds.loop import Evaluation, Rounds, Run, resume_run, start_run, tells_facts
from keyhole.rounds.machine import Buffering, exponential
from keyhole.rounds.record import RoundRecord
from keyhole.rounds.round import Executor, in_process
from keyhole.rounds.spec import RunParts, RunSpec
from keyhole.sampling import UNCOUNTED, Cohorts, Stream, generator
from keyhole.server.client_states import MAX_STATE_BYTES
from keyhole.server.frozen import Receipts
from keyhole.server.state import ServerState
from keyhole.server.store import holds_store

DATASET = PartKind("data set", "own-data", record=Dataset)
MADE_OPTIMIZER = PartKind("optimizer", "own-optimizer", {"step": Callable, "read": Callable})
KINDS = {
    "task": TASK,
    "keys": CHOICE,
    "server.optimizer": PartKind("optimizer", "own-optimizer", takes=("lr",)),
    "delivery": DELIVERY,
    "aggregation.name": AGGREGATION,
    "metrics": PartKind("metric", "own-metric", takes=("state",)),
    "engine": PartKind("engine", "own-engine", takes=("clients", "jobs")),
}
"""Field that names a part, `keys` for every choice -> what a part of your own must be there. An
engine that is named by its class is checked once it is made."""

Hold: TypeAlias = Callable[[ServerState], ServerState]
"""Takes over a server's state that was made in this process; returns the one to train."""


def hold_here(state: ServerState) -> ServerState:
    """Keeps the state in this process."""
    return state


LIBRARIES = ("keyhole", "numpy", "jax", "numba")


@dataclass(frozen=True, eq=False)
class Experiment:
    """A run on a dataset.

    Args:
        spec: how to train.
        dataset: on what.
        parts: dotted path of a field of the record -> a part of your own, in place of what the
            record names there, such as {"keys.word.choice": rare_words}.
        allow_simulation: lets the delivery `enclave` run without hardware that protects it.
        starts: what each trial starts from, by its number; a new model where there is none.

    Raises:
        InputError: the dataset does not fit the task, or a setting is out of range.
    """

    spec: RunSpec
    dataset: Dataset
    parts: Mapping[str, Any] = field(default_factory=dict)
    allow_simulation: bool = False
    starts: Mapping[int, Start] = field(default_factory=dict)

    def __post_init__(self) -> None:
        DATASET.check("dataset", self.dataset)
        if "data" in self.parts:
            raise InputError(
                "data are no part of an experiment: got one at data; expected none; pass the data "
                "set as `dataset`"
            )
        object.__setattr__(self, "dataset", with_held_out(self.dataset, self.spec.held_out))
        told = dict(self.spec.parts())
        own = {path: self._own(path) for path, ref in told.items() if ref.is_own} | {**self.parts}
        for path, part in own.items():
            kind = KINDS.get("keys" if path.startswith("keys.") else path)
            if kind is not None and not (path == "engine" and isinstance(part, type)):
                kind.check(path if path in self.parts else told[path].name, part)
        found = {path: self._identified(path, part, told.get(path)) for path, part in own.items()}
        object.__setattr__(self, "spec", self.spec.changed(found) if found else self.spec)

    def _identified(self, path: str, part: Any, ref: Ref | None) -> Ref:
        """The part's name and identity, which is the one that the record says, if it says one."""
        label = part.name if path == "task" else own_name(part)
        found = Ref(label if ref is None or path in self.parts else ref.name, identity_of(part))
        if ref is not None and ref.identity not in ("", found.identity):
            raise InputError(
                f"the code or fields of {ref.name} ({path}) are not those that the run was started "
                f"with: got {found.identity}; expected {ref.identity}; take those of the "
                "run, which a device gets from its trainer, or start a new run"
            )
        return found

    @cached_property
    def kind(self) -> TaskKind:
        """The task before it has data."""
        found: TaskKind = self.parts.get("task") or task_named(self.spec.task.name)
        return found

    @cached_property
    def task(self) -> TaskParts:
        """The task on this dataset."""
        minimum, splits = self.spec.client.min_examples, self.dataset.splits
        train = splits["train"].with_min_examples(minimum)
        if not (len(train) or self.dataset.is_at_devices):
            raise InputError(
                f"no client has this many examples: got min_examples {minimum}; expected at "
                f"most {splits['train'].counts.max(initial=0)}, which the largest has; ask for "
                "fewer, or bring more data"
            )
        dataset = replace(self.dataset, splits={**splits, "train": train})
        with running(f"task {self.spec.task}"):
            return self.kind.on(dataset, self.spec.sizes, self.spec.tuning)

    @cached_property
    def algorithm(self) -> Algorithm:
        """How clients train and how the server steps."""
        client, server = self.spec.client, self.spec.server
        named = algorithm_named(
            client.algorithm,
            client_lr=client.lr,
            server_lr=server.lr,
            epochs=client.epochs,
            batch_size=client.batch_size,
            momentum=client.momentum,
            clip_norm=client.clip_norm or inf,
            max_examples=client.max_examples,
            eps=server.eps,
            proximal=client.proximal,
        )
        if server.optimizer is not None:
            with running(f"optimizer {server.optimizer}"):
                own = self._own("server.optimizer")(server.lr)
            MADE_OPTIMIZER.check(f"what {server.optimizer} returns for a learning rate", own)
            named = replace(named, server=own)
        stepped = with_groups(server, named.server, self.task.model.layout)
        return replace(named, server=with_added(stepped, self.task.model))

    def _own(self, path: str) -> Any:
        """The part of your own that a field names."""
        return (
            self.parts[path] if path in self.parts else resolve(dict(self.spec.parts())[path].name)
        )

    @property
    def engine(self) -> Executor | None:
        """Where clients train, if that is an engine of your own."""
        if not self.spec.engine.is_own:
            return None
        found = self._own("engine")
        if isinstance(found, type):
            found = found()
            KINDS["engine"].check(self.spec.engine.name, found)
        return cast("Executor", found)

    @cached_property
    def keys_per_client(self) -> dict[str, int]:
        """m of each key space; every key where the record says so."""
        whole = {space.name: space.num_keys for space in self.task.model.layout.spaces}
        return whole | {s: k.count for s, k in self.spec.keys.items() if k.count is not None}

    @cached_property
    def clients(self) -> Clients:
        """The population; trials share what it has compiled."""
        slots = {name: [m] for name, m in self.keys_per_client.items()}
        return Clients(
            count=self._population,
            data=self.task.data,
            choose=choose_with(self._choices, self.task.count_keys),
            train=trainer_of(self.task.model, self.algorithm.client, slots),
            localize=localize_of(self.spec, self.task),
            max_state_bytes=getattr(self.task.model, "max_state_bytes", MAX_STATE_BYTES),
            frozen=Receipts.of(self.task.model),
            users=KeyUsers.among(self.task.clients, self.task.data, self.task.count_keys)
            if "users" in self._facts
            else None,
            measure=self.task.measure,
        )

    @cached_property
    def _choices(self) -> dict[str, Choice]:
        paths = {space: f"keys.{space}.choice" for space in self.keys_per_client}
        own = {space: self.parts[path] for space, path in paths.items() if path in self.parts}
        return choices_of(self.spec, self.task, own)

    @cached_property
    def _facts(self) -> set[Fact]:
        """What choices need to know besides a client's own data."""
        return {fact for choice in self._choices.values() for fact in facts_of(choice)}

    def _check_facts(self, kind: Rounds | None) -> None:
        """Raises InputError where a choice needs what clients of such rounds cannot know."""
        if self._facts and kind is not None and not tells_facts(kind):
            raise InputError(
                "clients of these rounds cannot choose keys in this way: got a choice that needs "
                f"{' and '.join(sorted(self._facts))} of all clients; expected one that needs its "
                "own data alone; choose keys another way, or train in process"
            )
        if "users" in self._facts and self.spec.privacy is not None:
            raise InputError(
                "a choice counts the users of keys, which the privacy account does not cover: got "
                "tf-idf, or another that needs users, with noise; expected other keys; give it a "
                "table of public data with tf_idf_by"
            )

    @property
    def _population(self) -> int:
        """How many clients there are."""
        if self.spec.cohort.sampling == "check-in":
            return UNCOUNTED
        if self.dataset.is_at_devices:
            raise InputError(
                f"nobody knows who holds the data: got {self.spec.cohort.sampling} sampling; "
                "expected check-in, and --devices DIR; pass both, or `keyhole run --deploy`"
            )
        return self.task.clients

    def run_parts(self, trial: int) -> RunParts:
        """Returns what stays the same in every round of one trial."""
        asked, clients = self.spec.cohort, self._population
        size = min(asked.size, clients)  # as large as the population allows
        over = min(asked.over_selection, clients / size)
        stream, private = self.spec.asynchronous, self.spec.privacy
        return RunParts(
            cohorts=Cohorts(clients, **asked.drawing() | {"size": size, "over_selection": over}),
            keys_per_client=self.keys_per_client,
            seed=self.spec.seed,
            trial=trial,
            over=self.spec.mean_over,
            max_weight=self.spec.client.max_examples or inf,
            sum_metrics=self.spec.aggregation.metrics,
            delivery=self._delivery,
            aggregate=self._aggregate,
            privacy=None if private is None else Privacy(**private.values()),
            max_update_norm=self.spec.aggregation.max_update_norm or inf,
            above_norm=self.spec.aggregation.above_norm,
            buffering=None
            if stream is None
            else Buffering(stream.concurrency, size, stream.max_staleness, duration=exponential),
            shared_keys=self.spec.shared_keys,
            for_devices=self.spec.with_trial(trial).for_devices(),
            norms={} if "norms" in self._facts else None,
        )

    @property
    def _aggregate(self) -> Aggregation:
        sums = self.spec.aggregation
        if "aggregation.name" in self.parts:
            found = cast("Aggregation", self.parts["aggregation.name"])
        else:
            rounding = Rounding(sums.value_clip, sums.ring_bits)
            name = PLAIN.about.name if sums.name is None else sums.name.name
            found = aggregation_named(
                name,
                rounding,
                signed=sums.signed,
                trim=sums.trim,
                untouched=sums.untouched,
                min_per_key=sums.min_clients_per_key,
                count_noise=sums.count_noise,
            )
        return found if sums.norm_alarm is None else NormAlarm(found, sums.norm_alarm)

    @cached_property
    def _delivery(self) -> Delivery:
        """How slices travel; trials share what it keeps."""
        is_select = any(keys.choice.name != "all" for keys in self.spec.keys.values())
        found: Delivery = OnDemand() if is_select else Broadcast()
        ref = self.spec.delivery
        if ref is not None:
            found = self._own("delivery") if ref.is_own else delivery_named(ref.name)
        told = found.for_run(self.keys_per_client, allow_simulation=self.allow_simulation)
        return with_popular(told, self.popular, self.task.model.layout, self.keys_per_client)

    @property
    def popular(self) -> PopularShares:
        """Popular keys, of which private queries ask a table of their own."""
        told = self.spec.popular
        return {space: (words, told.share) for space, words in told.keys.items()}

    def check(self) -> None:
        """Raises InputError where the record does not fit the dataset, before any work is done."""
        if self.spec.held_out is not None and not (self.task.measured or self.spec.metrics):
            raise InputError(
                f"nothing to measure on held-out examples: got {self.spec.held_out} for a task "
                "without metrics; expected one or more; name metrics in the task, or pass --metrics"
            )
        self.run_parts(0).check(self.task.model.layout)
        _ = self.clients  # builds the choices and the algorithm, which check themselves

    def check_worth(self) -> None:
        """Raises CostlyError where the run's delivery is private and dearer than broadcast."""
        if self._delivery.about.is_private:
            check_model_worth(self._delivery, self.task.model.layout, self.keys_per_client)

    def start(
        self,
        trial: int,
        directory: Path | None,
        kind: Rounds | None = None,
        hold: Hold = hold_here,
    ) -> Run:
        """Starts a trial, or goes on with it where it stopped.

        Args:
            directory: where to keep it; None keeps it in memory only.
            kind: what makes the rounds; None makes them in process.
            hold: what holds the server's state, given one in this process.

        Raises:
            InputError: the directory holds another run.
        """
        self._check_facts(kind)
        is_resumed = directory is not None and holds_store(directory / "state")
        model, layout = self._first_model(trial, is_resumed), self.task.model.layout
        if self.task.check is not None and not is_resumed:
            self.task.check(model)
        state = hold(ServerState.dense(layout, model, self.algorithm.server))
        clients, parts = self.clients, self.run_parts(trial)
        if directory is None:
            return start_run(state, clients, parts, kind=kind)
        self.check()  # before anything is written
        if is_resumed:
            return resume_run(state, clients, parts, directory, kind)
        begin_trial(directory, self.describe(trial))
        return start_run(state, clients, parts, directory, kind)

    def _first_model(self, trial: int, is_resumed: bool) -> Tree:
        """The model that a trial starts from; of one that is resumed, any of its shape."""
        start = self.starts.get(trial)
        if start is not None and not is_resumed:
            return start.model()
        seed = int(generator(self.spec.seed, trial, Stream.MODEL).integers(2**31))
        return self.task.model.init(seed)

    def run(
        self,
        trial: int,
        directory: Path | None = None,
        *,
        execute: Executor | None = None,
        stop: threading.Event | None = None,
        on_round: Callable[[RoundRecord], None] = lambda _: None,
        on_note: Callable[[str], None] = lambda _: None,
        keep_state: bool = True,
        kind: Rounds | None = None,
        hold: Hold = hold_here,
        on_end: Callable[[Run], None] = lambda _: None,
    ) -> Result | None:
        """Runs a trial to its end; returns the result, None if `stop` came first.

        Args:
            directory: where to keep it; None keeps it in memory only.
            execute: where clients train; None for the record's own engine, or else this process.
            stop: once set, the round under way is the last for now.
            on_round: called after each round that is made, and for those made before.
            on_note: called with each sentence on what was found amiss in the files of the trial.
            keep_state: whether the server's state stays on disk after the last round.
            kind: what makes the rounds; None makes them in process.
            hold: what holds the server's state, given one in this process.
            on_end: called with the run once its last round is made.
        """
        asked, over = self.describe(trial), tuple[str, ...]()
        if directory is not None and kind is None:  # devices may be at work on a first round
            self.check()
            over = start_over(directory, asked)
        done = None if directory is None else read_result(directory, asked)
        if done is not None:
            for note in done.notes:
                on_note(note)
            return done
        before, notes = (0.0, ()) if directory is None else read_seconds(directory)
        started, run = time.perf_counter(), self.start(trial, directory, kind, hold)
        run.best = None if self.goal is None else BestModel(self.goal, directory)
        if run.next_round > self.spec.rounds:
            run.close()
            raise too_few_rounds(directory, self.spec.rounds, run.next_round)
        notes = (*run.notes, *notes)
        for note in (*over, *notes):
            on_note(note)
        for record in run.records:
            on_round(record)
        try:
            measure = self.measuring.training(self._curve_split, kind, run)
            evaluation = Evaluation(measure, self.spec.evaluate_every)
            where = execute or self.engine or in_process
            made = run.rounds(self.spec.rounds, execute=where, evaluation=evaluation, stop=stop)
            for further, record in enumerate(made):
                if directory is not None and not further:
                    begin_trial(directory, asked)
                on_round(record)
        finally:
            run.close()
            seconds = before + time.perf_counter() - started
            if directory is not None:
                write_seconds(directory, seconds)
        if run.next_round < self.spec.rounds and not run.is_over:
            return None
        result = self.measuring.result(run, kind, seconds, notes, digest_of(asked))
        on_end(run)
        if directory is not None:
            write_result(directory, result)
            if not keep_state:
                shutil.rmtree(directory / "state")
                shutil.rmtree(directory / "clients", ignore_errors=True)
                (directory / BEST).unlink(missing_ok=True)
        return result

    @cached_property
    def goal(self) -> Goal | None:
        """What is best, where the best model is kept."""
        return Goal.of(self.spec.best, self.kind.metric)

    def describe(self, trial: int) -> dict[str, Any]:
        """Returns what is asked of a trial: `run.json`."""
        layout, start = self.task.model.layout, self.starts.get(trial)
        return {
            **({} if start is None else {"start": start.identity}),
            "spec": self.spec.with_trial(trial).describe(),
            "arm": name_of(self.spec),
            "titles": {
                "delivery": self._delivery.about.title,
                "aggregation": about_of(self._aggregate).title,
                **({} if start is None else {"start": start.name}),
            },
            "metric": self.kind.metric,
            "curve": self._curve_split,
            "dataset": {
                "name": self.dataset.name,
                "kind": self.dataset.kind,
                "clients": self.task.clients,
                **self.dataset.facts,
            },
            "size": {
                "server": layout.server_size,
                "client": layout.client_size(**self.keys_per_client),
            },
            "versions": {"python": platform.python_version()}
            | {name: version(name) for name in LIBRARIES},
        }

    @cached_property
    def measuring(self) -> Measuring:
        """How states are measured."""
        own = None if self.spec.metrics is None else Evaluation(self._own("metrics"))
        return Measuring(self.spec, self.task, own)

    @property
    def _curve_split(self) -> str:
        """Validation where there is one, else test, as in the paper's EMNIST figures."""
        return "validation" if "validation" in self.task.metrics else "test"
