"""Reads how `keyhole train` and `keyhole device` name the two aggregators of a secure sum."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from keyhole.cli.options import PLACE, NameOr, NumberRange, in_group
from keyhole.cli.token import read_token

if TYPE_CHECKING:
    import threading

    from keyhole.device.device import Device
    from keyhole.device.take_part import Send
    from keyhole.service.sum_services import SumServices


_Command = TypeVar("_Command", bound=Callable[..., Any])
_SALT = "aggregators.salt"


def _pair(context: click.Context, option: click.Parameter, text: str | None) -> tuple[str, ...]:
    """Two values with a comma between them; none if there are none."""
    found = tuple(text.split(",")) if text else ()
    if found and (len(found) != 2 or not all(found)):
        raise click.BadParameter("two with a comma between them, the first party's first")
    return found


def shared_names() -> tuple[str, ...]:
    """The sum that two aggregators make of shares; only those who ask load the catalogue."""
    from keyhole.aggregation import aggregation_names

    return aggregation_names(lambda about: about.is_shared)


def own_sum_option(group: str, text: str) -> Callable[[_Command], _Command]:
    """An option that names the sum of two aggregators."""
    return in_group(group, "--aggregation", type=NameOr(shared_names), help=text)


_NAMED = (
    in_group(
        PLACE,
        "--aggregators",
        callback=_pair,
        metavar="URL,URL",
        help="Updates go as shares to these two aggregators, party 0 first: neither learns one.",
    ),
    in_group(
        PLACE,
        "--aggregator-tokens",
        callback=_pair,
        metavar="FILE,FILE",
        help="Tokens to show there, from their operators.",
    ),
)
_TRAINER = (
    *_NAMED,
    in_group(
        PLACE,
        "--aggregator-ca",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="PEM file of the authorities to trust there, instead of the system's.",
    ),
    in_group(
        PLACE,
        "--min-clients",
        type=click.IntRange(2),
        help="With --aggregators: a sum of fewer is not released.",
        show_default="2",
    ),
    in_group(
        PLACE,
        "--aggregators-insecure",
        is_flag=True,
        help="Speak plain http to aggregators beyond this machine.",
    ),
)
_DEVICE = (
    *_NAMED,
    own_sum_option(PLACE, "With --aggregators: the sum that they make."),
    in_group(
        PLACE,
        "--min-clients",
        type=click.IntRange(1),
        help="With --aggregators: take part in no sum that may be released with fewer.",
        show_default="2",
    ),
    in_group(
        PLACE,
        "--min-noise",
        type=NumberRange(0),
        help="With --aggregators: take part in no sum to which each of them adds less noise, in "
        "units of the L2 clipping norm of updates.",
        show_default="0",
    ),
)


def named_options(command: _Command) -> _Command:
    """Adds the options that name two aggregators and the tokens for them."""
    return _with(_NAMED, command)


def trainer_sum_options(command: _Command) -> _Command:
    """Adds the options of a trainer."""
    return _with(_TRAINER, command)


def device_sum_options(command: _Command) -> _Command:
    """Adds the options of a device."""
    return _with(_DEVICE, command)


def check_aggregator_flags(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `keyhole train`, with the sum that aggregators make."""
    if not options["aggregators"]:
        for name in ("aggregator_tokens", "aggregator_ca", "min_clients"):
            if options[name]:
                raise click.UsageError(f"--{name.replace('_', '-')} goes with --aggregators")
        return dict(options)
    if not options["devices"] or not options["aggregator_tokens"]:
        raise click.UsageError("--aggregators goes with --devices and --aggregator-tokens")
    (shared,) = shared_names()
    name = options["aggregation"] or shared
    if name != shared and ":" not in name:
        raise click.UsageError(f"two aggregators make {shared}, or your own module:NAME")
    return {**options, "aggregation": name}


def sum_services(options: Mapping[str, Any], directory: Path, stop: threading.Event) -> SumServices:
    """The aggregators of a run.

    Args:
        directory: of the run, which keeps the salt of its sums.
    """
    from keyhole.service.sum_services import AggregatorClient, SumServices, kept_salt
    from keyhole.wire.http import HttpClient

    first, second = (
        AggregatorClient(
            HttpClient(
                url,
                ca=options["aggregator_ca"],
                stop=stop,
                insecure=options["aggregators_insecure"],
            ),
            read_token(Path(file)),
            party,
        )
        for party, (url, file) in enumerate(
            zip(options["aggregators"], options["aggregator_tokens"], strict=True)
        )
    )
    minimum = options["min_clients"] or 0
    return SumServices(
        first, second, salt=kept_salt(directory / _SALT), min_clients=minimum, stop=stop
    )


def send_of(options: Mapping[str, Any], connect: Callable[[str, str, Path | None], Device]) -> Send:
    """How a device sends its update.

    Args:
        connect: makes a device of another service, from what that is, its URL, and the file of the
            token; and closes it in the end.
    """
    from keyhole.device.device import Device

    if not options["aggregators"]:
        for name in ("aggregator_tokens", "aggregation", "min_clients", "min_noise"):
            if options[name]:
                raise click.UsageError(f"--{name.replace('_', '-')} goes with --aggregators")
        return Device.send
    from keyhole.aggregation import shared_sum
    from keyhole.device.sums import SumPolicy, SumSend

    given = options["aggregator_tokens"] or (None, None)
    files = [None if file is None else Path(file) for file in given]
    first, second = (
        connect(f"aggregator {party}", url, file)
        for party, (url, file) in enumerate(zip(options["aggregators"], files, strict=True))
    )
    minimum = options["min_clients"] or 2
    policy = SumPolicy(minimum, min_noise=options["min_noise"] or 0.0)
    return SumSend(first, second, policy, shared_sum(options["aggregation"]))


def _with(options: tuple[Callable[[_Command], _Command], ...], command: _Command) -> _Command:
    for option in reversed(options):
        command = option(command)
    return command
