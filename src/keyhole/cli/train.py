"""Runs `keyhole train`: trains one task with one way to choose keys."""

from __future__ import annotations

import json
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

from keyhole.aggregation.plain import PLAIN
from keyhole.cli.aggregators import check_aggregator_flags, sum_services, trainer_sum_options
from keyhole.cli.options import (
    data_option,
    json_option,
    load_data,
    out_option,
    parse_pairs,
    seed_option,
    start_jax,
    synthetic_sizes,
)
from keyhole.cli.train_options import (
    asynchronous_fields,
    asynchronous_options,
    check_engine_flags,
    check_sum_flags,
    engine_options,
    opened_engine,
    privacy_of,
    secure_sum_options,
)
from keyhole.delivery.base import DELIVERIES, PRIVATE_DELIVERIES
from keyhole.errors import InputError

if TYPE_CHECKING:
    from keyhole.experiments.arms import Arm
    from keyhole.experiments.experiment import Result
    from keyhole.experiments.task import TaskKind
    from keyhole.rounds.loop import Rounds


FIXED = "fixed"
_DEVICE_SECONDS = 600.0  # that an asynchronous round waits for a device: it would keep its place
SETTINGS = (
    "rounds",
    "cohort",
    "algorithm",
    "client_lr",
    "server_lr",
    "batch_size",
    "max_examples",
    "min_examples",
    "evaluate_every",
)


@click.command()
@click.argument("task")
@click.option(
    "--keys",
    "choices",
    multiple=True,
    metavar="[SPACE=]CHOICE",
    help="How clients choose keys: top, random, random-top, independent, fixed (drawn once a round "
    "for all clients) or all. Tasks with several key spaces take SPACE=CHOICE.",
)
@click.option(
    "--m",
    "counts",
    multiple=True,
    metavar="[SPACE=]COUNT",
    help="Keys per client; `all` for every key.",
)
@data_option
@click.option("--rounds", type=click.IntRange(1), help="Rounds of training.")
@click.option("--trials", default=1, show_default=True, type=click.IntRange(1, 1000))
@click.option("--cohort", type=click.IntRange(1), help="Clients of a round.")
@click.option("--algorithm", help="FedAvg, FedProx, FedAdagrad, FedAdam or FedYogi.")
@click.option("--client-lr", type=click.FloatRange(0, min_open=True))
@click.option("--server-lr", type=click.FloatRange(0, min_open=True))
@click.option("--batch-size", type=click.IntRange(1), help="Examples of a client's step.")
@click.option("--max-examples", type=click.IntRange(1), help="Most examples of a client a round.")
@click.option("--min-examples", type=click.IntRange(1), help="Leave out clients with fewer.")
@click.option("--evaluate-every", type=click.IntRange(1), help="Rounds between evaluations.")
@click.option(
    "--size",
    "sizes",
    multiple=True,
    callback=parse_pairs,
    metavar="NAME=N",
    help="A size of the model, such as words=50000.",
)
@click.option(
    "--mean-over",
    type=click.Choice(["cohort", "choosers"]),
    default="cohort",
    show_default=True,
    help="Divide a key's sum by the cohort (Eq. 5) or by those who chose the key.",
)
@click.option(
    "--negatives",
    type=click.FloatRange(0, 1, max_open=True),
    default=0.0,
    show_default=True,
    help="so_word: share of a client's words that are drawn at random, for a sampled softmax.",
)
@click.option(
    "--delivery",
    type=click.Choice(DELIVERIES),
    help="How slices travel; all ways train the same model. Without it, on demand. A private way "
    "that would send more than the whole model is refused.",
)
@click.option("--force", is_flag=True, help="Take a private way even if broadcast is cheaper.")
@click.option(
    "--allow-simulation",
    is_flag=True,
    help="With --delivery enclave: without hardware, that is WITHOUT PROTECTION from the host.",
)
@secure_sum_options
@asynchronous_options
@engine_options
@click.option(
    "--devices",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Let the devices of a slice service train: rounds are published to DIR, which `keyhole "
    "serve DIR` serves, and updates are taken from there.",
)
@click.option(
    "--round-seconds",
    type=click.FloatRange(0, min_open=True),
    help="With --devices: close a round after so many seconds with what has arrived. With "
    "--concurrency: wait so long for a device, 600 seconds unless told.",
)
@trainer_sum_options
@seed_option
@out_option(
    "keyhole-runs", "Where runs are kept; the same command goes on with a run that was stopped."
)
@json_option
def train(task: str, out: Path, trials: int, data: str, as_json: bool, **options: Any) -> None:
    """Train TASK: so_tag, emnist_cnn, emnist_2nn, so_word, experts or movies.

    Options that are not given take the task's defaults, which are the paper's where it names them.
    A run directory holds run.json (what was asked, versions, seed), records.jsonl (one line a
    round), state/ (the model) and result.json (metrics on the test split, sizes, bytes).
    """
    from keyhole.cli.trials import last_record, privacy_line, run_trials, trust_table
    from keyhole.experiments.experiment import Experiment
    from keyhole.experiments.named import task_named

    kind = task_named(task)
    options = check_aggregator_flags(options)
    arm = read_arm(kind, options)
    _check_flags(options)
    start_jax()
    sizes = synthetic_sizes(data, [arm])
    experiment = Experiment(
        arm,
        load_data(data, kind.kind, options["seed"], **sizes),
        allow_simulation=options["allow_simulation"],
    )
    experiment.check()
    if not options["force"]:
        experiment.check_worth()
    work = [
        (f"{arm.name}, trial {trial}", experiment, trial, out / arm.name / f"trial-{trial}")
        for trial in range(trials)
    ]
    with (
        _rounds(trials, options, out / arm.name / "trial-0") as kind_of,
        opened_engine(options, arm, data, sizes) as (execute, hold),
    ):
        done = dict(run_trials(work, trials, True, kind_of=kind_of, execute=execute, hold=hold))
    if as_json:
        click.echo(json.dumps([_described(*each) for each in done.items()], indent=2))
        return
    screen = Console()
    screen.print(_table(arm, experiment.describe(0)["size"], list(done.values())))
    last = last_record(next(iter(done)))
    if last is not None:
        screen.print(trust_table(last))
        click.echo(privacy_line(last), nl=bool(last.privacy))
    click.echo(f"runs: {out / arm.name}")


