"""Runs `keyhole train`: trains one task with one way to choose keys."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from math import isnan, nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table

from keyhole.cli.listening import metrics_option
from keyhole.cli.options import (
    DELIVERY,
    DIRECTORY,
    EXISTING_FILE,
    MODEL,
    PLACE,
    GroupedCommand,
    in_group,
    json_option,
    log_options,
    out_option,
    refuse,
    track_option,
)
from keyhole.cli.runs import (
    broadcast_line,
    privacy_line,
    run_trials,
    skipped_line,
    trust_table,
)
from keyhole.cli.screen import WaitingNotice, import_shown
from keyhole.cli.spec_options import keys_options, run_options, spec_from, spec_options
from keyhole.cli.sums import (
    aggregators_of,
    check_aggregator_flags,
    check_privacy_flags,
    check_served_clear,
    check_sum_flags,
    trainer_sum_options,
)
from keyhole.delivery import delivery_named
from keyhole.experiments.specs import DEFAULTS, SYNTHETIC, name_of
from keyhole.files import directory_for_work
from keyhole.logs import is_for_machines, say, tell

if TYPE_CHECKING:
    from keyhole.experiments.experiment import Experiment, Hold
    from keyhole.experiments.trial import Result
    from keyhole.rounds.loop import Rounds
    from keyhole.rounds.record import RoundRecord
    from keyhole.rounds.round import Executor
    from keyhole.rounds.spec import RunSpec
    from keyhole.service.inbox import Waiting
    from keyhole.service.telling import TrainerTelling

    OnRecord = Callable[[RoundRecord], None]


_UNKNOWN = "-"


def _task_defaults() -> str:
    """The defaults of every task, as a table for help."""
    head = ("task", "rounds", "cohort", "algorithm", "lr", "server", "batch", "keys")
    rows = [head, *(_row(spec) for spec in DEFAULTS.values())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        " ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return (
        "\b\nDefaults of the tasks (the last column is key space, --keys and --m):\n"
        + "\n".join(lines)
    )


def _row(spec: RunSpec) -> tuple[str, ...]:
    client = spec.client
    keys = ", ".join(
        f"{space} all" if keys.count is None else f"{space} {keys.choice} {keys.count}"
        for space, keys in spec.keys.items()
    )
    rates = f"{client.lr:g}", f"{spec.server.lr:g}"
    rounds, cohort, batch = str(spec.rounds), str(spec.cohort.size), str(client.batch_size)
    return spec.task.name, rounds, cohort, client.algorithm, *rates, batch, keys


@click.command(cls=GroupedCommand, epilog=_task_defaults())
@click.argument("task", required=False)
@run_options
@spec_options(
    *("--data", "--held-out", "--rounds", "--evaluate-every", "--metrics", "--seed"),
    *("--best-metric", "--best-mode", "--patience", "--min-delta"),
)
@in_group(
    MODEL,
    "--trials",
    default=1,
    type=click.IntRange(1, 1000),
    help="Repetitions, each with randomness of its own.",
)
@spec_options(
    *("--cohort", "--sampling", "--over-selection", "--min-updates"),
    *("--min-waiting", "--rest", "--min-memory-mb", "--evaluators"),
    *("--algorithm", "--client-lr"),
    *("--batch-size", "--epochs", "--client-momentum", "--client-clip-norm"),
    *("--max-examples", "--min-examples"),
)
@keys_options
@spec_options("--negatives", "--delivery", "--popular", "--popular-share")
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
    *("--aggregation", "--mean-over", "--server-lr", "--optimizer"),
    "--server-parameters",
    *("--value-clip", "--ring-bits", "--signed", "--max-update-norm", "--above-norm"),
    *("--trim", "--untouched", "--norm-alarm"),
    *("--min-clients-per-key", "--count-noise", "--sum-metrics"),
    *("--dp-noise", "--dp-clip", "--dp-delta", "--dp-budget"),
    *("--dp-kind", "--dp-threshold", "--dp-bands"),
    *("--concurrency", "--max-staleness", "--engine"),
)
@in_group(
    PLACE,
    "--address",
    metavar="HOST:PORT",
    help="With --engine ray: address of a cluster.",
    show_default="a new one on this machine",
)
@in_group(
    PLACE,
    "--workers",
    type=click.IntRange(1),
    help="Cores that train clients; with --engine ray, processes.",
    show_default="all there are",
)
@in_group(
    PLACE,
    "--shards",
    type=click.IntRange(1),
    help="With --engine ray: processes of the cluster that hold the server's tables, each a "
    "range of keys.",
    show_default="none: this process holds them",
)
@in_group(
    PLACE,
    "--devices",
    type=DIRECTORY,
    metavar="DIR",
    help="Let the devices of a slice service train: rounds are published to DIR, which `keyhole "
    "serve DIR` serves, and updates are taken from there. DIR/NAME makes it run NAME of that "
    "service, beside others.",
)
@in_group(
    PLACE,
    "--signing-key",
    type=EXISTING_FILE,
    help="With --devices: sign manifests with this key, of `keyhole token signing-key`, for "
    "devices that pin it.",
)
@spec_options("--round-seconds")
@in_group(
    PLACE,
    "--named-cohorts",
    is_flag=True,
    help="With --devices: rehearse. Draw cohorts from --seed, as a run in process does, and not "
    "from a secret of the run.",
)
@metrics_option
@trainer_sum_options
@log_options()
@out_option("keyhole-runs", "Where runs are kept; the same command resumes a run that was stopped.")
@track_option
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
    from keyhole.experiments.experiment import Experiment
    from keyhole.experiments.opening import open_data
    from keyhole.experiments.trackers import trackers_of
    from keyhole.rounds.cores import start_jax

    trackers = trackers_of(options["track"], out)
    start_jax()
    home, data = out / name_of(spec), open_data(spec, find=import_shown)
    experiment = Experiment(spec, data, allow_simulation=options["allow_simulation"])
    experiment.check()
    if not options["force"]:
        experiment.check_worth()
    work = [
        (f"{home.name}, trial {trial}", experiment, trial, home / f"trial-{trial}")
        for trial in range(trials)
    ]
    with (
        _rounds(spec, trials, options, home / "trial-0") as (kind_of, on_record),
        _opened_engine(options, experiment) as (execute, hold),
    ):
        made = run_trials(work, trials, True, kind_of, execute, hold, trackers, on_record)
        done = dict(made)
    if as_json:
        click.echo(json.dumps([_described(*each) for each in done.items()], indent=2))
    else:
        _show(home, experiment.describe(0)["size"], done)
        click.echo(_worth(spec, list(done.values())), nl=False)


def _show(home: Path, size: Mapping[str, int], done: Mapping[Path, Result]) -> None:
    """The tables that end the command."""
    from keyhole.rounds.record import read_records

    screen = Console()
    screen.print(_table(home.name, size, list(done.values())))
    for trial, result in enumerate(done.values()):
        click.echo(f"trial {trial}: {result.told}\n" * bool(result.told), nl=False)
    records = {directory: read_records(directory / "records.jsonl") for directory in done}
    for directory, made in records.items():
        click.echo(skipped_line(directory, made), nl=False)
    for line in dict.fromkeys(_select_line(result, size["server"]) for result in done.values()):
        click.echo(line, nl=False)  # trials of about the same bytes say the same
    for last in next(iter(records.values()))[-1:]:  # none where the first trial made no round
        screen.print(trust_table(last))
        if last.are_maxima:
            click.echo(
                "sizes and bytes are public maxima: nobody but the devices knows what they fetched"
            )
        click.echo(privacy_line(last), nl=bool(last.privacy))
    click.echo(f"runs: {home}")


def _worth(spec: RunSpec, results: Sequence[Result]) -> str:
    """What metrics are worth that devices measured with examples that they trained on."""
    from keyhole.experiments.measuring import measured_on

    words = {measured_on(spec, result.metrics, "") for result in results if result.metrics}
    if not words & {"training", "devices'"}:
        return ""
    said = "are of" if words == {"training"} else "may be of"
    return (
        f"note: metrics of devices {said} examples that they train on, not of new ones; start them "
        "with --hold-out 0.2 (hold_out of [deploy])\n"
    )


def _select_line(result: Result, numbers: int) -> str:
    """What select has cost beside broadcast; nothing where clients held all, or nobody knows."""
    from keyhole.experiments.report.results import broadcast_bytes

    held, down = result.client_size, result.bytes_down
    if held is None or down is None or held >= numbers:
        return ""
    whole = broadcast_bytes(numbers)
    return broadcast_line(down + result.bytes_up, whole * held / numbers, whole) + "\n"


def _described(directory: Path, result: Result) -> dict[str, Any]:
    """A trial as JSON."""
    from keyhole.rounds.record import metrics_to_json, read_records

    told = {"directory": str(directory), **asdict(result)}
    told["metrics"] = metrics_to_json(result.metrics)
    for last in read_records(directory / "records.jsonl")[-1:]:
        told |= {name: getattr(last, name) for name in ("seen_by", "seen_in_sum", "privacy")}
    return told


def _check_flags(options: Mapping[str, Any], spec: RunSpec) -> None:
    """Refuses flags that contradict each other or would do nothing."""
    delivery, engine = spec.delivery, spec.engine
    is_alone = options["devices"] and not options["aggregators"]
    if is_alone:
        check_served_clear(spec)
    about = delivery_named(delivery.name).about if delivery else None
    if options["force"] and not (about and about.is_private):
        raise click.UsageError("--force goes with a private --delivery")
    if options["allow_simulation"] and (about is None or about.basis != "hardware"):
        raise click.UsageError("--allow-simulation goes with a --delivery that rests on hardware")
    check_sum_flags(options, spec)
    if not spec.popular.keys:
        refuse(options, ["popular_share"], "goes with --popular")
    if options["devices"] and (engine != "local" or options["workers"]):
        raise click.UsageError("--engine and --workers: the devices of a service train themselves")
    if engine.is_own:
        refuse(options, ["workers"], "goes with --engine local or ray")
    if engine != "ray":
        refuse(options, ("address", "shards"), "goes with --engine ray")
    if options["devices"] is None:
        if spec.cohort.sampling == "check-in":
            raise click.UsageError(
                "--sampling check-in goes with --devices, or `keyhole run --deploy` in a project"
            )
        served = "round_seconds", "named_cohorts", "metrics_listen"
        refuse(options, served, "goes with --devices")


@contextmanager
def _rounds(
    spec: RunSpec, trials: int, options: Mapping[str, Any], run: Path
) -> Iterator[tuple[Callable[[threading.Event], Rounds | None], OnRecord | None]]:
    """What makes the rounds, this process or the devices of a service; and what tells how they
    ended."""
    directory = options["devices"]
    if directory is None:
        yield lambda stop: None, None
        return
    if trials > 1:
        raise click.UsageError("--devices trains one trial at a time")
    from keyhole.experiments.trial import rounds_kept
    from keyhole.front.devices import Devices
    from keyhole.service.telling import TrainerTelling

    is_terminal = sys.stderr.isatty() and not is_for_machines()
    telling = TrainerTelling(directory, run, is_quiet=is_terminal, kept=rounds_kept(run))
    notice = WaitingNotice() if is_terminal else None

    def on_look(waiting: Waiting) -> None:
        telling(waiting)
        if notice is not None:
            notice(waiting)

    devices = Devices(
        directory,
        options["signing_key"],
        aggregators_of(options),
        options["named_cohorts"],
    )
    with devices.rounds(spec, run, on_look) as make, _metrics_at(options, telling):
        try:
            yield make, telling.closed
        finally:
            telling.end()


@contextmanager
def _metrics_at(options: Mapping[str, Any], telling: TrainerTelling) -> Iterator[None]:
    """Shows gauges of the rounds where `--metrics-listen` says."""
    from keyhole.service.limits import Limits
    from keyhole.service.routes import MetricsApp
    from keyhole.service.transport import serving

    shown = MetricsApp(telling, Limits())
    with serving(shown, options["metrics_listen"], prepare=lambda: None) as url:
        if is_for_machines():
            tell("trainer", "listening", f"metrics at {url}/metrics")
        else:
            say(f"metrics at {url}/metrics")
        yield


@contextmanager
def _opened_engine(
    options: Mapping[str, Any], experiment: Experiment
) -> Iterator[tuple[Executor, Hold]]:
    """What trains clients and what holds the server's state, for as long as the context lasts."""
    from keyhole.experiments.experiment import hold_here
    from keyhole.rounds.cores import Cores

    spec, own = experiment.spec, experiment.engine
    if own is not None:
        yield own, hold_here
        return
    if spec.engine == "local":
        yield Cores(options["workers"]) if options["workers"] else Cores(), hold_here
        return
    from keyhole.engines.ray.engine import Population, RayEngine
    from keyhole.engines.ray.shards import Shards

    is_file = spec.data != SYNTHETIC and not spec.data.is_own
    directory = import_shown(spec.data.name) if is_file else None
    with RayEngine(
        Population(spec, directory), options["workers"], address=options["address"]
    ) as engine:
        if options["shards"] is None:
            yield engine, hold_here
        else:
            with Shards(options["shards"], address=options["address"]) as shards:
                yield engine, shards.hold


