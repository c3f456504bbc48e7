"""Makes tables: one row for each line of a sweep, the paper's number beside ours; one for each run,
with what it cost and who learned what.

One structure is written as Markdown, HTML, LaTeX, CSV or JSON.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from keyhole.experiments.report.paper import PaperNumber, find_number
from keyhole.experiments.report.results import Costs, Series, SweepResults, Trial
from keyhole.experiments.report.writing import (
    NOTHING,
    csv_table,
    escape_markdown,
    html_table,
    is_share,
    latex_table,
    markdown_table,
    metric_name,
    write_deviation,
    write_interval,
    write_kilobytes,
    write_p_value,
    write_share,
)
from keyhole.experiments.statistics import NUMBERS, Difference, Spread, numbers_of

HOW = (
    "± is half the 95 % interval of the mean over trials (Student's t), sd their sample standard "
    "deviation; one trial has neither. Differences are from the line of the panel whose clients "
    "hold the largest model, trial by trial, with the p-value of a paired test, two-sided and not "
    "corrected for how many there are."
)
"""How the numbers of a table were computed, for those who read it."""
REFERENCE = "reference"


@dataclass(frozen=True)
class Row:
    """One line of a sweep: numbers of its finished trials, how many trials there are, and the
    paper's number for the same setting. None stands for what is not there yet.

    Args:
        tests: metric -> the same as `test`, for every metric that the line has.
        differences: metric -> what the line has more than `against`, which shares its clients.
        against: the label of that line in the panel; its own where it is that line.
        costs: None before the first round.
    """

    panel: str
    label: str
    relative_size: float | None
    test: Spread | None
    last: Spread | None
    finished: int
    unfinished: int
    planned: int
    rounds: int | None
    minutes: float | None
    paper: PaperNumber | None
    tests: Mapping[str, Spread] = field(default_factory=dict)
    differences: Mapping[str, Difference] = field(default_factory=dict)
    against: str = ""
    costs: Costs | None = None

    @property
    def trials(self) -> str:
        """How many trials the numbers are over, and what is lacking."""
        if self.finished == self.planned:
            return str(self.finished)
        missing = self.planned - self.finished - self.unfinished
        lacking = [(self.unfinished, "unfinished"), (missing, "missing")]
        said = ", ".join(f"{count} {what}" for count, what in lacking if count)
        return f"{self.finished} of {self.planned} ({said})"

    @property
    def priced(self) -> tuple[str, str, str]:
        """KB of a client in a round, down and up, and epsilon."""
        costs = self.costs
        if costs is None:
            return (NOTHING,) * 3
        spent = costs.epsilon
        epsilon = NOTHING if spent is None else f"{spent:.3g}" if spent < math.inf else "no bound"
        down = write_kilobytes(costs.bytes_down) if costs.bytes_down else NOTHING  # not known here
        return down, write_kilobytes(costs.bytes_up), epsilon


@dataclass(frozen=True)
class RunFacts:
    """What the table of runs says beyond a row.

    Args:
        delivery: the title that it declares.
        aggregation: the title that it declares.
        settings: those in which the runs of the table differ, as text.
        metrics: test metrics beside the table's; None where the run has not measured it.
    """

    delivery: str
    aggregation: str
    settings: Mapping[str, str] = field(default_factory=dict)
    metrics: Mapping[str, Spread | None] = field(default_factory=dict)


@dataclass(frozen=True)
class ReportTable:
    """The table of a sweep, or of runs.

    Args:
        notes: what is lacking, a sentence for each line it concerns; then which models were best.
        runs: of each row, where the rows are runs that no sweep names.
    """

    sweep: str
    title: str
    metric: str
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    runs: tuple[RunFacts, ...] = ()

    @property
    def header(self) -> tuple[str, ...]:
        """The names of the columns; panels, costs and the paper's numbers only if there are any."""
        unit = " (%)" if is_share(self.metric) else ""
        further = self.runs[0].metrics if self.runs else ()
        columns = ["relative size", _test_column(self.metric), f"sd{unit}"]
        points = " (points)" if unit else ""
        columns += [f"difference{points}", "p"] if self._has_differences else []
        columns += map(_test_column, further)
        columns += ["KB down", "KB up", "epsilon"] if self.runs else []
        columns += ["trials", "rounds", "minutes a trial"]
        columns += [f"paper{unit}", "paper's size"] if self._has_paper else []
        return (*self._names, *columns)

    @property
    def cells(self) -> list[tuple[str, ...]]:
        """The rows as text."""
        runs = self.runs or (None,) * len(self.rows)
        return [self._write(*pair) for pair in zip(self.rows, runs, strict=True)]

    @property
    def names(self) -> int:
        """How many columns, from the left, hold names and not numbers."""
        return 3 if self.runs else len(self._names)

    @property
    def learned(self) -> list[tuple[str, ...]]:
        """Rows of a table of who learned what, under its header; empty for a sweep."""
        by_fact: dict[tuple[str, str, str], list[str]] = {}
        for row in self.rows if self.runs else ():
            keys, sums = (row.costs.seen_by, row.costs.seen_in_sum) if row.costs else ({}, {})
            for party in dict.fromkeys([*keys, *sums]):
                fact = party, keys.get(party, "nothing"), sums.get(party, "nothing")
                by_fact.setdefault(fact, []).append(row.label)
        rows = [(", ".join(runs), *fact) for fact, runs in by_fact.items()]
        return [LEARNED, *rows] if rows else []

    @property
    def _names(self) -> tuple[str, ...]:
        if self.runs:
            return "run", "delivery", "aggregation", *self.runs[0].settings
        return ("panel", "line") if any(row.panel for row in self.rows) else ("line",)

    @property
    def _has_paper(self) -> bool:
        return any(row.paper is not None for row in self.rows)

    @property
    def _has_differences(self) -> bool:
        return any(row.differences for row in self.rows)

    def _compared(self, row: Row, scale: float) -> list[str]:
        """What a row has more than the reference of its panel, and the p-value."""
        if row.against == row.label:
            return [REFERENCE, NOTHING]
        found = row.differences.get(self.metric)
        spread, p = (found.spread, found.p_value) if found else (None, None)
        return [write_interval(spread, scale, signed=True), write_p_value(p)]

    def _write(self, row: Row, run: RunFacts | None) -> tuple[str, ...]:
        """One row as text."""
        cells = [*(row.panel, row.label)[-len(self._names) :]]
        if run:
            cells = [row.label, run.delivery, run.aggregation, *run.settings.values()]
        cells.append(NOTHING if row.relative_size is None else write_share(row.relative_size))
        scale = _scale(self.metric)
        cells += [write_interval(row.test, scale), write_deviation(row.test, scale)]
        cells += self._compared(row, scale) if self._has_differences else []
        if run:
            cells += [write_interval(spread, _scale(name)) for name, spread in run.metrics.items()]
            cells += row.priced
        cells.append(row.trials)
        cells.append(NOTHING if row.rounds is None else f"{row.rounds:,}")
        cells.append(NOTHING if row.minutes is None else f"{row.minutes:.1f}")
        if self._has_paper:
            paper = row.paper
            cells += [str(paper), f"{paper.relative_size:.2f}"] if paper else [NOTHING] * 2
        return tuple(cells)


