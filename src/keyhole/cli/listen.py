"""Reads where a service listens, for `serve`, `relay` and `aggregator`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from keyhole.service.transport import Listen

_Command = TypeVar("_Command", bound=Callable[..., Any])
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


def listen_options(port: int) -> Callable[[_Command], _Command]:
    """Adds the options, with a port of the command's own."""
    options = [
        click.option(
            "--host", default="127.0.0.1", show_default=True, help="Address to listen at."
        ),
        click.option(
            "--port",
            default=port,
            show_default=True,
            type=click.IntRange(0, 65535),
            help="Port to listen at; 0 takes any that is free.",
        ),
        click.option(
            "--tls-cert", type=_FILE, help="Certificate chain, PEM; without it plain HTTP."
        ),
        click.option("--tls-key", type=_FILE, help="Its key, PEM; if it is not in the same file."),
        click.option(
            "--client-ca", type=_FILE, help="Demand client certificates signed by this, PEM."
        ),
        click.option(
            "--insecure", is_flag=True, help="Allow plain HTTP beyond this machine, both ways."
        ),
    ]

    def add(command: _Command) -> _Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def listen_of(options: Mapping[str, Any]) -> Listen:
    """What the options say."""
    from keyhole.service.transport import Listen

    return Listen(
        options["host"],
        options["port"],
        options["tls_cert"],
        options["tls_key"],
        options["client_ca"],
        insecure=options["insecure"],
    )
