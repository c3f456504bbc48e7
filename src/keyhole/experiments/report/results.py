"""Reads sweeps, their lines and the trials of each from the directory of runs.

A sweep is a figure or table of the paper; a line is one arm of it (one setting); a trial is one run
of an arm. An arm may be a line of several sweeps.

A JSON file is read as what it should be, or refused by the name of the field.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from keyhole.errors import InputError
from keyhole.experiments.report.spread import Curve, Spread, mean_curve, spread_of
from keyhole.rounds.record import RoundRecord, decode_records
from keyhole.rounds.runspec import RunSpec, flatten


@dataclass(frozen=True)
class Fields:
    """The fields of one JSON object.

    Args:
        values: name -> value.
        path: of the file.
        what: it should be, for errors.
        inside: where in the file the object stands, for errors.
    """

    values: Mapping[str, Any]
    path: Path
    what: str
    inside: str = ""

    def require(self, name: str, is_right: bool, allowed: str) -> None:
        """Raises InputError that names the file and the field unless its value is right."""
        if is_right:
            return
        raise InputError(
            f"{short(self.path)} is not {self.what}: field {self.inside}{name}",
            got=_shorten(self.values[name]) if name in self.values else "nothing",
            allowed=allowed,
            fix="run the sweep again, or move the file away",
        )

    def text(self, name: str, default: str | None = None) -> str:
        """Returns a printable text."""
        value = self.values.get(name, default)
        is_right = isinstance(value, str) and value.isprintable()
        self.require(name, is_right, "printable text on one line")
        return str(value)

    def texts(self, name: str) -> list[str]:
        """Returns a list of texts."""
        values = self.values.get(name)
        is_right = isinstance(values, list) and all(isinstance(v, str) for v in values)
        self.require(name, is_right, "a list of texts")
        return list(values or [])

    def count(self, name: str, default: int | None = None) -> int:
        """Returns a whole number from 0."""
        value = self.values.get(name, default)
        is_right = isinstance(value, int) and not isinstance(value, bool) and value >= 0
        self.require(name, is_right, "a whole number, 0 or more")
        return int(value or 0)

    def number(self, name: str, default: float | None) -> float | None:
        """Returns a finite number, or the default if there is none."""
        value = self.values.get(name)
        if value is None:
            return default
        self.require(name, _is_number(value) and math.isfinite(value), "a finite number")
        return float(value)

    def require_number(self, name: str) -> float:
        """Returns a finite number that has to be there."""
        self.require(name, self.values.get(name) is not None, "a finite number")
        return float(self.number(name, None) or 0.0)

    def numbers(self, name: str) -> dict[str, float]:
        """Returns names and numbers; a run that diverged has some that are not finite."""
        values = self.values.get(name)
        is_right = isinstance(values, dict) and all(_is_number(v) for v in values.values())
        self.require(name, is_right, "names and numbers")
        return {key: float(value) for key, value in dict(values or {}).items()}

    def record(self, name: str) -> Fields:
        """Returns the fields of an object inside this one."""
        value = self.values.get(name)
        self.require(name, isinstance(value, dict), "a JSON object")
        return Fields(dict(value or {}), self.path, self.what, f"{self.inside}{name}.")

    def records(self, name: str) -> list[Fields]:
        """Returns the fields of each object of a list."""
        values = self.values.get(name)
        is_right = isinstance(values, list) and all(isinstance(v, dict) for v in values)
        self.require(name, is_right, "a list of JSON objects")
        return [
            Fields(value, self.path, self.what, f"{self.inside}{name}[{i}].")
            for i, value in enumerate(values or [])
        ]


def read_json(path: Path, what: str) -> Fields:
    """Returns the fields of a file that holds one JSON object.

    Args:
        path: of the file.
        what: it should be, for errors: "a sweep".

    Raises:
        InputError: it cannot be read or holds something else.
    """
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise _foreign(path, what, f"{type(error).__name__}: {error}") from error
    if not isinstance(value, dict):
        raise _foreign(path, what, _shorten(value))
    return Fields(value, path, what)


def short(path: Path) -> str:
    """Returns the end of a path, enough to find the file: trial-0/run.json is too little."""
    return "/".join(path.parts[-3:]) if path.parent.name.startswith("trial-") else path.name


def _foreign(path: Path, what: str, got: str) -> InputError:
    return InputError(
        f"{short(path)} is not {what}",
        got=got,
        allowed="a JSON object as `keyhole sweep` writes it",
        fix="run the sweep again, or move the file away",
    )


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _shorten(value: object) -> str:
    """A value as one short line of an error."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


