"""Runs `keyhole privacy`: shows what sums have spent of devices' privacy, run after run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from keyhole.cli.options import NumberRange, json_option, option
from keyhole.errors import InputError

_SHOWN = 20  # devices, the dearest first


@click.command()
@click.argument("ledger", required=False, type=click.Path(exists=True, path_type=Path))
@option(
    "--delta",
    default=1e-6,
    type=NumberRange(0, 1, min_open=True, max_open=True),
    help="For which epsilon is stated.",
)
@option("--device", metavar="NAME", help="Show this device alone.")
@option("--all", "is_whole", is_flag=True, help=f"Show all devices, not the {_SHOWN} first.")
@json_option
def privacy(
    ledger: Path | None, delta: float, device: str | None, is_whole: bool, as_json: bool
) -> None:
    """Show what LEDGER holds: a file of `keyhole device --ledger`, or an aggregator's directory.

    Without LEDGER, that of the devices of this user: $XDG_STATE_HOME/keyhole/ledger, or
    ~/.local/state/keyhole/ledger.

    Of each population, what its sums cost a client that is in every one of them; of each device,
    what its own sums cost, in all populations together. Sums are composed as Gaussians; nothing is
    gained by sampling, since the keeper of a ledger sees who takes part.
    """
    from keyhole.aggregation.privacy.ledger import default_ledger, describe, read_ledger, totals_of

    ledger = ledger or default_ledger()
    path = ledger / "ledger" if ledger.is_dir() else ledger
    told = describe(totals_of(read_ledger(path)), delta)
    if device is not None:
        told["devices"] = [each for each in told["devices"] if each["name"] == device]
        if not told["devices"]:
            raise InputError(
                f"the ledger has no such device: got {device}; expected one that took part in a "
                "sum; leave out --device to see all"
            )
    if as_json:
        click.echo(json.dumps(told, indent=2))
        return
    devices = told["devices"] if is_whole else told["devices"][:_SHOWN]
    screen = Console()
    screen.print(_table("population", "epsilon, if in all", told["populations"]))
    screen.print(_table("device", "epsilon", devices))
    left = len(told["devices"]) - len(devices)
    click.echo(f"at delta {delta:g}" + (f"; {left} more devices: --all" if left else ""))


def _table(what: str, spent: str, lines: Sequence[Mapping[str, Any]]) -> Table:
    table = Table()
    table.add_column(what, overflow="fold")
    for column in ("sums", spent):
        table.add_column(column, justify="right")
    for line in lines:
        epsilon = "no bound" if line["epsilon"] is None else f"{line['epsilon']:.4g}"
        table.add_row(str(line["name"]), f"{line['sums']:,}", epsilon)
    return table
