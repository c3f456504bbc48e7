"""Runs `keyhole flower`: tasks on real devices, with Flower as the control plane."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from keyhole.cli.aggregators import named_options, shared_names
from keyhole.cli.options import (
    PLACE,
    GroupedCommand,
    NumberRange,
    in_group,
    keys_options,
    name_of_option,
    size_option,
    spec_from,
    spec_option,
    spec_options,
)
from keyhole.cli.train_options import check_privacy_flags, check_sum_flags
from keyhole.delivery import delivery_names
from keyhole.delivery.clear import DEFAULT_SERVED

if TYPE_CHECKING:
    from keyhole.rounds.spec import RunSpec


_Command = TypeVar("_Command", bound=Callable[..., Any])

# Options of the record that say how two aggregators add up.
_SUMS = ("--value-clip", "--ring-bits", "--dp-noise", "--dp-clip", "--dp-delta", "--dp-budget")
_SERVICES = (
    in_group(
        PLACE,
        "--delivery",
        type=click.Choice(delivery_names(lambda about: about.is_served)),
        default=DEFAULT_SERVED,
        show_default=True,
        help="How devices fetch: by keys that the service sees, or from two servers that learn "
        "none while they do not work together.",
    ),
    in_group(
        PLACE,
        "--second",
        metavar="URL",
        default="",
        help="With --delivery pir: the second slice server.",
    ),
    in_group(
        PLACE,
        "--aggregator-ca",
        type=click.Path(dir_okay=False, path_type=Path),
        help="PEM file of the authorities to trust at aggregators, on the server.",
    ),
)


def secure_round_options(command: _Command) -> _Command:
    """Adds the options that name the services of a secure round."""
    for option in reversed(_SERVICES):
        command = option(command)
    return named_options(command)


def _spec_of_round(context: click.Context, task: str) -> RunSpec:
    """The record that the options describe, with the sum that two aggregators make where there are
    two.
    """
    options = context.params
    check_privacy_flags(options)
    spec = spec_from(context, task)
    if not options["aggregators"]:
        for name in (*_SUMS, "--aggregator-tokens", "--aggregator-ca"):
            if options.get(name_of_option(name)):
                raise click.UsageError(f"{name} goes with --aggregators")
        return spec
    spec = spec.changed({"aggregation.name": shared_names()[0]})
    check_sum_flags(options, spec)
    return spec


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


# Options of the record that say what is trained; how slices travel is up to the run config.
_TRAINED = (
    *("--data", "--rounds", "--cohort", "--algorithm", "--client-lr", "--server-lr"),
    *("--batch-size", "--max-examples", "--min-examples", "--evaluate-every", "--mean-over"),
    *("--negatives", "--concurrency", "--max-staleness", "--seed"),
    *("--over-selection", "--min-updates"),
)
_DIRECTORY = click.Path(file_okay=False, path_type=Path)

_ROUNDS = (
    in_group(
        PLACE,
        "--round-seconds",
        type=NumberRange(1, 86_400),
        default=300.0,
        show_default=True,
        help="Close a round after this many seconds with what has arrived; of asynchronous ones, "
        "wait this long for a device.",
    ),
    in_group(
        PLACE,
        "--node-seconds",
        type=NumberRange(1, 86_400),
        default=120.0,
        show_default=True,
        help="Wait this many seconds for SuperNodes.",
    ),
)


def _options(command: _Command) -> _Command:
    """Adds the options of a task, of its rounds, and of their sums."""
    for option in reversed(_ROUNDS):
        command = option(command)
    command = spec_options(*_TRAINED, *_SUMS, over_selection=1.3, min_updates=1)(command)
    return spec_option(size_option(keys_options(command)))


@click.group()
def flower() -> None:
    """Train a task on devices that Flower calls; needs the extra 'flower'.

    Control messages go through Flower's SuperLink and SuperNodes; slices and updates go through
    the slice service of `keyhole serve`.
    """


@flower.command(cls=GroupedCommand)
@click.argument("directory", type=_DIRECTORY)
@_options
@secure_round_options
@in_group(PLACE, "--task", required=True, help="What to train, as `keyhole train` takes it.")
@in_group(PLACE, "--service", required=True, metavar="URL", help="The slice service, for devices.")
@in_group(PLACE, "--run", required=True, type=_DIRECTORY, help="Where the server keeps the run.")
@in_group(
    PLACE,
    "--rounds-directory",
    required=True,
    type=_DIRECTORY,
    help="Where the server publishes rounds: what `keyhole serve` serves.",
)
@in_group(
    PLACE,
    "--token-key",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Signing keys of the slice service, on the server.",
)
@in_group(
    PLACE,
    "--min-nodes",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Min nodes that a round waits for.",
)
@click.pass_context
def app(context: click.Context, /, directory: Path, task: str, **options: Any) -> None:
    """Write a Flower project to DIRECTORY, for `flwr run DIRECTORY` with a SuperLink of one's own.

    Paths are those of the machine that the SuperLink runs on.
    """
    from keyhole.engines.flower.config import RoundsConfig, write_project

    spec = _spec_of_round(context, task)
    key = options["token_key"]
    told = {
        "run": str(options["run"].absolute()),
        "rounds-directory": str(options["rounds_directory"].absolute()),
        "service": options["service"],
        "token-key": "" if key is None else str(key.absolute()),
        "min-nodes": options["min_nodes"],
    }
    config = {**_config(spec, options), **told, **told_of_sums(options)}
    RoundsConfig.of(config)  # a ServerApp would say so much later
    write_project(directory, config)
    click.echo(f"flwr run {shlex.quote(str(directory))}")


def _config(spec: RunSpec, options: Mapping[str, Any]) -> dict[str, Any]:
    """The run config: the record of the run, and how its rounds are made."""
    from keyhole.engines.flower.config import spec_config

    data = Path(spec.data.name)
    spec = spec.changed({"data": str(data.absolute())}) if data.exists() else spec
    rounds = {name: options[name_of_option(name)] for name in ("round-seconds", "node-seconds")}
    return {**spec_config(spec), **rounds}
