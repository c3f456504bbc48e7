"""Runs `keyhole check`: what a project would do, before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from keyhole.cli.numbers import write_bytes, write_seconds
from keyhole.cli.options import option, project_option
from keyhole.cli.runs import broadcast_line


@click.command()
@project_option
@option("--json", "as_json", is_flag=True, help="Print JSON.")
def check(folder: Path, as_json: bool) -> None:
    """Check keyhole.toml, and say who learns what and what a round costs.

    Nothing is started. A mistake is one line and a non-zero exit code.
    """
    import json
    from dataclasses import asdict

    from keyhole.project.forecast import forecast_of
    from keyhole.project.spec import Project

    project = Project.open(folder)
    with project.importable():
        found = forecast_of(project)
    if as_json:
        click.echo(json.dumps(asdict(found), indent=2))
        return
    told = asdict(found)
    screen = Console()
    screen.print(_parties(told["learned"]))
    screen.print(_costs(told))
    line = broadcast_line(found.select_bytes, found.parameter_bytes, found.broadcast_bytes)
    is_dear = found.select_bytes > found.broadcast_bytes
    for note in [line] * is_dear + found.notes:
        click.echo(f"note: {note}")
    if not is_dear:
        click.echo(line)
    verdict = "see the notes" if found.notes or is_dear else "nothing is wrong"
    click.echo(f"{found.task}: {found.rounds} rounds of {found.cohort} clients; {verdict}")


def _parties(learned: dict[str, dict[str, str]]) -> Table:
    """Who learns what."""
    table = Table(title="who learns what of a client", title_justify="left")
    for column in ("party", "when slices are delivered", "when updates are added"):
        table.add_column(column)
    for party, seen in learned.items():
        table.add_row(party, seen["keys"], seen["updates"])
    return table


def _costs(told: dict[str, Any]) -> Table:
    """What a client sends and receives in a round, beside broadcasting the model."""
    table = Table(title="per client and round", title_justify="left")
    for column in ("", "down", "up", "CPU of servers"):
        table.add_column(column, justify="left" if not column else "right")
    for name, cost in told["costs"].items():
        cpu = "-" if cost["server_seconds"] is None else write_seconds(cost["server_seconds"])
        table.add_row(name, write_bytes(cost["bytes_down"]), write_bytes(cost["bytes_up"]), cpu)
    return table
