"""Prices: what each way of delivery costs in a round, from public numbers alone.

Bytes are exact, seconds are estimates; see `lengths` and `work`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from keyhole.delivery.leakage import Learned
from keyhole.delivery.names import DELIVERIES, DeliveryName
from keyhole.delivery.parties import PARTIES, Basis
from keyhole.delivery.plan.lengths import traffic_of
from keyhole.delivery.plan.machine import Machine
from keyhole.delivery.plan.need import Need
from keyhole.delivery.plan.work import work_of
from keyhole.errors import InputError

__all__ = ["Price", "price_all", "price_of"]


@dataclass(frozen=True)
class Price:
    """What one way costs in a round.

    Args:
        way: its name.
        bytes_down: that a client receives, from all servers together.
        bytes_up: that a client sends, to all servers together.
        seconds_by: party -> CPU seconds of one core for answering the whole cohort.
        building_by: party -> CPU seconds of one core for what it makes before anybody asks, once a
            round; parties that make nothing are not in it.
        client_seconds: CPU seconds of one client.
        server_memory: bytes that one server holds.
        slices_generated: at the server side.
        is_cacheable: whether the same bytes serve many clients, so that caches can give them out.
        seen_by: party -> what it learns.
        basis: what that rests on.
        assumption: the same, in a sentence.
    """

    way: DeliveryName
    bytes_down: int
    bytes_up: int
    seconds_by: Mapping[str, float] = field(hash=False)
    building_by: Mapping[str, float] = field(hash=False)
    client_seconds: float
    server_memory: int
    slices_generated: int
    is_cacheable: bool
    seen_by: Mapping[str, Learned] = field(hash=False)
    basis: Basis
    assumption: str

    @property
    def bytes_total(self) -> int:
        """Both directions, of one client."""
        return self.bytes_down + self.bytes_up

    @property
    def server_seconds(self) -> float:
        """CPU seconds of all parties but the clients, together: building and answering."""
        return sum(self.seconds_by.values()) + sum(self.building_by.values())


def price_all(need: Need, machine: Machine | None = None) -> tuple[Price, ...]:
    """Returns the price of every way, in the order of `DELIVERIES`; broadcast is the first.

    A way that cannot serve the need, because its messages would grow beyond their limits, is left
    out.

    Args:
        need: the public numbers.
        machine: speeds; None takes those of a machine of ours.

    >>> need = Need(num_keys=10_000, keys_per_client=1_000, slice_bytes=2_000, cohort=50)
    >>> prices = {price.way: price for price in price_all(need)}
    >>> prices["broadcast"].bytes_total
    20000000
    >>> prices["pir"].bytes_total < prices["broadcast"].bytes_total / 3
    True
    """
    prices = (_price_within_limits(way, need, machine) for way in DELIVERIES)
    return tuple(price for price in prices if price is not None)


def price_of(way: DeliveryName, need: Need, machine: Machine | None = None) -> Price:
    """Returns the price of one way.

    Raises:
        InputError: the need is beyond what messages of this way can hold.
    """
    traffic, parties = traffic_of(way, need), PARTIES[way]
    work = work_of(way, need, machine or Machine())
    return Price(
        way=way,
        bytes_down=traffic.down,
        bytes_up=traffic.up,
        seconds_by=work.seconds_by,
        building_by=work.building_by,
        client_seconds=work.client_seconds,
        server_memory=work.server_memory,
        slices_generated=work.slices_generated,
        is_cacheable=work.is_cacheable,
        seen_by=parties.seen_by,
        basis=parties.basis,
        assumption=parties.assumption,
    )


def _price_within_limits(way: DeliveryName, need: Need, machine: Machine | None) -> Price | None:
    try:
        return price_of(way, need, machine)
    except InputError:  # a need is checked when it is made, so this is a limit of the way
        return None
