"""Runs `keyhole token`: keys that sign, and tokens for devices."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from keyhole.cli.options import EXISTING_FILE, NumberRange, option
from keyhole.errors import InputError
from keyhole.files import storage_errors
from keyhole.logs import say

_DAY = 86_400.0
_MAX_TOKEN = 4096  # bytes of a file that can hold one


@click.group()
def token() -> None:
    """Make signing keys, and tokens with which devices check in."""


@token.command("new-key", short_help="Write a new key that signs tokens.")
@click.argument("file", type=click.Path(path_type=Path))
def new_key(file: Path) -> None:
    """Write a new signing key to FILE, which must not exist and only its owner can read.

    A file may hold several keys, one a line: the first signs, all are accepted.
    """
    from keyhole.service.access import new_key as make_key

    _write_new(file, f"{make_key()}\n".encode("ascii"))


@token.command("gateway-key", short_help="Write a new key of a gateway.")
@click.argument("file", type=click.Path(path_type=Path))
@option(
    "--number",
    default=1,
    type=click.IntRange(0, 255),
    help="By which requests name the key; a new key takes a new one.",
)
def gateway_key(file: Path, number: int) -> None:
    """Write a new key of a gateway to FILE, which must not exist and only its owner can read.

    Requests that come through a relay are sealed to it. A file may hold several keys, one a line:
    devices use the first, all are accepted.
    """
    from keyhole.delivery.relay.ohttp import GatewayKey, encode_gateway_key

    _write_new(file, encode_gateway_key(GatewayKey.fresh(number)).encode("ascii"))


@token.command("signing-key", short_help="Write a new key of a trainer, and its public half.")
@click.argument("file", type=click.Path(path_type=Path))
@click.argument("public_file", metavar="PUBLIC", type=click.Path(path_type=Path))
def signing_key(file: Path, public_file: Path) -> None:
    """Write a new key of a trainer to FILE, which must not exist and only its owner can read, and
    its public half to PUBLIC.

    `keyhole train` and `keyhole publish` sign manifests with FILE (--signing-key); devices pin
    PUBLIC (--trainer-key).
    """
    from keyhole.wire.signing import SigningKey

    key = SigningKey.fresh()
    _write_new(file, key.encode().encode("ascii"))
    _write_new(public_file, key.public.encode().encode("ascii"), mode=0o644)


@token.command("aggregator-key", short_help="Write the key for tokens of an aggregator.")
@click.argument("key_file", metavar="KEYFILE", type=EXISTING_FILE)
@click.argument("party", type=click.IntRange(0, 1))
@click.argument("file", type=click.Path(path_type=Path))
def aggregator_key(key_file: Path, party: int, file: Path) -> None:
    """Write the key for tokens of devices at aggregator PARTY, 0 or 1, to FILE, which is new.

    It follows from the slice service's keys in KEYFILE. With it that aggregator (--token-key) takes
    the tokens that the service gives devices for it; it makes none for the service or the other
    aggregator.
    """
    from keyhole.service.access import Keyring

    ring = Keyring.load(key_file).for_aggregator(party)
    _write_new(file, "".join(f"{key.hex()}\n" for key in ring.keys).encode("ascii"))


@token.command("gateway-config", short_help="Write the public half of a gateway's keys.")
@click.argument(
    "key_file",
    metavar="KEYFILE",
    type=EXISTING_FILE,
)
@click.argument("file", required=False, type=click.Path(path_type=Path))
def gateway_config(key_file: Path, file: Path | None) -> None:
    """Write what devices may know of the gateway's keys in KEYFILE, for their --gateway-config.

    It goes to FILE, which must not exist, or to standard output. Nothing in it is secret; give the
    same to all devices.
    """
    from keyhole.delivery.relay.ohttp import encode_configs, load_gateway_keys

    listed = encode_configs([key.config for key in load_gateway_keys(key_file)])
    if file is None:
        click.echo(listed, nl=False)
    else:
        _write_new(file, listed, mode=0o644)


def _write_new(file: Path, content: bytes, mode: int = 0o600) -> None:
    """Writes to a file that was not there; others cannot read it, unless `mode` says so."""
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    except OSError as error:
        raise InputError(
            f"cannot make {file.name}: got {error.strerror or 'refused'}; expected a file that "
            "does not exist yet; choose another name; a key that is in use is never replaced"
        ) from error
    with storage_errors(file, "write"):
        try:
            with os.fdopen(descriptor, "wb") as opened:
                opened.write(content)
        except OSError:  # half a key is none, and would be in the way of the next one
            file.unlink()
            raise


@token.command(short_help="Print a token for a device.")
@option("--key", required=True, type=EXISTING_FILE, help="File of signing keys.")
@option("--device", required=True, help="Name of the device.")
@option(
    "--audience",
    default="slices",
    type=click.Choice(["slices", "aggregator", "relay"]),
    help="The kind of service that the token is for.",
)
@option(
    "--days",
    default=7.0,
    type=NumberRange(0, 3650, min_open=True),
    help="How long the token is good.",
)
@option("--max-keys", type=click.IntRange(1), help="Max keys per query.")
@option(
    "--run",
    "runs",
    multiple=True,
    metavar="NAME",
    show_default="all runs of the service",
    help="Run that the token is good for; may be repeated.",
)
def issue(key: Path, device: str, days: float, **options: Any) -> None:
    """Print a token that a device shows to a slice service, an aggregator or a relay.

    Its id goes to standard error: keep it beside the name of the device, to revoke the token.
    """
    from keyhole.service.access import Keyring
    from keyhole.wire.assignment import claims_in

    ring = Keyring.load(key)
    made = ring.issue("device", device, now=time.time(), seconds=days * _DAY, **options)
    click.echo(made)
    say(f"id {claims_in(made)['id']}")


@token.command(short_help="Print what a token says.")
@click.argument("file", type=EXISTING_FILE)
def show(file: Path) -> None:
    """Print what the token in FILE says: its id, whom and what it is for, until when.

    The signature is not checked: that takes the key of the service.
    """
    from keyhole.wire.assignment import claims_in

    told = claims_in(read_token(file))
    if not told:
        raise InputError(
            f"no token of this version: got file {file.name}; expected a token that `keyhole token "
            "issue` has printed; issue a new one"
        )
    click.echo(json.dumps(told, indent=1))


@token.command(short_help="Revoke tokens: add their ids to a deny list.")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.argument("ids", metavar="ID...", nargs=-1, required=True)
def deny(file: Path, ids: tuple[str, ...]) -> None:
    """Add ids of tokens to the deny list FILE; services with --deny FILE refuse them.

    Services notice within a second. Round tokens that devices got by them are refused as well.
    FILE must be there: a list under another name is read by no service.
    """
    from keyhole.files import replacing, write_all
    from keyhole.service.access import TOKEN_ID

    bad = [each for each in ids if not TOKEN_ID.fullmatch(each)]
    if bad:
        raise InputError(
            f"not the id of a token: got {len(bad)} of {len(ids)}; expected 32 hex digits; "
            "`keyhole token show` tells the id of a token"
        )
    try:
        listed = file.read_bytes()
    except OSError as error:
        raise InputError(
            f"no deny list can be read, and nothing was denied: got {file}, "
            f"{error.strerror or 'refused'}; expected the file that services were started with "
            f"(--deny FILE); name that file, or make the first one with `touch {file}`"
        ) from error
    known = set(listed.decode("ascii", "replace").split())
    fresh = [each for each in dict.fromkeys(ids) if each not in known]
    listed += b"" if listed.endswith(b"\n") or not listed else b"\n"
    with replacing(file) as descriptor:
        write_all(descriptor, [listed + "".join(f"{each}\n" for each in fresh).encode("ascii")])
    click.echo(f"{file}: {len(fresh)} denied, {len(ids) - len(fresh)} were before")


def refuse_token(file: Path, audience: str, device: str | None = None) -> None:
    """Raises InputError for a token that is for another kind of service, or for another device
    than `device`: its owner hears of it before anything is sent."""
    from keyhole.wire.assignment import claims_in

    told = claims_in(read_token(file))
    named, kind = told.get("device"), told.get("audience", audience)
    if kind != audience:
        raise InputError(
            f"the token is for another kind of service: got {file}, for {kind}; expected a token "
            f"for {audience}; ask the operator for one of `keyhole token issue --audience "
            f"{audience}`"
        )
    if device is not None and named not in (None, device):
        raise InputError(
            f"the token is for another device: got {file}, for {named}; expected a token for "
            f"{device}; pass the --client that the token is for, or ask the operator for another "
            "token"
        )


_SIMULATED = re.compile(r"device-(\d+)")
_AUDIENCES = {
    "token_file": "slices",
    "second_token_file": "slices",
    "relay_token_file": "relay",
    "aggregator_tokens": "aggregator",
}


def refuse_tokens(options: Mapping[str, Any]) -> None:
    """Raises InputError where a token of `keyhole device` is for another client of the data, whose
    update this one's would be, or for another kind of service."""
    from keyhole.wire.assignment import device_name, name_in

    client = options["client"]
    for name, audience in _AUDIENCES.items():
        given = options[name] or ()
        for file in given if isinstance(given, tuple) else (given,):
            is_named = _SIMULATED.fullmatch(name_in(read_token(Path(file)))) is not None
            mine = device_name(client) if client is not None and is_named else None
            refuse_token(Path(file), audience, mine)


def read_token(path: Path) -> str:
    """The token of a file."""
    try:
        found = path.read_bytes()[: _MAX_TOKEN + 1].decode("ascii").strip()
    except (OSError, UnicodeDecodeError):
        found = ""
    if not (0 < len(found) <= _MAX_TOKEN and found.isprintable() and " " not in found):
        raise InputError(
            f"no token can be read: got file {path}; expected a file with one token; ask the "
            "operator for one: `keyhole token` makes them"
        )
    return found
