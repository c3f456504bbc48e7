"""Secure rounds of `keyhole flower`: how slices are fetched and updates added up in secret."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from keyhole.cli.secure_sums import check_sum_flags
from keyhole.cli.train import train

__all__ = ["check_secure", "secure_round_options", "sum_options", "told_of_sums"]

# Options of `keyhole train` that say how two aggregators add up.
_SUMS = ("value_clip", "ring_bits", "dp_noise", "dp_clip", "dp_delta", "dp_budget")
_NAMED = ("aggregators", "aggregator_tokens")
_SECURE_SPARSE = "secure-sparse"
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
    told = {**options, "aggregation": _SECURE_SPARSE, "signed": False}
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
