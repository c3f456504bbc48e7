"""Options of asynchronous rounds, for every command that trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

__all__ = ["asynchronous_fields", "asynchronous_options"]

_Command = TypeVar("_Command", bound=Callable[..., Any])
_OPTIONS = (
    click.option(
        "--concurrency",
        type=click.IntRange(1),
        metavar="N",
        help="Asynchronous rounds: N clients are at work at any time, another begins when one has "
        "ended, and the server steps whenever the updates of a cohort are there, however old. In "
        "process a client takes a random time, exponential; devices take their own.",
    ),
    click.option(
        "--most-staleness",
        type=click.IntRange(0),
        metavar="STEPS",
        help="With --concurrency: leave out updates that are older.  [default: 20]",
    ),
)


def asynchronous_options(command: _Command) -> _Command:
    """Adds the options."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def asynchronous_fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an arm that the options give.

    Raises:
        UsageError: a bound on what does not occur.
    """
    names = ("concurrency", "most_staleness")
    given = {name: options[name] for name in names if options.get(name) is not None}
    if "most_staleness" in given and "concurrency" not in given:
        raise click.UsageError("--most-staleness goes with --concurrency")
    return given