def _table(name: str, size: Mapping[str, int], results: list[Result]) -> Table:
    from keyhole.experiments.statistics import spread_of

    table = Table(title=name)
    for column in ("trial", *results[0].metrics, "client size", "share", "KB down", "KB up", "s"):
        table.add_column(column, justify="right")
    metrics = len(results[0].metrics)
    shapes = ["{:.4f}"] * metrics + ["{:,.0f}", "{:.2%}", "{:,.1f}", "{:,.1f}", "{:,.1f}"]
    rows = [
        [
            *result.metrics.values(),
            _or_nan(result.client_size),
            _or_nan(result.client_size) / size["server"],
            _or_nan(result.bytes_down) / 1000,
            result.bytes_up / 1000,
            result.seconds,
        ]
        for result in results
    ]

    def cells(row: Sequence[float]) -> list[str]:
        """The numbers of a row; a dash for what devices do not tell."""
        pairs = list(zip(shapes, row, strict=True))
        known = [shape.format(value) for shape, value in pairs[:metrics]]
        return known + [_UNKNOWN if isnan(v) else shape.format(v) for shape, v in pairs[metrics:]]

    for trial, row in enumerate(rows):
        table.add_row(str(trial), *cells(row))
    if len(rows) > 1:
        spreads = [spread_of(column) for column in zip(*rows, strict=True)]
        for name, part in {"mean": "mean", "± 95 %": "half_width"}.items():
            table.add_row(name, *cells([getattr(spread, part) for spread in spreads]))
    return table


def _or_nan(value: float | None) -> float:
    return nan if value is None else value
