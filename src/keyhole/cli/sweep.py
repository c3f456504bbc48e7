"""Runs `keyhole sweep`: all runs behind a figure or table of the paper, or a grid of your own."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from keyhole.cli.bars import progress_bars
from keyhole.cli.options import EXISTING_FILE, json_option, option, out_option, track_option
from keyhole.cli.runs import run_trials
from keyhole.cli.screen import import_shown
from keyhole.cli.spec_options import data_option, seed_option
from keyhole.files import make_directory, storage_errors
from keyhole.logs import say

if TYPE_CHECKING:
    from keyhole.data.federated import Dataset
    from keyhole.experiments.experiment import Experiment
    from keyhole.experiments.parallel import Cell, DataSource
    from keyhole.experiments.report.kept import KeptSweep
    from keyhole.experiments.sweeps import Sweep
    from keyhole.experiments.trackers import Tracker
    from keyhole.experiments.trial import Result


@click.command()
@click.argument("figure", metavar="FIGURE|FILE.toml")
@option(
    "--scale",
    type=click.Choice(["small", "paper"]),
    default="small",
    help="small: minutes a trial on two cores; paper: the paper's settings, for its full data.",
)
@data_option
@option("--rounds", type=click.IntRange(1), help="Rounds of training.", show_default="the sweep's")
@option(
    "--trials",
    type=click.IntRange(1, 1000),
    help="Repetitions of each run.",
    show_default="five, or the file's",
)
@option("--cohort", type=click.IntRange(1), help="Clients per round.", show_default="the sweep's")
@seed_option
@option(
    "--processes",
    type=click.IntRange(1, 1000),
    default=1,
    help="Trials that run at a time, each in a process; cores are shared out among them.",
)
@option(
    "--kept",
    type=EXISTING_FILE,
    help="Leave out the runs that this file holds, as `docs/results.py keep` writes it.",
)
@out_option("keyhole-runs", "Where runs are kept; sweeps that share an arm share its runs.")
@track_option
@option("--keep-state", is_flag=True, help="Keep the models of finished runs on disk.")
@json_option
@click.pass_context
def sweep(context: click.Context, /, figure: str, out: Path, as_json: bool, **options: Any) -> None:
    """Run everything behind FIGURE, or every cell of a grid in FILE.toml, trial by trial.

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

    FILE.toml has fields of a run as in run.json, each of which may be a list, and runs every
    combination, in the trials that it says or else in five (docs/runs.md).

    What is finished is not run again, so the same command resumes a sweep that was stopped. Draw
    the figure with `keyhole report`.
    """
    from keyhole.experiments.report.kept import read_kept
    from keyhole.experiments.trackers import trackers_of
    from keyhole.rounds.cores import start_jax

    given = {
        name: value
        for name, value in options.items()
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE
    }
    trackers = trackers_of(options["track"], out)
    asked, scale = _asked(figure, options["scale"], given)
    kept = None if options["kept"] is None else read_kept(options["kept"])
    start_jax()
    cells, names = _cells(asked, out, options, kept)
    make_directory(out)
    path = out / f"{asked.name}.json"
    with storage_errors(path, "write"):
        path.write_text(json.dumps(asked.describe(scale, ", ".join(names)), indent=1) + "\n")
    arms = [line.arm for line in asked.lines]
    _print(_results(cells, options, trackers), arms, out, as_json)


def _asked(figure: str, scale: Any, given: dict[str, Any]) -> tuple[Sweep, str]:
    """The sweep, with what the command line says in place of its own settings, and its scale."""
    from keyhole.experiments.grid import read_grid
    from keyhole.experiments.sweeps import sweep_named

    is_own = figure.endswith(".toml")
    if is_own and "scale" in given:
        raise click.UsageError("--scale goes with a figure of the paper, not with a file")
    asked = read_grid(Path(figure)) if is_own else sweep_named(figure, scale)
    paths = {"rounds": "rounds", "cohort": "cohort.size", "seed": "seed", "data": "data"}
    changes = {path: given[n] for n, path in paths.items() if given.get(n) is not None}
    lines = tuple(replace(line, spec=line.spec.changed(changes)) for line in asked.lines)
    asked = replace(asked, lines=lines, trials=given.get("trials") or asked.trials)
    return asked, "" if is_own else scale


def _cells(
    asked: Sweep, out: Path, options: dict[str, Any], kept: KeptSweep | None
) -> tuple[list[tuple[Experiment, Cell]], list[str]]:
    """Every trial of every run that is not kept, each run once, checked before any is begun: first
    trial of all, then the second. And the names of their data."""
    from keyhole.experiments.experiment import Experiment
    from keyhole.experiments.opening import synthetic_sizes
    from keyhole.experiments.parallel import Cell, DataSource
    from keyhole.experiments.trial import read_result

    specs = {line.arm: line.spec for line in asked.lines}
    sizes = tuple(synthetic_sizes(specs.values()).items())
    arms: dict[str, tuple[Experiment, DataSource]] = {}
    opened: dict[DataSource, Dataset] = {}
    for arm, spec in specs.items():
        source = DataSource(spec.task.name, spec.data.name, spec.seed, sizes)
        if source not in opened:
            opened[source] = source.open(import_shown)
        arms[arm] = Experiment(spec, opened[source]), source
        arms[arm][0].check()
    found = []
    for trial in range(asked.trials):
        for arm, (experiment, source) in arms.items():
            directory = out / arm / f"trial-{trial}"
            described = experiment.describe(trial)
            read_result(directory, described)
            if kept and kept.holds(arm, experiment.spec, trial, described["dataset"]):
                continue
            cell = Cell(
                experiment.spec, source, trial, directory, options["keep_state"], options["track"]
            )
            found.append((experiment, cell))
    return found, list(dict.fromkeys(data.name for data in opened.values()))


def _results(
    cells: list[tuple[Experiment, Cell]], options: dict[str, Any], trackers: list[Tracker]
) -> Iterator[tuple[Path, Result]]:
    """Runs the trials, here or in processes; yields their results as they end."""
    _tell_resumed([cell for _, cell in cells])
    if options["processes"] > 1:
        return _in_processes([cell for _, cell in cells], options["processes"])
    work = (
        (
            f"{cell.directory.parent.name}, trial {cell.trial}",
            experiment,
            cell.trial,
            cell.directory,
        )
        for experiment, cell in cells
    )
    return run_trials(work, len(cells), options["keep_state"], trackers=trackers)


def _tell_resumed(cells: list[Cell]) -> None:
    """Says which trials go on from rounds that were made before."""
    from keyhole.experiments.trial import rounds_kept

    for cell in cells:
        made, rounds, place = rounds_kept(cell.directory), cell.spec.rounds, cell.directory
        if 0 < made < rounds:
            name = f"{place.parent.name}/{place.name}"
            click.echo(f"{name}: resumed after {made} of {rounds} rounds", err=True)


def _in_processes(cells: list[Cell], processes: int) -> Iterator[tuple[Path, Result]]:
    """Runs trials in processes, under one bar."""
    from keyhole.experiments.parallel import run_cells
    from keyhole.signals import stop_on_signals

    stopped = 0
    with progress_bars() as bars, stop_on_signals() as stop:
        bar = bars.add_task("trials", total=len(cells), note="")
        for cell, result in run_cells(cells, processes, stop):
            if result is None:
                stopped += 1
                continue
            bars.update(bar, advance=1, note=str(cell.directory.parent.name))
            yield cell.directory, result
    if stop.is_set():
        say(f"{stopped} trials keep their rounds; the same command resumes them")
        raise click.Abort


def _print(
    results: Iterator[tuple[Path, Result]], order: Sequence[str], out: Path, as_json: bool
) -> None:
    """One line for each trial as it ends and one for each arm in the end, or the trials as JSON."""
    from keyhole.experiments.report.writing import write_interval
    from keyhole.experiments.statistics import spread_of
    from keyhole.rounds.record import metrics_to_json

    rows = []
    arms: dict[str, dict[str, list[float]]] = {arm: {} for arm in order}
    for path, result in results:
        reached = arms[path.parent.name]
        for name, value in result.metrics.items():
            reached.setdefault(name, []).append(value)
        rows.append(
            {"run": str(path), "seconds": result.seconds, **metrics_to_json(result.metrics)}
        )
        if not as_json:
            metrics = ", ".join(f"{name} {value:.4f}" for name, value in result.metrics.items())
            click.echo(f"{path.relative_to(out)}: {metrics} ({result.seconds:.0f} s)")
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    else:
        for arm, reached in arms.items():
            found = [f"{name} {write_interval(spread_of(v))}" for name, v in reached.items()]
            if found:  # not where all of its trials are kept
                click.echo(f"{arm}, over trials: {', '.join(found)}")
        click.echo(f"runs: {out}; draw them with: keyhole report {out}")
