"""Keeps the finished runs of a sweep in one small JSON file, from which figures and tables are made
again without its runs.

A file has the curve of each run, its test metrics, what it cost, and how to make it again: the
record of the run, data by their digest, the commit, the command, the day.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from keyhole.errors import InputError
from keyhole.experiments.report.reading import read_results
from keyhole.experiments.report.results import (
    Costs,
    Series,
    SweepResults,
    Trial,
    TrialResult,
    broadcast_bytes,
)
from keyhole.experiments.specs import defaults_of
from keyhole.experiments.trial import find_result
from keyhole.files import storage_errors
from keyhole.rounds.fields import flatten
from keyhole.rounds.record import metrics_from_json, metrics_to_json
from keyhole.rounds.spec import RunSpec

DIGITS = 5
"""Of the points of a curve; test metrics are kept as they are."""

_Count = Annotated[int, Meta(ge=0)]


class KeptLine(Struct, frozen=True, kw_only=True):
    """A line of a sweep, and what tells its runs from those of the first line.

    Args:
        changes: dotted names of fields of the record, and their values here.
        size: numbers that the server holds, and at most a client; None before the first run.
    """

    panel: str
    label: str
    x: float | None
    arm: str
    changes: dict[str, Any]
    size: dict[str, _Count] | None = None


class KeptRun(Struct, frozen=True, kw_only=True):
    """A finished run.

    Args:
        run: digest of what decides its result, as in its `result.json`.
        date: the day, in UTC, on which it ended.
        commit: of the tree that ran it.
        at: the rounds after which the metric of the sweep was measured.
        curve: the metric then; None where it was not finite.
        metrics: on the test data; None where one is not finite.
        bytes_down: that a client received in a round, on average over clients and rounds.
        epsilon: spent; None without privacy, -1 without a bound.
    """

    arm: str
    trial: _Count
    run: str
    date: str
    commit: str
    rounds: _Count
    seconds: float
    at: list[int]
    curve: list[float | None]
    metrics: dict[str, float | None]
    bytes_down: float
    bytes_up: float
    epsilon: float | None = None


class KeptSweep(Struct, frozen=True, kw_only=True):
    """A sweep with its finished runs.

    Args:
        command: that runs what is missing.
        split: of the data, on which curves were measured.
        dataset: what `run.json` says of the data.
        spec: the record of the runs of the first line.
    """

    sweep: str
    title: str
    scale: str
    metric: str
    figures: list[str]
    x_label: str
    trials: _Count
    command: str
    split: str
    dataset: dict[str, Any]
    versions: dict[str, str]
    spec: dict[str, Any]
    lines: list[KeptLine]
    runs: list[KeptRun]

    @property
    def results(self) -> SweepResults:
        """The sweep as the report reads it from its runs."""
        return SweepResults(
            name=self.sweep,
            title=self.title,
            scale=self.scale,
            data=str(self.dataset.get("name", "")),
            metric=self.metric,
            figures=tuple(self.figures),
            x_label=self.x_label,
            lines=tuple(self._series(line) for line in self.lines),
            trials=self.trials,
        )

    def _series(self, line: KeptLine) -> Series:
        own = (run for run in self.runs if run.arm == line.arm)
        trials = tuple(self._trial(line, run) for run in own)
        return Series(line.panel, line.label, line.x, line.arm, self.metric, trials)

    def spec_of(self, line: KeptLine) -> RunSpec:
        """Returns the record of the runs of a line, of trial 0. Fields that records did not have
        when it was kept are those of the task."""
        told = {name: value for name, value in self.spec.items() if name != "version"}
        task = told["task"]  # one of your own has an identity beside its name
        name = task["name"] if isinstance(task, dict) else task
        return defaults_of(name).changed(told).changed(line.changes)

    def holds(self, arm: str, spec: RunSpec, trial: int, dataset: Mapping[str, Any]) -> bool:
        """Returns whether a run is kept that had this record and these data.

        Args:
            spec: as an experiment on its data has it, of any trial.
            dataset: as `run.json` has it.
        """
        if json.loads(json.dumps(dataset)) != self.dataset:
            return False
        known = {line.arm: line for line in self.lines}
        return any(
            (run.arm, run.trial) == (arm, trial) and self.spec_of(known[arm]) == spec.with_trial(0)
            for run in self.runs
        )

    def _trial(self, line: KeptLine, run: KeptRun) -> Trial:
        assert line.size is not None  # there is a run
        bound = math.inf if run.epsilon == -1 else run.epsilon
        curve = (math.nan if value is None else value for value in run.curve)
        return Trial(
            number=run.trial,
            spec=self.spec_of(line).with_trial(run.trial),
            run={"dataset": self.dataset, "versions": self.versions, "metric": self.metric},
            rounds_done=run.rounds,
            relative_size=line.size["client"] / line.size["server"],
            broadcast_bytes=broadcast_bytes(line.size["server"]),
            split=self.split,
            curves={self.metric: dict(zip(run.at, curve, strict=True))},
            costs=Costs(run.bytes_down, run.bytes_up, bound, {}, {}),
            result=TrialResult(run.rounds, run.seconds, metrics_from_json(run.metrics)),
        )

    def with_runs_of(self, other: KeptSweep) -> KeptSweep:
        """Returns this with the runs of lines of its own that only the other has: runs that were
        kept before and whose folders are gone."""
        known = {(run.arm, run.trial) for run in self.runs}
        theirs = {line.arm: line for line in other.lines if line.size}
        lines = [self._filled(line, other, theirs.get(line.arm)) for line in self.lines]
        order = [line.arm for line in lines]
        specs = {line.arm: self.spec_of(line) for line in lines if line.arm in theirs}
        more = [
            run
            for run in other.runs
            if run.arm in specs
            and (run.arm, run.trial) not in known
            and other.holds(run.arm, specs[run.arm], run.trial, self.dataset)
        ]
        runs = sorted([*self.runs, *more], key=lambda run: (order.index(run.arm), run.trial))
        return msgspec.structs.replace(self, lines=lines, runs=runs)

    def _filled(self, line: KeptLine, other: KeptSweep, theirs: KeptLine | None) -> KeptLine:
        """A line of ours that has no run yet, as the other's runs are."""
        if line.size is not None or theirs is None:
            return line
        base = self.spec_of(msgspec.structs.replace(line, changes={}))
        changes = changes_of(base, other.spec_of(theirs))
        return msgspec.structs.replace(line, changes=changes, size=theirs.size)


