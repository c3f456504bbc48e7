"""Makes tables: one row for each line of a sweep, the paper's number beside ours; one for each run,
with what it cost and who learned what.

One structure is written as Markdown, HTML or JSON.

The paper's numbers are those of its Tables 2 and 3, means and standard deviations over 5 trials at
its scale. Its figures print no numbers; what its text says of them is told here in our words.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import msgspec

from keyhole.experiments.report.results import Costs, Series, SweepResults, Trial
from keyhole.experiments.report.style import (
    NOTHING,
    is_share,
    metric_name,
    write_share,
    write_spread,
)
from keyhole.experiments.statistics import Spread


@dataclass(frozen=True)
class PaperNumber:
    """One row of a table of the paper: test accuracy in percent, its deviation over 5 trials, and
    client over server size with two decimals."""

    mean: float
    deviation: float
    relative_size: float
    source: str

    def __str__(self) -> str:
        return f"{self.mean:.2f} ± {self.deviation:.2f}"


@dataclass(frozen=True)
class Finding:
    """What the paper says of one experiment.

    Args:
        numbers: m -> row of a table, where there is one.
        only: word that a line's name must hold to be the setting of the table.
    """

    source: str
    text: str
    numbers: Mapping[int, PaperNumber] = field(default_factory=dict)
    only: str = ""


_CNN = {  # m -> a row
    4: PaperNumber(75.02, 0.92, 0.08, "Table 2"),
    8: PaperNumber(81.92, 0.10, 0.14, "Table 2"),
    16: PaperNumber(84.15, 0.12, 0.26, "Table 2"),
    32: PaperNumber(85.66, 0.15, 0.51, "Table 2"),
    64: PaperNumber(86.71, 0.06, 1.00, "Table 2"),
}
_2NN = {
    10: PaperNumber(14.17, 0.78, 0.11, "Table 3"),
    50: PaperNumber(50.61, 0.93, 0.30, "Table 3"),
    100: PaperNumber(63.97, 0.32, 0.53, "Table 3"),
    200: PaperNumber(74.93, 0.13, 1.00, "Table 3"),
}

FINDINGS: Mapping[str, Finding] = MappingProxyType(
    {
        "tag-recall": Finding(
            "Figures 2 and 3",
            "100 keys cost recall, but going from 1,000 keys to 10,000 gains little or nothing: "
            "clients can hold a tenth of the model without loss. With m held fixed, a larger "
            "vocabulary n generally raises recall and costs the clients nothing.",
        ),
        "tag-keys": Finding(
            "Figure 4",
            "All three ways end at similar recall, and Top is ahead of Random and Random Top "
            "in every phase of training. The trials of Random differ most, and go on differing; "
            "Random Top is hardly better than Random.",
        ),
        "emnist-cnn": Finding(
            "Figure 5 (left) and Table 2",
            "Accuracy grows with m, and many values of m come close to the whole model.",
            _CNN,
        ),
        "emnist-2nn": Finding(
            "Figure 5 (right) and Table 3",
            "Accuracy falls steeply as m shrinks, far more than with the CNN.",
            _2NN,
        ),
        "emnist-cnn-fixed": Finding(
            "Figure 6 (left)",
            "One set of keys for all clients of a round costs the CNN no accuracy to speak of.",
            _CNN,
            only="independent",
        ),
        "emnist-2nn-fixed": Finding(
            "Figure 6 (right)",
            "One set of keys for all clients of a round lowers the accuracy of the 2NN further.",
            _2NN,
            only="independent",
        ),
        "word-alpha": Finding(
            "Figure 7",
            "Random keys alone lose accuracy quickly and save little size. Structured keys keep "
            "accuracy better, down to a size below which they cannot go. Mixed keys match "
            "structured ones for large alpha and, for small alpha, extend the frontier to sizes "
            "that the others do not reach.",
        ),
        "divisor": Finding(
            "Equation 5",
            "The paper divides every key's sum by the number of clients in the cohort and compares "
            "no other divisor.",
            _2NN,
            only="over the cohort",
        ),
        "rates": Finding(
            "Section 5.1",
            "Client and server rate are tuned over 0.001 to 10 in powers of ten, without select, "
            "by mean validation metric over 5 trials. The text does not print the chosen rates.",
        ),
    }
)
"""Name of a sweep -> what the paper says of it."""


def find_finding(sweep: str) -> Finding | None:
    """Returns what the paper says of a sweep; the rates of every task are one experiment.

    >>> find_finding("so-tag-rates").source
    'Section 5.1'
    """
    return FINDINGS.get("rates" if sweep.endswith("-rates") else sweep)


def find_number(sweep: str, panel: str, label: str) -> PaperNumber | None:
    """Returns the paper's number for a line of a sweep, or None if it prints none; the label or the
    panel names m, as in "m = 4".

    >>> print(find_number("emnist-cnn", "CNN", "m = 4"))
    75.02 ± 0.92
    >>> find_number("emnist-cnn-fixed", "m = 4", "fixed") is None
    True
    """
    finding, name = find_finding(sweep), f"{panel}, {label}"
    named = re.search(r"\bm\s*=\s*([\d,]*\d)", name)
    if finding is None or named is None or finding.only not in name.lower():
        return None
    return finding.numbers.get(int(named[1].replace(",", "")))


def place_in_paper(sweep: str) -> tuple[int, str]:
    """Returns what sorts sweeps as the paper tells them; those it does not have come last.

    >>> sorted(["mine", "word-alpha", "tag-recall"], key=place_in_paper)
    ['tag-recall', 'word-alpha', 'mine']
    """
    findings = list(FINDINGS.values())
    finding = find_finding(sweep)
    return (len(findings) if finding is None else findings.index(finding), sweep)


@dataclass(frozen=True)
class Row:
    """One line of a sweep: numbers of its finished trials, how many trials there are, and the
    paper's number for the same setting. None stands for what is not there yet."""

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

    @property
    def trials(self) -> str:
        """How many trials the numbers are over, and what is lacking."""
        if self.finished == self.planned:
            return str(self.finished)
        missing = self.planned - self.finished - self.unfinished
        lacking = [(self.unfinished, "unfinished"), (missing, "missing")]
        said = ", ".join(f"{count} {what}" for count, what in lacking if count)
        return f"{self.finished} of {self.planned} ({said})"


