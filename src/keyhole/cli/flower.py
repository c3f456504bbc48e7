"""Runs `keyhole flower`: tasks on real devices, with Flower as the control plane."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from keyhole.cli.aggregators import SHARED
from keyhole.cli.options import load_data, synthetic_sizes
from keyhole.cli.train import read_arm, train
from keyhole.cli.train_options import check_sum_flags

if TYPE_CHECKING:
    from keyhole.experiments.arms import Arm


# Options of `keyhole train` that say how two aggregators add up.
_SUMS = ("value_clip", "ring_bits", "dp_noise", "dp_clip", "dp_delta", "dp_budget")
_NAMED = ("aggregators", "aggregator_tokens")
_SERVICES = (
    click.option(
        "--delivery",
        type=click.Choice(["clear", "pir"]),
        default="clear",
        show_default=True,
        help="How devices fetch: by keys that the service sees, or from two servers that learn "
        "none while they do not work together.",
    ),
    click.option(
        "--second", metavar="URL", default="", help="With --delivery pir: the second slice server."
    ),
    click.option(
        "--aggregator-ca",
        type=click.Path(dir_okay=False, path_type=Path),
        help="PEM file of the authorities to trust at aggregators, on the server.",
    ),
)


def sum_options(command: click.Command) -> click.Command:
    """Adds the options of secure sums."""
    command.params.extend(param for param in train.params if param.name in _SUMS)
    return command


def secure_round_options(command: click.Command) -> click.Command:
    """Adds the options that name the services of a secure round."""
    for option in _SERVICES:
        option(command)
    command.params.extend(param for param in train.params if param.name in _NAMED)
    return command


def check_secure(options: Mapping[str, Any], is_secure: bool, flag: str) -> dict[str, Any]:
    """The options, with the sum that two aggregators make where there are two.

    Args:
        options: of the command.
        is_secure: whether there are aggregators.
        flag: what asks for them.

    Raises:
        click.UsageError: options that would do nothing.
    """
    if not is_secure:
        for name in (*_SUMS, "aggregator_tokens", "aggregator_ca"):
            if options.get(name):
                raise click.UsageError(f"--{name.replace('_', '-')} goes with {flag}")
        return dict(options)
    told = {**options, "aggregation": SHARED, "signed": False}
    check_sum_flags(told)
    return told


def told_of_sums(options: Mapping[str, Any]) -> dict[str, Any]:
    """What the run config says of the services of a secure round."""
    ca = options["aggregator_ca"]
    files = [str(Path(file).absolute()) for file in options["aggregator_tokens"]]
    return {
        "delivery": options["delivery"],
        "second": options["second"],
        "aggregators": " ".join(options["aggregators"]),
        "aggregator-tokens": " ".join(files),
        "aggregator-ca": "" if ca is None else str(ca.absolute()),
    }


# Options of `keyhole train` that say what is trained; how slices travel is up to the run config.
_ARM = (
    "choices",
    "counts",
    "data",
    "rounds",
    "cohort",
    "algorithm",
    "client_lr",
    "server_lr",
    "batch_size",
    "max_examples",
    "min_examples",
    "evaluate_every",
    "sizes",
    "mean_over",
    "negatives",
    "concurrency",
    "max_staleness",
    "seed",
)
_DIRECTORY = click.Path(file_okay=False, path_type=Path)

_ROUNDS = (
    click.option(
        "--round-seconds",
        type=click.FloatRange(1, 86_400),
        default=300.0,
        show_default=True,
        help="Close a round after so many seconds with what has arrived; of asynchronous ones, "
        "wait so long for a device.",
    ),
    click.option(
        "--over-selection",
        type=click.FloatRange(1, 10),
        default=1.3,
        show_default=True,
        help="Call so many times more clients than a synchronous round waits for.",
    ),
    click.option(
        "--min-updates",
        type=click.IntRange(1),
        default=1,
        show_default=True,
        help="With fewer, a synchronous round makes no step.",
    ),
    click.option(
        "--node-seconds",
        type=click.FloatRange(1, 86_400),
        default=120.0,
        show_default=True,
        help="Wait so long for SuperNodes.",
    ),
)


def _options(command: click.Command) -> click.Command:
    """Adds the options of a task, of its rounds, and of their sums."""
    command.params.extend(param for param in train.params if param.name in _ARM)
    for option in _ROUNDS:
        option(command)
    return sum_options(command)


@click.group()
def flower() -> None:
    """Train a task on devices that Flower calls; needs the extra 'flower'.

    Control messages go through Flower's SuperLink and SuperNodes; slices and updates go through
    the slice service of `keyhole serve`.
    """


@_options
@flower.command()
@click.argument("task")
@click.option(
    "--nodes",
    type=click.IntRange(1, 64),
    default=2,
    show_default=True,
    help="SuperNodes, each of which stands in for any client. One takes some 150 MB, and as much "
    "again and more while it trains.",
)
@click.option(
    "--out",
    type=_DIRECTORY,
    default=Path("keyhole-flower"),
    show_default=True,
    help="Where the run is kept; the same command goes on with a run that was stopped.",
)
@click.option(
    "--secure",
    is_flag=True,
    help="Slices by private retrieval from two servers, updates in shares to two aggregators: four "
    "services in place of one. On one machine they show the way and hide nothing.",
)
def local(task: str, nodes: int, out: Path, secure: bool, **options: Any) -> None:
    """Train TASK with a whole Flower deployment on this machine.

    Starts a slice service, a SuperLink and SuperNodes, runs the task, and ends them all. Their
    logs stay in OUT/ARM/flower/logs. Nothing that is started here leaves this machine.
    """
    options = check_secure(options, secure, "--secure")
    arm = _checked_arm(task, options)
    from keyhole.engines.flower.local import LocalRun

    run = out / arm.name / "trial-0"
    made = LocalRun(out / arm.name / "flower", run, nodes, _config(arm, options), secure, _note)
    rounds = arm.settings.rounds
    with _ended_by_signals(), _rounds_shown(arm.name, run, rounds) as is_done:
        made(is_done)
    click.echo(f"run: {run}")


@_options
@secure_round_options
@flower.command()
@click.argument("directory", type=_DIRECTORY)
@click.option("--task", required=True, help="What to train, as `keyhole train` takes it.")
@click.option("--service", required=True, metavar="URL", help="The slice service, for devices.")
@click.option("--run", required=True, type=_DIRECTORY, help="Where the server keeps the run.")
@click.option(
    "--rounds-directory",
    required=True,
    type=_DIRECTORY,
    help="Where the server publishes rounds: what `keyhole serve` serves.",
)
@click.option(
    "--token-key",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Signing keys of the slice service, on the server.",
)
@click.option("--min-nodes", type=click.IntRange(1), default=1, show_default=True)
def app(directory: Path, task: str, **options: Any) -> None:
    """Write a Flower project to DIRECTORY, for `flwr run DIRECTORY` with a SuperLink of one's own.

    Paths are those of the machine that the SuperLink runs on.
    """
    from keyhole.engines.flower.config import RoundsConfig
    from keyhole.engines.flower.project import write_project

    options = check_secure(options, bool(options["aggregators"]), "--aggregators")
    arm = _arm(task, options)
    key = options["token_key"]
    told = {
        "run": str(options["run"].absolute()),
        "rounds-directory": str(options["rounds_directory"].absolute()),
        "service": options["service"],
        "token-key": "" if key is None else str(key.absolute()),
        "min-nodes": options["min_nodes"],
    }
    config = {**_config(arm, options), **told, **told_of_sums(options)}
    RoundsConfig.of(config)  # a ServerApp would say so much later
    write_project(directory, config)
    click.echo(f"flwr run {shlex.quote(str(directory))}")


def _arm(task: str, options: Mapping[str, Any]) -> Arm:
    from keyhole.experiments.named import task_named

    return read_arm(task_named(task), options)


def _checked_arm(task: str, options: Mapping[str, Any]) -> Arm:
    """The arm, once it is known to fit its data: children would take a minute to say so."""
    from keyhole.experiments.experiment import Experiment
    from keyhole.experiments.named import task_named

    arm, data = _arm(task, options), options["data"]
    sizes = synthetic_sizes(data, [arm])
    dataset = load_data(data, task_named(task).kind, options["seed"], **sizes)
    over, minimum = options["over_selection"], options["min_updates"]
    Experiment(arm, dataset, over_selection=over, min_updates=minimum).check()
    return arm


def _config(arm: Arm, options: Mapping[str, Any]) -> dict[str, Any]:
    """The run config: the arm, and how its rounds are made."""
    from keyhole.engines.flower.config import arm_config

    names = ("round_seconds", "over_selection", "min_updates", "node_seconds")
    rounds = {name.replace("_", "-"): options[name] for name in names}
    data = options["data"]
    is_path = Path(data).exists()
    return {**arm_config(arm), "data": str(Path(data).absolute()) if is_path else data, **rounds}


@contextmanager
def _rounds_shown(name: str, run: Path, rounds: int) -> Iterator[Callable[[], bool]]:
    """Bars that move with the records of a run; tells whether the run is done."""
    from keyhole.cli.screen import progress_bars

    records, result = run / "records.jsonl", run / "result.json"
    with progress_bars() as bars:
        bar = bars.add_task(name, total=rounds, note="")

        def is_done() -> bool:
            made = records.read_bytes().count(b"\n") if records.exists() else 0
            bars.update(bar, completed=made)
            return made >= rounds and result.exists()

        yield is_done


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM ends the command as Ctrl-C does: with all that it has started."""

    def end(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    except KeyboardInterrupt:
        raise click.Abort from None
    finally:
        signal.signal(signal.SIGTERM, before)


def _note(text: str) -> None:
    click.echo(text, err=True)
