"""Describes the runs and rounds of a folder as plain values, for a page and for the command line.

What is told of a run is what `keyhole report` tells: the same curves, costs, bytes beside broadcast
and who learned what. Files that have not changed are not read again, and of records that have grown
the new lines alone. Nothing outside the folder is read, whatever links in it say; what cannot be
read is named, and hides nothing else. Texts of files and names of folders are told without what
could steer a terminal, or has no place in JSON.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from keyhole.errors import InputError, KeyholeError
from keyhole.experiments.measuring import BESIDE
from keyhole.experiments.report.reading import trial_number, trial_of
from keyhole.experiments.report.results import Curve, Series, Trial
from keyhole.experiments.report.writing import is_share, metric_name, shorten_names
from keyhole.experiments.statistics import Spread, numbers_of
from keyhole.rounds.record import RoundRecord, decode_records
from keyhole.service.directory import COHORT, CURRENT, MANIFEST, read_current, round_path
from keyhole.service.lobby import WAITING
from keyhole.service.spool import REFUSED
from keyhole.service.status import PROGRESS, UPDATES, RoundFiles, counted, has_rounds

Told: TypeAlias = dict[str, Any]
"""A JSON object."""

_FILES = "run.json", "records.jsonl", "result.json"
_LISTS = ("late", "stale", "refused", "empty", "lost_before", "lost_after")  # of a record
_OF_ROUNDS = CURRENT, PROGRESS, "rounds"
_KEPT = 16  # trials whose records stay in memory: those looked at last
_MAX_DEPTH = 6  # of folders below the one that is watched


@dataclass
class _Records:
    """Records of a file as far as it was read."""

    file: int = -1  # its inode: a run that goes on replaces the file
    read: int = 0  # bytes
    found: list[RoundRecord] = field(default_factory=list)


@dataclass(frozen=True)
class _Known:
    """What is kept of a trial whose records are not."""

    version: object  # of its files
    trial: Trial
    empty: int  # rounds
    are_maxima: bool


@dataclass
class RunFolder:
    """The folder that is watched: of runs, of rounds, or of folders with such.

    Args:
        root: where links are followed to, and no further.
        names: whether devices that a round waits for are named; counts alone are shown otherwise.
        patience: seconds after which a look leaves the runs that it has not read to the next one.
        now: unix seconds.
    """

    root: Path
    names: bool = False
    now: Callable[[], float] = time.time
    patience: float = math.inf
    _records: dict[Path, _Records] = field(default_factory=dict, repr=False)
    _files: dict[Path, RoundFiles] = field(default_factory=dict, repr=False)
    _trials: dict[Path, _Known] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.root = self.root.resolve()

    def overview(self) -> Told:
        """Returns a line for every run, how rounds stand, and what could not be read."""
        runs, rounds, troubles, unread = [], [], [], 0
        until = time.monotonic() + self.patience
        for kind, path in sorted(self._places(), key=self._changed, reverse=True):
            if kind == "run" and time.monotonic() > until and not self._is_known(path):
                unread += 1
                continue
            try:
                if kind == "run":
                    runs.append(self._line(path))
                elif (status := self._rounds(path)) is not None:
                    rounds.append(status)
            except (KeyholeError, OSError, OverflowError) as error:
                troubles.append(f"{self._name(path)}: {_words(error)}")
        runs.sort(key=lambda run: -run["changed"])
        shorts = shorten_names([run["label"] for run in runs]) if len(runs) > 1 else []
        for run, short in zip(runs, shorts or [run["label"] for run in runs], strict=True):
            run["short"] = short
        told = {"folder": self.root.name, "runs": runs, "rounds": rounds, "troubles": troubles}
        whole: Told = printable(told | {"unread": unread, "now": self.now()})
        return whole

    def run(self, name: str) -> Told:
        """Returns everything that the page shows of a run.

        Raises:
            InputError: the folder has no run of this name, or a file of it is damaged.
        """
        runs = (path for kind, path in self._places() if kind == "run")
        found = (path for path in runs if printable(self._name(path)) == name)
        path = next(found, None)
        if path is None:
            raise InputError(
                f"no such run: got {name!r}; expected one of those in {self.root.name}; take its "
                "name from the list"
            )
        told = _described(self._line(path), self._series(path), self._newest(path))
        whole: Told = printable(told)
        return whole

    def _places(self) -> Iterator[tuple[str, Path]]:
        """Folders of runs and of rounds, by name; links that lead out are passed over."""
        here = self.root.parent if trial_number(self.root) is not None else self.root
        self.root = here
        for folder, names, files in os.walk(here):
            path = Path(folder)
            if any(trial_number(path / n) is not None and self._is_run(path / n) for n in names):
                yield "run", path
            if CURRENT in files:
                names[:] = [n for n in names if has_rounds(path / n)]  # of runs beside it
                if all(self._is_here(path / n) for n in _OF_ROUNDS):
                    yield "rounds", path
            depth = len(path.relative_to(here).parts)
            names[:] = sorted(n for n in names if trial_number(path / n) is None)
            if depth >= _MAX_DEPTH:
                names.clear()

    def _is_run(self, trial: Path) -> bool:
        """Whether a trial was begun here, and all that is read of it lies in the folder."""
        if trial.is_symlink() or not (trial / _FILES[0]).is_file():
            return False
        return all(self._is_here(trial / name) for name in _FILES)

    def _is_here(self, path: Path) -> bool:
        """Whether it is missing, or a file or folder below the one that is watched: no link that
        leads out, and no pipe, which would be waited for."""
        is_plain = path.is_file() or path.is_dir() or not path.exists()
        return is_plain and path.resolve().is_relative_to(self.root)

    def _name(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    def _label(self, path: Path) -> str:
        return path.name if path == self.root else self._name(path)

    def _rounds(self, path: Path) -> Told | None:
        files = self._files.setdefault(path, RoundFiles(path))
        current = read_current(path)
        if current is None or not all(map(self._is_here, _of_round(path, current.round))):
            return None
        status = files.status(self.now())
        if status is None:
            return None
        named = {"missing": files.missing()} if self.names else {}
        facts: Told = msgspec.to_builtins(status)
        return {"name": self._label(path), "told": status.told, **named, **facts}

    def _series(self, path: Path) -> Series:
        trials = tuple(self._trial(trial) for trial in self._trial_folders(path))
        metric = str(trials[0].run.get("metric", "")) if trials else ""
        return Series("", self._label(path), None, path.name, metric, trials)

    def _trial_folders(self, path: Path) -> list[Path]:
        found = [each for each in path.glob("trial-*") if trial_number(each) is not None]
        return sorted((t for t in found if self._is_run(t)), key=lambda t: trial_number(t) or 0)

    def _newest(self, path: Path) -> Sequence[RoundRecord]:
        """The records of the first trial, which stand for the others round by round."""
        folders = self._trial_folders(path)
        return self._records_of(folders[0]) if folders else ()

    def _trial(self, path: Path) -> Trial:
        """A trial, read again where one of its files has changed."""
        version, known = _versions(path), self._trials.get(path)
        if known is None or known.version != version:
            records = self._records_of(path)
            empty = sum(record.is_skipped for record in records)
            are_maxima = any(record.are_maxima for record in records)
            known = _Known(version, trial_of(path, records), empty, are_maxima)
            self._trials[path] = known
        return known.trial

    def _is_known(self, path: Path) -> bool:
        """Whether nothing of a run has to be read again."""
        known = ((self._trials.get(trial), trial) for trial in self._trial_folders(path))
        return all(it is not None and it.version == _versions(trial) for it, trial in known)

    def _changed(self, place: tuple[str, Path]) -> int:
        """When something of a run or of rounds changed last."""
        trials = self._trial_folders(place[1])
        return max((_version(t / name)[1] for t in trials for name in _FILES), default=0)

    def _records_of(self, trial: Path) -> list[RoundRecord]:
        """The records of a trial; of a file that has grown, what is new is read."""
        known, path = self._records.pop(trial, _Records()), trial / _FILES[1]
        try:
            found = path.stat()
        except FileNotFoundError:
            return []
        self._records = dict([*self._records.items(), (trial, known)][-_KEPT:])  # the last used
        if known.file != found.st_ino or found.st_size < known.read:
            known = self._records[trial] = _Records(found.st_ino)
        if found.st_size > known.read:
            with path.open("rb") as file:
                file.seek(known.read)
                new = file.read()
            whole = new[: new.rfind(b"\n") + 1]  # the last line may be half written
            known.found = [*known.found, *decode_records(whole)]
            known.read += len(whole)
        return known.found

    def _line(self, path: Path) -> Told:
        """What the list says of a run."""
        line, folders = self._series(path), self._trial_folders(path)
        if not line.trials:
            raise InputError("a run has gone: got no trial; expected one or more; look again")
        first, costs = line.trials[0], line.costs
        reached, known = line.test or line.last, self._trials[folders[0]]
        return {
            "name": self._name(path),
            "label": line.label,
            "task": first.spec.task.name,
            "delivery": first.title("delivery"),
            "aggregation": first.title("aggregation"),
            "trials": len(line.trials),
            "finished": len(line.finished),
            "rounds": min(trial.rounds_done for trial in line.trials),
            "planned": max(trial.rounds_planned for trial in line.trials),
            "changed": self._changed(("run", path)) / 1e9,
            "metric": line.metric,
            "metric_title": metric_name(line.metric),
            "is_share": is_share(line.metric),
            "split": first.tested_on if line.test else first.split,
            "reached": _number(reached.mean) if reached else None,
            "half_width": _number(reached.half_width) if reached else None,
            "bytes": costs.bytes_down + costs.bytes_up if costs else None,
            "are_maxima": known.are_maxima,
            "broadcast_bytes": first.broadcast_bytes,
            "epsilon": _number(costs.epsilon) if costs and costs.epsilon is not None else None,
            "is_private": costs is not None and costs.epsilon is not None,
            "empty": known.empty,
        }


def _of_round(path: Path, round_id: str) -> Iterator[Path]:
    """What is read of a round, in the rounds directory at `path`."""
    of_round, updates = round_path(path, round_id), path / UPDATES / round_id
    yield from (of_round / COHORT, of_round / MANIFEST, updates / REFUSED, path / WAITING)


def _described(line: Told, series: Series, records: Sequence[RoundRecord]) -> Told:
    """Everything that the page shows of a run."""
    metrics = {name for trial in series.trials for name in trial.curves}
    first, costs = series.trials[0], series.costs
    learned = (
        []
        if costs is None
        else [
            (party, costs.seen_by.get(party, "nothing"), costs.seen_in_sum.get(party, "nothing"))
            for party in dict.fromkeys([*costs.seen_by, *costs.seen_in_sum])
        ]
    )
    return {
        **line,
        "curves": {
            name: _curve(series, name)
            for name in sorted(metrics, key=lambda name: (name != series.metric, name))
        },
        "split_of_curves": {
            name: "" if first.spec.cohort.evaluators and name.startswith(BESIDE) else first.split
            for name in sorted(metrics)
        },
        "tests": {name: _told(series.test_of(name)) for name in series.metrics},
        "bytes_down": costs.bytes_down if costs else None,
        "bytes_up": costs.bytes_up if costs else None,
        "cohorts": _cohorts(records),
        "learned": learned,
        "privacy": dict(records[-1].privacy) if records else {},
        "incidents": list(_incidents(records)),
        "settings": {name: str(value) for name, value in first.settings.items()},
        "differing": series.differing,
        "ends": [
            f"trial {trial.number}: {trial.result.told}"
            for trial in series.finished
            if trial.result is not None and trial.result.told
        ],
    }


def _curve(series: Series, metric: str) -> Told:
    """A metric over rounds: the mean with its interval, and each trial."""
    curve: Curve = series.curve_of(metric)
    halves = [spread.half_width or 0.0 for spread in curve.spreads]
    pairs = list(zip(curve.mean, halves, strict=True))
    return {
        "title": metric_name(metric),
        "is_share": is_share(metric),
        "rounds": curve.rounds,
        "mean": [_number(mean) for mean in curve.mean],
        "low": [_number(mean - half) for mean, half in pairs],
        "high": [_number(mean + half) for mean, half in pairs],
        "trials": [
            {
                "trial": trial.number,
                "rounds": list(found),
                "values": list(map(_number, found.values())),
            }
            for trial in series.trials
            if (found := trial.curves.get(metric))
        ],
    }


def _cohorts(records: Sequence[RoundRecord]) -> Mapping[str, list[Any]]:
    """What became of each round's clients, as counts, and their bytes."""
    counts = {name: [len(getattr(r, name)) for r in records] for name in _LISTS}
    return {
        "round": [record.round for record in records],
        "asked": [len(record.clients) for record in records],
        "added": [len(record.staleness) for record in records],
        **counts,
        "closed": [record.closed for record in records],
        "is_skipped": [record.is_skipped for record in records],
        "bytes_down": [_mean(record.bytes_down) for record in records],
        "bytes_up": [_mean(record.bytes_up) for record in records],
    }


