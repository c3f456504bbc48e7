"""Runs `keyhole report`: figures, tables and a page from the records of sweeps and runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from keyhole.cli.bars import progress_bars
from keyhole.cli.options import DIRECTORY, EXISTING_DIRECTORY, json_option, option
from keyhole.logs import say

if TYPE_CHECKING:
    from keyhole.experiments.report.page import Section
    from keyhole.experiments.report.results import SweepResults


PRIVACY = "privacy"
"""In place of a directory: the report on private select."""


def _find_runs(
    context: click.Context, argument: click.Parameter, outs: tuple[str, ...]
) -> list[Path]:
    """The directories of runs; none where `privacy` was asked for. A callback of click."""
    if outs == (PRIVACY,):
        return []
    if PRIVACY in outs:
        raise click.BadParameter(f"{PRIVACY} stands alone; a directory of that name is ./{PRIVACY}")
    return [Path(EXISTING_DIRECTORY.convert(out, argument, context)) for out in outs]


@click.command()
@click.argument("outs", metavar=f"OUT...|{PRIVACY}", nargs=-1, required=True, callback=_find_runs)
@option(
    "--to",
    "--out",
    type=DIRECTORY,
    help="Where to write.",
    show_default="OUT/report; keyhole-report where several OUT are given; "
    f"keyhole-{PRIVACY} for {PRIVACY}",
)
@json_option
def report(outs: list[Path], to: Path | None, as_json: bool) -> None:
    """Draw and tabulate the sweeps and runs of directories, beside the paper's numbers.

    OUT is where `keyhole sweep`, `keyhole train` or `kh.train` wrote, or a folder that holds such
    at any depth; several are shown on one page. For each sweep, and for the runs of each task,
    there will be figures as PNG and SVG, a table as Markdown and LaTeX, its numbers as CSV, and for
    all of them one page, index.html, that needs no other file. Numbers are means over trials with
    95 % intervals; where lines share their clients, the differences between them have an interval
    and a p-value, too. Of runs it shows metrics over rounds and against bytes, what they cost and
    who learned what. Trials that are missing or unfinished are named; the command that started them
    resumes them. JSON that is no sweep is named and left out.

    `keyhole report privacy` needs no runs. It draws what hiding the keys costs against what select
    saves, over the number of keys and for every private delivery, and tabulates from where on
    broadcast sends less. (A directory of that name is ./privacy.)
    """
    if not outs:
        files, tables = _report_privacy(to or Path(f"keyhole-{PRIVACY}"))
    else:
        usual = outs[0] / "report" if len(outs) == 1 else Path("keyhole-report")
        files, tables = _report_results(outs, to or usual)
    if as_json:
        click.echo(json.dumps(tables, indent=2))
        return
    for path in files:
        click.echo(path)


def _report_results(outs: list[Path], to: Path) -> tuple[list[Path], list[dict[str, Any]]]:
    """Writes the report on sweeps and runs; returns its files and its tables as plain values."""
    # matplotlib takes most of a second to import, and no other command needs it.
    from keyhole.experiments.report.page import write_page
    from keyhole.experiments.report.paper import place_in_paper
    from keyhole.experiments.report.reading import read_results
    from keyhole.experiments.report.tables import to_json

    sweeps = sorted(
        read_results(*outs, on_skip=_tell), key=lambda sweep: place_in_paper(sweep.name)
    )
    sections, files = _write_sections(sweeps, to)
    files.append(write_page(", ".join(out.resolve().name for out in outs), sections, to))
    return files, [to_json(section.table) for section in sections]


def _tell(skipped: str) -> None:
    say(f"keyhole: {skipped}")


def _report_privacy(to: Path) -> tuple[list[Path], list[dict[str, Any]]]:
    """Writes the report on private select; returns its files and its tables as plain values."""
    from keyhole.experiments.report.page import write_privacy
    from keyhole.experiments.report.privacy import slice_tables, to_json

    tables = slice_tables()
    return write_privacy(tables, to), to_json(tables)


def _write_sections(sweeps: list[SweepResults], to: Path) -> tuple[list[Section], list[Path]]:
    """Writes one sweep after the other, with a bar on standard error."""
    from keyhole.experiments.report.page import write_section

    sections, files = [], []
    with progress_bars() as bars:
        bar = bars.add_task("drawing", total=len(sweeps), note="", unit="sweeps")
        for sweep in sweeps:
            bars.update(bar, note=sweep.name)
            section, paths = write_section(sweep, to)
            sections.append(section)
            files += paths
            bars.advance(bar)
    return sections, files
