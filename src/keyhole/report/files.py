"""Files of a report: figures, tables and the page, in one directory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from keyhole.report import privacy
from keyhole.report.figures import draw_sweep, save_figure
from keyhole.report.page import Section, make_page
from keyhole.report.paper import find_finding
from keyhole.report.privacy import SliceTable
from keyhole.report.privacy_figure import draw_privacy
from keyhole.report.results import Sweep
from keyhole.report.tables import Table, make_table, to_markdown
from keyhole.server.files import make_directory, storage_errors

__all__ = ["write_page", "write_privacy", "write_section"]


def write_section(sweep: Sweep, to: Path) -> tuple[Section, list[Path]]:
    """Writes the figures and the Markdown table of a sweep.

    Args:
        sweep: the results.
        to: a directory; it is made if it is not there.

    Returns:
        What the page shows of the sweep, and the files: `<sweep>-<kind>.png`, `.svg`, `<sweep>.md`.

    Raises:
        StorageError: a file cannot be written.
    """
    make_directory(to)
    table = make_table(sweep)
    saved = {
        kind: save_figure(figure, to / f"{sweep.name}-{kind}")
        for kind, figure in draw_sweep(sweep).items()
    }
    text = to / f"{sweep.name}.md"
    _write(text, _markdown(sweep, table))
    section = Section(sweep, table, {kind: svg.read_bytes() for kind, (_, svg) in saved.items()})
    return section, [path for paths in saved.values() for path in paths] + [text]


def write_page(name: str, sections: list[Section], to: Path) -> Path:
    """Writes `index.html`, which holds everything, and returns its path.

    Raises:
        StorageError: it cannot be written.
    """
    path = to / "index.html"
    _write(path, make_page(name, sections))
    return path


def write_privacy(tables: Sequence[SliceTable], to: Path) -> list[Path]:
    """Writes the figure and the tables on private select; returns their paths.

    Raises:
        StorageError: a file cannot be written.
    """
    make_directory(to)
    text = to / "private-select.md"
    drawn = save_figure(draw_privacy(tables), to / "private-select")
    _write(text, privacy.to_markdown(tables))
    return [*drawn, text]


def _markdown(sweep: Sweep, table: Table) -> str:
    """The table, with what the paper found above it."""
    finding = find_finding(sweep.name)
    said = f"The paper ({finding.source}): {finding.text}\n\n" if finding else ""
    return said + to_markdown(table)


def _write(path: Path, text: str) -> None:
    with storage_errors(path, "write"):
        path.write_text(text, encoding="utf-8")
