"""Lists every delivery, and finds one by its name."""

from __future__ import annotations

from typing import cast

from keyhole.delivery.base import Delivery
from keyhole.delivery.clear import Broadcast, OnDemand, Pregenerated
from keyhole.delivery.enclave.way import Enclave
from keyhole.delivery.pir.way import OneServerPir, PirDelivery, TwoServerPir
from keyhole.delivery.relay.way import BlindRelay
from keyhole.errors import InputError
from keyhole.identity import resolve

PIR_DELIVERIES: tuple[PirDelivery, ...] = (TwoServerPir(), OneServerPir())
"""Those by private queries, which a service answers and a device asks in one form."""

DELIVERIES: tuple[Delivery, ...] = (
    Broadcast(),
    OnDemand(),
    Pregenerated(),
    BlindRelay(),
    TwoServerPir(),
    OneServerPir(),
    Enclave(),
)
"""All of them: the paper's options 1, 2 and 3, and the private ones over option 3."""

DELIVERY_NAMES: tuple[str, ...] = tuple(delivery.about.name for delivery in DELIVERIES)
"""The words on the command line and in run.json, in the same order."""


SERVED_NAMES: tuple[str, ...] = tuple(
    delivery.about.name for delivery in DELIVERIES if delivery.about.is_served
)
"""Those that devices can use."""


def pir_delivery_named(name: str) -> PirDelivery:
    """Returns a delivery by private queries.

    Raises:
        InputError: there is no such delivery.
    """
    for delivery in PIR_DELIVERIES:
        if delivery.about.name == name:
            return delivery
    names = ", ".join(delivery.about.name for delivery in PIR_DELIVERIES)
    raise InputError(
        "no such delivery by private queries", got=name, allowed=names, fix="choose one of them"
    )


def delivery_named(name: str) -> Delivery:
    """Returns a delivery, one's own by "module:NAME" too; `for_run` gives it what a run says.

    Raises:
        InputError: there is no such delivery.
    """
    if ":" in name:
        return cast(Delivery, resolve(name))
    for delivery in DELIVERIES:
        if delivery.about.name == name:
            return delivery
    raise InputError(
        "no such delivery", got=name, allowed=", ".join(DELIVERY_NAMES), fix="choose one of them"
    )
