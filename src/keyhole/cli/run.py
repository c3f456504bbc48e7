"""Runs `keyhole run`: trains the run of a project."""

from __future__ import annotations

from pathlib import Path

import click

from keyhole.cli.options import EXISTING_DIRECTORY, option, project_option
from keyhole.cli.screen import Around
from keyhole.errors import InputError

KITS = "kits"
"""The folder of a project that has its kits, unless told."""


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)
@project_option
@option(
    "--deploy",
    "is_deployed",
    is_flag=True,
    help="Train with the devices and services of [deploy], which run elsewhere.",
)
@option(
    "--kit",
    type=EXISTING_DIRECTORY,
    show_default=f"{KITS}/trainer of the project",
    help="With --deploy: the trainer's kit, of `keyhole provision` or `keyhole up`.",
)
@click.pass_context
def run(context: click.Context, folder: Path, is_deployed: bool, kit: Path | None) -> None:
    """Train what keyhole.toml of this folder says.

    All options of `keyhole train` are options here, too, and take precedence over the file, such as
    --rounds 5 or --engine ray. Runs are kept in `runs` beside the file unless --out names another
    folder; the same command resumes a run that was stopped.
    """
    from keyhole.cli.train import train
    from keyhole.project.kits import check_kit
    from keyhole.project.parties import TRAINER, check_parties, simulating_args, trainer_args
    from keyhole.project.spec import FILE, Project

    project, extra = Project.open(folder), list(context.args)
    with project.importable():
        args = ["--spec", str(project.folder / FILE), "--out", str(project.folder / "runs")]
        if is_deployed:
            check_parties(project)
            kit = (kit or project.folder / KITS / TRAINER).absolute()
            if not kit.is_dir():
                raise InputError(
                    f"the trainer has no kit: got no folder {kit}; expected one of `keyhole "
                    "provision` or `keyhole up`; make it, or name it with --kit"
                )
            check_kit(project, kit)
            args += trainer_args(project, kit)
        elif kit is not None:
            raise click.UsageError("--kit goes with --deploy")
        elif unused := project.of_check_ins:
            args += simulating_args(project)
            click.echo(
                f"note: without --deploy no device checks in: {', '.join(unused)} of [cohort] in "
                f"{FILE} do nothing",
                err=True,
            )
        if project.deploy.force and project.delivery is not None and project.delivery.is_private:
            args.append("--force")
        known = [name for each in context.command.params for name in each.opts]
        whole = context.find_object(Around) or Around()
        around = Around(whole.logs, known)
        train.main([*args, *extra], prog_name="keyhole run", standalone_mode=False, obj=around)