LEARNED = ("runs", "party", "learned when slices were delivered", "when updates were added")
"""The columns of the table of who learned what; all hold words."""


def make_table(sweep: SweepResults) -> ReportTable:
    """Returns the table of a sweep, with a note for every line whose trials are not all there."""
    rows = tuple(_make_row(sweep, line) for line in sweep.lines)
    lacking = tuple(note for line in sweep.lines if (note := _note(sweep, line)))
    notes = (*lacking, *(note for line in sweep.lines for note in _ends(line)))
    runs = () if sweep.is_sweep else tuple(_facts(sweep))
    return ReportTable(sweep.name, sweep.title, sweep.metric, rows, notes, runs)


def _scale(metric: str) -> float:
    """What a metric is multiplied by to be written."""
    return 100.0 if is_share(metric) else 1.0


def _test_column(metric: str) -> str:
    return f"test {metric_name(metric)}{' (%)' if is_share(metric) else ''}"


def _facts(sweep: SweepResults) -> Iterator[RunFacts]:
    """What tells the runs apart; lines of runs have a trial each, at least."""
    told = [_settings_of(line.trials[0]) for line in sweep.lines]
    names = dict.fromkeys(name for each in told for name in each)
    differing = [name for name in names if len({each.get(name, NOTHING) for each in told}) > 1]
    metrics = sorted({m for line in sweep.lines for m in line.metrics} - {sweep.metric})
    for line, each in zip(sweep.lines, told, strict=True):
        first = line.trials[0]
        yield RunFacts(
            first.title("delivery"),
            first.title("aggregation"),
            {name: each.get(name, NOTHING) for name in differing},
            {metric: line.test_of(metric) for metric in metrics},
        )


def _settings_of(trial: Trial) -> dict[str, str]:
    """Data, seed, start and settings as text; rounds have a column, the optimizer a name."""
    usual = {
        name: value
        for name, value in trial.settings.items()
        if name != "rounds" and not name.startswith("server.optimizer")
    }
    told = {"data": trial.spec.data.name, "seed": trial.spec.seed, "start": trial.start, **usual}
    return {name: NOTHING if value is None else str(value) for name, value in told.items()}


def to_markdown(table: ReportTable) -> str:
    """Returns a Markdown table, who learned what in runs, and a list of what is lacking."""
    text = markdown_table([table.header, *table.cells], table.names)
    if table.learned:
        text += f"\nWho learned what:\n\n{markdown_table(table.learned, len(LEARNED))}"
    text += f"\n{HOW}\n"
    notes = "".join(f"- {escape_markdown(note)}\n" for note in table.notes)
    return f"{text}\n{notes}" if notes else text


