"""Keeps what a trial was asked and what it reached, in the files of its directory.

`run.json` says what was asked, with versions and seeds; `plan.json`, `records.jsonl` and `state/`
are the training loop's; `result.json` says what was reached, with a digest of what was asked. A
directory that holds another run is refused, and what is refused changes no file: a result is gone
once a further round has been made, not before. A run of which no round was made stands in the way
of none.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from keyhole.arrays import Tree
from keyhole.errors import InputError
from keyhole.files import make_directory, replacing, write_all
from keyhole.rounds.best import Goal
from keyhole.rounds.fields import flatten, typed
from keyhole.rounds.record import (
    RoundRecord,
    metrics_from_json,
    metrics_to_json,
    read_records,
)
from keyhole.rounds.spec import RunSpec
from keyhole.server.store import drop_unused_store, holds_store

_RUN, _RESULT, _CLOCK, _RECORDS = "run.json", "result.json", "clock.json", "records.jsonl"


@dataclass(frozen=True, eq=False)
class Start:
    """The model that a trial starts from, in place of a new one; the optimizer starts anew.

    Args:
        identity: what tells it from others, as `identity_of` gives it.
        model: returns the parameters; called where a trial begins, not where it is resumed.
        name: what tables call it.
    """

    identity: str
    model: Callable[[], Tree]
    name: str


@dataclass(frozen=True)
class Best:
    """The best model of a trial, which it keeps beside the last.

    Args:
        rounds: how many were made when it was best.
        metric: that says so.
        value: of the metric, as the run measured it while it trained.
        metrics: of this model on the test split; of devices, as they measured it.
    """

    rounds: int
    metric: str
    value: float
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Result:
    """What a trial reached and what it cost.

    Args:
        rounds: T.
        seconds: wall time of training and evaluation, where no process was killed.
        metrics: on the test split, in the end.
        client_size: numbers in a client's sub-model, on average; None where none is known. Of
            devices whose slices or updates are private it is the max, as bytes are.
        bytes_down: what a client received in a round, on average; None likewise.
        bytes_up: what it sent.
        records: rounds that these three are means over: all of them, unless records were lost.
        notes: what was found amiss in the files of the trial, each as a sentence.
        run: digest of what was asked, but for the number of rounds; see `digest_of`.
        best: the best model, where the run keeps it and has measured one.
        stopped: why the run ended before all rounds were made; None where it did not.
    """

    rounds: int
    seconds: float
    metrics: Mapping[str, float]
    client_size: float | None
    bytes_down: float | None
    bytes_up: float
    records: int
    notes: list[str]
    run: str
    best: Best | None = None
    stopped: str | None = None

    @property
    def told(self) -> str:
        """Which model was best and why the trial ended early, as `told_of` says it."""
        return told_of(self.best, self.rounds, self.stopped)

    @staticmethod
    def of(
        records: Sequence[RoundRecord],
        metrics: Mapping[str, float],
        seconds: float,
        notes: Iterable[str],
        run: str,
    ) -> Result:
        """Returns what rounds have reached, the last of which is the run's last."""
        down = [b for record in records for b in record.bytes_down]
        up = [b for record in records for b in record.bytes_up]
        sizes = [size for record in records for size in record.client_sizes if size]
        return Result(
            rounds=records[-1].round + 1,
            seconds=seconds,
            metrics=metrics,
            client_size=float(np.mean(sizes)) if sizes else None,
            bytes_down=float(np.mean(down)) if any(down) else None,
            bytes_up=float(np.mean(up)),
            records=len(records),
            notes=list(notes),
            run=run,
        )


def told_of(best: Best | None, rounds: int, stopped: str | None) -> str:
    """Returns which model was best and why a trial ended early, in one line; empty where there is
    neither.

    >>> told_of(Best(30, "auc", 0.75, {"auc": 0.7}), 40, None)
    'best auc 0.75 after 30 of 40 rounds (test: auc 0.7)'
    """
    found = []
    if best is not None:
        test = ", ".join(f"{name} {value:.4g}" for name, value in best.metrics.items())
        found.append(
            f"best {best.metric} {best.value:.4g} after {best.rounds} of {rounds} rounds "
            f"(test: {test})"
        )
    if stopped is not None:
        found.append(f"ended early: {stopped}")
    return "; ".join(found)


