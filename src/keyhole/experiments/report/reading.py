"""Reads sweeps and runs from the directory that holds them.

A JSON file is read as what it should be, or refused by the name of the field.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from os.path import commonpath
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec
from msgspec import Meta, Struct

from keyhole.errors import InputError, worded
from keyhole.experiments.measuring import measured_on
from keyhole.experiments.report.results import (
    OVERVIEW,
    Costs,
    Kind,
    Series,
    SweepResults,
    Trial,
    TrialResult,
    broadcast_bytes,
)
from keyhole.experiments.trial import Best, told_of
from keyhole.rounds.record import RoundRecord, metrics_from_json, read_records
from keyhole.rounds.spec import RunSpec
from keyhole.wire.settings import HELD_OUT_SHARE


class _Read(Struct, frozen=True):
    """Fields of a JSON object; others are ignored. Texts are printable, numbers finite."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, str) and not value.isprintable():
                raise ValueError(f"{name} is not printable text on one line")
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{name} is not a finite number")


_Count: TypeAlias = Annotated[int, Meta(ge=0)]


class _Best(_Read, frozen=True):
    rounds: _Count
    metric: str
    value: float
    metrics: dict[str, float | None]


class _Result(_Read, frozen=True):
    rounds: _Count
    seconds: float
    metrics: dict[str, float | None]  # null where it is not finite
    best: _Best | None = None
    stopped: str | None = None


class _Line(_Read, frozen=True):
    label: str
    arm: str
    panel: str = ""
    x: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        # A name, not a path: a sweep must not lead the reader out of its directory.
        if Path(self.arm).name != self.arm or self.arm == "..":
            raise ValueError("arm is not the name of a directory")


class _Sweep(_Read, frozen=True):
    sweep: str
    title: str
    scale: str
    data: str
    metric: str
    figures: list[Kind]
    lines: Annotated[list[_Line], Meta(min_length=1)]
    x_label: str = ""
    trials: _Count = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if len({(line.panel, line.label) for line in self.lines}) < len(self.lines):
            raise ValueError("two lines of a panel are alike")


class _Size(_Read, frozen=True):
    server: Annotated[int, Meta(ge=1, lt=1 << 62)]
    client: Annotated[int, Meta(ge=0, lt=1 << 62)]


class _Run(_Read, frozen=True):
    spec: dict[str, Any]
    size: _Size
    metric: str = ""
    curve: str = ""
    titles: dict[str, str] = msgspec.field(default_factory=dict)


def curve_of(records: Iterable[RoundRecord], metric: str) -> dict[int, float]:
    """Returns rounds done -> value, where a round was evaluated: the record of round t tells the
    state after t + 1 rounds."""
    return {r.round + 1: r.metrics[metric] for r in records if metric in r.metrics}


_T = TypeVar("_T", bound=_Read)


def read_results(
    *outs: Path, on_skip: Callable[[str], None] = lambda _: None
) -> list[SweepResults]:
    """Returns the sweeps of directories, each with what there is of its trials, and then the runs
    that no sweep names, by task.

    Args:
        outs: where `keyhole sweep`, `keyhole train` or `kh.train` wrote, folders of such at any
            depth, or single runs.
        on_skip: called with a sentence on each file that is left out: JSON that is no sweep, and a
            second sweep of one name.

    Raises:
        InputError: a directory has neither, or a file of a sweep or a run is damaged.
    """
    trials: dict[Path, tuple[Trial, ...]] = {}
    roots = {out: _root(out) for out in outs}
    arms = {run.parent.parent for root in roots.values() for run in root.rglob("trial-*/run.json")}
    sweeps: dict[str, SweepResults] = {}
    files = list(_sweep_files({*roots.values()}, arms, on_skip))
    for path in files:
        sweep = _read_sweep(path, trials)  # its runs are known then, and no runs of their own
        if sweep.name in sweeps:
            on_skip(f"{path} is left out: another folder has a sweep {sweep.name}; name its folder")
        sweeps.setdefault(sweep.name, sweep)
    found = {arm: read_trials(arm) for arm in sorted(arms - trials.keys())}
    runs = {arm: begun for arm, begun in found.items() if begun}
    for out, root in roots.items():
        if not any(path.is_relative_to(root) for path in (*files, *runs)):
            raise InputError(
                f"{out} holds no sweep and no run: got no .json file of one; expected the --out "
                "of `keyhole sweep` or `keyhole train`; run one of them first, or point at its "
                "directory"
            )
    common = Path(commonpath(roots.values()))
    tasks = sorted({begun[0].spec.task.name for begun in runs.values()})
    return [*sweeps.values(), *(_group(task, runs, common) for task in tasks)]


