"""Delivers slices to the clients of a round (section 3.2): in the clear, or without showing keys.

This module is the catalogue, which finds deliveries by the names that they declare. It imports
them when it is asked: a device that fetches in the clear loads none of the private ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from keyhole.parts import pick

if TYPE_CHECKING:
    from keyhole.delivery.base import Delivery, DeliveryAbout

__all__ = ["all_deliveries", "delivery_named", "delivery_names"]


def all_deliveries() -> tuple[Delivery, ...]:
    """Returns every delivery that comes with keyhole: the paper's options 1, 2 and 3, then the
    private ones over option 3."""
    from keyhole.delivery.clear import Broadcast, OnDemand, Pregenerated
    from keyhole.delivery.enclave.client import Enclave
    from keyhole.delivery.pir.one_server import OneServerPir
    from keyhole.delivery.pir.two_server import TwoServerPir
    from keyhole.delivery.relay.client import BlindRelay

    clear = Broadcast(), OnDemand(), Pregenerated()
    return *clear, BlindRelay(), TwoServerPir(), OneServerPir(), Enclave()


def delivery_names(
    where: Callable[[DeliveryAbout], bool] = lambda about: True,
) -> tuple[str, ...]:
    """Returns the names of all deliveries, or of those whose declaration fits: the words on the
    command line and in run.json.

    >>> delivery_names(lambda about: not about.is_private)
    ('broadcast', 'on-demand', 'pregenerated')
    """
    return tuple(each.about.name for each in all_deliveries() if where(each.about))


def delivery_named(name: str) -> Delivery:
    """Returns a delivery, your own by "module:NAME"; `for_run` gives it what a run says.

    Raises:
        InputError: there is no such delivery, or what is named is none.
    """
    from keyhole.delivery.base import DELIVERY

    return pick(DELIVERY, name, {each.about.name: each for each in all_deliveries()})
