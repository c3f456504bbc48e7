"""Where `keyhole train` trains clients, and which of its options go together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import inf
from typing import TYPE_CHECKING, Any, TypeVar

import click

from keyhole.cli.options import PLACE, SYNTHETIC, in_group

if TYPE_CHECKING:
    from keyhole.experiments.experiment import Experiment, Hold
    from keyhole.identity import Ref
    from keyhole.rounds.round import Executor
    from keyhole.rounds.spec import RunSpec


_Command = TypeVar("_Command", bound=Callable[..., Any])
_ENGINE_OPTIONS = (
    in_group(
        PLACE,
        "--address",
        metavar="HOST:PORT",
        help="With --engine ray: address of a cluster.",
        show_default="a new one on this machine",
    ),
    in_group(
        PLACE,
        "--workers",
        type=click.IntRange(1),
        help="Cores that train clients; with --engine ray, processes.",
        show_default="all there are",
    ),
    in_group(
        PLACE,
        "--shards",
        type=click.IntRange(1),
        help="With --engine ray: processes of the cluster that hold the server's tables, each a "
        "range of keys.",
        show_default="none: this process holds them",
    ),
)


def engine_options(command: _Command) -> _Command:
    """Adds the options."""
    for option in reversed(_ENGINE_OPTIONS):
        command = option(command)
    return command


def check_engine_flags(options: Mapping[str, Any], engine: Ref) -> None:
    """Refuses flags that contradict each other or would do nothing."""
    if options["devices"] and (engine != "local" or options["workers"]):
        raise click.UsageError("--engine and --workers: the devices of a service train themselves")
    if options["workers"] and engine.is_own:
        raise click.UsageError("--workers goes with --engine local or ray")
    for name in ("address", "shards"):
        if options[name] and engine != "ray":
            raise click.UsageError(f"--{name} goes with --engine ray")


@contextmanager
def opened_engine(
    options: Mapping[str, Any], experiment: Experiment, sizes: Mapping[str, int]
) -> Iterator[tuple[Executor, Hold]]:
    """What trains clients and what holds the server's state, for as long as the context lasts."""
    from keyhole.experiments.experiment import hold_here
    from keyhole.rounds.cores import Cores
    from keyhole.rounds.threads import count_cores

    spec, own = experiment.spec, experiment.engine
    if own is not None:
        yield own, hold_here
        return
    if spec.engine == "local":
        yield Cores(options["workers"] or count_cores()), hold_here
        return
    from keyhole.cli.screen import import_shown
    from keyhole.engines.ray.engine import Population, RayEngine
    from keyhole.engines.ray.shards import Shards

    is_file = spec.data != SYNTHETIC and not spec.data.is_own
    directory = import_shown(spec.data.name) if is_file else None
    population = Population(spec, directory, sizes)
    with RayEngine(population, options["workers"], address=options["address"]) as engine:
        if options["shards"] is None:
            yield engine, hold_here
        else:
            with Shards(options["shards"], address=options["address"]) as shards:
                yield engine, shards.hold


def check_sum_flags(options: Mapping[str, Any], spec: RunSpec) -> None:
    """Refuses options that would do nothing."""
    from keyhole.aggregation import aggregation_names
    from keyhole.aggregation.plain import PLAIN

    name = PLAIN.about.name if spec.aggregation.name is None else spec.aggregation.name.name
    secure = aggregation_names(lambda about: about.ring is not None)
    signed = aggregation_names(lambda about: about.can_sign)
    for option in ("value_clip", "ring_bits"):
        if options[option] is not None and name not in secure:
            raise click.UsageError(f"--{option.replace('_', '-')} goes with a secure --aggregation")
    if spec.aggregation.signed and name not in signed:
        raise click.UsageError(f"--signed goes with --aggregation {', '.join(signed)}")
    if options["value_clip"] is not None and spec.privacy and spec.privacy.clip < inf:
        raise click.UsageError("--value-clip does nothing beside --dp-clip, which bounds all of it")


def check_privacy_flags(options: Mapping[str, Any]) -> None:
    """Refuses options of privacy and of asynchronous rounds that lack what they go with.

    What a file of `--spec` says is not known here: `RunSpec` checks it.
    """
    if options.get("spec_file") is not None:
        return
    if options.get("max_staleness") is not None and options.get("concurrency") is None:
        raise click.UsageError("--max-staleness goes with --concurrency")
    names = ("noise", "clip", "delta", "budget", "kind", "threshold", "bands")
    given = {name for name in names if options.get(f"dp_{name}") is not None}
    if given and not given >= {"noise", "clip"}:
        raise click.UsageError("differential privacy takes --dp-noise and --dp-clip")
    kind = options.get("dp_kind")
    for name, needed in (("threshold", "thresholded"), ("bands", "correlated")):
        if name in given and kind != needed:
            raise click.UsageError(f"--dp-{name} goes with --dp-kind {needed}")
    if kind == "correlated" and not options.get("rounds"):
        raise click.UsageError("correlated noise is planned for a number of --rounds")
