"""Runs `keyhole plan`: what each delivery would cost, which to use, and how many servers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from keyhole.aggregation import aggregation_named, aggregation_names
from keyhole.cli.numbers import parse_whole, write_bytes, write_count, write_seconds
from keyhole.cli.options import (
    GroupedCommand,
    NameOr,
    NumberRange,
    json_option,
    option,
    refuse,
)
from keyhole.delivery import delivery_names
from keyhole.planner.prices import TRUSTS, Trust
from keyhole.pricing import Speeds, Workload, measured

if TYPE_CHECKING:
    from keyhole.aggregation.base import Aggregation
    from keyhole.delivery.base import Price
    from keyhole.planner.capacity import Fleet, PartyNeed
    from keyhole.planner.popular import Zipf

_ABOVE, _SHARE = NumberRange(0, min_open=True), NumberRange(0, 1, min_open=True)
_WIDTH = 110  # characters of the widest line
_FLEET = {"round_seconds": "seconds", "memory_gb": "memory"}  # their names there


def _fleet_of(options: Mapping[str, Any]) -> Fleet | None:
    """The servers to count with; None where they are not to be counted."""
    from keyhole.planner.capacity import Fleet

    given = {name: value for name, value in options.items() if value is not None}
    if not given:
        return None
    if "round_seconds" not in given:
        refuse(given, given, "goes with --round-seconds")
    if "memory_gb" in given:
        given["memory_gb"] *= 1e9
    return Fleet(**{_FLEET.get(name, name): value for name, value in given.items()})


def _show_fleet(
    need: Workload, fleet: Fleet, prices: Sequence[Price], own: Sequence[Aggregation]
) -> None:
    """Prints what deliveries and sums take, your own sums among them."""
    from keyhole.planner.capacity import price_sums

    console = Console()
    console.width = max(console.width, _WIDTH)  # else numbers would be cut
    console.print(_fleet_table(_fleet_title(need, fleet), _deliveries(need, fleet, prices)))
    console.print(_fleet_table("Checking in, and adding up", _sums(need, fleet, own)))
    priced = {price.name for price in price_sums(need, own)}
    if beyond := [way for way in aggregation_names() if way not in priced]:
        click.echo(f"beyond the limits of its messages: {', '.join(beyond)}")


def _fleet_as_json(
    need: Workload, fleet: Fleet, prices: Sequence[Price], own: Sequence[Aggregation]
) -> dict[str, Any]:
    """The same for programs."""
    lines = [*_deliveries(need, fleet, prices), *_sums(need, fleet, own)]
    names = "party", "gbit", "cores", "requests", "memory", "servers", "fits", "first"
    needs = [
        {
            "way": way,
            "bytes_total": sent,
            **{name: getattr(one, name) for name in names},
            "by": dict(one.by),
        }
        for way, sent, one in lines
    ]
    return {"fleet": vars(fleet), "needs": needs}


def _deliveries(
    need: Workload, fleet: Fleet, prices: Sequence[Price]
) -> Iterator[tuple[str, int, PartyNeed]]:
    """A way, the bytes of a device and what one party needs."""
    from keyhole.planner.capacity import delivery_needs

    for price in prices:
        for one in delivery_needs(price, need, fleet):
            yield price.name, price.bytes_total, one


def _sums(
    need: Workload, fleet: Fleet, own: Sequence[Aggregation]
) -> Iterator[tuple[str, int, PartyNeed]]:
    from keyhole.planner.capacity import checkin_need, price_sums, sum_needs

    yield "check-in", 0, checkin_need(need, fleet)
    for price in price_sums(need, own):
        for one in sum_needs(price, need, fleet):
            yield price.name, price.bytes_up + price.bytes_down, one


def _fleet_table(title: str, lines: Iterator[tuple[str, int, PartyNeed]]) -> Table:
    numbers = "a device", "Gbit/s", "cores", "memory", "servers"
    table = _empty(title)
    for name in ("way", "party", *numbers, "first"):
        table.add_column(name, justify="right" if name in numbers else "left", no_wrap=True)
    for way, sent, one in lines:
        table.add_row(
            way,
            one.party,
            write_bytes(sent) if sent else "-",
            _write_number(one.gbit),
            _write_number(one.cores),
            write_bytes(one.memory) if one.memory else "-",
            _write_number(one.servers) if one.fits else "-",
            one.first,
        )
    return table


def _write_number(value: float) -> str:
    """Few digits: 0.053, 27, 9,528, 224k.

    >>> [_write_number(value) for value in (0.0531, 26.7, 9_528, 224_247, 6.7e12)]
    ['0.053', '27', '9,528', '224k', '6.7e12']
    """
    if value < 10:
        return f"{value:.2g}"
    for limit, size, unit in ((9_999.5, 1.0, ""), (999_500.0, 1e3, "k"), (999.5e6, 1e6, "M")):
        if value < limit:
            return f"{value / size:,.0f}{unit}"
    return write_count(value)


def _fleet_title(need: Workload, fleet: Fleet) -> str:
    return (
        f"{write_count(need.cohort)} devices in {fleet.seconds:g} s, each "
        f"{write_count(need.keys_per_client)} of {write_count(need.num_keys)} slices of "
        f"{write_bytes(need.slice_bytes)};\nservers of {fleet.cores} cores, {fleet.gbit:g} Gbit/s "
        f"and {write_bytes(fleet.memory)}, {100 * fleet.busy:.0f}% in use"
    )


_Command = TypeVar("_Command", bound=Callable[..., Any])


def _whole(
    name: str, about: str, *, required: bool = False, shown: str | None = None
) -> Callable[[_Command], _Command]:
    """An option that takes a whole number as people type it."""
    rest: dict[str, Any] = {"metavar": "N", "required": required, "show_default": shown}
    return option(name, callback=parse_whole, help=about, **rest)


def _server(
    name: str, kind: click.ParamType[Any], shown: str, about: str
) -> Callable[[_Command], _Command]:
    """An option of the servers that are counted; None unless given."""
    return option(name, type=kind, show_default=shown, help=about)


@click.command(
    cls=GroupedCommand,
    roles={
        "Workload": "num_keys keys_per_client slice_bytes cohort distinct broadcast_bytes",
        "Popular keys": "popular popular_share zipf",
        "Deliveries and sums": "trust delivery force aggregation calibrate",
        "Servers": "round_seconds cores gbit memory_gb busy",
    },
)
@_whole("--num-keys", "K: slices there are, such as words of a vocabulary.", required=True)
@_whole("--keys-per-client", "m: max slices per client.", required=True)
@_whole("--slice-bytes", "Bytes of one slice.", required=True)
@_whole("--cohort", "Clients per round.", required=True)
@_whole("--distinct", "Different keys of the cohort.", shown="the max possible")
@_whole("--broadcast-bytes", "Bytes that everyone receives beside slices.", shown="0")
@_whole("--popular", "Private retrieval asks a table of this many popular keys.", shown="none")
@option(
    "--popular-share",
    type=_SHARE,
    show_default="1",
    help="With --popular: share of a client's keys that this table is asked for; the whole table "
    "is asked for the rest.",
)
@option(
    "--zipf",
    type=NumberRange(0, 10),
    show_default="1",
    help="With --popular: exponent of the law of popularity.",
)
@option(
    "--trust",
    type=click.Choice(get_args(Trust)),
    help="Name the best way for this requirement only.",
)
@option(
    "--aggregation",
    metavar="module:NAME",
    multiple=True,
    help="With --round-seconds: price your own sum beside those of keyhole.",
)
@option(
    "--delivery",
    type=NameOr(delivery_names),
    help="Check this one: a private one that sends more than the whole model is refused.",
)
@option("--force", is_flag=True, help="With --delivery: do not refuse it.")
@option("--calibrate", is_flag=True, help="Measure this machine first, for a few seconds.")
@option(
    "--round-seconds",
    type=_ABOVE,
    help="Count the servers instead, for rounds whose devices arrive over this many seconds.",
)
@_server("--cores", click.IntRange(1), "32", "Cores of a server.")
@_server("--gbit", _ABOVE, "25", "Gbit/s of its network.")
@_server("--memory-gb", _ABOVE, "512", "Memory of a server.")
@_server("--busy", _SHARE, "0.7", "Share of the time that a resource may be in use.")
@json_option
def plan(
    num_keys: int,
    keys_per_client: int,
    slice_bytes: int,
    cohort: int,
    distinct: int | None,
    broadcast_bytes: int | None,
    popular: int | None,
    popular_share: float | None,
    zipf: float | None,
    trust: Trust | None,
    aggregation: tuple[str, ...],
    delivery: str | None,
    force: bool,
    calibrate: bool,
    as_json: bool,
    **servers: Any,
) -> None:
    """Price every delivery of slices, and name the best.

    Prices follow from public numbers alone: bytes per client are exact, except proofs that slices
    belong to the round, which are shorter where keys lie together; seconds are estimates for one
    core. The best delivery for a requirement sends the fewest bytes. A private one that sends more
    than the whole model is never the best: broadcast hides everything for less. Nor is one whose
    slices no proof binds.

    With --round-seconds it says how many servers the round takes, of deliveries and of sums, and
    which of their resources runs out first; docs/deploy.md works from that.
    """
    from keyhole.delivery.clear import Broadcast
    from keyhole.planner.popular import Zipf
    from keyhole.planner.prices import best, check_worth, price_all, price_of

    if force and delivery is None:
        raise click.UsageError("--force goes with --delivery")
    own = [aggregation_named(name) for name in aggregation]
    counts = num_keys, keys_per_client, slice_bytes, cohort, distinct
    need = Workload(*counts, broadcast_bytes=broadcast_bytes or 0)
    if popular is None:
        refuse(
            {"popular_share": popular_share, "zipf": zipf is not None},
            ("popular_share", "zipf"),
            "goes with --popular",
        )
    else:
        slots = max(1, min(keys_per_client, round((popular_share or 1) * keys_per_client)))
        need = replace(need, popular=(popular, slots))
    fleet, machine = _fleet_of(servers), measured(Speeds)
    if calibrate:
        from keyhole.planner.speeds import calibrate as measure

        machine = measure()
    prices = price_all(need, machine)
    if delivery is not None and ":" in delivery:  # your own
        prices = (*prices, price_of(delivery, need, machine))
    chosen = {asked: best(prices, need, asked) for asked in ([trust] if trust else TRUSTS)}
    law = None if popular is None else Zipf(need, 1.0 if zipf is None else zipf)
    if as_json:
        counted = {} if fleet is None else _fleet_as_json(need, fleet, prices, own)
        counted |= {} if law is None else {"zipf": law.exponent, "dropped": law.dropped}
        click.echo(json.dumps(_as_json(need, machine, prices, chosen) | counted, indent=2))
    elif fleet is not None:
        _show_fleet(need, fleet, prices, own)
    else:
        _show(need, prices, chosen)
    if law is not None and not as_json:
        _show_popular(law, prices, price_all(replace(need, popular=None), machine))
    if delivery is not None and not force:
        check_worth(price_of(delivery, need, machine), Broadcast().price(need, machine))


def _as_json(
    need: Workload, machine: Speeds, prices: Sequence[Price], chosen: Mapping[Trust, Price]
) -> dict[str, Any]:
    """Everything for programs."""
    return {
        "workload": asdict(need),
        "speeds": asdict(machine),
        "prices": [_price_as_json(price) for price in prices],
        "best": {trust: price.name for trust, price in chosen.items()},
    }


def _show(need: Workload, prices: Sequence[Price], chosen: Mapping[Trust, Price]) -> None:
    """Prints everything for people, the choice first."""
    console = Console()
    console.print(_best_table(need, chosen))
    for table in (_cost_table(need, prices), _server_table(prices), _trust_table(prices)):
        console.print(table)
    click.echo(_write_proofs(need, prices))
    if beyond := set(delivery_names()) - {price.name for price in prices}:
        click.echo(f"beyond the limits of its messages: {', '.join(sorted(beyond))}")


def _show_popular(law: Zipf, prices: Sequence[Price], before: Sequence[Price]) -> None:
    """Prints what popular keys change, and what that costs."""
    popular = law.load.popular
    assert popular is not None
    count, slots = (write_count(each) for each in popular)
    title = (
        f"{slots} of {write_count(law.load.keys_per_client)} keys are asked of {count} popular "
        f"ones\nZipf's law with exponent {law.exponent:g}: a client does without "
        f"{100 * law.dropped:.2g}% of its keys"
    )
    table = _numbers(title, "bytes", "before", "server CPU", "before", "memory", "before")
    was = {price.name: price for price in before}
    for price in prices:
        if price.about.has_popular and (old := was.get(price.name)) is not None:
            cells = (
                *(write_bytes(each.bytes_total) for each in (price, old)),
                *(_write_split(each.seconds_by) for each in (price, old)),
                *(write_bytes(each.server_memory) for each in (price, old)),
            )
            table.add_row(price.name, *cells)
    Console().print(table)


def _write_proofs(need: Workload, prices: Sequence[Price]) -> str:
    """What it costs that slices fetched by key are bound to the round."""
    found = max(prices, key=lambda price: price.proof_bytes)
    share = found.proof_bytes / need.asked_bytes
    line = (
        f"Proofs are {write_bytes(found.proof_bytes)} of what {found.name} sends, "
        f"{_write_share(share)} of its slices."
    )
    is_dear = found.bytes_total > need.table_bytes + need.broadcast_bytes
    return line + ("\nAll slices together are less than that: broadcast them." if is_dear else "")


def _best_table(need: Workload, chosen: Mapping[Trust, Price]) -> Table:
    """The delivery of the fewest bytes for each requirement."""
    table = _empty("The best delivery, by what must be kept from whom")
    for name in ("for", "best"):
        table.add_column(name, no_wrap=True)
    table.add_column("where")
    for trust, price in chosen.items():
        where = TRUSTS[trust]
        if price.about.basis == "hardware":
            # No attester of real hardware comes with keyhole, only one that simulates it.
            where += "\n(with hardware and an attester of your own)"
        elif any(party.keys and not party.whose for party in price.about.leaks.values()):
            where += f"\n(in a crowd of {_write_clients(need)})"
        table.add_row(trust, price.name, where)
    return table


def _cost_table(need: Workload, prices: Sequence[Price]) -> Table:
    """What each way costs; narrow enough for a terminal of 80 columns."""
    table = _numbers(_title(need), "down", "up", "of all", "server CPU", "client CPU")
    whole = prices[0].bytes_total
    for price in prices:
        table.add_row(
            price.name,
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
            price.name,
            _write_split(price.building_by),
            write_count(price.slices_generated) if price.slices_generated else "-",
            write_bytes(price.server_memory),
            "yes" if price.is_cacheable else "no",
        )
    return table


def _numbers(title: str, *names: str) -> Table:
    """A table of ways and columns of numbers."""
    table = _empty(title)
    table.add_column("way", no_wrap=True)
    for name in names:
        table.add_column(name, justify="right")
    return table


def _trust_table(prices: Sequence[Price]) -> Table:
    """Who learns what, and what that rests on."""
    table = _empty("Who learns what")
    table.add_column("way", no_wrap=True)
    table.add_column("party: what it learns, and what that rests on")
    for price in prices:
        learned = [f"{party}: {leak}" for party, leak in price.about.leaks.items()]
        table.add_row(price.name, "\n".join([*learned, f"assumption: {price.about.rests_on}"]))
    return table


def _empty(title: str) -> Table:
    """A table that takes as little room as it can."""
    return Table(
        title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False
    )


def _title(need: Workload) -> str:
    return (
        f"{_write_clients(need)}, each {write_count(need.keys_per_client)} of "
        f"{write_count(need.num_keys)} slices of {write_bytes(need.slice_bytes)}"
    )


def _write_clients(need: Workload) -> str:
    """The cohort, in words."""
    return f"{write_count(need.cohort)} client{'s' if need.cohort > 1 else ''}"


def _write_share(share: float) -> str:
    """Bytes over those of broadcast, in percent."""
    percent = 100 * share
    return f"{percent:.2g}%" if percent < 10 else f"{write_count(percent)}%"


def _write_split(seconds_by: Mapping[str, float]) -> str:
    """Seconds of each party: `2 x 2.8 s`, or `5 s + 4 s` where they differ."""
    parts = [write_seconds(seconds) for seconds in seconds_by.values()]
    if not parts:
        return "-"
    return f"{len(parts)} x {parts[0]}" if len(parts) > len(set(parts)) else " + ".join(parts)


def _price_as_json(price: Price) -> dict[str, Any]:
    """A price as plain values."""
    return {
        **{name: value for name, value in vars(price).items() if name != "about"},
        "way": price.name,
        "basis": price.about.basis,
        "assumption": price.about.rests_on,
        "bytes_total": price.bytes_total,
        "server_seconds": price.server_seconds,
        "seconds_by": dict(price.seconds_by),
        "building_by": dict(price.building_by),
        # Of keys: a delivery has nothing to do with updates.
        "seen_by": {
            party: {
                **{name: getattr(leak, name) for name in ("keys", "whose", "how_many")},
                "in_words": str(leak),
            }
            for party, leak in price.about.leaks.items()
        },
    }
