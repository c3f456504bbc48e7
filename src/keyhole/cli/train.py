"""Runs `keyhole train`: trains one task with one way to choose keys."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from keyhole.cli.aggregators import check_aggregator_flags, sum_services, trainer_sum_options
from keyhole.cli.options import (
    DELIVERY,
    MODEL,
    PLACE,
    GroupedCommand,
    NumberRange,
    in_group,
    json_option,
    keys_options,
    out_option,
    size_option,
    spec_from,
    spec_option,
    spec_options,
    task_defaults,
)
from keyhole.cli.runs import load_data, start_jax, synthetic_sizes
from keyhole.cli.screen import WaitingNotice
from keyhole.cli.train_options import (
    check_engine_flags,
    check_privacy_flags,
    check_sum_flags,
    engine_options,
    opened_engine,
)
from keyhole.delivery import delivery_named
from keyhole.experiments.specs import name_of
from keyhole.files import directory_for_work

if TYPE_CHECKING:
    from keyhole.experiments.trial import Result
    from keyhole.rounds.loop import Rounds
    from keyhole.rounds.spec import RunSpec


_DEVICE_SECONDS = 600.0  # that an asynchronous round waits for a device: it would keep its place


@click.command(cls=GroupedCommand, epilog=task_defaults())
@click.argument("task", required=False)
@spec_option
@size_option
@spec_options("--data", "--rounds", "--evaluate-every", "--metrics", "--seed")
@in_group(
    MODEL,
    "--trials",
    default=1,
    show_default=True,
    type=click.IntRange(1, 1000),
    help="Repetitions, each with randomness of its own.",
)
@spec_options(
    "--cohort",
    "--sampling",
    "--algorithm",
    "--client-lr",
    "--batch-size",
    "--max-examples",
    "--min-examples",
)
@keys_options
@spec_options("--negatives", "--delivery")
@in_group(
    DELIVERY, "--force", is_flag=True, help="Take a private delivery even if broadcast is cheaper."
)
@in_group(
    DELIVERY,
    "--allow-simulation",
    is_flag=True,
    help="Run an enclave without hardware, that is WITHOUT PROTECTION from the host.",
)
@spec_options(
    *(
        "--aggregation",
        "--mean-over",
        "--server-lr",
        "--optimizer",
        "--value-clip",
        "--ring-bits",
        "--signed",
    ),
    *("--dp-noise", "--dp-clip", "--dp-delta", "--dp-budget"),
    *("--dp-kind", "--dp-threshold", "--dp-bands"),
    *("--concurrency", "--max-staleness", "--engine"),
)
@engine_options
@in_group(
    PLACE,
    "--devices",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Let the devices of a slice service train: rounds are published to DIR, which `keyhole "
    "serve DIR` serves, and updates are taken from there.",
)
@in_group(
    PLACE,
    "--round-seconds",
    type=NumberRange(0, min_open=True),
    show_default="no limit; 600 with --concurrency",
    help="With --devices: close a round after this many seconds with what has arrived. With "
    "--concurrency: wait this long for a device.",
)
@in_group(
    PLACE,
    "--replace-rounds",
    is_flag=True,
    help="With --devices: drop the rounds and updates that another run has left in DIR.",
)
@trainer_sum_options
@out_option(
    "keyhole-runs", "Where runs are kept; the same command goes on with a run that was stopped."
)
@json_option
@click.pass_context
def train(
    context: click.Context,
    /,
    task: str | None,
    out: Path,
    trials: int,
    as_json: bool,
    **options: Any,
) -> None:
    """Train a task: so_tag, emnist_cnn, emnist_2nn, so_word, experts, movies, or module:NAME.

    Options that are not given take the task's defaults, which are the paper's where it names them.
    A run directory holds run.json (what was asked, versions, seed), records.jsonl (one line per
    round), state/ (the model) and result.json (metrics on the test split, sizes, bytes).
    """
    options = check_aggregator_flags(options)
    context.params["aggregation"] = options["aggregation"]
    check_privacy_flags(options)
    spec = spec_from(context, task)
    _check_flags(options, spec)
    with directory_for_work(out):  # what cannot be made shows before JAX and data are loaded
        _train(spec, trials, out, as_json, options)


def _train(
    spec: RunSpec, trials: int, out: Path, as_json: bool, options: Mapping[str, Any]
) -> None:
    from keyhole.cli.trials import run_trials
    from keyhole.experiments.experiment import Experiment
    from keyhole.experiments.named import task_named

    start_jax()
    source, home = spec.data.name, out / name_of(spec)
    sizes = synthetic_sizes(source, [spec])
    data = load_data(source, task_named(spec.task.name).kind, spec.seed, **sizes)
    experiment = Experiment(spec, data, allow_simulation=options["allow_simulation"])
    experiment.check()
    if not options["force"]:
        experiment.check_worth()
    work = [
        (f"{home.name}, trial {trial}", experiment, trial, home / f"trial-{trial}")
        for trial in range(trials)
    ]
    with (
        _rounds(trials, options, home / "trial-0") as kind_of,
        opened_engine(options, experiment, sizes) as (execute, hold),
    ):
        done = dict(run_trials(work, trials, True, kind_of=kind_of, execute=execute, hold=hold))
    if as_json:
        click.echo(json.dumps([_described(*each) for each in done.items()], indent=2))
    else:
        _show(home, experiment.describe(0)["size"], done)


def _show(home: Path, size: Mapping[str, int], done: Mapping[Path, Result]) -> None:
    """The tables that end the command."""
    from keyhole.cli.trials import last_record, privacy_line, skipped_line, trust_table

    screen = Console()
    screen.print(_table(home.name, size, list(done.values())))
    for directory in done:
        click.echo(skipped_line(directory), nl=False)
    last = last_record(next(iter(done)))
    if last is not None:
        screen.print(trust_table(last))
        click.echo(privacy_line(last), nl=bool(last.privacy))
    click.echo(f"runs: {home}")


def _described(directory: Path, result: Result) -> dict[str, Any]:
    """A trial as JSON."""
    from keyhole.cli.trials import last_record
    from keyhole.rounds.record import metrics_to_json

    last = last_record(directory)
    told = ("seen_by", "seen_in_sum", "privacy")
    seen = {} if last is None else {name: getattr(last, name) for name in told}
    metrics = metrics_to_json(result.metrics)
    return {"directory": str(directory), **asdict(result), "metrics": metrics, **seen}


def _check_flags(options: Mapping[str, Any], spec: RunSpec) -> None:
    """Refuses flags that contradict each other or would do nothing."""

    delivery = spec.delivery
    if options["devices"] and delivery:
        raise click.UsageError("--delivery: devices choose their own")
    is_alone = options["devices"] and not options["aggregators"]
    if is_alone and (spec.aggregation.name or spec.privacy):
        raise click.UsageError("--aggregation and --dp-noise with --devices take --aggregators")
    about = delivery_named(delivery.name).about if delivery else None
    if options["force"] and not (about and about.is_private):
        raise click.UsageError("--force goes with a private --delivery")
    if options["allow_simulation"] and (about is None or about.basis != "hardware"):
        raise click.UsageError("--allow-simulation goes with a --delivery that rests on hardware")
    check_sum_flags(options, spec)
    check_engine_flags(options, spec.engine)


@contextmanager
def _rounds(
    trials: int, options: Mapping[str, Any], run: Path
) -> Iterator[Callable[[threading.Event], Rounds | None]]:
    """What makes the rounds: this process, or the devices of a service."""
    directory, seconds = options["devices"], options["round_seconds"]
    if directory is None:
        for name in ("round_seconds", "replace_rounds"):
            if options[name]:
                raise click.UsageError(f"--{name.replace('_', '-')} goes with --devices")
        yield lambda stop: None
        return
    if trials > 1:
        raise click.UsageError("--devices trains one trial at a time")
    from keyhole.service.inbox import SpoolInbox
    from keyhole.service.publishing import Publisher
    from keyhole.service.served import Served
    from keyhole.service.spool import UpdateSpool

    with Publisher(directory) as publisher:
        if not (options["replace_rounds"] or (run / "plan.json").exists()):
            publisher.check_unused()

        def make(stop: threading.Event) -> Rounds:
            spool = SpoolInbox(UpdateSpool(directory / "updates"))
            inbox = sum_services(options, run, stop) if options["aggregators"] else spool
            usual = inf if options["concurrency"] is None else _DEVICE_SECONDS
            tell = WaitingNotice(is_terminal=sys.stderr.isatty())
            made = Served(publisher, inbox, seconds=seconds or usual, stop=stop, on_arrival=tell)
            made.goes_on = options["replace_rounds"]
            return made

        yield make


def _table(name: str, size: Mapping[str, int], results: list[Result]) -> Table:
    table = Table(title=name)
    for column in ("trial", *results[0].metrics, "client size", "share", "KB down", "KB up", "s"):
        table.add_column(column, justify="right")
    rows = [
        [
            *result.metrics.values(),
            result.client_size,
            result.client_size / size["server"],
            result.bytes_down / 1000,
            result.bytes_up / 1000,
            result.seconds,
        ]
        for result in results
    ]
    metrics = len(results[0].metrics)
    shapes = ["{:.4f}"] * metrics + ["{:,.0f}", "{:.2%}", "{:,.1f}", "{:,.1f}", "{:,.1f}"]
    for trial, row in enumerate(rows):
        cells = [shape.format(value) for shape, value in zip(shapes, row, strict=True)]
        table.add_row(str(trial), *cells)
    if len(rows) > 1:
        mean = [shape.format(value) for shape, value in zip(shapes, np.mean(rows, 0), strict=True)]
        table.add_row("mean", *mean)
    return table
