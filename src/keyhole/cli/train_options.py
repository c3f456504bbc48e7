"""Reads the options of training: asynchronous rounds, engines, aggregation and privacy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import inf
from typing import TYPE_CHECKING, Any, TypeVar

import click

from keyhole.aggregation import aggregation_names
from keyhole.aggregation.plain import PLAIN
from keyhole.cli.options import SYNTHETIC
from keyhole.cli.screen import import_shown

if TYPE_CHECKING:
    from keyhole.experiments.arms import Arm
    from keyhole.experiments.experiment import Hold
    from keyhole.rounds.round import Executor


_Command = TypeVar("_Command", bound=Callable[..., Any])
_ASYNC_OPTIONS = (
    click.option(
        "--concurrency",
        type=click.IntRange(1),
        metavar="N",
        help="Asynchronous rounds: N clients are at work at any time, another begins when one has "
        "ended, and the server steps whenever the updates of a cohort are there, however old. In "
        "process a client takes a random time, exponential; devices take their own.",
    ),
    click.option(
        "--max-staleness",
        type=click.IntRange(0),
        metavar="STEPS",
        help="With --concurrency: leave out updates that are older.  [default: 20]",
    ),
)


def asynchronous_options(command: _Command) -> _Command:
    """Adds the options."""
    for option in reversed(_ASYNC_OPTIONS):
        command = option(command)
    return command


def asynchronous_fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an arm that the options give.

    Raises:
        UsageError: a bound on what does not occur.
    """
    names = ("concurrency", "max_staleness")
    given = {name: options[name] for name in names if options.get(name) is not None}
    if "max_staleness" in given and "concurrency" not in given:
        raise click.UsageError("--max-staleness goes with --concurrency")
    return given


_ENGINE_OPTIONS = (
    click.option(
        "--engine",
        type=click.Choice(["local", "ray"]),
        default="local",
        show_default=True,
        help="Where clients train: in this process, or on Ray. The result is the same, to the "
        "byte.",
    ),
    click.option(
        "--address",
        metavar="HOST:PORT",
        help="With --engine ray: of a cluster. Without it, Ray starts on this machine.",
    ),
    click.option(
        "--workers",
        type=click.IntRange(1),
        help="Cores that train clients; with --engine ray, processes. Without it, all there are.",
    ),
    click.option(
        "--shards",
        type=click.IntRange(1),
        help="With --engine ray: so many processes of the cluster hold the server's tables, each a "
        "range of keys. Without it, this process does.",
    ),
)


def engine_options(command: _Command) -> _Command:
    """Adds the options."""
    for option in reversed(_ENGINE_OPTIONS):
        command = option(command)
    return command


def check_engine_flags(options: Mapping[str, Any]) -> None:
    """Refuses flags that contradict each other or would do nothing."""
    if options["devices"] and (options["engine"] != "local" or options["workers"]):
        raise click.UsageError("--engine and --workers: the devices of a service train themselves")
    for name in ("address", "shards"):
        if options[name] and options["engine"] != "ray":
            raise click.UsageError(f"--{name} goes with --engine ray")


@contextmanager
def opened_engine(
    options: Mapping[str, Any], arm: Arm, data: str, sizes: Mapping[str, int]
) -> Iterator[tuple[Executor, Hold]]:
    """What trains clients and what holds the server's state, for as long as the context lasts.

    Args:
        options: of the command.
        arm: that is trained.
        data: as `--data` has it.
        sizes: of synthetic data.
    """
    from keyhole.experiments.experiment import hold_here
    from keyhole.rounds.cores import Cores
    from keyhole.rounds.threads import count_cores

    if options["engine"] == "local":
        yield Cores(options["workers"] or count_cores()), hold_here
        return
    from keyhole.engines.ray.engine import Population, RayEngine
    from keyhole.engines.ray.shards import Shards

    directory = None if data == SYNTHETIC else import_shown(data)
    population = Population(arm, directory, sizes)
    with RayEngine(population, options["workers"], address=options["address"]) as engine:
        if options["shards"] is None:
            yield engine, hold_here
        else:
            with Shards(options["shards"], address=options["address"]) as shards:
                yield engine, shards.hold


