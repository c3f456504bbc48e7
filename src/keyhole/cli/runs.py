"""Finds runs of `keyhole train` for other commands: what was asked, and with what data."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import click

from keyhole.cli.options import load_data, synthetic_sizes
from keyhole.delivery.records import CodingKind
from keyhole.errors import InputError

if TYPE_CHECKING:
    from keyhole.experiments.arms import Arm
    from keyhole.experiments.experiment import Experiment


_Command = TypeVar("_Command", bound=Callable[..., Any])


def coding_option(command: _Command) -> _Command:
    """`--coding`."""
    return click.option(
        "--coding",
        type=click.Choice(get_args(CodingKind)),
        default="plain",
        show_default=True,
        help="How the numbers of slices are stored: as they are, in 16, 8 or 4 bits.",
    )(command)


def read_run(run: Path, data: str) -> Experiment:
    """Returns the experiment that a directory says it holds, on the data it was trained with.

    Raises:
        InputError: it is not the directory of a trial, or was trained with other data.
    """
    from keyhole.experiments.experiment import Experiment, read_result
    from keyhole.experiments.named import task_named

    arm, trial = _read_arm(run)
    sizes = synthetic_sizes(data, [arm])
    dataset = load_data(data, task_named(arm.task).kind, arm.seed, **sizes)
    experiment = Experiment(arm, dataset)
    read_result(run, experiment.describe(trial))  # refuses other data than the run's
    return experiment


def _read_arm(run: Path) -> tuple[Arm, int]:
    """What a run's directory says was asked, and which trial it is."""
    from keyhole.experiments.arms import Arm
    from keyhole.experiments.task import Settings

    path = run / "run.json"
    try:
        said = json.loads(path.read_text())
        told = {
            field.name: said[field.name]
            for field in fields(Arm)
            if field.name in said or field.default is MISSING
        }
        return Arm(**{**told, "settings": Settings(**told["settings"])}), int(said["trial"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{run} is not the directory of a trial",
            got=f"{path.name}: {error}",
            allowed="what keyhole train writes: OUT/ARM/trial-N",
            fix="name such a directory",
        ) from error


def run_settings(experiment: Experiment) -> dict[str, Any]:
    """What devices are told about a run whose state is given out."""
    return {
        "task": experiment.arm.task,
        "keys_per_client": experiment.keys_per_client,
        "seed": experiment.arm.seed,
    }
