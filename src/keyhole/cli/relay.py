"""Runs `keyhole relay` between devices and a slice service, which then does not see who asks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from keyhole.cli.listen import listen_of, listen_options
from keyhole.cli.options import NumberRange
from keyhole.cli.token import read_token

if TYPE_CHECKING:
    from keyhole.service.metrics import Metrics
    from keyhole.service.relay import RelayApp
    from keyhole.wire.http import HttpClient


_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command()
@click.option("--gateway", required=True, metavar="URL", help="The slice service: the only target.")
@click.option(
    "--gateway-ca", type=_FILE, help="Authorities to trust there, instead of the system's."
)
@click.option("--token-file", type=_FILE, help="The relay's own token, where reading takes one.")
@listen_options(8101)
@click.option(
    "--mix-ms",
    default=200,
    show_default=True,
    type=click.IntRange(0, 60_000),
    help="Requests wait so long for those of other devices.",
)
@click.option(
    "--mix-count",
    default=64,
    show_default=True,
    type=click.IntRange(1),
    help="They go at once when this many devices wait.",
)
@click.option(
    "--batch",
    default=4096,
    show_default=True,
    type=click.IntRange(1, 65_536),
    help="Requests that are forwarded at a time; fewer where slices are large.",
)
@click.option(
    "--rate-per-address",
    type=NumberRange(0, min_open=True),
    help="Bodies a second that one address may send; not limited by default.",
)
def relay(**options: Any) -> None:
    """Carry sealed requests from devices to a slice service until interrupted.

    The relay sees who asks and how many requests, and cannot read them; the service sees what is
    asked and not who asks. That holds as long as different people run the two.
    """
    from keyhole.service.transport import run

    client, token = _gateway(options)  # before a port is taken, and a process made

    def make(metrics: Metrics) -> RelayApp:
        return _app(client, token, options, metrics)

    def tell(url: str) -> None:
        click.echo(f"relaying to {options['gateway']} at {url}", err=True)

    run(make, listen_of(options), on_listen=tell)


def _gateway(options: dict[str, Any]) -> tuple[HttpClient, str | None]:
    """How the gateway is asked, and the token to show there; nothing is opened yet."""
    from keyhole.wire.http import HttpClient
    from keyhole.wire.sockets import Retry

    client = HttpClient(
        options["gateway"],
        ca=options["gateway_ca"],
        retry=Retry(attempts=1),
        insecure=options["insecure"],
    )
    file = options["token_file"]
    return client, None if file is None else read_token(file)


def _app(
    client: HttpClient, token: str | None, options: dict[str, Any], metrics: Metrics
) -> RelayApp:
    """Makes the relay, in its worker: its line has a thread, which no fork carries over."""
    from math import inf

    from keyhole.service.limits import Limits
    from keyhole.service.relay import GatewayLink, Mix, RelayApp

    limits = Limits(rate_per_address=options["rate_per_address"] or inf)
    return RelayApp(
        GatewayLink(client, token, limits.max_answer),
        mix=Mix(options["mix_ms"] / 1000, options["mix_count"], options["batch"]),
        limits=limits,
        metrics=metrics,
    )