FIGURES = ("curves", "final", "frontier", "grid")
"""The kinds of figure that a sweep may ask for."""


@dataclass(frozen=True)
class TrialResult:
    """The end of a finished trial.

    Args:
        rounds: that were run.
        seconds: that they took.
        metrics: name -> value on the test data.
    """

    rounds: int
    seconds: float
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Trial:
    """One run of an arm.

    Args:
        number: k, from 0.
        spec: how the run was set up.
        run: `run.json`, which holds it beside versions and facts about data.
        rounds_done: by now.
        rounds_planned: in all.
        relative_size: numbers in the largest sub-model over numbers in the server's model.
        split: on which the run was evaluated while it trained; empty if it does not say.
        curves: metric -> rounds done -> value on that split.
        result: None while the trial is unfinished.
    """

    number: int
    spec: RunSpec
    run: Mapping[str, Any]
    rounds_done: int
    rounds_planned: int
    relative_size: float
    split: str
    curves: Mapping[str, Mapping[int, float]]
    result: TrialResult | None

    @property
    def settings(self) -> Mapping[str, Any]:
        """Rates, cohort, batch and rounds, by their names in the record."""
        told = self.spec.describe()
        parts = {name: told[name] for name in ("evaluate_every", "cohort", "client", "server")}
        # A run may have gone on for more rounds than it was set up with.
        return {"rounds": self.rounds, **flatten(parts)}

    @property
    def rounds(self) -> int:
        """How many it ran, or will run."""
        return self.result.rounds if self.result is not None else self.rounds_planned


@dataclass(frozen=True, eq=False)
class Series:
    """One arm of a sweep.

    Args:
        panel: which part of the figure it belongs to.
        label: what it is called there.
        x: where it stands on the figure's x axis, if it has one.
        arm: the directory of its trials.
        metric: what is compared.
        trials: that were begun, by number.
    """

    panel: str
    label: str
    x: float | None
    arm: str
    metric: str
    trials: tuple[Trial, ...] = ()

    @property
    def finished(self) -> tuple[Trial, ...]:
        """The trials that have a result."""
        return tuple(trial for trial in self.trials if trial.result is not None)

    @property
    def unfinished(self) -> tuple[Trial, ...]:
        """The trials that were begun and have none."""
        return tuple(trial for trial in self.trials if trial.result is None)

    @cached_property
    def curve(self) -> Curve:
        """The metric over rounds: of the finished trials, or of all while none is finished."""
        used = self.finished or self.trials
        return mean_curve([trial.curves.get(self.metric, {}) for trial in used])

    @cached_property
    def test(self) -> Spread | None:
        """The test metric of the finished trials."""
        results = [trial.result for trial in self.trials if trial.result is not None]
        return spread_of([result.metrics[self.metric] for result in results])

    @property
    def last(self) -> Spread | None:
        """The last point of the curve."""
        return self.curve.spreads[-1] if self.curve.spreads else None

    @property
    def relative_size(self) -> float | None:
        """Of the largest sub-model of any trial; None before the first."""
        return max((trial.relative_size for trial in self.trials), default=None)

    @property
    def differing(self) -> tuple[str, ...]:
        """The settings in which the trials are not alike, which makes their mean doubtful."""
        names = dict.fromkeys(name for trial in self.trials for name in trial.settings)
        kinds = {name: {repr(trial.settings.get(name)) for trial in self.trials} for name in names}
        return tuple(name for name, values in kinds.items() if len(values) > 1)

    @property
    def minutes(self) -> float | None:
        """Per finished trial, on average."""
        times = [trial.result.seconds for trial in self.trials if trial.result is not None]
        return sum(times) / len(times) / 60 if times else None


