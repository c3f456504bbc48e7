"""Runs `keyhole provision`: a start-up kit for each party of a project."""

from __future__ import annotations

from pathlib import Path

import click

from keyhole.cli.options import DIRECTORY, EXISTING_FILE, option, project_option
from keyhole.cli.run import KITS
from keyhole.logs import say


@click.command()
@project_option
@option(
    "--out",
    type=DIRECTORY,
    show_default=f"{KITS} of the project",
    help="Folder of the kits.",
)
@option(
    "--devices",
    "names",
    type=EXISTING_FILE,
    metavar="FILE",
    show_default="device-0 to device-N, N being `devices` of [deploy] less one",
    help="Make kits for the devices that this file names, one in a line.",
)
def provision(folder: Path, out: Path | None, names: Path | None) -> None:
    """Write a start-up kit for the trainer, each service and each device of a project.

    A kit has a folder: keys, tokens, certificates, a script and a systemd unit for each process.
    Where there are kits, those of devices that have none are added and the others stay as they are.
    """
    from keyhole.project.kits import device_names, provision
    from keyhole.project.spec import Project

    project = Project.open(folder)
    wanted = names.read_text().split() if names else device_names(project.deploy.devices)
    with project.importable():
        made = provision(project, out or project.folder / KITS, wanted)
    for name in made:
        click.echo((out or project.folder / KITS) / name)
    if made:
        say(f"{len(made)} kits made: give each to its party, and to nobody else")
    else:
        say("all kits are there; their code is that of the project")
