"""The `keyhole` command: its verbs, and how it ends."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from keyhole.cli.aggregator import aggregator
from keyhole.cli.data import data
from keyhole.cli.demo import demo
from keyhole.cli.device import device
from keyhole.cli.flower import flower
from keyhole.cli.mirror import mirror
from keyhole.cli.plan import plan
from keyhole.cli.publish import publish
from keyhole.cli.relay import relay
from keyhole.cli.report import report
from keyhole.cli.serve import serve
from keyhole.cli.sweep import sweep
from keyhole.cli.token import token
from keyhole.cli.train import train
from keyhole.errors import KeyholeError
from keyhole.server.allocator import keep_freed_memory

INTERRUPTED = 130


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="keyhole", message="%(prog)s %(version)s")
def keyhole() -> None:
    """Federated select: devices train on the slices of a model they ask for."""


keyhole.add_command(data)
keyhole.add_command(demo)
keyhole.add_command(train)
keyhole.add_command(sweep)
keyhole.add_command(report)
keyhole.add_command(plan)
keyhole.add_command(publish)
keyhole.add_command(serve)
keyhole.add_command(device)
keyhole.add_command(token)
keyhole.add_command(mirror)
keyhole.add_command(relay)
keyhole.add_command(aggregator)
keyhole.add_command(flower)


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Runs the command; an error is one line on standard error and a non-zero exit code."""
    keep_freed_memory()
    try:
        code = keyhole.main(args, prog_name="keyhole", standalone_mode=False)
    except click.ClickException as error:
        click.echo(f"keyhole: {_in_one_line(error)}", err=True)
        code = error.exit_code
    except click.Abort:
        click.echo("keyhole: interrupted", err=True)
        code = INTERRUPTED
    except KeyholeError as error:
        click.echo(f"keyhole: {error}", err=True)
        code = error.exit_code
    sys.exit(code)


def _in_one_line(error: click.ClickException) -> str:
    message = " ".join(error.format_message().split())
    context = getattr(error, "ctx", None)
    return (
        message if context is None else f"{message.rstrip('.')}; see {context.command_path} --help"
    )