@dataclass(frozen=True)
class SweepResults:
    """A figure or table of the paper, as we ran it.

    Args:
        name: also of its files.
        title: for people.
        scale: small or paper.
        data: the name of the data.
        metric: what is compared.
        figures: kinds out of `FIGURES`.
        x_label: of the x axis of kind `final`.
        lines: in the order of the table.
        trials: of each line: the number that was asked for, if it is known, or the largest seen.
    """

    name: str
    title: str
    scale: str
    data: str
    metric: str
    figures: tuple[str, ...]
    x_label: str
    lines: tuple[Series, ...] = field(repr=False)
    trials: int

    @cached_property
    def panels(self) -> Mapping[str, tuple[Series, ...]]:
        """Panel -> its lines, in the order in which they first appear."""
        names = dict.fromkeys(line.panel for line in self.lines)
        panels = {name: tuple(line for line in self.lines if line.panel == name) for name in names}
        return MappingProxyType(panels)

    @property
    def split(self) -> str:
        """On which the curves were measured; empty if the runs do not say or do not agree."""
        splits = {trial.split for line in self.lines for trial in line.trials}
        return splits.pop() if len(splits) == 1 else ""

    def is_complete(self, line: Series) -> bool:
        """Whether every trial of a line is there and finished."""
        return len(line.finished) >= max(1, self.trials) and not line.unfinished


def curve_of(records: list[RoundRecord], metric: str) -> dict[int, float]:
    """Returns rounds done -> value, where a round was evaluated.

    Args:
        records: of one run; the record of round t tells the state after t + 1 rounds.
        metric: its name in the records.
    """
    return {r.round + 1: r.metrics[metric] for r in records if metric in r.metrics}


def read_sweeps(out: Path) -> list[SweepResults]:
    """Returns the sweeps of a directory, by name, each with what there is of its trials.

    Args:
        out: where `keyhole sweep` wrote: `<sweep>.json` and `<arm>/trial-<k>/`.

    Raises:
        InputError: there is no sweep, or a file is damaged or foreign.
    """
    paths = sorted(out.glob("*.json"))
    if not paths:
        is_run = next(out.glob("**/trial-*/run.json"), None) is not None or out.match("trial-*")
        raise InputError(
            f"{out} holds no sweep",
            got="runs of `keyhole train`" if is_run else "no .json file in it",
            allowed="the directory that `keyhole sweep` wrote",
            fix="read trial-N/result.json and records.jsonl, or the --json of `keyhole train`"
            if is_run
            else "run `keyhole sweep` first, or point at its directory",
        )
    trials: dict[str, tuple[Trial, ...]] = {}
    return [_read_sweep(path, trials) for path in paths]


def _read_sweep(path: Path, known: dict[str, tuple[Trial, ...]]) -> SweepResults:
    """Reads a sweep; trials of an arm that several sweeps share are read once, into `known`."""
    fields = read_json(path, "a sweep")
    metric = fields.text("metric")
    lines = [_read_line(line, path.parent, metric, known) for line in fields.records("lines")]
    seen = (trial.number + 1 for line in lines for trial in line.trials)
    places = {(line.panel, line.label) for line in lines}
    fields.require("lines", 0 < len(lines) == len(places), "1 or more, no two alike in a panel")
    fields.require("sweep", fields.text("sweep") == path.stem, f"{path.stem!r}, as the file")
    fields.require("figures", set(fields.texts("figures")) <= set(FIGURES), ", ".join(FIGURES))
    return SweepResults(
        name=path.stem,
        title=fields.text("title"),
        scale=fields.text("scale"),
        data=fields.text("data"),
        metric=metric,
        figures=tuple(fields.texts("figures")),
        x_label=fields.text("x_label", ""),
        lines=tuple(lines),
        trials=fields.count("trials", 0) or max(seen, default=0),
    )


