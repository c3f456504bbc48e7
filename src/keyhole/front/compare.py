"""Compares runs: a table with intervals and paired differences, and a figure, for a paper."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from keyhole.errors import InputError
from keyhole.experiments.report.writing import (
    NOTHING,
    csv_table,
    latex_table,
    write_interval,
    write_kilobytes,
    write_p_value,
)
from keyhole.experiments.statistics import (
    NUMBERS,
    ArmTrials,
    Difference,
    Spread,
    differences,
    numbers_of,
    spreads_of,
)
from keyhole.files import make_directory, storage_errors
from keyhole.front.run import Against, TrainedRun, placed_curve
from keyhole.front.train import open_run

if TYPE_CHECKING:
    from keyhole.experiments.report.comparison import Drawing

Comparable: TypeAlias = TrainedRun | str | Path


@dataclass(frozen=True)
class ComparedRun:
    """One row of a comparison.

    Args:
        metrics: name -> mean and interval on the test split, over finished trials.
        trials: those that are finished.
        bytes_per_round: what a client received and sent in a round, on average.
        broadcast_bytes: what it would receive and send of the whole model.
        start: what its model started from, where that is no new one.
        differences: name -> what this run has more than the first, trial by trial; empty for the
            first, and where the two do not share seed and data.
        best: name -> the same as `metrics`, of the models that were best; empty where none is kept.
        best_rounds: rounds that were made when they were best, by trial.
        stopped: why trials ended early, each reason once.
    """

    label: str
    metrics: Mapping[str, Spread]
    trials: int
    rounds: int
    bytes_per_round: float
    broadcast_bytes: int
    start: str
    differences: Mapping[str, Difference]
    best: Mapping[str, Spread]
    best_rounds: tuple[int, ...]
    stopped: tuple[str, ...]


class Comparison:
    """Runs beside each other; the first is what the others are measured against.

    `print` shows the table. Intervals are 95 %, Student's, over trials; p-values are of paired
    tests, two-sided and not corrected for how many there are.

    Args:
        runs: label -> run.
    """

    def __init__(self, runs: Mapping[str, TrainedRun]) -> None:
        self.runs = dict(runs)
        first = next(iter(self.runs.values()))
        self.rows = [_compared(label, run, first) for label, run in self.runs.items()]

    def __str__(self) -> str:
        cells = self._cells()
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = [
            "  ".join(
                cell.rjust(width) if i else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in cells
        ]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return str(self)

    @property
    def metrics(self) -> list[str]:
        """The metrics that some run has, in order."""
        return list(dict.fromkeys(name for row in self.rows for name in row.metrics))

    def plot(
        self, metric: str, against: Against = "rounds", path: str | Path | None = None
    ) -> Drawing:
        """Draws a metric of every run, with bands of 95 % over trials; returns matplotlib's figure.

        Args:
            metric: one that was measured while the runs trained.
            against: "rounds", or "bytes" that a client has received and sent.
            path: where to write it, as .png, .svg or .pdf; None writes nothing.
        """
        from keyhole.experiments.report.comparison import draw_comparison, write_figure

        curves = {label: placed_curve(run, metric, against) for label, run in self.runs.items()}
        figure = draw_comparison(curves, metric, against)
        if path is not None:
            write_figure(figure, path)
        return figure

    def to_csv(self, path: str | Path | None = None) -> str:
        """Returns the numbers, unrounded, with a row for each run and metric; writes them to a
        file, too, if one is given."""
        rows = [_plain(row, metric) for row in self.rows for metric in self.metrics]
        return _written(csv_table(_COLUMNS, rows), path)

    def to_latex(self, path: str | Path | None = None) -> str:
        """Returns the table for LaTeX with the package booktabs; writes it to a file, too, if one
        is given."""
        return _written(latex_table(self._cells(), 1 + self._has_starts), path)

    def _cells(self) -> list[list[str]]:
        """The table as text, header first."""
        against = self.rows[0].label
        header = [
            "run",
            *(["start"] if self._has_starts else []),
            *self.metrics,
            "trials",
            "rounds",
            "KB a round",
            "of broadcast",
        ]
        if self._has_best:
            header += [*(f"best {metric}" for metric in self.metrics), "best after", "ended early"]
        for metric in self.metrics:
            header += [f"{metric} - {against}", "p"]
        return [header, *(self._row(row) for row in self.rows)]

    @property
    def _has_starts(self) -> bool:
        return any(row.start for row in self.rows)

    @property
    def _has_best(self) -> bool:
        return any(row.best for row in self.rows)

    def _row(self, row: ComparedRun) -> list[str]:
        share = row.bytes_per_round / row.broadcast_bytes
        cells = [row.label, *([row.start or NOTHING] if self._has_starts else [])]
        cells += [*(write_interval(row.metrics.get(name)) for name in self.metrics)]
        cells += [str(row.trials), str(row.rounds)]
        cells.append(write_kilobytes(row.bytes_per_round))
        cells.append(f"{share:.1%}")
        if self._has_best:
            cells += [write_interval(row.best.get(name)) for name in self.metrics]
            cells.append(", ".join(map(str, row.best_rounds)) or NOTHING)
            cells.append("; ".join(row.stopped) or NOTHING)
        for name in self.metrics:
            found = row.differences.get(name)
            cells.append(write_interval(found.spread if found else None, signed=True))
            cells.append(write_p_value(found.p_value if found else None))
        return cells


def compare(*runs: Comparable, **named: Comparable) -> Comparison:
    """Compares runs, or the directories that hold them; the others are measured against the first.

    Args:
        runs: called by their directories, or by their keys per client.
        named: label -> run.

    Raises:
        InputError: there are fewer than two, or a directory holds no run.
    """
    opened: list[tuple[str | None, Comparable]] = [(None, run) for run in runs]
    opened += named.items()
    found: dict[str, TrainedRun] = {}
    for label, given in opened:
        run = given if isinstance(given, TrainedRun) else open_run(given)
        wanted = label or run.label
        same = [each for each in found if each == wanted or each.startswith(f"{wanted} (")]
        found[f"{wanted} ({len(same) + 1})" if same else wanted] = run
    if len(found) < 2:
        raise InputError(
            f"nothing to compare with: got {len(found)} runs; expected two or more; pass another"
        )
    return Comparison(found)


def _compared(label: str, run: TrainedRun, first: TrainedRun) -> ComparedRun:
    finished = [trial for trial in run.trials if trial.result is not None]
    moved = [trial.bytes_per_round.mean() for trial in run.trials if len(trial.records)]
    results = [trial.result for trial in finished if trial.result is not None]
    best = [result.best for result in results if result.best is not None]
    return ComparedRun(
        label,
        run.spreads,
        len(finished),
        run.rounds,
        float(np.mean(moved)) if moved else math.nan,
        run.trials[0].broadcast_bytes,
        run.start,
        {} if run is first else differences(_trials_of(first), _trials_of(run)),
        spreads_of([each.metrics for each in best]),
        tuple(each.rounds for each in best),
        tuple(dict.fromkeys(result.stopped for result in results if result.stopped)),
    )


def _trials_of(run: TrainedRun) -> ArmTrials:
    """The finished trials of a run, as differences are taken between runs."""
    found = {trial.number: trial.result.metrics for trial in run.trials if trial.result}
    return ArmTrials((run.spec.seed, run.trials[0].asked["dataset"]), found)


_COSTS = "rounds", "bytes_per_round", "broadcast_bytes", "start"
_BEST = "best_mean", "best_rounds", "ended_early"
_COLUMNS = ("run", "metric", *NUMBERS, *_COSTS, *_BEST)


def _plain(row: ComparedRun, metric: str) -> dict[str, Any]:
    """A run and a metric as numbers; nothing where there is none."""
    costs = {name: getattr(row, name) for name in _COSTS}
    numbers = numbers_of(row.metrics.get(metric), row.differences.get(metric))
    best = row.best.get(metric)
    after, ended = " ".join(map(str, row.best_rounds)), "; ".join(row.stopped)
    kept = dict(zip(_BEST, ("" if best is None else best.mean, after, ended), strict=True))
    return {"run": row.label, "metric": metric, **numbers, **costs, **kept}


def _written(text: str, path: str | Path | None) -> str:
    if path is not None:
        make_directory(Path(path).parent)
        with storage_errors(Path(path), "write"):
            Path(path).write_text(text, encoding="utf-8")
    return text