def changes_of(base: RunSpec, spec: RunSpec) -> dict[str, Any]:
    """Returns dotted name -> value in `spec`, where it differs from `base`."""
    usual, own = flatten(base.describe()), flatten(spec.describe())
    return {name: value for name, value in own.items() if usual.get(name) != value}


def keep_sweeps(out: Path, commit: str, commands: Mapping[str, str]) -> list[KeptSweep]:
    """Returns the sweeps of a folder, at any depth, with their finished runs.

    Args:
        commit: of the tree that ran them.
        commands: sweep -> what runs it; `keyhole sweep NAME` where it has none.

    Raises:
        InputError: the folder holds no sweep, or a file of a run is damaged.
    """
    folders = sorted({path.parent for path in out.rglob("*.json") if _is_sweep(path)})
    if not folders:
        raise InputError(
            f"{out} holds no sweep: got no .json file of one; expected the --out of `keyhole "
            "sweep`; run one first, or name its folder"
        )
    kept = []
    for folder in folders:
        for sweep in read_results(folder):
            if sweep.is_sweep and (folder / f"{sweep.name}.json").exists():
                command = commands.get(sweep.name, f"keyhole sweep {sweep.name}")
                kept.append(_keep(sweep, folder, commit, command))
    return [sweep for sweep in kept if sweep.runs]


def _is_sweep(path: Path) -> bool:
    return (
        path.parent.name != "report"
        and path.name not in {"run.json", "result.json"}
        and (b'"sweep"' in path.read_bytes()[:200])
    )