def _root(out: Path) -> Path:
    """The directory whose runs are meant: of one trial, that of all trials."""
    root = out.resolve()
    return root if trial_number(root) is None else root.parent


def _sweep_files(
    roots: set[Path], arms: set[Path], on_skip: Callable[[str], None]
) -> Iterator[Path]:
    """The files of sweeps, which stand beside their runs; tells of other JSON there."""
    for folder in sorted(roots | {arm.parent for arm in arms - roots}):
        for path in sorted(folder.glob("*.json")):
            try:
                is_sweep = "sweep" in _load(path, "a sweep")
            except InputError:
                is_sweep = False
            if is_sweep:
                yield path
            else:
                on_skip(f"{path} is left out: it is no sweep of `keyhole sweep`")


def _read_sweep(path: Path, known: dict[Path, tuple[Trial, ...]]) -> SweepResults:
    """Reads a sweep; trials of an arm that several sweeps share are read once, into `known`."""
    told = _convert(_load(path, "a sweep"), _Sweep, path, "a sweep")
    if told.sweep != path.stem:
        raise _foreign(path, "a sweep", f"sweep {told.sweep!r} in a file of another name")
    lines = [_read_line(line, path, told.metric, known) for line in told.lines]
    seen = (trial.number + 1 for line in lines for trial in line.trials)
    return SweepResults(
        name=path.stem,
        title=told.title,
        scale=told.scale,
        data=told.data,
        metric=told.metric,
        figures=tuple(told.figures),
        x_label=told.x_label,
        lines=tuple(lines),
        trials=told.trials or max(seen, default=0),
    )


def _read_line(
    told: _Line, path: Path, metric: str, known: dict[Path, tuple[Trial, ...]]
) -> Series:
    arm = path.parent / told.arm
    if arm not in known:
        known[arm] = read_trials(arm)
    for trial in known[arm]:
        if trial.result is not None and metric not in trial.result.metrics:
            got = f"metric {metric!r}, which trial {trial.number} of {told.arm} did not measure"
            raise _foreign(path, "a sweep", got)
    return Series(told.panel, told.label, told.x, told.arm, metric, known[arm])


def _group(task: str, runs: Mapping[Path, tuple[Trial, ...]], root: Path) -> SweepResults:
    """The runs of one task, each called as its directory, without the name of the task."""
    own = {arm: trials for arm, trials in runs.items() if trials[0].spec.task == task}
    first, called = next(iter(own.values()))[0], task.replace(":", ".")  # as in names of files
    metric = str(first.run.get("metric", ""))
    names = [arm.name for arm in own]
    lines = []
    for arm, trials in own.items():
        is_only = names.count(arm.name) == 1
        label = arm.name.removeprefix(f"{called}-") if is_only else str(arm.relative_to(root))
        lines.append(Series("", label, None, arm.name, metric, trials))
    return SweepResults(
        name=f"{called.replace('_', '-')}-runs",
        title=f"Runs of {task}",
        scale="",
        data=first.spec.data.name,
        metric=metric,
        figures=(OVERVIEW,),
        x_label="",
        lines=tuple(lines),
        trials=max(len(line.trials) for line in lines),
    )


def read_trials(directory: Path) -> tuple[Trial, ...]:
    """Returns the trials of an arm that were begun; a directory without run.json was not."""
    paths = [path.parent for path in directory.glob("trial-*/run.json")]
    trials = [
        trial_of(path, _read_records(path / "records.jsonl"))
        for path in paths
        if trial_number(path) is not None
    ]
    return tuple(sorted(trials, key=lambda trial: trial.number))


def trial_number(directory: Path) -> int | None:
    """Returns the k of trial-<k>; None where a directory is called otherwise."""
    number = directory.name.removeprefix("trial-")
    is_trial = directory.name.startswith("trial-") and number.isascii() and number.isdigit()
    return int(number) if is_trial else None