def _incidents(records: Sequence[RoundRecord]) -> Iterator[tuple[int, str]]:
    """Rounds in which something went wrong, the newest first."""
    for record in reversed(records):
        yield from ((record.round, incident) for incident in record.incidents)
        if record.is_skipped:
            yield record.round, record.told
        if record.outliers or record.above_norm:
            what = f"{counted(record.above_norm, 'update')} above the max norm, "
            yield record.round, f"{what}{record.outliers} beyond the norm alarm"


def _told(spread: Spread | None) -> Told | None:
    return None if spread is None else {k: _number(v) for k, v in numbers_of(spread, None).items()}


def _mean(values: Sequence[int]) -> float | None:
    return sum(values) / len(values) if values else None


def printable(told: Any) -> Any:
    """Returns plain values with texts that can be printed and sent: characters that could steer a
    terminal, and bytes of names that are no text, as the escapes that Python writes for them.

    >>> printable({"name": "run\\x1b[2J"})
    {'name': 'run\\\\x1b[2J'}
    """
    if isinstance(told, str):
        return told if told.isprintable() else "".join(map(_escaped, told))
    if isinstance(told, Mapping):
        return {printable(name): printable(value) for name, value in told.items()}
    if isinstance(told, list | tuple):
        return type(told)(map(printable, told))
    return told


def _escaped(letter: str) -> str:
    return letter if letter.isprintable() else letter.encode("unicode_escape").decode("ascii")


def _number(value: Any) -> Any:
    """JSON has neither NaN nor infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _versions(trial: Path) -> object:
    """What changes with a trial."""
    return tuple(_version(trial / name) for name in _FILES)


def _version(path: Path) -> tuple[int, int, int]:
    """What changes with a file; zeros where there is none."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return (0, 0, 0)
    return found.st_ino, found.st_mtime_ns, found.st_size


def _words(error: Exception) -> str:
    return str(error) if isinstance(error, KeyholeError) else type(error).__name__
