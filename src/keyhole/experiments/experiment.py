"""Runs a `RunSpec` on a dataset, trial by trial, each in a directory that explains itself.

`run.json` says what was asked, with versions and seeds; `plan.json`, `records.jsonl` and `state/`
are the training loop's; `result.json` says what was reached. Nothing that was reached is ever
removed: a directory that holds another run is refused.
"""

from __future__ import annotations

import json
import platform
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from keyhole.aggregation import aggregation_named
from keyhole.aggregation.base import Aggregation, Rounding, about_of
from keyhole.aggregation.plain import PLAIN
from keyhole.aggregation.privacy.mechanism import Privacy
from keyhole.data.federated import Dataset
from keyhole.delivery import delivery_named
from keyhole.delivery.base import Delivery
from keyhole.delivery.clear import Broadcast, OnDemand
from keyhole.errors import InputError
from keyhole.experiments.client_keys import choice_called, choices_of, localize_of
from keyhole.experiments.named import task_named
from keyhole.experiments.specs import name_of
from keyhole.experiments.task import Task
from keyhole.files import make_directory, replacing, write_all
from keyhole.identity import identity_of, resolve
from keyhole.keys.choice import Choice, choose_with
from keyhole.planner.prices import check_model_worth
from keyhole.rounds.clients import Clients
from keyhole.rounds.local_training import LocalSgd
from keyhole.rounds.loop import Evaluation, Rounds, Run, resume_run, start_run
from keyhole.rounds.machine import Buffering
from keyhole.rounds.named import Algorithm, algorithm_named
from keyhole.rounds.record import RoundRecord
from keyhole.rounds.round import Executor, in_process
from keyhole.rounds.runspec import RunSpec, flatten
from keyhole.rounds.spec import Plan, exponential
from keyhole.sampling import Cohorts, Stream, generator
from keyhole.server.state import ServerState
from keyhole.server.store import holds_store

_RUN, _RESULT, _CLOCK = "run.json", "result.json", "clock.json"


@dataclass(frozen=True)
class Result:
    """What a trial reached and what it cost.

    Args:
        rounds: T.
        seconds: wall time of training and evaluation, where no process was killed.
        metrics: on the test split, in the end.
        client_size: numbers in a client's sub-model, on average.
        bytes_down: what a client received in a round, on average.
        bytes_up: what it sent.
    """

    rounds: int
    seconds: float
    metrics: Mapping[str, float]
    client_size: float
    bytes_down: float
    bytes_up: float


def read_result(directory: Path, asked: Mapping[str, Any]) -> Result | None:
    """Returns the result of a finished trial, None where there is work to do.

    Args:
        directory: of the trial.
        asked: what `run.json` is to say.

    Raises:
        InputError: the directory holds another run, more rounds, or fewer without their state.
    """
    _check_same(directory, asked)
    path, rounds = directory / _RESULT, asked["spec"]["rounds"]
    if not path.exists():
        return None
    try:
        result = Result(**_read(path))
    except TypeError as error:
        raise _foreign(path, str(error)) from error
    if result.rounds == rounds:
        return result
    if result.rounds > rounds or not holds_store(directory / "state"):
        raise InputError(
            f"{directory} holds a finished run of another length",
            got=f"{rounds} rounds",
            allowed=f"{result.rounds}, or more where the run was kept with its state",
            fix="choose another --out",
        )
    return None


def begin_trial(directory: Path, asked: Mapping[str, Any]) -> bool:
    """Writes down what is asked; returns whether there is a state to go on from.

    Raises:
        StorageError: the directory cannot be written.
    """
    make_directory(directory)
    (directory / _RESULT).unlink(missing_ok=True)  # of fewer rounds, which go on now
    _write(directory / _RUN, asked)
    return holds_store(directory / "state")


def write_result(directory: Path, result: Result) -> None:
    """Says that a trial is finished."""
    _write(directory / _RESULT, asdict(result))


def add_seconds(directory: Path, seconds: float) -> float:
    """Adds to the time that a trial has taken so far, over all its processes; returns the sum."""
    path = directory / _CLOCK
    before = float(_read(path).get("seconds", 0.0)) if path.exists() else 0.0
    _write(path, {"seconds": before + seconds})
    return before + seconds


def _check_same(directory: Path, asked: Mapping[str, Any]) -> None:
    """A directory goes on with the run it began with; more rounds and other versions are fine."""
    path = directory / _RUN
    if not path.exists():
        return
    found = _read(path)
    RunSpec.read(found.get("spec", {}))
    known, given = _compared(found), _compared(json.loads(json.dumps(asked)))
    for name in sorted(known.keys() | given, key=lambda name: ("." in name, name)):
        if known.get(name) != given.get(name):
            raise InputError(
                f"{directory} holds a run with another {name}",
                got=given.get(name),
                allowed=known.get(name),
                fix="choose another --out, or ask for the same",
            )