def _described(directory: Path, result: Result) -> dict[str, Any]:
    """A trial as JSON."""
    from keyhole.cli.trials import last_record

    last = last_record(directory)
    told = ("seen_by", "seen_in_sum", "privacy")
    seen = {} if last is None else {name: getattr(last, name) for name in told}
    return {"directory": str(directory), **asdict(result), **seen}


def _check_flags(options: Mapping[str, Any]) -> None:
    """Refuses flags that contradict each other or would do nothing."""
    delivery = options["delivery"]
    if options["devices"] and delivery:
        raise click.UsageError("--delivery: devices choose their own")
    is_alone = options["devices"] and not options["aggregators"]
    if is_alone and (options["aggregation"] or options["dp_noise"]):
        raise click.UsageError("--aggregation and --dp-noise with --devices take --aggregators")
    if options["force"] and delivery not in PRIVATE_DELIVERIES:
        raise click.UsageError("--force goes with a private --delivery")
    if options["allow_simulation"] and delivery != "enclave":
        raise click.UsageError("--allow-simulation goes with --delivery enclave")
    check_sum_flags(options)
    check_engine_flags(options)


@contextmanager
def _rounds(
    trials: int, options: Mapping[str, Any], run: Path
) -> Iterator[Callable[[threading.Event], Rounds | None]]:
    """What makes the rounds: this process, or the devices of a service."""
    directory, seconds = options["devices"], options["round_seconds"]
    if directory is None:
        if seconds is not None:
            raise click.UsageError("--round-seconds goes with --devices")
        yield lambda stop: None
        return
    if trials > 1:
        raise click.UsageError("--devices trains one trial at a time")
    from keyhole.service.inbox import SpoolInbox
    from keyhole.service.publishing import Publisher
    from keyhole.service.served import Served
    from keyhole.service.spool import UpdateSpool

    with Publisher(directory) as publisher:

        def make(stop: threading.Event) -> Rounds:
            spool = SpoolInbox(UpdateSpool(directory / "updates"))
            inbox = sum_services(options, run, stop) if options["aggregators"] else spool
            usual = inf if options["concurrency"] is None else _DEVICE_SECONDS
            return Served(publisher, inbox, seconds=seconds or usual, stop=stop)

        yield make


def read_arm(kind: TaskKind, options: Mapping[str, Any]) -> Arm:
    """The arm that the options of `keyhole train` describe."""
    from keyhole.experiments.arms import arm_of

    choices = _by_space(kind, options["choices"])
    counts = {space: _count(text) for space, text in _by_space(kind, options["counts"]).items()}
    counts |= {space: None for space, choice in choices.items() if choice == "all"}
    shared = FIXED in choices.values()
    _check_fixed(choices)
    return arm_of(
        kind.name,
        sizes={name: _whole(value) for name, value in options["sizes"].items()},
        keys={s: "independent" if c == FIXED else c for s, c in choices.items()},
        keys_per_client=counts,
        changes={name: options[name] for name in SETTINGS if options[name] is not None},
        shared_keys=shared,
        over=options["mean_over"],
        negatives=options["negatives"],
        delivery=options.get("delivery"),
        aggregation=options.get("aggregation") or PLAIN.about.name,
        value_clip=options.get("value_clip") or 16.0,
        ring_bits=int(options.get("ring_bits") or 32),
        is_signed=bool(options.get("signed")),
        sampling=options.get("sampling") or "fixed",
        privacy=privacy_of(options),
        **asynchronous_fields(options),
        seed=options["seed"],
    )


def _check_fixed(choices: Mapping[str, str]) -> None:
    """Random numbers are shared by all key spaces of a plan or by none."""
    others = set(choices.values()) & {"random", "random-top", "independent"}
    if FIXED in choices.values() and others:
        raise InputError(
            "fixed keys cannot be mixed with keys that each client draws",
            got=", ".join(f"{space}={choice}" for space, choice in choices.items()),
            allowed="fixed with top or all",
            fix="choose one of the two",
        )


def _by_space(kind: TaskKind, texts: tuple[str, ...]) -> dict[str, str]:
    """`SPACE=VALUE`, or a value alone where the task has one key space."""
    found = {}
    for text in texts:
        space, sign, value = text.rpartition("=")
        if not sign and len(kind.keys) > 1:
            raise InputError(
                f"task {kind.name} has several key spaces",
                got=text,
                allowed=", ".join(f"{name}={text}" for name in kind.keys),
                fix="say which one is meant",
            )
        found[space if sign else next(iter(kind.keys))] = value.lower()
    return found


def _count(text: str) -> int | None:
    return None if text == "all" else _whole(text)


def _whole(text: str) -> int:
    try:
        return int(text.replace("_", ""))
    except ValueError:
        raise InputError(
            "not a whole number", got=text, allowed="digits", fix="write it such as 1000"
        ) from None


def _table(arm: Arm, size: Mapping[str, int], results: list[Result]) -> Table:
    table = Table(title=arm.name)
    for name in ("trial", *results[0].metrics, "client size", "share", "KB down", "KB up", "s"):
        table.add_column(name, justify="right")
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
