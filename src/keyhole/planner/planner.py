"""Planner: which way of delivery to use, given what parties may learn.

A pure function of public numbers. It prefers fewer bytes, then less work of servers, and never a
private way that sends more than the whole model: broadcast hides everything for less.

Whether a private way is worth its bytes for a whole model: broadcast hides everything too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Literal, TypeAlias

from keyhole.delivery.base import PRIVATE_DELIVERIES, Basis, DeliveryName
from keyhole.delivery.records import PLAIN, Coding, records_of
from keyhole.errors import CostlyError, InputError
from keyhole.planner.prices import Price, traffic_of
from keyhole.pricing import Workload
from keyhole.primitives.layout import Layout, max_keys_of

Trust: TypeAlias = Literal["open", "unlinked", "hidden", "hidden-one-server", "hidden-enclave"]
"""What a delivery must keep from whom."""

TRUSTS: Mapping[Trust, str] = MappingProxyType(
    {
        "open": "a server may learn each client's keys",
        "unlinked": "nobody learns whose keys are whose",
        "hidden": "nobody learns a key, if two operators do not work together",
        "hidden-one-server": "nobody learns a key, by cryptography and with one operator",
        "hidden-enclave": "nobody learns a key, with one operator and hardware that is trusted",
    }
)
"""Trust -> what it asks for."""

# What a requirement may rest on. Hardware is trusted only where that was asked for by name.
_BASES: Mapping[Trust, frozenset[Basis]] = MappingProxyType(
    {
        "open": frozenset(("nothing", "no collusion", "cryptography")),
        "unlinked": frozenset(("nothing", "no collusion", "cryptography")),
        "hidden": frozenset(("nothing", "no collusion", "cryptography")),
        "hidden-one-server": frozenset(("nothing", "cryptography")),
        "hidden-enclave": frozenset(("nothing", "cryptography", "hardware")),
    }
)


def satisfies(price: Price, trust: Trust, need: Workload) -> bool:
    """Whether a way keeps what is asked for, by what its parties learn and what that rests on.

    Somebody's keys are unlinked among many clients only: the keys of a cohort of one are its own.

    Raises:
        InputError: no such requirement.
    """
    if trust not in TRUSTS:
        raise InputError(
            "no such trust requirement",
            got=trust,
            allowed=", ".join(TRUSTS),
            fix="choose one of them",
        )
    if price.basis not in _BASES[trust]:
        return False
    learned = price.seen_by.values()
    if trust == "open":
        return True
    if trust == "unlinked":
        is_crowd = need.cohort > 1
        return not any(party.keys and (party.whose or not is_crowd) for party in learned)
    return not any(party.keys for party in learned)


def best(prices: Iterable[Price], need: Workload, trust: Trust = "open") -> Price:
    """Returns the way with the fewest bytes that satisfies a requirement; of several the one that
    servers compute least for.

    Broadcast satisfies every requirement, so a private way that is dearer is never the best.

    Args:
        prices: of ways, all for this need.
        need: the public numbers.
        trust: the requirement.

    Raises:
        InputError: none of the prices satisfies it, or no such requirement.

    >>> need = Workload(num_keys=10_000, keys_per_client=1_000, slice_bytes=2_000, cohort=50)
    >>> prices = price_all(need)
    >>> [best(prices, need, trust).way for trust in ("unlinked", "hidden", "hidden-one-server")]
    ['relay', 'pir', 'broadcast']
    """
    suitable = [price for price in prices if satisfies(price, trust, need)]
    if not suitable:
        raise InputError(
            f"no way satisfies {trust!r}",
            got="prices of none that does",
            allowed="prices with broadcast among them",
            fix="take them from price_all",
        )
    return min(suitable, key=lambda price: (price.bytes_total, price.server_seconds))


def check_worth(price: Price, broadcast: Price) -> None:
    """Refuses a private way that sends more than the whole model.

    Args:
        price: of the way.
        broadcast: of sending everything, for the same need.

    Raises:
        CostlyError: it is dearer.
    """
    refuse_dearer(price.way, price.bytes_total, broadcast.bytes_total)


def refuse_dearer(way: DeliveryName, sent: int, whole: int) -> None:
    """Refuses a private way with which a client sends and receives more than all slices are.

    A way that is not private may be chosen for other reasons: less work of clients, say.

    Raises:
        CostlyError: it does.
    """
    if way in PRIVATE_DELIVERIES and sent > whole:
        raise CostlyError(
            f"{way} sends more than the whole model",
            got=f"{sent:,} bytes a client",
            allowed=f"at most {whole:,}, what broadcast sends",
            fix="choose broadcast, another number of keys a client, or force it",
        )


def break_even(num_keys: int, slice_bytes: int, way: DeliveryName) -> int:
    """Returns a number of keys a client up to which a way sends no more than broadcast, and from
    which on it sends more; 0 if it never saves.

    Found by bisection on exact bytes. They grow with every key, but for a few places: whoever takes
    every key in the clear names none, and a batch for two servers changes its shape here and there,
    which can make it smaller. With tiny slices there may be more than one such number.

    Args:
        num_keys: K.
        slice_bytes: of one slice.
        way: which is compared. More keys than its messages can hold do not count as saving.

    Raises:
        InputError: a number is out of range.

    >>> break_even(10_000, 2_000, "broadcast")
    10000
    """

    def saves(keys_per_client: int) -> bool:
        need = Workload(num_keys, keys_per_client, slice_bytes, cohort=1)
        try:
            return traffic_of(way, need).total <= need.table_bytes
        except InputError:  # a limit of the way, since the need is sound
            return False

    Workload(num_keys, 1, slice_bytes, cohort=1)  # refuses numbers that make no sense
    return _last(saves, num_keys)


def _last(holds: Callable[[int], bool], limit: int) -> int:
    """The last of 1..most for which something holds that holds up to some number; 0 if none."""
    low, high = 0, limit + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def check_model_worth(
    way: DeliveryName, layout: Layout, keys_per_client: Mapping[str, int], coding: Coding = PLAIN
) -> None:
    """Refuses a way that sends more than the whole model, as `PrivateWay` would deliver it.

    Args:
        way: of delivery.
        layout: the model and its cuts.
        keys_per_client: key space -> the most keys of a client.
        coding: of the cut parts.

    Raises:
        CostlyError: it is dearer than broadcast.
    """
    sent = whole = 0
    limit = max_keys_of(layout, keys_per_client)
    for part, records, m in zip(layout.parts, records_of(layout, coding), limit, strict=True):
        table = part.space.num_keys * records.record_bytes
        if 0 < m < part.space.num_keys:
            need = Workload(part.space.num_keys, m, records.record_bytes, cohort=1)
            sent += traffic_of(way, need).total
        elif m:
            sent += table
        whole += table
    refuse_dearer(way, sent, whole)
