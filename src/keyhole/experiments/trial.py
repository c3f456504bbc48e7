"""Keeps what a trial was asked and what it reached, in the files of its directory.

`run.json` says what was asked, with versions and seeds; `plan.json`, `records.jsonl` and `state/`
are the training loop's; `result.json` says what was reached. Nothing that was reached is ever
removed: a directory that holds another run is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from keyhole.errors import InputError
from keyhole.files import make_directory, replacing, write_all
from keyhole.rounds.fields import flatten
from keyhole.rounds.spec import RunSpec
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
            f"{directory} holds a finished run of another length: got {rounds} rounds; expected "
            f"{result.rounds}, or more where the run was kept with its state; choose another --out"
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
    if known.get("engine.name") != given.get("engine.name"):  # another engine, the same result
        for run in (known, given):
            for name in [name for name in run if name.partition(".")[0] == "engine"]:
                del run[name]
    for name in sorted(known.keys() | given, key=lambda name: ("." in name, name)):
        if known.get(name) != given.get(name):
            raise InputError(
                f"{directory} holds a run with another {name.removesuffix('.identity')}: got "
                f"{given.get(name)}; expected {known.get(name)}; choose another --out, or ask for "
                "the same"
            )


_FREE = (("data", str), ("engine", str))  # names of the library's; those of one's own are tables


def _compared(run: Mapping[str, Any]) -> dict[str, Any]:
    """What two runs must share, by name: fields of the record as they are called, others as
    `dataset.kind`. The same data may lie elsewhere: its facts are compared."""
    spec = {k: v for k, v in run["spec"].items() if k != "rounds" and (k, type(v)) not in _FREE}
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
        f"{path} is not as training writes it: got {got}; expected the JSON of a run; choose "
        "another --out, or move the file away"
    )


def _write(path: Path, value: Mapping[str, Any]) -> None:
    with replacing(path) as descriptor:
        write_all(descriptor, [(json.dumps(value, indent=1) + "\n").encode()])
