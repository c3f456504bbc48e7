"""Writes a report: figures, tables, and one HTML page that needs nothing else."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from keyhole.experiments.report import privacy
from keyhole.experiments.report.figures import draw_sweep
from keyhole.experiments.report.paper import find_finding
from keyhole.experiments.report.privacy import PriceTable, draw_privacy
from keyhole.experiments.report.results import SweepResults, Trial
from keyhole.experiments.report.style import save_figure
from keyhole.experiments.report.tables import (
    HOW,
    ReportTable,
    make_table,
    to_csv,
    to_html,
    to_latex,
    to_markdown,
)
from keyhole.files import make_directory, storage_errors

CAPTIONS: Mapping[str, str] = {
    "curves": "Over rounds: the line is the mean over trials, the shade its 95 % interval.",
    "final": "Left: size of a client's model over the server's. Right: test metric, mean over "
    "trials with bars over its 95 % interval.",
    "frontier": "Test metric against the size that clients hold; bars are 95 % intervals of the "
    "mean over trials.",
    "bytes": "Test metric against what a client receives and sends in a round; bars are 95 % "
    "intervals of the mean over trials.",
    "epsilon": "Test metric against the epsilon that a run spent; bars as above.",
    "reached": "Test metric, mean over trials with bars over its 95 % interval.",
    "grid": "Each cell is the mean over trials for one pair of learning rates.",
    "overview": "Each metric over rounds, and the first against what a client receives and sends "
    "in a round; shades and bars are 95 % intervals of the mean over trials.",
}
_MAX_VALUES = 6  # of one setting; a grid of rates has more than a reader wants to see in a line

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1b1f; --soft: #5b5b66; --paper: #ffffff;
  --rule: #d9d9e0; --shade: #f4f4f7; --warn: #8a4b00; --warn-shade: #fff4e0; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e8ee; --soft: #a5a5b2; --paper: #17171b;
  --rule: #3a3a44; --shade: #222229; --warn: #ffc266; --warn-shade: #33270f; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1000px; padding: 1.5rem 1rem 4rem; color: var(--ink);
  background: var(--paper); font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; margin: 0 0 .5rem; }
h3 { font-size: 1rem; margin: 1rem 0 .3rem; }
h2 { font-size: 1.25rem; margin: 0 0 .5rem; overflow-wrap: anywhere; }
a { color: inherit; }
nav ul { padding-left: 1.2rem; }
section { border-top: 1px solid var(--rule); margin-top: 2.5rem; padding-top: 1.5rem; }
.paper { border-left: 4px solid var(--rule); margin: 0 0 1rem; padding: .2rem 0 .2rem .9rem; }
.paper cite { color: var(--soft); }
figure { margin: 1rem 0; }
figure img { background: #fff; border: 1px solid var(--rule); border-radius: 4px; display: block;
  height: auto; max-width: 100%; padding: .5rem; width: 100%; }
figcaption, .settings { color: var(--soft); font-size: .875rem; }
.table { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums;
  min-width: 100%; }
th, td { border-bottom: 1px solid var(--rule); padding: .3rem .6rem; text-align: right; }
th { background: var(--shade); vertical-align: bottom; }
td { white-space: nowrap; }
.names-1 :is(th, td):nth-child(-n+1), .names-2 :is(th, td):nth-child(-n+2),
.names-3 :is(th, td):nth-child(-n+3), .names-4 :is(th, td) { text-align: left; }
.names-4 td { white-space: normal; }
tr.incomplete td { background: var(--warn-shade); }
.lacking, .mark { color: var(--warn); }
.lacking { font-size: .9rem; padding-left: 1.2rem; }
.settings { display: flex; flex-wrap: wrap; gap: .1rem 1.5rem; }
.settings div { display: flex; gap: .4rem; }
.settings dt::after { content: ":"; }
.settings dd { color: var(--ink); margin: 0; overflow-wrap: anywhere; }
@page { margin: 14mm; }
@media print {
  :root { color-scheme: light; --ink: #000; --soft: #333; --paper: #fff; --rule: #bbb;
    --shade: #eee; --warn: #000; --warn-shade: #eee; }
  body { font-size: 10pt; max-width: none; padding: 0; }
  nav { display: none; }
  section { break-before: page; border: 0; margin: 0; padding: 0; }
  section:first-of-type { break-before: auto; margin-top: 1rem; }
  figure img { border: 0; margin: 0 auto; max-height: 85mm; padding: 0; width: auto; }
  figure, tr, .settings, .paper { break-inside: avoid; }
  h2, thead { break-after: avoid; }
  table, figcaption, .settings, .lacking { font-size: 8.5pt; }
  th, td { padding: .15rem .35rem; }
}
"""


@dataclass(frozen=True)
class Section:
    """What the page shows of one sweep: results, their table, and kind of figure -> SVG."""

    sweep: SweepResults
    table: ReportTable
    figures: Mapping[str, bytes]


