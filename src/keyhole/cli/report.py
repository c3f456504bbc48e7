"""`keyhole report`: figures, tables and a page from the records of sweeps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from keyhole.cli.progress import progress_bars

if TYPE_CHECKING:
    from keyhole.report.page import Section
    from keyhole.report.results import Sweep

__all__ = ["report"]

_DIRECTORY = click.Path(file_okay=False, path_type=Path)


@click.command()
@click.argument("out", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--to", type=_DIRECTORY, help="Where to write.  [default: OUT/report]")
@click.option("--json", "as_json", is_flag=True, help="Print the tables as JSON.")
def report(out: Path, to: Path | None, as_json: bool) -> None:
    """Draw and tabulate the sweeps of a directory, beside the paper's numbers.

    OUT is where `keyhole sweep` wrote. For each sweep there will be its figures as PNG and SVG and
    its table as Markdown, and for all of them one page, index.html, that needs no other file.
    Trials that are missing or unfinished are named; run the sweep again to go on with them.
    """
    # matplotlib takes most of a second to import, and no other command needs it.
    from keyhole.report.files import write_page
    from keyhole.report.paper import place_in_paper
    from keyhole.report.results import read_sweeps
    from keyhole.report.tables import to_json

    to = to or out / "report"
    sweeps = sorted(read_sweeps(out), key=lambda sweep: place_in_paper(sweep.name))
    sections, files = _write_sections(sweeps, to)
    files.append(write_page(out.resolve().name, sections, to))
    if as_json:
        click.echo(json.dumps([to_json(section.table) for section in sections], indent=2))
        return
    for path in files:
        click.echo(path)


def _write_sections(sweeps: list[Sweep], to: Path) -> tuple[list[Section], list[Path]]:
    """Writes one sweep after the other, with a bar on standard error."""
    from keyhole.report.files import write_section

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
