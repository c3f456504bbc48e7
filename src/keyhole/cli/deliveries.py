"""How `keyhole device` fetches: the options that say so, and the fetch they stand for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from keyhole.errors import InputError, MalformedError

if TYPE_CHECKING:
    from keyhole.serving.device.device import Device
    from keyhole.serving.device.participation import Fetch

__all__ = ["delivery_options", "fetch_of"]

_Command = TypeVar("_Command", bound=Callable[..., Any])

_OPTIONS = (
    click.option(
        "--delivery",
        type=click.Choice(["clear", "broadcast", "pir", "pir-one-server", "relay"]),
        default="clear",
        show_default=True,
        help="How slices are fetched: by keys that the service sees, by downloading whole rounds, "
        "by private queries to two servers or to one, or through a relay that hides who asks.",
    ),
    click.option("--second", metavar="URL", help="With --delivery pir: the second server."),
    click.option(
        "--second-token-file",
        type=click.Path(dir_okay=False, path_type=Path),
        help="The token of this device there, from its operator; the other is never shown to it.",
    ),
    click.option("--relay", metavar="URL", help="With --delivery relay: the relay."),
    click.option(
        "--gateway-config",
        type=click.Path(dir_okay=False, path_type=Path),
        help="With --delivery relay: the keys of the gateway, from its operator. Without, what "
        "relay and gateway say is compared.",
    ),
)


def delivery_options(command: _Command) -> _Command:
    """Adds the options."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def fetch_of(
    options: Mapping[str, Any],
    connect: Callable[[str, str, Path | None], Device],
) -> Fetch:
    """Returns how slices are fetched.

    Args:
        options: those of `delivery_options`, checked.
        connect: makes a device of another service, from what that is, its URL, and the file of the
            token; and closes it in the end.

    Raises:
        InputError: the file of --gateway-config holds no keys.
    """
    from keyhole.serving.device.device import Device
    from keyhole.serving.device.participation import fetch_at_home

    _check(options)
    way = options["delivery"]
    if way == "pir":
        from keyhole.serving.pir.pir_fetch import PirFetch

        return PirFetch(connect("second server", options["second"], options["second_token_file"]))
    if way == "pir-one-server":
        from keyhole.serving.pir.pir_fetch import OneServerFetch

        return OneServerFetch()
    if way == "relay":
        from keyhole.serving.relay.relayed_fetch import RelayedFetch

        pinned = _pinned(options["gateway_config"])
        relay = connect("relay", options["relay"], None)  # never a token
        return RelayedFetch(relay.client, pinned)
    return fetch_at_home if way == "broadcast" else Device.fetch


def _check(options: Mapping[str, Any]) -> None:
    """Each URL belongs to one delivery, which needs it: nothing falls back to a plainer way."""
    way = options["delivery"]
    for name, needed in (("second", "pir"), ("relay", "relay")):
        if (options[name] is None) == (way == needed):
            raise click.UsageError(f"--{name} and --delivery {needed} belong together")
    for name, needed in (("second_token_file", "pir"), ("gateway_config", "relay")):
        if options[name] is not None and way != needed:
            flag = name.replace("_", "-")
            raise click.UsageError(f"--{flag} and --delivery {needed} belong together")


def _pinned(path: Path | None) -> bytes | None:
    """What the file of a gateway's keys holds, once it is known to be that."""
    from keyhole.private.oblivious.key_config import decode_configs

    if path is None:
        return None
    try:
        found = path.read_bytes()
        decode_configs(found)
    except (OSError, MalformedError) as error:
        raise InputError(
            "the gateway's keys cannot be read",
            got=f"file {path}",
            allowed="a file that `keyhole token gateway-config` has written",
            fix="ask the operator of the gateway for it",
        ) from error
    return found