def make_page(name: str, sections: Sequence[Section]) -> str:
    """Returns the whole page. It loads nothing, and tells the browser to refuse if it tried."""
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    title = f"keyhole: {name}"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{escape(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{escape(title)}</h1>
<p>Federated select, our runs beside the paper's. {escape(HOW)} The paper's numbers are its own, at
its own scale: mean ± sample standard deviation over 5 trials.</p>
{_contents(sections)}
{"".join(map(_section, sections))}</body>
</html>
"""


def _contents(sections: Sequence[Section]) -> str:
    """Links to the sweeps, with a mark at those that are not complete."""
    items = []
    for section in sections:
        sweep, lacking = section.sweep, len(section.table.notes)
        lines = "line" if lacking == 1 else "lines"
        mark = f' <span class="mark">({lacking} {lines} incomplete)</span>' if lacking else ""
        link = f'<a href="#{escape(sweep.name)}">{escape(sweep.title)}</a>'
        items.append(f"<li>{link}{mark}</li>\n")
    return f"<nav><ul>\n{''.join(items)}</ul></nav>"


def _section(section: Section) -> str:
    """One sweep: title, the paper, figures, table, settings."""
    sweep = section.sweep
    figures = "".join(_figure(sweep, kind, svg) for kind, svg in section.figures.items())
    return f"""<section id="{escape(sweep.name)}">
<h2>{escape(sweep.title)}</h2>
{_paper(sweep)}{figures}{to_html(section.table)}{_settings(sweep)}</section>
"""


def _paper(sweep: SweepResults) -> str:
    """What the paper found, if it made this experiment."""
    finding = find_finding(sweep.name)
    if not sweep.is_sweep:
        return ""
    if finding is None:
        return '<p class="paper">The paper has no such experiment.</p>\n'
    source = escape(finding.source)
    return f'<p class="paper">{escape(finding.text)} <cite>The paper, {source}.</cite></p>\n'


def _figure(sweep: SweepResults, kind: str, svg: bytes) -> str:
    """A picture inside the page; as an image, so that ids of two pictures cannot clash."""
    data = base64.b64encode(svg).decode()
    caption = escape(CAPTIONS[kind])
    return (
        f'<figure><img alt="{escape(sweep.title)}: {kind}" '
        f'src="data:image/svg+xml;base64,{data}">\n<figcaption>{caption}</figcaption></figure>\n'
    )


def _settings(sweep: SweepResults) -> str:
    """How the runs were set up, each setting with all the values it took."""
    trials = [trial for line in sweep.lines for trial in line.trials]
    facts = {
        "sweep": sweep.name,
        "scale": sweep.scale,
        "data": _values(map(_data, trials)) or sweep.data,
        "task": _values(trial.spec.task for trial in trials),
        "seed": _values(trial.spec.seed for trial in trials),
        "start": _values(trial.start for trial in trials),
        "trials": str(sweep.trials),
    }
    for name in dict.fromkeys(name for trial in trials for name in trial.settings):
        facts[name] = _values(trial.settings.get(name) for trial in trials)
    versions = [trial.run.get("versions") for trial in trials]
    pairs = [
        [f"{name} {v}" for name, v in each.items()] for each in versions if isinstance(each, dict)
    ]
    facts["versions"] = _values(map(", ".join, pairs))
    items = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>\n"
        for name, value in facts.items()
        if value
    )
    return f'<dl class="settings">\n{items}</dl>\n'


def _data(trial: Trial) -> str:
    """The name of the data, what it holds, and the start of its checksum."""
    data = trial.run.get("dataset")
    if not isinstance(data, dict):
        return str(data)
    checksum = str(data.get("sha256", ""))[:12]
    kind = f"{data.get('kind')}, sha256 {checksum}..." if checksum else data.get("kind")
    return f"{data.get('name')} ({kind})"


def _values(values: Iterable[Any]) -> str:
    """The different values that a setting took, in order; none is left out unsaid."""
    texts = list(dict.fromkeys(str(value) for value in values if value is not None))
    shown = ", ".join(texts[:_MAX_VALUES])
    more = len(texts) - _MAX_VALUES
    return f"{shown} and {more} more" if more > 0 else shown


def write_section(sweep: SweepResults, to: Path) -> tuple[Section, list[Path]]:
    """Writes the figures and the table of a sweep to a directory, which is made if it is not there.
    Returns what the page shows of the sweep, and the files: `<sweep>-<kind>.png`, `.svg`,
    `<sweep>.md`, `.csv`, `.tex`."""
    make_directory(to)
    table = make_table(sweep)
    saved = {
        kind: save_figure(figure, to / f"{sweep.name}-{kind}")
        for kind, figure in draw_sweep(sweep).items()
    }
    finding = find_finding(sweep.name)
    said = f"The paper ({finding.source}): {finding.text}\n\n" if finding else ""
    texts = {
        to / f"{sweep.name}.md": said + to_markdown(table),
        to / f"{sweep.name}.csv": to_csv(table),
        to / f"{sweep.name}.tex": to_latex(table),
    }
    for path, text in texts.items():
        _write(path, text)
    section = Section(sweep, table, {kind: svg.read_bytes() for kind, (_, svg) in saved.items()})
    return section, [*(path for paths in saved.values() for path in paths), *texts]


def write_page(name: str, sections: list[Section], to: Path) -> Path:
    """Writes `index.html`, which holds everything, and returns its path."""
    path = to / "index.html"
    _write(path, make_page(name, sections))
    return path


def write_privacy(tables: Sequence[PriceTable], to: Path) -> list[Path]:
    """Writes the figure and the tables on private select; returns their paths."""
    make_directory(to)
    text = to / "private-select.md"
    drawn = save_figure(draw_privacy(tables), to / "private-select")
    _write(text, privacy.to_markdown(tables))
    return [*drawn, text]


def _write(path: Path, text: str) -> None:
    with storage_errors(path, "write"):
        path.write_text(text, encoding="utf-8")