@dataclass(frozen=True)
class _Clock:
    seconds: float


def read_result(directory: Path, asked: Mapping[str, Any]) -> Result | None:
    """Returns the result of a finished trial, None where there is work to do.

    Args:
        asked: what `run.json` is to say.

    Raises:
        InputError: the directory holds another run, more rounds, or fewer without their state; or
            a result or a state, and no word on what was asked.
    """
    if (error := _difference(directory, asked)) is not None:
        raise error
    path, rounds, result = directory / _RESULT, asked["spec"]["rounds"], find_result(directory)
    if result is None:
        return None
    if result.run != digest_of(asked):
        raise InputError(
            f"{path} is the result of another run: got digest {result.run}; expected "
            f"{digest_of(asked)}, of what is asked and of run.json; choose another directory"
        )
    if result.rounds == rounds or (result.stopped and _is_over(directory, asked)):
        return result
    if result.rounds > rounds or not holds_store(directory / "state"):
        raise InputError(
            f"{directory} holds a finished run of another length: got {rounds} rounds; expected "
            f"{result.rounds}, or more where the run was kept with its state (--keep-state); "
            "choose another directory"
        )
    return None


def _is_over(directory: Path, asked: Mapping[str, Any]) -> bool:
    """Whether a trial that ended early is to end there as it is asked for now."""
    goal = Goal.of(RunSpec.read(asked["spec"]).best, asked["metric"])
    return goal is not None and goal.is_over(read_records(directory / _RECORDS))


def too_few_rounds(directory: Path | None, rounds: int, made: int) -> InputError:
    """Returns the error of a trial that is not finished and has more rounds than are asked."""
    return InputError(
        f"{directory} has more rounds than are asked for: got {rounds}; expected {made} or more; "
        "ask for them, or choose another directory"
    )


def find_result(directory: Path) -> Result | None:
    """Returns the result that a trial's directory holds, None where it holds none; what was asked
    is not compared."""
    path = directory / _RESULT
    return _read_as(path, Result) if path.exists() else None


def rounds_kept(directory: Path) -> int:
    """Returns how many rounds of a trial are on disk."""
    records = read_records(directory / _RECORDS)
    return records[-1].round + 1 if records else 0


def start_over(directory: Path, asked: Mapping[str, Any]) -> tuple[str, ...]:
    """Drops another run than is asked, if no round of it was made; returns a note where it did.

    Raises:
        InputError: run.json is damaged or foreign.
        StorageError: another process is making the first round.
    """
    error = _difference(directory, asked)
    if error is None or (directory / _RESULT).exists() or read_records(directory / _RECORDS):
        return ()
    if not drop_unused_store(directory / "state"):
        return ()
    for name in (_RUN, _CLOCK):
        (directory / name).unlink(missing_ok=True)
    return (f"no round had been made, so the run starts over: {error.wrong}",)


def begin_trial(directory: Path, asked: Mapping[str, Any]) -> None:
    """Writes down what is asked, before the first round or once a further one has been made.

    Raises:
        StorageError: the directory cannot be written.
    """
    make_directory(directory)
    _write(directory / _RUN, asked)
    (directory / _RESULT).unlink(missing_ok=True)  # of fewer rounds


def write_result(directory: Path, result: Result) -> None:
    """Says that a trial is finished."""
    told = asdict(result) | {"metrics": metrics_to_json(result.metrics)}
    if result.best is not None:
        told["best"]["metrics"] = metrics_to_json(result.best.metrics)
    _write(directory / _RESULT, told)


def read_seconds(directory: Path) -> tuple[float, tuple[str, ...]]:
    """Returns the time that earlier processes have given to a trial, with a note where it is lost:
    for that alone no run is refused."""
    path = directory / _CLOCK
    if not path.exists():
        return 0.0, ()
    try:
        return _read_as(path, _Clock).seconds, ()
    except InputError as error:
        return 0.0, (f"{_CLOCK}: the seconds of earlier rounds are lost: got {error.got}",)


