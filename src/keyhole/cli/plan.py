"""`keyhole plan`: what each way of delivery would cost, and which to use."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from keyhole.cli.fleet import fleet_as_json, fleet_of, fleet_options, show_fleet
from keyhole.cli.inputs import json_option
from keyhole.cli.numbers import parse_whole, write_bytes, write_count, write_seconds
from keyhole.delivery.names import DELIVERIES, DeliveryName
from keyhole.delivery.plan.need import Need
from keyhole.delivery.plan.trust import TRUSTS, Trust

if TYPE_CHECKING:
    from keyhole.delivery.plan.machine import Machine
    from keyhole.delivery.plan.prices import Price

__all__ = ["plan"]

_Command = TypeVar("_Command", bound=Callable[..., Any])


def _whole(name: str, about: str, *, required: bool = False) -> Callable[[_Command], _Command]:
    """An option that takes a whole number as people type it."""
    return click.option(name, callback=parse_whole, metavar="N", required=required, help=about)


@click.command()
@_whole("--num-keys", "Slices there are, such as words of a vocabulary: K.", required=True)
@_whole("--keys-per-client", "Slices that a client asks for at most: m.", required=True)
@_whole("--slice-bytes", "Of one slice.", required=True)
@_whole("--cohort", "Clients of a round.", required=True)
@_whole("--distinct", "Different keys of the cohort.  [default: as many as there can be]")
@_whole("--broadcast-bytes", "What everyone receives beside slices.  [default: 0]")
@click.option(
    "--trust",
    type=click.Choice(get_args(Trust)),
    help="Name the best way for this requirement only.",
)
@click.option(
    "--way",
    type=click.Choice(DELIVERIES),
    help="Check this way: a private one that sends more than the whole model is refused.",
)
@click.option("--force", is_flag=True, help="With --way: do not refuse it.")
@click.option("--calibrate", is_flag=True, help="Measure this machine first, for a few seconds.")
@fleet_options
@json_option
def plan(
    num_keys: int,
    keys_per_client: int,
    slice_bytes: int,
    cohort: int,
    distinct: int | None,
    broadcast_bytes: int | None,
    trust: Trust | None,
    way: DeliveryName | None,
    force: bool,
    calibrate: bool,
    as_json: bool,
    **servers: Any,
) -> None:
    """Price every way of delivering slices, and name the best.

    From public numbers alone: bytes of a client are exact, seconds are estimates for one core. The
    best way for a requirement sends the fewest bytes; a private way that sends more than the whole
    model never is, since broadcast hides everything for less.

    With --round-seconds it says how many servers the round takes, of deliveries and of sums, and
    which of their resources runs out first; docs/deploy.md works from that.
    """
    # Lengths come from the private protocols, which take a while to import: not for --help.
    from keyhole.delivery.plan.planner import best, check_worth, price_all, price_of

    if force and way is None:
        raise click.UsageError("--force goes with --way")
    need = Need(
        num_keys,
        keys_per_client,
        slice_bytes,
        cohort,
        distinct,
        broadcast_bytes=broadcast_bytes or 0,
    )
    fleet, machine = fleet_of(servers), _machine(calibrate)
    prices = price_all(need, machine)
    chosen = {asked: best(prices, need, asked) for asked in ([trust] if trust else TRUSTS)}
    if as_json:
        counted = {} if fleet is None else fleet_as_json(need, fleet, prices)
        click.echo(json.dumps(_as_json(need, machine, prices, chosen) | counted, indent=2))
    elif fleet is not None:
        show_fleet(need, fleet, prices)
    else:
        _show(need, prices, chosen)
    if way is not None and not force:
        check_worth(price_of(way, need, machine), price_of("broadcast", need, machine))


def _machine(calibrate: bool) -> Machine:
    """The speeds to reckon with."""
    from keyhole.delivery.plan.machine import Machine

    if not calibrate:
        return Machine()
    from keyhole.delivery.plan.calibration import calibrate as measure

    return measure()


def _as_json(
    need: Need, machine: Machine, prices: Sequence[Price], chosen: Mapping[Trust, Price]
) -> dict[str, Any]:
    """Everything for programs."""
    return {
        "need": asdict(need),
        "machine": asdict(machine),
        "prices": [_price_as_json(price) for price in prices],
        "best": {trust: price.way for trust, price in chosen.items()},
    }


def _show(need: Need, prices: Sequence[Price], chosen: Mapping[Trust, Price]) -> None:
    """Prints everything for people."""
    console = Console()
    for table in (_cost_table(need, prices), _server_table(prices), _trust_table(prices)):
        console.print(table)
    if beyond := set(DELIVERIES) - {price.way for price in prices}:
        click.echo(f"beyond the limits of its messages: {', '.join(sorted(beyond))}")
    for trust, price in chosen.items():
        click.echo(f"best for {trust} ({TRUSTS[trust]}): {price.way}{_write_provided(need, price)}")


def _write_provided(need: Need, price: Price) -> str:
    """What a choice comes with, in a few words."""
    if price.basis == "hardware":
        # No attester of real hardware comes with keyhole, only one that simulates it.
        return ", with hardware and an attester of your own"
    if any(party.keys and not party.whose for party in price.seen_by.values()):
        return f", in a crowd of {_write_clients(need)}"
    return ""


def _cost_table(need: Need, prices: Sequence[Price]) -> Table:
    """What each way costs; narrow enough for a terminal of 80 columns."""
    table = _numbers(_title(need), "down", "up", "of all", "server CPU", "client CPU")
    whole = prices[0].bytes_total
    for price in prices:
        table.add_row(
            price.way,
            write_bytes(price.bytes_down),
            write_bytes(price.bytes_up) if price.bytes_up else "-",
            _write_share(price.bytes_total / whole),
            _write_split(price.seconds_by),
            write_seconds(price.client_seconds),
        )
    return table


def _server_table(prices: Sequence[Price]) -> Table:
    """What a server makes and holds."""
    title = "At a server; building is done once a round, before anybody asks"
    table = _numbers(title, "building CPU", "slices made", "memory", "can be cached")
    for price in prices:
        table.add_row(
            price.way,
            _write_split(price.building_by),
            write_count(price.slices_generated) if price.slices_generated else "-",
            write_bytes(price.server_memory),
            "yes" if price.is_cacheable else "no",
        )
    return table


def _numbers(title: str, *names: str) -> Table:
    """A table of ways and columns of numbers."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("way", no_wrap=True)
    for name in names:
        table.add_column(name, justify="right")
    return table