def _keep(sweep: SweepResults, folder: Path, commit: str, command: str) -> KeptSweep:
    begun = [line for line in sweep.lines if line.finished]
    first = begun[0].finished[0] if begun else None
    base = first.spec.with_trial(0) if first else None
    return KeptSweep(
        sweep=sweep.name,
        title=sweep.title,
        scale=sweep.scale,
        metric=sweep.metric,
        figures=list(sweep.figures),
        x_label=sweep.x_label,
        trials=sweep.trials,
        command=command,
        split=first.split if first else "",
        dataset=dict(first.run.get("dataset", {})) if first else {},
        versions=dict(first.run.get("versions", {})) if first else {},
        spec=json.loads(json.dumps(base.describe())) if base else {},
        lines=[_keep_line(line, base) for line in sweep.lines],
        runs=list(
            {
                (line.arm, trial.number): _keep_run(line, trial, folder, commit)
                for line in begun
                for trial in line.finished
            }.values()
        ),
    )


def _keep_line(line: Series, base: RunSpec | None) -> KeptLine:
    """A line; one that has no finished run has neither changes nor a size yet."""
    trial = line.finished[0] if line.finished else None
    return KeptLine(
        panel=line.panel,
        label=line.label,
        x=line.x,
        arm=line.arm,
        changes=changes_of(base, trial.spec.with_trial(0)) if base and trial else {},
        size=trial.run["size"] if trial else None,
    )


def _keep_run(line: Series, trial: Trial, folder: Path, commit: str) -> KeptRun:
    path = folder / line.arm / f"trial-{trial.number}"
    result = find_result(path)
    assert result is not None  # it is finished
    ended = datetime.fromtimestamp((path / "result.json").stat().st_mtime, UTC)
    curve = trial.curves.get(line.metric, {})
    spent = trial.costs.epsilon if trial.costs else None
    return KeptRun(
        arm=line.arm,
        trial=trial.number,
        run=result.run,
        date=ended.date().isoformat(),
        commit=commit,
        rounds=result.rounds,
        seconds=round(result.seconds, 1),
        at=sorted(curve),
        curve=[_rounded(curve[done]) for done in sorted(curve)],
        metrics=metrics_to_json(result.metrics),
        bytes_down=round(result.bytes_down or 0.0, 1),
        bytes_up=round(result.bytes_up, 1),
        epsilon=-1.0 if spent == math.inf else spent,
    )


def _rounded(value: float) -> float | None:
    return round(value, DIGITS) if math.isfinite(value) else None


def read_kept(path: Path) -> KeptSweep:
    """Returns a sweep that was kept.

    Raises:
        InputError: the file cannot be read, or is none that `write_kept` wrote.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=KeptSweep)
    except (OSError, msgspec.DecodeError) as error:
        raise InputError(
            f"{path.name} is no kept sweep: got {error}; expected JSON as it was written; restore "
            "it from a copy, or keep the sweep again"
        ) from error


def write_kept(sweep: KeptSweep, folder: Path) -> Path:
    """Writes NAME.json, with the runs that an older file has and this sweep does not; returns its
    path. The same runs give the same bytes."""
    path = folder / f"{sweep.sweep}.json"
    if path.exists():
        sweep = sweep.with_runs_of(read_kept(path))
    with storage_errors(path, "write"):
        path.write_text(_to_text(msgspec.to_builtins(sweep)), encoding="utf-8")
    return path


def _to_text(told: Mapping[str, Any]) -> str:
    """JSON in which each line of a sweep and each run has a line of its own."""
    fields = (f" {json.dumps(name)}: {_write(value)}" for name, value in told.items())
    return "{\n" + ",\n".join(fields) + "\n}\n"


def _write(value: Any) -> str:
    is_table = isinstance(value, list) and any(isinstance(each, dict) for each in value)
    return "[\n" + _rows(value) + "\n ]" if is_table else json.dumps(value, ensure_ascii=False)


def _rows(values: Iterable[Any]) -> str:
    return ",\n".join(f"  {json.dumps(each, ensure_ascii=False)}" for each in values)
