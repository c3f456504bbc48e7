"""Prices every delivery and names the best, given what parties may learn.

A pure function of public numbers. It prefers fewer bytes, then less work of servers, and never a
private delivery that sends more than the whole model: broadcast hides everything for less. Nor
slices that are bound to nothing (`DeliveryAbout.is_bound`): they have no proofs, and cost less for
it. Bytes are exact, proofs for keys that are drawn evenly excepted: slices, keys and the messages
of a protocol, without HTTP and TLS around them. Seconds are estimates of one core: `Speeds` times
what is copied, hashed, scanned and enciphered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Literal, TypeAlias

from keyhole.delivery import all_deliveries, delivery_named
from keyhole.delivery.base import Basis, Delivery, Price
from keyhole.delivery.popular import NO_POPULAR, PopularShares, popular_of_part, shares_of
from keyhole.delivery.records import PLAIN, Coding, records_of
from keyhole.errors import CostlyError, InputError
from keyhole.parts import PartKind
from keyhole.pricing import Speeds, Workload, measured
from keyhole.primitives.layout import Layout, max_keys_of

Trust: TypeAlias = Literal["open", "unlinked", "hidden", "hidden-one-server", "hidden-enclave"]
"""What a delivery must keep from whom."""

TRUSTS: Mapping[Trust, str] = MappingProxyType(
    {
        "open": "a server may learn each client's keys",
        "unlinked": "nobody learns whose keys are whose",
        "hidden": "nobody learns a key, if two do not collude",
        "hidden-one-server": "nobody learns a key, by cryptography alone",
        "hidden-enclave": "nobody learns a key, hardware is trusted",
    }
)
"""Trust -> what it asks for."""

# What a requirement may rest on. Hardware is trusted only where that was asked for by name.
_USUAL_BASES: tuple[Basis, ...] = ("nothing", "no collusion", "cryptography")
_BASES: Mapping[Trust, tuple[Basis, ...]] = MappingProxyType(
    {
        "hidden-one-server": ("nothing", "cryptography"),
        "hidden-enclave": ("nothing", "cryptography", "hardware"),
    }
)


def price_all(load: Workload, speeds: Speeds | None = None) -> tuple[Price, ...]:
    """Returns the price of every delivery, in the order of the catalogue; broadcast is first.

    One that cannot serve the load, because its messages would grow beyond their limits, is left
    out. Speeds are of one core; None takes those of a machine that was measured.

    >>> load = Workload(num_keys=10_000, keys_per_client=1_000, slice_bytes=2_000, cohort=50)
    >>> prices = {price.name: price for price in price_all(load)}
    >>> prices["broadcast"].bytes_total
    20000000
    >>> prices["pir"].bytes_total < prices["broadcast"].bytes_total / 3
    True
    """
    speeds, found = speeds or measured(Speeds), []
    for delivery in all_deliveries():
        try:
            found.append(delivery.price(load, speeds))
        except InputError:  # a load is checked when it is made, so this is a limit of the delivery
            continue
    return tuple(found)


_PRICED = PartKind("delivery with a price", "own-delivery", {"price": Callable})


def price_of(name: str, load: Workload, speeds: Speeds | None = None) -> Price:
    """Returns the price of one delivery, by its name; raises InputError where its messages cannot
    hold the load, or there is no such delivery."""
    found = delivery_named(name)
    _PRICED.check(name, found)
    return found.price(load, speeds or measured(Speeds))


def satisfies(price: Price, trust: Trust, load: Workload) -> bool:
    """Returns whether a way keeps what is asked for, by what its parties learn and what that rests
    on.

    Somebody's keys are unlinked among many clients only: the keys of a cohort of one are its own.
    """
    if trust not in TRUSTS:
        raise InputError(
            f"no such trust requirement: got {trust}; expected {', '.join(TRUSTS)}; choose one of "
            "them"
        )
    if price.about.basis not in _BASES.get(trust, _USUAL_BASES):
        return False
    if trust == "open":
        return True
    is_hidden_in_crowd = trust == "unlinked" and load.cohort > 1
    return not any(
        party.keys and (party.whose or not is_hidden_in_crowd)
        for party in price.about.leaks.values()
    )


def best(prices: Iterable[Price], load: Workload, trust: Trust = "open") -> Price:
    """Returns the way with the fewest bytes that satisfies a requirement, and gives all devices one
    model provably; of several the one that servers compute least for.

    Broadcast satisfies every requirement, so a private way that is dearer is never the best. Raises
    InputError where none of the prices satisfies it, or there is no such requirement.

    >>> load = Workload(num_keys=10_000, keys_per_client=1_000, slice_bytes=2_000, cohort=50)
    >>> prices = price_all(load)
    >>> [best(prices, load, trust).name for trust in ("unlinked", "hidden", "hidden-one-server")]
    ['relay', 'pir', 'pir-one-server']
    """
    suitable = [p for p in prices if p.about.is_bound and satisfies(p, trust, load)]
    if not suitable:
        raise InputError(
            f"no way satisfies {trust!r}: got prices of none that does; expected prices with "
            "broadcast among them; take them from price_all"
        )
    return min(suitable, key=lambda price: (price.bytes_total, price.server_seconds))


def check_worth(price: Price, broadcast: Price) -> None:
    """Raises CostlyError for a private delivery that sends more than `broadcast` does for the same
    load."""
    _refuse_dearer(price.name, price.about.is_private, price.bytes_total, broadcast.bytes_total)


def _refuse_dearer(name: str, is_private: bool, sent: int, whole: int) -> None:
    """Refuses a private delivery with which a client sends and receives more than all slices are.

    One in the clear may be chosen for other reasons: less work of clients, say.
    """
    if is_private and sent > whole:
        raise CostlyError(
            f"{name} sends more than the whole model: got {sent:,} bytes per client; expected at "
            f"most {whole:,}, what broadcast sends; choose broadcast, another number of keys a "
            "client, or force it"
        )


def break_even(num_keys: int, slice_bytes: int, name: str) -> int:
    """Returns a number of keys per client up to which a delivery sends no more than broadcast, and
    from which on it sends more; 0 if it never saves.

    Found by bisection on exact bytes. They grow with every key, but for a few places: one who takes
    every key in the clear names none, and a batch for two servers changes its shape here and there,
    which can make it smaller. With tiny slices there may be more than one such number.

    More keys than messages of the delivery can hold do not count as saving.

    >>> break_even(10_000, 2_000, "broadcast")
    10000
    """

    def saves(keys_per_client: int) -> bool:
        load = Workload(num_keys, keys_per_client, slice_bytes, cohort=1)
        try:
            return price_of(name, load).bytes_total <= load.table_bytes
        except InputError:  # a limit of the delivery, since the load is sound
            return False

    Workload(num_keys, 1, slice_bytes, cohort=1)  # refuses numbers that make no sense
    low, high = 0, num_keys + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if saves(middle) else (low, middle)
    return low


def check_model_worth(
    delivery: Delivery, layout: Layout, keys_per_client: Mapping[str, int], coding: Coding = PLAIN
) -> None:
    """Raises CostlyError for a private delivery that sends more than the whole model would be;
    `coding` is that of the cut parts."""
    sent = sum(max_bytes(delivery, layout, keys_per_client, coding, shares_of(delivery)))
    tables = zip(layout.parts, records_of(layout, coding), strict=True)
    whole = sum(part.space.num_keys * records.record_bytes for part, records in tables)
    _refuse_dearer(delivery.about.name, delivery.about.is_private, sent, whole)


def max_bytes(
    delivery: Delivery,
    layout: Layout,
    keys_per_client: Mapping[str, int],
    coding: Coding = PLAIN,
    popular: PopularShares = NO_POPULAR,
) -> tuple[int, int]:
    """Returns what a client that takes as many keys as it may receives and sends while slices are
    delivered, in bytes. It follows from public numbers; private deliveries pad everyone to it."""
    down = up = 0
    shares = popular if delivery.about.has_popular else NO_POPULAR
    limit = max_keys_of(layout, keys_per_client)
    for part, records, m in zip(layout.parts, records_of(layout, coding), limit, strict=True):
        if 0 < m < part.space.num_keys:
            few = popular_of_part(shares, part, m)
            load = Workload(
                part.space.num_keys,
                m,
                records.record_bytes,
                cohort=1,
                popular=None if few is None else (few.count, few.slots),
            )
            price = delivery.price(load, measured(Speeds))
            down, up = down + price.bytes_down, up + price.bytes_up
        elif m:
            down += part.space.num_keys * records.record_bytes
    return down, up