def _compared(run: Mapping[str, Any]) -> dict[str, Any]:
    """What two runs must share, by name: fields of the record as they are called, others as
    `dataset.kind`. The same data may lie elsewhere: its facts are compared."""
    spec = {k: v for k, v in run["spec"].items() if k not in ("rounds", "data")}
    facts = {k: v for k, v in run.items() if k not in ("versions", "titles", "spec")}
    return flatten(facts) | flatten(spec)


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise _foreign(path, str(error)) from error
    if not isinstance(value, dict):
        raise _foreign(path, type(value).__name__)
    return value


def _foreign(path: Path, got: str) -> InputError:
    return InputError(
        f"{path} is not as training writes it",
        got=got,
        allowed="the JSON of a run",
        fix="choose another --out, or move the file away",
    )


def _write(path: Path, value: Mapping[str, Any]) -> None:
    with replacing(path) as descriptor:
        write_all(descriptor, [(json.dumps(value, indent=1) + "\n").encode()])


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
        choices: key space -> a way to choose keys of your own, in place of the one that the
            record names.
        allow_simulation: lets the delivery `enclave` run without hardware that protects it.

    Raises:
        InputError: the dataset does not fit the task, or a setting is out of range.
    """

    spec: RunSpec
    dataset: Dataset
    choices: Mapping[str, Choice] = field(default_factory=dict)
    allow_simulation: bool = False

    @cached_property
    def task(self) -> Task:
        """The task on this dataset."""
        minimum, splits = self.spec.client.min_examples, self.dataset.splits
        train = splits["train"].with_at_least(minimum)
        if not len(train):
            raise InputError(
                "no client has this many examples",
                got=f"min_examples {minimum}",
                allowed=f"1..{splits['train'].counts.max(initial=1)}",
                fix="ask for fewer, or bring more data",
            )
        dataset = replace(self.dataset, splits={**splits, "train": train})
        return task_named(self.spec.task).on(dataset, self.spec.sizes, self.spec.tuning)

    @cached_property
    def algorithm(self) -> Algorithm:
        """How clients train and how the server steps."""
        client, server = self.spec.client, self.spec.server
        further = {"fedavg": {}, "fedprox": {"proximal": client.proximal}}
        return algorithm_named(
            client.algorithm,
            client_lr=client.lr,
            server_lr=server.lr,
            batch_size=client.batch_size,
            max_examples=client.max_examples,
            **further.get(client.algorithm.lower(), {"eps": server.eps}),
        )

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
            count=self.task.clients,
            data=self.task.data,
            choose=choose_with(
                choices_of(self.spec, self.task, self.choices), self.task.count_keys
            ),
            train=LocalSgd(self.task.model, self.algorithm.client, slots),
            localize=localize_of(self.spec, self.task),
        )

    def plan(self, trial: int) -> Plan:
        """The plan of one trial."""
        return Plan(
            cohorts=self._cohorts,
            keys_per_client=self.keys_per_client,
            seed=self.spec.seed,
            trial=trial,
            over=self.spec.mean_over,
            delivery=self._delivery,
            aggregate=self._aggregate,
            privacy=self._privacy,
            buffering=self._buffering,
            shared_keys=self.spec.shared_keys,
            for_devices=self.spec.with_trial(trial).for_devices(),
        )

    @property
    def _buffering(self) -> Buffering | None:
        stream, goal = self.spec.asynchronous, self._cohorts.size
        if stream is None:
            return None
        return Buffering(stream.concurrency, goal, stream.max_staleness, duration=exponential)

    @property
    def _privacy(self) -> Privacy | None:
        private = self.spec.privacy
        return None if private is None else Privacy(**private.values())

    @property
    def _aggregate(self) -> Aggregation:
        sums = self.spec.aggregation
        rounding = Rounding(sums.value_clip, sums.ring_bits)
        return aggregation_named(sums.name or PLAIN.about.name, rounding, signed=sums.signed)

    @property
    def _cohorts(self) -> Cohorts:
        """As large as the population allows."""
        asked, clients = self.spec.cohort, self.task.clients
        size = min(asked.size, clients)
        over = min(asked.over_selection, clients / size)
        return Cohorts(clients, **asked.values() | {"size": size, "over_selection": over})

    @cached_property
    def _delivery(self) -> Delivery:
        """How slices travel; trials share what it keeps."""
        is_select = any(keys.choice != "all" for keys in self.spec.keys.values())
        usual = OnDemand() if is_select else Broadcast()
        return self._named(usual).for_run(
            self.keys_per_client, allow_simulation=self.allow_simulation
        )

    def check(self) -> None:
        """Raises InputError where the record does not fit the dataset, before any work is done."""
        self.plan(0).check(self.task.model.layout)
        _ = self.clients  # builds the choices and the algorithm, which check themselves

    def _named(self, usual: Delivery) -> Delivery:
        """The delivery that the spec names, or else the usual one."""
        name = self.spec.delivery
        return usual if name is None else delivery_named(name)

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
            trial: which.
            directory: where to keep it; None keeps it in memory only.
            kind: what makes the rounds; None makes them in process.
            hold: what holds the server's state, given one in this process.

        Raises:
            InputError: the directory holds another run.
        """
        seed = int(generator(self.spec.seed, trial, Stream.MODEL).integers(2**31))
        model, layout = self.task.model.init(seed), self.task.model.layout
        state = hold(ServerState.dense(layout, model, self.algorithm.server))
        clients, plan = self.clients, self.plan(trial)
        if directory is None:
            return start_run(state, clients, plan, kind=kind)
        self.check()  # before anything is written
        begin = resume_run if begin_trial(directory, self.describe(trial)) else start_run
        return begin(state, clients, plan, directory, kind)

    def run(
        self,
        trial: int,
        directory: Path | None = None,
        *,
        execute: Executor = in_process,
        stop: threading.Event | None = None,
        on_round: Callable[[RoundRecord], None] = lambda _: None,
        keep_state: bool = True,
        kind: Rounds | None = None,
        hold: Hold = hold_here,
    ) -> Result | None:
        """Runs a trial to its end.

        Args:
            trial: which.
            directory: where to keep it; None keeps it in memory only.
            execute: where clients train.
            stop: once set, the round under way is the last for now.
            on_round: called after each round that is made, and for those made before.
            keep_state: whether the server's state stays on disk after the last round.
            kind: what makes the rounds; None makes them in process.
            hold: what holds the server's state, given one in this process.

        Returns:
            The result, None if `stop` came first.
        """
        done = None if directory is None else read_result(directory, self.describe(trial))
        if done is not None:
            return done
        started, run = time.perf_counter(), self.start(trial, directory, kind, hold)
        for record in run.records:
            on_round(record)
        try:
            metrics = self.task.metrics[self._curve_split]
            evaluation = Evaluation(metrics, self.spec.evaluate_every)
            for record in run.rounds(
                self.spec.rounds, execute=execute, evaluation=evaluation, stop=stop
            ):
                on_round(record)
        finally:
            run.close()
            seconds = time.perf_counter() - started
            if directory is not None:
                seconds = add_seconds(directory, seconds)
        if run.next_round < self.spec.rounds:
            return None
        result = self._result(run, seconds)
        if directory is not None:
            write_result(directory, result)
            if not keep_state:
                shutil.rmtree(directory / "state")
        return result

    def describe(self, trial: int) -> dict[str, Any]:
        """What is asked of a trial: `run.json`."""
        layout = self.task.model.layout
        kind = task_named(self.spec.task)
        return {
            "spec": self.spec.with_trial(trial).describe(),
            "arm": name_of(self.spec),
            "choices": {space: identity_of(choice) for space, choice in self._own.items()},
            "identity": {
                "client": identity_of(self.algorithm.client),
                "server": identity_of(self.algorithm.server),
                **self._own_parts,
            },
            "titles": {
                "delivery": self._delivery.about.title,
                "aggregation": about_of(self._aggregate).title,
            },
            "metric": kind.metric,
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

    @property
    def _own(self) -> dict[str, Choice]:
        """Choices that the library does not know by name: which they are is recorded."""
        named = {space: keys.choice for space, keys in self.spec.keys.items()}
        found = {space: choice_called(name) for space, name in named.items() if ":" in name}
        return found | dict(self.choices)

    @property
    def _own_parts(self) -> dict[str, str]:
        """Which delivery and aggregation "module:NAME" stands for."""
        parts = {"delivery": self.spec.delivery, "aggregation": self.spec.aggregation.name}
        return {
            part: identity_of(resolve(name))
            for part, name in parts.items()
            if name is not None and ":" in name
        }

    @property
    def _curve_split(self) -> str:
        """Validation where there is one, else test, as in the paper's EMNIST figures."""
        return "validation" if "validation" in self.task.metrics else "test"

    def _result(self, run: Run, seconds: float) -> Result:
        down = [b for record in run.records for b in record.bytes_down]
        up = [b for record in run.records for b in record.bytes_up]
        sizes = [size for record in run.records for size in record.client_sizes if size]
        return Result(
            rounds=run.next_round,
            seconds=seconds,
            metrics=Evaluation(self.task.metrics["test"]).of(run.state),
            client_size=float(np.mean(sizes)) if sizes else 0.0,  # private fetches tell none
            bytes_down=float(np.mean(down)),
            bytes_up=float(np.mean(up)),
        )