def _read_line(
    fields: Fields, out: Path, metric: str, known: dict[str, tuple[Trial, ...]]
) -> Series:
    arm = fields.text("arm")
    # A name, not a path: a sweep must not lead the reader out of its directory.
    fields.require("arm", Path(arm).name == arm and arm != "..", "the name of a directory")
    if arm not in known:
        known[arm] = _read_trials(out / arm)
    for trial in known[arm]:
        if trial.result is not None and metric not in trial.result.metrics:
            fields.require("metric", False, f"one that trial {trial.number} of {arm} measured")
    return Series(
        panel=fields.text("panel", ""),
        label=fields.text("label"),
        x=fields.number("x", None),
        arm=arm,
        metric=metric,
        trials=known[arm],
    )


def _read_trials(directory: Path) -> tuple[Trial, ...]:
    """Reads the trials that were begun; a directory without run.json was not."""
    paths = [path for path in directory.glob("trial-*/run.json") if _number(path) is not None]
    trials = [_read_trial(path.parent) for path in paths]
    return tuple(sorted(trials, key=lambda trial: trial.number))


def _number(run: Path) -> int | None:
    """The k of trial-<k>."""
    number = run.parent.name.removeprefix("trial-")
    return int(number) if number.isascii() and number.isdigit() else None


def _read_trial(directory: Path) -> Trial:
    run = read_json(directory / "run.json", "the set-up of a run")
    size = run.record("size")
    spec = _read_spec(run)
    size.require("server", size.count("server") > 0, "1 or more")
    is_right = spec.trial == _number(run.path)
    run.record("spec").require("trial", is_right, "the number of the directory")
    records = _read_records(directory / "records.jsonl")
    metrics = {name for record in records for name in record.metrics}
    done = max((record.round + 1 for record in records), default=0)
    result = _read_result(directory / "result.json")
    return Trial(
        number=spec.trial,
        spec=spec,
        run=run.values,
        rounds_done=done,
        rounds_planned=max(spec.rounds, done),
        relative_size=size.count("client") / size.count("server"),
        split=run.text("curve", ""),
        curves={name: curve_of(records, name) for name in sorted(metrics)},
        # Records beyond the result are of a run that was asked to go on and has not ended yet.
        result=result if result is not None and result.rounds >= done else None,
    )


def _read_spec(run: Fields) -> RunSpec:
    """The record of a run; an error names the file."""
    try:
        return RunSpec.read(run.record("spec").values)
    except InputError as error:
        wrong = f"{short(run.path)}: {error.wrong}"
        raise InputError(wrong, got=error.got, allowed=error.allowed, fix=error.fix) from error


def _read_records(path: Path) -> list[RoundRecord]:
    """The records of a run that may have none yet; an error names the file."""
    try:
        records = decode_records(path.read_bytes()) if path.exists() else []
    except InputError as error:
        wrong = f"{short(path)}: {error.wrong}"
        raise InputError(wrong, got=error.got, allowed=error.allowed, fix=error.fix) from error
    for line, record in enumerate(records, 1):
        fields = Fields(record.__dict__, path, "the records of a run", f"line {line}, ")
        fields.count("round")
        fields.numbers("metrics")
    return records


def _read_result(path: Path) -> TrialResult | None:
    if not path.exists():
        return None
    fields = read_json(path, "the result of a run")
    return TrialResult(
        rounds=fields.count("rounds"),
        seconds=fields.require_number("seconds"),
        metrics=fields.numbers("metrics"),
    )