@dataclass(frozen=True)
class RunFacts:
    """What the table of runs says beyond a row.

    Args:
        delivery: the title that it declares.
        aggregation: the title that it declares.
        costs: None before the first round.
        settings: those in which the runs of the table differ, as text.
        metrics: test metrics beside the table's; None where the run has not measured it.
    """

    delivery: str
    aggregation: str
    costs: Costs | None
    settings: Mapping[str, str] = field(default_factory=dict)
    metrics: Mapping[str, Spread | None] = field(default_factory=dict)

    @property
    def cells(self) -> tuple[str, str, str]:
        """KB of a client in a round, down and up, and epsilon."""
        costs = self.costs
        if costs is None:
            return (NOTHING,) * 3
        spent = costs.epsilon
        epsilon = NOTHING if spent is None else f"{spent:.3g}" if spent < math.inf else "no bound"
        return f"{costs.bytes_down / 1000:,.1f}", f"{costs.bytes_up / 1000:,.1f}", epsilon


@dataclass(frozen=True)
class ReportTable:
    """The table of a sweep, or of runs.

    Args:
        notes: what is lacking, a sentence for each line it concerns.
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
        columns = ["relative size", *map(_test_column, (self.metric, *further))]
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
        for row, run in zip(self.rows, self.runs, strict=False):
            keys, sums = (run.costs.seen_by, run.costs.seen_in_sum) if run.costs else ({}, {})
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

    def _write(self, row: Row, run: RunFacts | None) -> tuple[str, ...]:
        """One row as text."""
        cells = [*(row.panel, row.label)[-len(self._names) :]]
        if run:
            cells = [row.label, run.delivery, run.aggregation, *run.settings.values()]
        cells.append(NOTHING if row.relative_size is None else write_share(row.relative_size))
        cells.append(write_spread(row.test, self.metric))
        if run:
            cells += [write_spread(spread, metric) for metric, spread in run.metrics.items()]
            cells += run.cells
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
    notes = tuple(note for line in sweep.lines if (note := _note(sweep, line)))
    runs = () if sweep.is_sweep else tuple(_facts(sweep))
    return ReportTable(sweep.name, sweep.title, sweep.metric, rows, notes, runs)


def _test_column(metric: str) -> str:
    return f"test {metric_name(metric)}{' (%)' if is_share(metric) else ''}"


def _facts(sweep: SweepResults) -> Iterator[RunFacts]:
    """What tells the runs apart; lines of runs have a trial each, at least."""
    told = [_settings_of(line.trials[0]) for line in sweep.lines]
    names = dict.fromkeys(name for each in told for name in each)
    differing = [name for name in names if len({each.get(name, NOTHING) for each in told}) > 1]
    results = [result for line in sweep.lines for result in line.results]
    metrics = sorted({m for result in results for m in result.metrics} - {sweep.metric})
    for line, each in zip(sweep.lines, told, strict=True):
        first = line.trials[0]
        yield RunFacts(
            first.title("delivery"),
            first.title("aggregation"),
            line.costs,
            {name: each.get(name, NOTHING) for name in differing},
            {metric: line.test_of(metric) for metric in metrics},
        )


def _settings_of(trial: Trial) -> dict[str, str]:
    """Data, seed and settings as text; rounds have a column, the optimizer is in the name."""
    usual = {
        name: value
        for name, value in trial.settings.items()
        if name != "rounds" and not name.startswith("server.optimizer")
    }
    told = {"data": trial.spec.data.name, "seed": trial.spec.seed, **usual}
    return {name: NOTHING if value is None else str(value) for name, value in told.items()}


def to_markdown(table: ReportTable) -> str:
    """Returns a Markdown table, who learned what in runs, and a list of what is lacking."""
    text = markdown_table([table.header, *table.cells], table.names)
    if table.learned:
        text += f"\nWho learned what:\n\n{markdown_table(table.learned, len(LEARNED))}"
    notes = "".join(f"- {_escape(note)}\n" for note in table.notes)
    return f"{text}\n{notes}" if notes else text


def markdown_table(rows: Sequence[Sequence[str]], names: int) -> str:
    """Returns rows, of which the first is the header, as Markdown; the first columns hold names,
    the others numbers, which are aligned to the right."""
    marks = ["---"] * names + ["---:"] * (len(rows[0]) - names)
    header, *others = (list(map(_escape, row)) for row in rows)
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (header, marks, *others))


def to_html(table: ReportTable) -> str:
    """Returns an HTML table, who learned what in runs, and a list of what is lacking."""
    rows = table.rows
    classes = ["" if row.finished == row.planned else ' class="incomplete"' for row in rows]
    text = _html_table([table.header, *table.cells], table.names, classes)
    if table.learned:
        empty = [""] * (len(table.learned) - 1)
        text += f"<h3>Who learned what</h3>\n{_html_table(table.learned, len(LEARNED), empty)}"
    notes = "".join(f"<li>{html.escape(note)}</li>\n" for note in table.notes)
    return f'{text}<ul class="lacking">\n{notes}</ul>\n' if notes else text


def _html_table(rows: Sequence[Sequence[str]], names: int, classes: Sequence[str]) -> str:
    """Rows, of which the first is the header; `classes` are attributes of the others."""
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in rows[0])
    body = "\n".join(
        f"<tr{kind}>{''.join(f'<td>{html.escape(cell)}</td>' for cell in cells)}</tr>"
        for kind, cells in zip(classes, rows[1:], strict=True)
    )
    return (
        f'<div class="table"><table class="names-{names}">\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody>\n</table></div>\n"
    )


def to_json(table: ReportTable) -> dict[str, Any]:
    """Returns the table as plain values; shares as shares, what is not finite as None."""
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(table))
    if not table.runs:
        del plain["runs"]
    return plain


def _make_row(sweep: SweepResults, line: Series) -> Row:
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
    name = ", ".join(part for part in (line.panel, line.label) if part)
    return f"{name}: {'; '.join(facts)}. {_meaning(line)}"


def _meaning(line: Series) -> str:
    """Which trials the numbers of a line are over."""
    if line.finished:
        trials = "1 trial" if len(line.finished) == 1 else f"{len(line.finished)} trials"
        return f"Its numbers are over {trials}."
    if line.trials:
        return "It has no result yet; its curve is over the unfinished."
    return "It has no result yet."


def _escape(text: str) -> str:
    """Text as Markdown shows it: nothing in it is markup or ends a cell."""
    return re.sub(r"([\\`*_\[\]|])", r"\\\1", html.escape(text, quote=False))
