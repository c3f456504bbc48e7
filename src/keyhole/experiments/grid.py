"""Reads a sweep of your own: a TOML file with fields of a run, each of which may be a list.

    task = "so_tag"
    rounds = 100
    trials = 5                           # unless told
    keys.word.count = [30, 300, "none"]  # none: every key
    client.lr = [1.0, 3.0]

Every combination is a cell, which is run in each trial. What varies last in the file is what the
lines of a figure differ in, and stands on its x axis where it is a number; what varies before
makes panels.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

from keyhole.errors import InputError
from keyhole.experiments.specs import fields_of, spec_of
from keyhole.experiments.sweeps import TRIALS, Sweep, SweepLine
from keyhole.rounds.fields import flatten

_OWN = ("name", "title", "trials")  # of the file, beside fields of a run


def read_grid(path: Path) -> Sweep:
    """Returns the sweep that a file describes.

    Raises:
        InputError: the file cannot be read, a field is unknown or out of range, or a list is empty
            or names a value twice.
    """
    told = _load(path)
    own = {name: told.pop(name, None) for name in _OWN}
    task = told.pop("task", None)
    if not isinstance(task, str):
        raise InputError(
            f'{path} names no task: got {task!r}; expected a name, or module:NAME; write task = "so'
            '_tag", say'
        )
    fields = flatten(fields_of(str(path), told, varied=True))
    varied = {name: value for name, value in fields.items() if isinstance(value, list)}
    for name, values in varied.items():
        _check_values(path, name, values)
    fixed = {name: value for name, value in fields.items() if name not in varied}
    cells = [dict(zip(varied, values, strict=True)) for values in product(*varied.values())]
    name = str(own["name"] or path.stem)
    return Sweep(
        name=name,
        title=str(own["title"] or name),
        task=task,
        figures=("curves", "final") if varied else ("curves",),
        x_label=list(varied)[-1] if varied else "",
        lines=tuple(_line(task, fixed, cell) for cell in cells),
        trials=_trials(path, own["trials"]),
    )


def _line(task: str, fixed: Mapping[str, Any], cell: Mapping[str, Any]) -> SweepLine:
    """One cell, in a folder that is called by what varies."""
    spec = spec_of(task, {**fixed, **cell})
    if not cell:
        return SweepLine("", task, None, spec)
    *panel, label = [f"{name} = {value}" for name, value in cell.items()]
    last = list(cell.values())[-1]
    is_number = isinstance(last, int | float) and not isinstance(last, bool)
    folder = ",".join(f"{name}={value}" for name, value in cell.items())
    folder = f"{spec.task.name}-{folder}".replace(":", ".").replace("/", ".")
    return SweepLine(", ".join(panel), label, float(last) if is_number else None, spec, folder)


def _load(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            f"{path} cannot be read: got {error}; expected TOML with fields of a run; check the "
            "file"
        ) from error


def _trials(path: Path, given: Any) -> int:
    if given is None:
        return TRIALS
    if not isinstance(given, int) or isinstance(given, bool) or given < 1:
        raise InputError(
            f"{path} asks for no number of trials: got {given!r}; expected 1 or more; write trials "
            f"= {TRIALS}"
        )
    return given


def _check_values(path: Path, name: str, values: list[Any]) -> None:
    """Raises InputError where a list is empty, names a value twice, or has more than one level."""
    if not values or any(isinstance(value, list | dict) for value in values):
        raise InputError(
            f"{path} lists no values of {name}: got {values}; expected numbers, words or true and "
            "false; name one or more"
        )
    if len({(type(value), value) for value in values}) < len(values):
        raise InputError(
            f"{path} lists a value of {name} twice: got {values}; expected each once; leave one out"
        )
