"""What `keyhole plan --round-seconds` adds: how many servers a round takes, and what runs out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from keyhole.cli.numbers import write_bytes, write_count

if TYPE_CHECKING:
    from keyhole.delivery.plan.capacity import Fleet, PartyNeed
    from keyhole.delivery.plan.need import Need
    from keyhole.delivery.plan.prices import Price

__all__ = ["fleet_as_json", "fleet_of", "fleet_options", "show_fleet"]

_Command = TypeVar("_Command", bound=Callable[..., Any])

_ABOVE = click.FloatRange(0, min_open=True)
_OPTIONS = (
    click.option(
        "--round-seconds",
        type=_ABOVE,
        help="Count the servers instead, if the devices of a round come spread over so long.",
    ),
    click.option("--cores", type=click.IntRange(1), help="Of a server.  [default: 32]"),
    click.option("--gbit", type=_ABOVE, help="Of its line, a second.  [default: 25]"),
    click.option("--memory-gb", type=_ABOVE, help="Of a server.  [default: 512]"),
    click.option(
        "--busy",
        type=click.FloatRange(0, 1, min_open=True),
        help="Share of the time that a resource may be in use.  [default: 0.7]",
    ),
)
_WIDTH = 110  # characters of the widest line
_NAMES = ("round_seconds", "cores", "gbit", "memory_gb", "busy")


def fleet_options(command: _Command) -> _Command:
    """Adds the options."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def fleet_of(options: Mapping[str, Any]) -> Fleet | None:
    """The servers to count with; None where they are not to be counted."""
    given = {name: options[name] for name in _NAMES if options[name] is not None}
    if not given:
        return None
    if "round_seconds" not in given:
        name = next(iter(given)).replace("_", "-")
        raise click.UsageError(f"--{name} goes with --round-seconds")
    from keyhole.delivery.plan.capacity import Fleet

    names = {"round_seconds": "seconds", "memory_gb": "memory"}
    scale = {"memory_gb": 1e9}
    return Fleet(**{names.get(name, name): n * scale.get(name, 1) for name, n in given.items()})


def show_fleet(need: Need, fleet: Fleet, prices: Sequence[Price]) -> None:
    """Prints what deliveries and sums take."""
    from keyhole.delivery.plan.sums import SUMS, price_sums

    console = Console()
    console.width = max(console.width, _WIDTH)  # else numbers would be cut
    console.print(_table(_title(need, fleet), _deliveries(need, fleet, prices)))
    sums = price_sums(need)
    console.print(_table("Checking in, and adding up", _sums(need, fleet)))
    if beyond := [way for way in SUMS if way not in {price.way for price in sums}]:
        click.echo(f"beyond the limits of its messages: {', '.join(beyond)}")


def fleet_as_json(need: Need, fleet: Fleet, prices: Sequence[Price]) -> dict[str, Any]:
    """The same for programs."""
    lines = [*_deliveries(need, fleet, prices), *_sums(need, fleet)]
    needs = [
        {
            "way": way,
            "bytes_total": sent,
            **{name: getattr(one, name) for name in ("party", "gbit", "cores", "requests")},
            **{name: getattr(one, name) for name in ("memory", "servers", "fits", "first")},
            "by": dict(one.by),
        }
        for way, sent, one in lines
    ]
    return {"fleet": vars(fleet), "needs": needs}


def _deliveries(
    need: Need, fleet: Fleet, prices: Sequence[Price]
) -> Iterator[tuple[str, int, PartyNeed]]:
    """A way, the bytes of a device and what one party needs."""
    from keyhole.delivery.plan.capacity import delivery_needs

    for price in prices:
        for one in delivery_needs(price, need, fleet):
            yield price.way, price.bytes_total, one


def _sums(need: Need, fleet: Fleet) -> Iterator[tuple[str, int, PartyNeed]]:
    from keyhole.delivery.plan.capacity import checkin_need, sum_needs
    from keyhole.delivery.plan.sums import price_sums

    yield "check-in", 0, checkin_need(need, fleet)
    for price in price_sums(need):
        for one in sum_needs(price, need, fleet):
            yield price.way, price.bytes_up + price.bytes_down, one


def _table(title: str, lines: Iterator[tuple[str, int, PartyNeed]]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("way", "party"):
        table.add_column(name, no_wrap=True)
    for name in ("a device", "Gbit/s", "cores", "memory", "servers"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("first", no_wrap=True)
    for way, sent, one in lines:
        table.add_row(
            way,
            one.party,
            write_bytes(sent) if sent else "-",
            _write_number(one.gbit),
            _write_number(one.cores),
            write_bytes(one.memory) if one.memory else "-",
            write_count(one.servers) if one.fits else "-",
            one.first,
        )
    return table


def _write_number(value: float) -> str:
    """Two digits of what is small, whole numbers of what is not."""
    return f"{value:.2g}" if value < 10 else f"{value:,.0f}"


def _title(need: Need, fleet: Fleet) -> str:
    return (
        f"{write_count(need.cohort)} devices in {fleet.seconds:g} s, each "
        f"{write_count(need.keys_per_client)} of {write_count(need.num_keys)} slices of "
        f"{write_bytes(need.slice_bytes)};\nservers of {fleet.cores} cores, {fleet.gbit:g} Gbit/s "
        f"and {write_bytes(fleet.memory)}, {100 * fleet.busy:.0f}% in use"
    )
