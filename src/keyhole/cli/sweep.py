"""Runs `keyhole sweep`: all runs behind a figure or table of the paper."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from keyhole.cli.options import json_option, out_option
from keyhole.cli.runs import run_trials, start_jax
from keyhole.cli.screen import import_shown
from keyhole.cli.spec_options import data_option, seed_option
from keyhole.files import make_directory, storage_errors

if TYPE_CHECKING:
    from keyhole.data.federated import Dataset
    from keyhole.experiments.sweeps import Sweep


@click.command()
@click.argument("figure")
@click.option(
    "--scale",
    type=click.Choice(["small", "paper"]),
    default="small",
    help="small: minutes on two cores; paper: the paper's settings, for its full data.",
)
@data_option
@click.option("--rounds", type=click.IntRange(1), help="Rounds, instead of the scale's.")
@click.option("--trials", type=click.IntRange(1, 1000), help="Trials, instead of the scale's.")
@click.option("--cohort", type=click.IntRange(1), help="Clients per round, instead of the scale's.")
@seed_option
@out_option("keyhole-runs", "Where runs are kept; sweeps that share an arm share its runs.")
@click.option("--keep-state", is_flag=True, help="Keep the models of finished runs on disk.")
@json_option
def sweep(figure: str, out: Path, data: str, as_json: bool, **options: Any) -> None:
    """Run everything behind FIGURE, trial by trial.

    FIGURE is one of

    \b
    tag-recall        recall@5 by vocabulary and keys per client (so_tag)
    tag-keys          recall@5 by choice of keys (so_tag)
    emnist-cnn        accuracy by random keys per client
    emnist-2nn        accuracy by random keys per client
    emnist-cnn-fixed  keys drawn by each client, or once a round
    emnist-2nn-fixed  keys drawn by each client, or once a round
    word-alpha        accuracy against client size (so_word)
    divisor           means over the cohort, or over those who chose a key
    so-tag-rates emnist-cnn-rates emnist-2nn-rates so-word-rates
                      client and server rates, without select

    What is finished is not run again, so the same command resumes a sweep that was stopped. Draw
    the figure with `keyhole report`.
    """
    from keyhole.experiments.opening import open_data, synthetic_sizes
    from keyhole.experiments.sweeps import sweep_named
    from keyhole.experiments.trial import read_result
    from keyhole.rounds.record import metrics_to_json

    asked = _changed(sweep_named(figure, options["scale"]), options)
    start_jax()
    specs = [line.spec for line in asked.lines]
    sizes, find = synthetic_sizes(specs), import_shown
    dataset = open_data(specs[0], data, options["seed"], sizes=sizes, find=find)
    work = _work(asked, dataset, out)
    for _, experiment, trial, directory in work:
        experiment.check()
        read_result(directory, experiment.describe(trial))
    make_directory(out)
    described = asked.describe(options["scale"], dataset.name)
    path = out / f"{asked.name}.json"
    with storage_errors(path, "write"):
        path.write_text(json.dumps(described, indent=1) + "\n")
    rows = []
    for path, result in run_trials(work, len(work), options["keep_state"]):
        rows.append(
            {"run": str(path), "seconds": result.seconds, **metrics_to_json(result.metrics)}
        )
        if not as_json:
            metrics = ", ".join(f"{name} {value:.4f}" for name, value in result.metrics.items())
            click.echo(f"{path.relative_to(out)}: {metrics} ({result.seconds:.0f} s)")
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    else:
        click.echo(f"runs: {out}; draw them with: keyhole report {out}")


def _changed(asked: Sweep, options: dict[str, Any]) -> Sweep:
    """The sweep with what the command line says in place of the scale's settings."""
    paths = {"rounds": "rounds", "cohort": "cohort.size", "seed": "seed"}
    changes = {path: options[n] for n, path in paths.items() if options[n] is not None}
    lines = tuple(replace(line, spec=line.spec.changed(changes)) for line in asked.lines)
    return replace(asked, lines=lines, trials=options["trials"] or asked.trials)


def _work(asked: Sweep, dataset: Dataset, out: Path) -> list[tuple[str, Any, int, Path]]:
    """Every trial of every run, each run once; first trial of all, then the second."""
    from keyhole.experiments.experiment import Experiment
    from keyhole.experiments.specs import name_of

    specs = {name_of(line.spec): line.spec for line in asked.lines}
    experiments = {name: Experiment(spec, dataset) for name, spec in specs.items()}
    return [
        (f"{name}, trial {trial}", experiment, trial, out / name / f"trial-{trial}")
        for trial in range(asked.trials)
        for name, experiment in experiments.items()
    ]