def _trust_table(prices: Sequence[Price]) -> Table:
    """Who learns what."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("way", "who learns what", "which assumes"):
        table.add_column(name, no_wrap=name == "way")
    for price in prices:
        learned = "\n".join(f"{party}: {learned}" for party, learned in price.seen_by.items())
        table.add_row(price.way, learned, price.assumption)
    return table


def _title(need: Need) -> str:
    return (
        f"{_write_clients(need)}, each {write_count(need.keys_per_client)} of "
        f"{write_count(need.num_keys)} slices of {write_bytes(need.slice_bytes)}"
    )


def _write_clients(need: Need) -> str:
    """The cohort, in words."""
    return f"{write_count(need.cohort)} client{'s' if need.cohort > 1 else ''}"


def _write_share(share: float) -> str:
    """Bytes over those of broadcast, in percent."""
    percent = 100 * share
    return f"{percent:.2g}%" if percent < 10 else f"{percent:,.0f}%"


def _write_split(seconds_by: Mapping[str, float]) -> str:
    """Seconds of each party: `2 x 2.8 s`, or `5 s + 4 s` where they differ."""
    parts = [write_seconds(seconds) for seconds in seconds_by.values()]
    if not parts:
        return "-"
    return f"{len(parts)} x {parts[0]}" if len(parts) > len(set(parts)) else " + ".join(parts)


def _price_as_json(price: Price) -> dict[str, Any]:
    """A price as plain values."""
    return {
        **vars(price),
        "bytes_total": price.bytes_total,
        "server_seconds": price.server_seconds,
        "seconds_by": dict(price.seconds_by),
        "building_by": dict(price.building_by),
        "seen_by": {
            party: {**asdict(learned), "in_words": str(learned)}
            for party, learned in price.seen_by.items()
        },
    }
