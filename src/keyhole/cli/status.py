"""Runs `keyhole status`: how runs and rounds stand, on one screen."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from keyhole.cli.options import EXISTING_FILE, option
from keyhole.cli.watch import watched_at

if TYPE_CHECKING:
    from rich.console import RenderableType

    from keyhole.experiments.watch.folder import Told

_GONE = 15.0  # seconds without a look after which a trainer is said to be gone
_EVERY = 2.0  # seconds between two looks
_NAMED = 8  # devices that are named on a screen
_RUNS = 15  # that a screen lists


@click.command()
@click.argument("place", metavar="DIR|URL")
@option("--ca", type=EXISTING_FILE, help="With a URL: authorities to trust there, PEM.")
@option("--insecure", is_flag=True, help="Speak plain HTTP beyond this machine.")
@option("--watch", is_flag=True, help="Look again every two seconds, until interrupted.")
@option("--json", "as_json", is_flag=True, help="Print JSON; with --watch a line each time.")
def status(place: str, ca: Path | None, insecure: bool, watch: bool, as_json: bool) -> None:
    """Show how rounds and runs stand, and what they wait for.

    DIR holds rounds that `keyhole serve` serves, or runs, at any depth. URL is the address of
    metrics that a service, a trainer or an aggregator prints when it starts; at the address of
    devices a service tells number and phase of its round alone. In a folder of rounds, devices
    whose update is missing are named: it is for those who run the trainer.
    """
    found = watched_at(place, ca, insecure, names=True)
    with suppress(KeyboardInterrupt):
        if as_json:
            for told in _looks(found, watch):
                click.echo(json.dumps(told, indent=None if watch else 2))
        elif watch and Console().is_terminal:
            with Live(console=Console(), auto_refresh=False, screen=True) as live:
                for told in _looks(found, watch):
                    live.update(_screen(told), refresh=True)
        else:
            for told in _looks(found, watch):
                Console().print(_screen(told))
    if not watch and told["troubles"] and not (told["runs"] or told["rounds"]):
        raise click.exceptions.Exit(1)


def _looks(found: Any, again: bool) -> Iterator[Told]:
    """What is told of a place, once or every two seconds."""
    yield found.overview()
    while again:
        time.sleep(_EVERY)
        yield found.overview()


def _screen(told: Mapping[str, Any]) -> RenderableType:
    """One screen: rounds, runs, and what could not be read."""
    parts: list[RenderableType] = [_round(each) for each in told["rounds"]]
    if told["runs"]:
        parts.append(_runs(told["runs"], told["now"]))
    parts += [Text(f"! {trouble}", style="yellow") for trouble in told["troubles"]]
    if not parts:
        parts.append(Text(f"{told['folder']}: no runs and no rounds yet"))
    return Group(*parts)


def _round(told: Mapping[str, Any]) -> RenderableType:
    """How a round stands: what it waits for first."""
    away = told["trainer_away"]
    trainer = _trainer(away, told.get("has_ended", False))
    lines = [Text(f"{told['name']}: {told['told']}", style="bold")]
    facts = {
        "open": _seconds(told["seconds_open"]) if told["phase"] == "open" else None,
        "closes in": _seconds(told["seconds_left"]),
        "cohort": told["cohort"],
        "checked in": told["checked_in"],
        "waiting to be drawn": told["waiting"],
        "refused": told["refused"] or None,
        "bytes": told["bytes"],
        "trainer looked": f"{_seconds(away)} ago" if away is not None and not trainer else None,
    }
    known = [
        f"{name} {value:,}" if isinstance(value, int) else f"{name} {value}"
        for name, value in facts.items()
        if value is not None
    ]
    lines.append(Text(f"  {', '.join(known)}"))
    if trainer:
        lines.append(Text(f"  {trainer}", style="yellow"))
    if told["phase"] == "open" and told.get("missing"):
        more = len(told["missing"]) - _NAMED
        named = ", ".join(told["missing"][:_NAMED])
        lines.append(Text(f"  to come: {named}{f' and {more:,} more' if more > 0 else ''}"))
    if told["empty"]:
        text = f"  {told['empty']} of {told['closed']} rounds closed empty, the last of them round "
        lines.append(Text(f"{text}{told['last_empty']}", style="yellow"))
    return Group(*lines)


def _trainer(away: float | None, has_ended: bool) -> str:
    """That nobody makes rounds; nothing while somebody does, or nobody knows."""
    if has_ended:
        return "its trainer has ended"
    gone = away is not None and away > _GONE
    return f"its trainer is gone: it last looked {_seconds(away)} ago; start it again" * gone


def _runs(runs: list[Mapping[str, Any]], now: float) -> Table:
    table = Table(title="runs", title_justify="left")
    for name in ("run", "rounds", "metric", "of broadcast", "epsilon", "state"):
        table.add_column(name, justify="left" if name in ("run", "state") else "right")
    for run in runs[:_RUNS]:
        is_done = run["finished"] == run["trials"] and run["rounds"] >= run["planned"]
        empty = f", {run['empty']} empty" if run["empty"] else ""
        private = "no bound" if run["epsilon"] is None else f"{run['epsilon']:.3g}"
        table.add_row(
            run["short"],
            f"{run['rounds']} of {run['planned']}{empty}",
            "-" if run["reached"] is None else f"{run['metric_title']} {run['reached']:.4f}",
            f"{'≤ ' * run['are_maxima']}{run['bytes'] / run['broadcast_bytes']:.1%}"
            if run["bytes"]
            else "-",
            private if run["is_private"] else "-",
            "finished" if is_done else f"last change {_seconds(now - run['changed'])} ago",
        )
    if len(runs) > _RUNS:
        table.caption = f"and {len(runs) - _RUNS} older runs"
    return table


def _seconds(value: float | None) -> str | None:
    """Seconds, minutes, hours or days, in two digits."""
    if value is None:
        return None
    for size, unit in ((86_400, "days"), (3600, "h"), (60, "min")):
        if value >= 1.5 * size:
            return f"{value / size:.0f} {unit}"
    return f"{value:.0f} s"