def to_latex(table: ReportTable) -> str:
    """Returns the table for LaTeX with the package booktabs, after a comment on its numbers."""
    return f"% {HOW}\n{latex_table([table.header, *table.cells], table.names)}"


_COSTS = ("bytes_down", "bytes_up", "epsilon")
_COLUMNS = (
    *("panel", "line", "metric"),
    *NUMBERS,
    *("against", "relative_size", "rounds", "minutes_a_trial", *_COSTS),
    *("paper_mean", "paper_deviation"),
)


def to_csv(table: ReportTable) -> str:
    """Returns the numbers, unrounded, with a row for each line and metric; shares as shares."""
    rows = []
    for row in table.rows:
        costs, paper = row.costs, row.paper
        told = {
            "panel": row.panel,
            "line": row.label,
            "against": row.against,
            "relative_size": row.relative_size,
            "rounds": row.rounds,
            "minutes_a_trial": row.minutes,
            **{name: getattr(costs, name) if costs else None for name in _COSTS},
        }
        for metric in row.tests or (table.metric,):
            is_papers = paper is not None and metric == table.metric
            printed = (paper.mean / 100, paper.deviation / 100) if paper and is_papers else ("", "")
            numbers = numbers_of(row.tests.get(metric), row.differences.get(metric))
            more = dict(zip(_COLUMNS[-2:], printed, strict=True))
            rows.append({**told, "metric": metric, **numbers, **more})
    return csv_table(_COLUMNS, rows)


def to_html(table: ReportTable) -> str:
    """Returns an HTML table, who learned what in runs, and a list of what is lacking."""
    rows = table.rows
    classes = ["" if row.finished == row.planned else ' class="incomplete"' for row in rows]
    text = html_table([table.header, *table.cells], table.names, classes)
    if table.learned:
        empty = [""] * (len(table.learned) - 1)
        text += f"<h3>Who learned what</h3>\n{html_table(table.learned, len(LEARNED), empty)}"
    notes = "".join(f"<li>{html.escape(note)}</li>\n" for note in table.notes)
    return f'{text}<ul class="lacking">\n{notes}</ul>\n' if notes else text


def to_json(table: ReportTable) -> dict[str, Any]:
    """Returns the table as plain values; shares as shares, what is not finite as None."""
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(table))
    for row, told in zip(table.rows, plain["rows"], strict=True):
        found = {m: numbers_of(spread, row.differences.get(m)) for m, spread in row.tests.items()}
        told["tests"] = msgspec.json.decode(msgspec.json.encode(found))
        del told["differences"]
        if told["costs"] is None:
            del told["costs"]
    if not table.runs:
        del plain["runs"]
    return plain


def _make_row(sweep: SweepResults, line: Series) -> Row:
    reference = sweep.reference(line.panel)
    tests = {metric: line.test_of(metric) for metric in line.metrics}
    return Row(
        panel=line.panel,
        label=line.label,
        relative_size=line.relative_size,
        test=line.test,
        last=line.last,
        finished=len(line.finished),
        unfinished=len(line.unfinished),
        planned=max(sweep.trials if sweep.is_sweep else 1, len(line.trials)),
        rounds=max((trial.rounds for trial in line.trials), default=None),
        minutes=line.minutes,
        paper=find_number(sweep.name, line.panel, line.label),
        tests={metric: spread for metric, spread in tests.items() if spread is not None},
        differences=sweep.differences(line),
        against=reference.label if reference else "",
        costs=line.costs,
    )


def _note(sweep: SweepResults, line: Series) -> str:
    """What is lacking of a line, as a sentence; empty if nothing is."""
    if sweep.is_complete(line) and not line.differing:
        return ""
    facts = [
        f"trial {trial.number} is unfinished after {trial.rounds_done} of "
        f"{trial.rounds_planned} rounds"
        for trial in line.unfinished
    ]
    begun = {trial.number for trial in line.trials}
    asked = sweep.trials if sweep.is_sweep else 0
    missing = [str(number) for number in range(asked) if number not in begun]
    if not line.trials:
        facts.append("no trial was begun")
    elif missing:
        facts.append(f"missing: trial {', '.join(missing)}")
    if line.differing:
        facts.append(f"trials differ in {', '.join(line.differing)}")
    return f"{_name(line)}: {'; '.join(facts)}. {_meaning(line)}"


def _ends(line: Series) -> Iterator[str]:
    """Which model of each trial was best, and why the trial ended early."""
    for trial in line.finished:
        if trial.result is not None and trial.result.told:
            yield f"{_name(line)}, trial {trial.number}: {trial.result.told}."


def _name(line: Series) -> str:
    return ", ".join(part for part in (line.panel, line.label) if part)


def _meaning(line: Series) -> str:
    """Which trials the numbers of a line are over."""
    if line.finished:
        trials = "1 trial" if len(line.finished) == 1 else f"{len(line.finished)} trials"
        return f"Its numbers are over {trials}."
    if line.trials:
        return "It has no result yet; its curve is over the unfinished."
    return "It has no result yet."