def write_seconds(directory: Path, seconds: float) -> None:
    """Keeps the time that a trial has taken so far, over all its processes."""
    _write(directory / _CLOCK, {"seconds": seconds})


def digest_of(asked: Mapping[str, Any]) -> str:
    """Returns a digest of what decides a result: all that two runs must share, but for the
    engine."""
    told = json.loads(json.dumps(asked))
    fields = {k: v for k, v in _compared(told).items() if k.partition(".")[0] != "engine"}
    return sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]


def _difference(directory: Path, asked: Mapping[str, Any]) -> InputError | None:
    """What keeps a directory from going on with the run it began with, if anything; more rounds and
    other versions do not."""
    path = directory / _RUN
    if not path.exists():
        if (directory / _RESULT).exists() or holds_store(directory / "state"):
            raise InputError(
                f"{directory} does not say what it holds: got files of a run; expected {_RUN} "
                "beside them; restore it from a copy, or choose another directory"
            )
        return None
    found = _read(path)
    RunSpec.read(found.get("spec", {}))
    known, given = _compared(found), _compared(json.loads(json.dumps(asked)))
    if known.get("engine") != given.get("engine"):  # another engine, the same result
        for run in (known, given):
            for name in [name for name in run if name.partition(".")[0] == "engine"]:
                del run[name]
    for name in sorted(known.keys() | given, key=lambda name: ("." in name, name)):
        got, expected = given.get(name), known.get(name)
        if got != expected and name.endswith(_IDENTITY):  # of one name
            return InputError(
                f"the code or fields of {known[name.removesuffix(_IDENTITY)]} are not those that "
                f"the run in {directory} was started with: got {got}; expected {expected}; restore "
                "them, or choose another directory"
            )
        if got != expected:
            what = "another run" if name == "arm" else f"a run with another {name}"
            return InputError(
                f"{directory} holds {what}: got {got}; expected {expected}; "
                "choose another directory, or ask for the same"
            )
    return None


_IDENTITY = ".identity"
_NOT_COMPARED = ("rounds", "cohort.seconds", "best.patience", "best.min_delta", "held_out")
"""Fields in which a run that goes on may differ: it may be made longer, and its rounds too, and
held-out examples may lie elsewhere: their digest is compared."""
_FREE = (("data", str), ("engine", str))  # names of the library's; those of one's own are tables


def _compared(run: Mapping[str, Any]) -> dict[str, Any]:
    """What two runs must share, by name: fields of the record as they are called, others as
    `dataset.kind`. The same data may lie elsewhere: its facts are compared."""
    spec = {k: v for k, v in run["spec"].items() if (k, type(v)) not in _FREE}
    facts = {k: v for k, v in run.items() if k not in ("versions", "titles", "spec")}
    found = flatten(facts) | flatten(_with_names(spec))
    return {name: value for name, value in found.items() if name not in _NOT_COMPARED}


def _with_names(told: Mapping[str, Any]) -> dict[str, Any]:
    """A record whose parts stand by their names, one's own with an identity beside."""
    found: dict[str, Any] = {}
    for key, value in told.items():
        if isinstance(value, Mapping) and "identity" in value:
            found |= {key: value["name"], f"{key}{_IDENTITY}": value["identity"]}
        else:
            found[key] = _with_names(value) if isinstance(value, Mapping) else value
    return found


_T = TypeVar("_T")


def _read_as(path: Path, kind: type[_T]) -> _T:
    told = _read(path)
    for part in (told, told.get("best")):
        if isinstance(part, dict) and isinstance(metrics := part.get("metrics"), dict):
            part["metrics"] = metrics_from_json(metrics)
    try:
        return typed(kind, told)
    except ValueError as error:
        raise _foreign(path, str(error)) from error


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise _foreign(path, str(error)) from error
    if not isinstance(value, dict):
        raise _foreign(path, type(value).__name__)
    return value


def _foreign(path: Path, got: str) -> InputError:
    return InputError(
        f"{path} is not as training writes it: got {got}; expected the JSON of a run; restore "
        "it from a copy, or choose another directory"
    )


def _write(path: Path, value: Mapping[str, Any]) -> None:
    with replacing(path) as descriptor:
        write_all(descriptor, [(json.dumps(value, indent=1) + "\n").encode()])
