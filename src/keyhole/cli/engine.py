"""Where `keyhole train` trains clients: the options that say so, and the engine they name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click

from keyhole.cli.inputs import SYNTHETIC
from keyhole.cli.progress import import_shown

if TYPE_CHECKING:
    from keyhole.tasks.arms import Arm
    from keyhole.tasks.experiment import Hold
    from keyhole.training.visit import Executor

__all__ = ["check_engine_flags", "engine_options", "opened_engine"]

_Command = TypeVar("_Command", bound=Callable[..., Any])

_OPTIONS = (
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
    for option in reversed(_OPTIONS):
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
    from keyhole.tasks.experiment import hold_here
    from keyhole.training.cores import Cores
    from keyhole.training.threads import count_cores

    if options["engine"] == "local":
        yield Cores(options["workers"] or count_cores()), hold_here
        return
    from keyhole.engines.population import Population
    from keyhole.engines.ray.engine import RayEngine
    from keyhole.engines.ray.shards import Shards

    directory = None if data == SYNTHETIC else import_shown(data)
    population = Population(arm, directory, sizes)
    with RayEngine(population, options["workers"], address=options["address"]) as engine:
        if options["shards"] is None:
            yield engine, hold_here
        else:
            with Shards(options["shards"], address=options["address"]) as shards:
                yield engine, shards.hold
