"""How `keyhole train` adds updates up: the options that say so."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf
from typing import Any, TypeVar

import click

from keyhole.training.aggregation.named import AGGREGATIONS, SIGNED

__all__ = ["check_sum_flags", "privacy_of", "secure_sum_options"]

_Command = TypeVar("_Command", bound=Callable[..., Any])

_OPTIONS = (
    click.option(
        "--aggregation",
        type=click.Choice(AGGREGATIONS),
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
        help="secure-dense, -sketch, -union: clients sign who is left, so that a server that shows "
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
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def check_sum_flags(options: Mapping[str, Any]) -> None:
    """Refuses options that would do nothing."""
    way = options["aggregation"] or "plain"
    for name in ("value_clip", "ring_bits"):
        if options[name] is not None and not way.startswith("secure-"):
            raise click.UsageError(f"--{name.replace('_', '-')} goes with a secure --aggregation")
    if options["signed"] and way not in SIGNED:
        raise click.UsageError(f"--signed goes with --aggregation {', '.join(SIGNED)}")
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
