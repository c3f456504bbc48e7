"""Runs `keyhole flower`: tasks on real devices, with Flower as the control plane."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import click

from keyhole.cli.options import (
    DIRECTORY,
    FILE,
    PLACE,
    GroupedCommand,
    NumberRange,
    in_group,
    refuse,
)
from keyhole.cli.spec_options import (
    keys_options,
    name_of_option,
    run_options,
    spec_from,
    spec_options,
)
from keyhole.cli.sums import (
    aggregator_options,
    check_privacy_flags,
    check_served_clear,
    check_sum_flags,
    shared_names,
)
from keyhole.delivery import delivery_named, delivery_names
from keyhole.delivery.clear import DEFAULT_SERVED

# Options of the record that say how two aggregators add up.
_SUMS = (
    "--value-clip",
    "--ring-bits",
    "--sum-metrics",
    "--dp-noise",
    "--dp-clip",
    "--dp-delta",
    "--dp-budget",
)
# Options of the record that say how updates in the clear are added up, and how long one may be.
_CLEAR = ("--aggregation", "--trim", "--untouched", "--norm-alarm", "--above-norm")
# Options of the record that say what is trained; how slices travel is up to the run config.
_TRAINED = (
    *("--data", "--rounds", "--cohort", "--algorithm", "--client-lr", "--server-lr"),
    *("--batch-size", "--epochs", "--client-momentum", "--client-clip-norm"),
    *("--max-examples", "--min-examples", "--evaluate-every", "--mean-over"),
    *("--negatives", "--concurrency", "--max-staleness"),
    *("--over-selection", "--min-updates", "--max-update-norm"),
    *("--popular", "--popular-share"),
)


@click.group()
def flower() -> None:
    """Train a task on devices that Flower calls; needs the extra 'flower'.

    Control messages go through Flower's SuperLink and SuperNodes; slices and updates go through
    the slice service of `keyhole serve`.
    """


@flower.command(cls=GroupedCommand, short_help="Write a Flower project for `flwr run`.")
@click.argument("directory", type=DIRECTORY)
@run_options
@keys_options
@spec_options(*_TRAINED, *_CLEAR, *_SUMS, over_selection=1.3, min_updates=1)
@in_group(
    PLACE,
    "--round-seconds",
    type=NumberRange(1, 86_400),
    default=300.0,
    help="Close a round after this many seconds with what has arrived; of asynchronous ones, "
    "wait this long for a device.",
)
@in_group(
    PLACE,
    "--node-seconds",
    type=NumberRange(1, 86_400),
    default=120.0,
    help="Wait this many seconds for SuperNodes.",
)
@in_group(
    PLACE,
    "--named-cohorts",
    is_flag=True,
    help="Rehearse: draw cohorts from seed 0, as a run in process does, and not from a secret of "
    "the run.",
)
@aggregator_options
@in_group(
    PLACE,
    "--delivery",
    type=click.Choice(delivery_names(lambda about: about.is_served)),
    default=DEFAULT_SERVED,
    help="How devices fetch: by keys that the service sees, or from two servers that learn "
    "none while they do not work together.",
)
@in_group(
    PLACE,
    "--second",
    metavar="URL",
    default="",
    show_default=False,
    help="With --delivery pir: the second slice server.",
)
@in_group(
    PLACE,
    "--aggregator-ca",
    type=FILE,
    help="PEM file of the authorities to trust at aggregators, on the server.",
)
@in_group(PLACE, "--task", required=True, help="What to train, as `keyhole train` takes it.")
@in_group(PLACE, "--service", required=True, metavar="URL", help="The slice service, for devices.")
@in_group(PLACE, "--run", required=True, type=DIRECTORY, help="Where the server keeps the run.")
@in_group(
    PLACE,
    "--rounds-directory",
    required=True,
    type=DIRECTORY,
    help="Where the server publishes rounds: what `keyhole serve` serves.",
)
@in_group(PLACE, "--token-key", type=FILE, help="Signing keys of the slice service, on the server.")
@in_group(
    PLACE,
    "--signing-key",
    type=FILE,
    help="On the server: sign manifests with this key, for nodes that pin its public half "
    "(trainer-key of --node-config).",
)
@in_group(
    PLACE,
    "--min-nodes",
    type=click.IntRange(1),
    default=1,
    help="Min nodes that a round waits for.",
)
@click.pass_context
def app(context: click.Context, /, directory: Path, task: str, **options: Any) -> None:
    """Write a Flower project to DIRECTORY, for `flwr run DIRECTORY` with your own SuperLink.

    Paths are those of the machine that the SuperLink runs on.
    """
    from keyhole.engines.flower.config import RoundsConfig, spec_config, write_project

    check_privacy_flags(options)
    spec = spec_from(context, task)
    if options["popular"]:  # it is this delivery that asks for them
        if not delivery_named(options["delivery"]).about.has_popular:
            raise click.UsageError("--popular goes with a --delivery by private retrieval")
        spec = spec.changed({"delivery": options["delivery"]})
    else:
        refuse(options, ["popular_share"], "goes with --popular")
    if options["aggregators"]:
        refuse(options, list(map(name_of_option, _CLEAR)), "does not go with --aggregators")
        spec = spec.changed({"aggregation.name": shared_names()[0]})
    else:
        names = [*map(name_of_option, _SUMS), "aggregator_tokens", "aggregator_ca"]
        refuse(options, names, "goes with --aggregators")
        check_served_clear(spec)
    check_sum_flags(options, spec)
    if (data := Path(spec.data.name)).exists():
        spec = spec.changed({"data": str(data.absolute())})
    config = {
        **spec_config(spec),
        "round-seconds": options["round_seconds"],
        "node-seconds": options["node_seconds"],
        "run": _absolute(options["run"]),
        "rounds-directory": _absolute(options["rounds_directory"]),
        "service": options["service"],
        "token-key": _absolute(options["token_key"]),
        "signing-key": _absolute(options["signing_key"]),
        "min-nodes": options["min_nodes"],
        "named-cohorts": options["named_cohorts"],
        "delivery": options["delivery"],
        "second": options["second"],
        "aggregators": " ".join(map(_with_key, options["aggregators"])),
        "aggregator-tokens": " ".join(map(_absolute, options["aggregator_tokens"])),
        "aggregator-ca": _absolute(options["aggregator_ca"]),
    }
    RoundsConfig.of(config)  # a ServerApp would say so much later
    write_project(directory, config)
    click.echo(f"flwr run {shlex.quote(str(directory))}")


def _with_key(text: str) -> str:
    """An aggregator as nodes are told it: with its key, not with a file of this machine."""
    from keyhole.device.sums import aggregator_of

    url, key = aggregator_of(text)
    return f"{url}#{key.hex()}"


def _absolute(path: Path | str | None) -> str:
    return "" if path is None else str(Path(path).absolute())