def trial_of(directory: Path, records: Sequence[RoundRecord]) -> Trial:
    """Returns a trial that was begun, with these records of its rounds.

    Raises:
        InputError: a file of it is damaged, or belongs to another directory.
    """
    path, what = directory / "run.json", "the set-up of a run"
    run = _load(path, what)
    told = _convert(run, _Run, path, what)
    try:
        spec = RunSpec.read_older(told.spec)
    except InputError as error:
        raise _naming(path, error) from error
    except UnicodeEncodeError as error:  # half a letter, which JSON can hold
        raise _foreign(path, what, str(error)) from error
    if spec.trial != trial_number(directory):
        raise _foreign(path, what, f"spec.trial {spec.trial} in another directory")
    try:
        costs = _costs(records)
    except OverflowError as error:
        raise _foreign(directory / "records.jsonl", "the records of a run", str(error)) from error
    metrics = {name for record in records for name in record.metrics} - {HELD_OUT_SHARE}
    last = next((record.metrics for record in reversed(records) if record.metrics), {})
    done = max((record.round + 1 for record in records), default=0)
    result = _read_result(directory / "result.json")
    return Trial(
        number=spec.trial,
        spec=spec,
        run=run,
        rounds_done=done,
        relative_size=told.size.client / told.size.server,
        broadcast_bytes=broadcast_bytes(told.size.server),
        split=measured_on(spec, last, told.curve),
        curves={name: curve_of(records, name) for name in sorted(metrics)},
        costs=costs,
        # Records beyond the result are of a run that was asked to go on and has not ended yet.
        result=result if result is not None and result.rounds >= done else None,
    )


def _read_records(path: Path) -> list[RoundRecord]:
    """The records of a run that may have none yet."""
    try:
        records = read_records(path)
    except InputError as error:
        raise _naming(path, error) from error
    for record in records:
        if min(record.round, *record.bytes_down, *record.bytes_up, 0) < 0:
            got = f"a round or bytes below 0 in round {record.round}"
            raise _foreign(path, "the records of a run", got)
    return records


def _read_result(path: Path) -> TrialResult | None:
    if not path.exists():
        return None
    what = "the result of a run"
    told = _convert(_load(path, what), _Result, path, what)
    kept = None
    if (best := told.best) is not None:
        kept = Best(best.rounds, best.metric, best.value, metrics_from_json(best.metrics))
    said = told_of(kept, told.rounds, told.stopped)
    return TrialResult(told.rounds, told.seconds, metrics_from_json(told.metrics), said)


def _costs(records: Sequence[RoundRecord]) -> Costs | None:
    """Means over all clients and rounds; what parties learned in any round.

    Raises:
        OverflowError: numbers that no run has.
    """
    down = [count for record in records for count in record.bytes_down]
    up = [count for record in records for count in record.bytes_up]
    if not down or not up:
        return None
    spent = records[-1].privacy
    epsilon = spent.get("epsilon")  # has no number where there is no bound
    bound = float(epsilon) if isinstance(epsilon, int | float) else math.inf
    return Costs(
        bytes_down=statistics.fmean(down),
        bytes_up=statistics.fmean(up),
        epsilon=bound if spent else None,
        seen_by={party: what for record in records for party, what in record.seen_by.items()},
        seen_in_sum={party: w for record in records for party, w in record.seen_in_sum.items()},
    )


def _load(path: Path, what: str) -> dict[str, Any]:
    """The JSON object in a file; unlike msgspec, the module `json` reads NaN as it writes it."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise _foreign(path, what, f"{type(error).__name__}: {error}") from error
    if not isinstance(value, dict):
        raise _foreign(path, what, f"{type(value).__name__} in place of an object")
    return value


def _convert(value: Mapping[str, Any], kind: type[_T], path: Path, what: str) -> _T:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise _foreign(path, what, str(error).replace("`$.", "`")) from error


def _short(path: Path) -> str:
    """The end of a path, enough to find the file: trial-0/run.json is too little."""
    return "/".join(path.parts[-3:]) if path.parent.name.startswith("trial-") else path.name


def _foreign(path: Path, what: str, got: str) -> InputError:
    return InputError(
        f"{_short(path)} is not {what}: got {got}; expected JSON as `keyhole sweep` and `keyhole "
        "train` write it; restore it from a copy, or leave the run out"
    )


def _naming(path: Path, error: InputError) -> InputError:
    """The same error with the name of the file."""
    wrong = f"{_short(path)}: {error.wrong}"
    return InputError(worded(wrong, error.got, error.allowed, error.fix))
