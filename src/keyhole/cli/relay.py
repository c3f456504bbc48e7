"""Runs `keyhole relay` between devices and a slice service, which then does not see who asks."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any

import click

from keyhole.cli.listening import (
    LISTENS,
    client_of,
    deny_list_of,
    deny_option,
    keyring_of,
    listen_options,
    serve_with,
)
from keyhole.cli.options import EXISTING_FILE, GroupedCommand, NumberRange, option
from keyhole.cli.token import read_token

if TYPE_CHECKING:
    from keyhole.service.metrics import Metrics
    from keyhole.service.relay import RelayApp


@click.command(
    cls=GroupedCommand,
    roles={
        "Slice service": "gateway gateway_ca token_file",
        "Who is let in": "token_key deny is_open rate_per_address",
        "Mixing": "mix_ms mix_count mix_min mix_longest batch",
        **LISTENS,
    },
)
@option("--gateway", required=True, metavar="URL", help="The slice service: the only target.")
@option(
    "--gateway-ca", type=EXISTING_FILE, help="Authorities to trust there, instead of the system's."
)
@option(
    "--token-file",
    type=EXISTING_FILE,
    help="The relay's own token, if the service wants one for reads.",
)
@option(
    "--token-key",
    type=EXISTING_FILE,
    help="Keys that sign tokens of devices for it (`keyhole token issue --audience relay`).",
)
@deny_option
@option(
    "--open", "is_open", is_flag=True, help="Let everyone in; each body then counts as a device."
)
@listen_options(8101)
@option(
    "--mix-ms",
    default=200,
    type=click.IntRange(0, 60_000),
    help="Milliseconds that requests wait for those of other devices.",
)
@option(
    "--mix-count",
    default=64,
    type=click.IntRange(1),
    help="Forward at once when requests of this many devices wait.",
)
@option(
    "--mix-min",
    default=8,
    type=click.IntRange(1),
    help="Never forward requests of fewer devices: these are told to come back.",
)
@option(
    "--mix-longest",
    default=10.0,
    type=NumberRange(0, 60, min_open=True),
    help="Seconds after which requests that found too few others are sent back.",
)
@option(
    "--batch",
    default=4096,
    type=click.IntRange(1, 65_536),
    help="Requests that are forwarded at a time; fewer where slices are large.",
)
@option(
    "--rate-per-address",
    type=NumberRange(0, min_open=True),
    help="Requests per second that one address may send.",
)
def relay(**options: Any) -> None:
    """Carry sealed requests from devices to a slice service until interrupted.

    The relay sees who asks and how many requests, and cannot read them; the service sees what is
    asked and not who asks. That holds as long as different people run the two.
    """
    from keyhole.service.limits import Limits
    from keyhole.service.relay import GatewayLink, Mix, RelayApp, relay_access

    client = client_of(options, "gateway")  # before a port is taken, and a process made
    token = None if options["token_file"] is None else read_token(options["token_file"])
    limits = Limits(rate_per_address=options["rate_per_address"] or inf)
    if (options["token_key"] is None) != options["is_open"]:
        raise click.UsageError("pass --token-key to know devices by, or --open to let everyone in")
    access = relay_access(keyring_of(options), deny_list_of(options))
    mix = Mix(
        options["mix_ms"] / 1000,
        max(options["mix_count"], options["mix_min"]),
        options["mix_min"],
        options["mix_longest"],
        options["batch"],
    )

    def make(metrics: Metrics) -> RelayApp:
        # In the worker: a line has a thread, which no fork carries over.
        link = GatewayLink(client, token, limits.max_answer)
        return RelayApp(link, mix=mix, access=access, limits=limits, metrics=metrics)

    def told(url: str) -> str:
        return f"relaying to {options['gateway']} at {url}"

    serve_with(options, make, told, part=str(relay.name))
