"""`keyhole token`: keys that sign, and tokens for devices."""

from __future__ import annotations

import os
import time
from pathlib import Path

import click

from keyhole.errors import InputError

__all__ = ["token"]

_DAY = 86_400.0


@click.group()
def token() -> None:
    """Make signing keys, and tokens with which devices check in."""


@token.command("new-key")
@click.argument("file", type=click.Path(path_type=Path))
def new_key(file: Path) -> None:
    """Write a new signing key to FILE, which must not exist and only its owner can read.

    A file may hold several keys, one a line: the first signs, all are accepted.
    """
    from keyhole.serving.service.access import new_key as make_key

    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise InputError(
            f"cannot make {file.name}",
            got=error.strerror or "refused",
            allowed="a file that does not exist yet",
            fix="choose another name; a key that is in use is never replaced",
        ) from error
    with os.fdopen(descriptor, "w") as opened:
        opened.write(make_key() + "\n")


@token.command()
@click.option(
    "--key",
    required=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File of signing keys.",
)
@click.option("--device", required=True, help="Name of the device.")
@click.option(
    "--days",
    default=30.0,
    show_default=True,
    type=click.FloatRange(0, 3650, min_open=True),
    help="How long the token is good.",
)
@click.option("--most-keys", type=click.IntRange(1), help="Keys that one query may name.")
def issue(key: Path, device: str, days: float, most_keys: int | None) -> None:
    """Print a token with which a device checks in."""
    from keyhole.serving.service.access import Keyring

    ring = Keyring.load(key)
    made = ring.issue("device", device, now=time.time(), seconds=days * _DAY, most_keys=most_keys)
    click.echo(made)
