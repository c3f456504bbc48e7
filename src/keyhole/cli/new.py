"""Runs `keyhole new`: a small project that trains, to be changed from there."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
def new(folder: Path) -> None:
    """Write a small project to FOLDER, which is new or empty.

    keyhole.toml says what is trained and where its parties are; task.py has the model, the data and
    the metric; test_task.py tests them; devices/ has examples for a try-out. All of it runs.
    """
    from keyhole.project.new import write_project

    for path in write_project(folder):
        click.echo(path)
    click.echo(
        f"\ncd {folder}\n"
        "keyhole run             # train in this process\n"
        "keyhole check           # who learns what, and what a round costs\n"
        "keyhole up              # start a service and devices on this machine; then, elsewhere:\n"
        "keyhole run --deploy    # train with those devices"
    )
