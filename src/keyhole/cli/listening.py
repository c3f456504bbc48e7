"""Options of the commands that serve: where they listen, whom they let in; and the serving."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import click

from keyhole.cli.options import (
    EXISTING_FILE,
    PLACE,
    Command,
    in_group,
    log_options,
    option,
    options_of,
)
from keyhole.logs import is_for_machines, say, tell

if TYPE_CHECKING:
    from pathlib import Path

    from keyhole.service.access import DenyList, Keyring
    from keyhole.service.metrics import Metrics
    from keyhole.service.routes import Application
    from keyhole.service.transport import Listen
    from keyhole.wire.http import HttpClient

LISTENS = {
    "Where it listens": "host port tls_cert tls_key client_ca insecure metrics_listen workers",
    "Log": "log log_level",
}
"""The role of `listen_options` in help."""


def listen_options(port: int) -> Callable[[Command], Command]:
    """Returns where a service listens, with a port of the command's own."""
    free = "Port to listen at; 0 takes any that is free."
    chain = "Certificate chain, PEM; without it plain HTTP."
    signed = "Demand client certificates signed by this, PEM."
    return options_of(
        option("--host", default="127.0.0.1", help="Address to listen at."),
        option("--port", default=port, type=click.IntRange(0, 65535), help=free),
        option("--tls-cert", type=EXISTING_FILE, help=chain),
        option(
            "--tls-key", type=EXISTING_FILE, help="Its key, PEM; if it is not in the same file."
        ),
        option("--client-ca", type=EXISTING_FILE, help=signed),
        option("--insecure", is_flag=True, help="Allow plain HTTP beyond this machine, both ways."),
        metrics_option,
        log_options(),
    )


deny_option = option(
    "--deny",
    type=EXISTING_FILE,
    help="Ids of revoked tokens, as `keyhole token deny` writes them; read again when the file "
    "changes.",
)


def _metrics_listen(_: click.Context, option: click.Parameter, text: str | None) -> Listen | None:
    """Where metrics are shown; an address that is named is meant."""
    from keyhole.service.transport import Listen

    if text is None:
        return None
    host, _sign, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise click.BadParameter(f"{text!r} is not HOST:PORT", param=option)
    return Listen(host.strip("[]"), int(port), insecure=True)


metrics_option = in_group(
    PLACE,
    "--metrics-listen",
    metavar="HOST:PORT",
    callback=_metrics_listen,
    show_default="a free port of 127.0.0.1",
    help="Where /metrics is shown, in plain HTTP: never at the port of devices.",
)


def deny_list_of(options: Mapping[str, Any]) -> DenyList | None:
    """Returns the list that `--deny` names."""
    from keyhole.service.access import DenyList

    return None if options["deny"] is None else DenyList(options["deny"])


def keyring_of(options: Mapping[str, Any]) -> Keyring | None:
    """Returns the keys that `--token-key` names."""
    from keyhole.service.access import Keyring

    return None if options["token_key"] is None else Keyring.load(options["token_key"])


def client_of(options: Mapping[str, Any], name: str, **rest: Any) -> HttpClient:
    """Returns a client of the service that option `name` is the URL of; it asks once, and opens
    nothing yet."""
    from keyhole.wire.http import HttpClient
    from keyhole.wire.sockets import Retry

    url, ca, insecure = options[name], options[f"{name}_ca"], options["insecure"]
    return HttpClient(url, ca=ca, retry=Retry(attempts=1), insecure=insecure, **rest)


def serve_with(
    options: Mapping[str, Any],
    make: Callable[[Metrics], Application],
    told: Callable[[str], str],
    workers: int = 1,
    *,
    part: str,
    rounds: Path | None = None,
) -> None:
    """Serves where `listen_options` say until interrupted.

    Args:
        make: makes the service, in each worker.
        told: what to say once it listens at a URL.
        part: what it is called in its log.
        rounds: the rounds directory that it serves, of which the log tells.
    """
    from keyhole.service.telling import ServiceTelling
    from keyhole.service.transport import Listen, run

    names = "host", "port", "tls_cert", "tls_key", "client_ca", "insecure"
    listen = Listen(*(options[name] for name in names))

    def listens(url: str, metrics: str) -> None:
        if is_for_machines():
            tell(part, "listening", f"{told(url).partition('#')[0]}; metrics at {metrics}")
        else:
            say(f"{told(url)}\nmetrics at {metrics}")

    look = ServiceTelling(part, rounds)
    shown = options["metrics_listen"]
    run(make, listen, workers=workers, metrics=shown, on_listen=listens, on_look=look)
