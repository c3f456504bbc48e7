"""Runs `keyhole up`: all parties of a project on this machine, for a try-out."""

from __future__ import annotations

from pathlib import Path

import click

from keyhole.cli.options import project_option
from keyhole.cli.run import KITS
from keyhole.errors import WorkerError


@click.command()
@project_option
def up(folder: Path) -> None:
    """Start all services and devices of a project on this machine, until interrupted.

    `keyhole run --deploy`, in another terminal, is the trainer. Kits are made where there are none.
    """
    from keyhole.project.kits import device_names, provision
    from keyhole.project.local import check_local, running_parties
    from keyhole.project.spec import Project
    from keyhole.signals import stop_on_signals

    project = Project.open(folder)
    kits, count = project.folder / KITS, project.deploy.devices
    check_local(project)

    def tell(name: str, line: str) -> None:
        click.echo(f"{name:<12} {line}")

    with project.importable():
        provision(project, kits, device_names(count))
        with (
            stop_on_signals(every=True) as stop,
            running_parties(project, kits, stop, tell) as gone,
        ):
            services, pages = ", ".join(project.deploy.urls), ", ".join(project.deploy.pages)
            told = f"pages of {pages} may be devices, too; " if pages else ""
            click.echo(
                f"{services} and {count} devices are up; {told}`keyhole run --deploy` trains with "
                "them; Ctrl-C ends them"
            )
            known = set[str]()
            while not stop.wait(0.2):
                for name, code in gone().items():
                    if name in known:
                        continue
                    known.add(name)
                    tell(name, f"has ended, with exit code {code}")
                    if name in project.deploy.urls:
                        raise WorkerError(
                            f"{name} has ended: got no service any more; expected it to go on; "
                            "read its lines above, and start again"
                        )
    click.echo("all have ended")