_SIGNED = aggregation_names(lambda about: about.can_sign)
_SUM_OPTIONS = (
    click.option(
        "--aggregation",
        type=click.Choice(aggregation_names()),
        help="How updates are added up: in the clear; dense at the client; by one server that sees "
        "sums alone, dense or as a sketch; by two servers that see nothing. Without it, plain.",
    ),
    click.option(
        "--value-clip",
        type=click.FloatRange(0, min_open=True),
        help="Secure sums clip the numbers of an update to it.  [default: 16]",
    ),
    click.option(
        "--ring-bits",
        type=click.Choice(["16", "32"]),
        help="Secure sums add whole numbers of so many bits: 16 halves what is sent, and rounds "
        "to steps that are 65,536 times as coarse.  [default: 32]",
    ),
    click.option(
        "--signed",
        is_flag=True,
        help=f"{', '.join(_SIGNED)}: clients sign who is left, so that a server that shows "
        "them different lists is caught. One message more each way.",
    ),
    click.option(
        "--sampling",
        type=click.Choice(["fixed", "poisson", "cyclic"]),
        help="How cohorts are drawn: so many clients, each with the same probability, or in turns.",
    ),
    click.option(
        "--dp-noise",
        type=click.FloatRange(0),
        help="Differential privacy of a client: noise on a sum, in units of --dp-clip.",
    ),
    click.option(
        "--dp-clip",
        type=click.FloatRange(0, min_open=True),
        help="The most that one client's whole update may measure.",
    ),
    click.option(
        "--dp-delta", type=click.FloatRange(0, 1, min_open=True, max_open=True), help="For epsilon."
    ),
    click.option(
        "--dp-budget",
        type=click.FloatRange(0, min_open=True),
        help="The most epsilon; a round that would spend more does not start.",
    ),
    click.option(
        "--dp-kind",
        type=click.Choice(["all-rows", "thresholded", "correlated"]),
        help="Noise on all rows, on those that enough clients chose, or correlated over rounds.",
    ),
    click.option(
        "--dp-threshold",
        type=float,
        help="With --dp-kind thresholded: noisy counts below it drop a row.  [default: 10 clients]",
    ),
    click.option(
        "--dp-bands",
        type=click.IntRange(1),
        help="With --dp-kind correlated: noise takes back that of so many rounds, its own among "
        "them. Without it, that of all rounds before.",
    ),
)


def secure_sum_options(command: _Command) -> _Command:
    """Adds the options."""
    for option in reversed(_SUM_OPTIONS):
        command = option(command)
    return command


def check_sum_flags(options: Mapping[str, Any]) -> None:
    """Refuses options that would do nothing."""
    way = options["aggregation"] or PLAIN.about.name
    secure = aggregation_names(lambda about: about.ring is not None)
    for name in ("value_clip", "ring_bits"):
        if options[name] is not None and way not in secure:
            raise click.UsageError(f"--{name.replace('_', '-')} goes with a secure --aggregation")
    if options["signed"] and way not in _SIGNED:
        raise click.UsageError(f"--signed goes with --aggregation {', '.join(_SIGNED)}")
    if options["value_clip"] is not None and (options["dp_clip"] or inf) < inf:
        raise click.UsageError("--value-clip does nothing beside --dp-clip, which bounds all of it")


def privacy_of(options: Mapping[str, Any]) -> dict[str, Any] | None:
    """The fields of `Privacy` that were given; None if there are none."""
    given = {
        name: options[f"dp_{name}"]
        for name in ("noise", "clip", "delta", "budget", "kind", "threshold", "bands")
        if options.get(f"dp_{name}") is not None
    }
    if not given:
        return None
    if "noise" not in given or "clip" not in given:
        raise click.UsageError("differential privacy takes --dp-noise and --dp-clip")
    for name, kind in (("threshold", "thresholded"), ("bands", "correlated")):
        if name in given and given.get("kind") != kind:
            raise click.UsageError(f"--dp-{name} goes with --dp-kind {kind}")
    if given.get("kind") == "correlated":
        given["rounds"] = options.get("rounds") or 0
        if not given["rounds"]:
            raise click.UsageError("correlated noise is planned for a number of --rounds")
    return given
