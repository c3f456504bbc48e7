"""Finds how a device fetches slices, from what a delivery declares."""

from __future__ import annotations

from collections.abc import Mapping

from keyhole.delivery.base import Delivery
from keyhole.device.device import Device
from keyhole.device.take_part import Fetch, fetch_at_home
from keyhole.errors import InputError


def fetch_by(
    delivery: Delivery, others: Mapping[str, Device], pinned: bytes | None = None
) -> Fetch:
    """Returns how a device fetches by a delivery. What it does not use is not loaded.

    Args:
        delivery: which one.
        others: devices of the parties that it connects to beside the service, by their names.
        pinned: the key configuration of a gateway, for sealed requests; None compares what relay
            and gateway say.

    Raises:
        InputError: devices cannot use the delivery, or a party is missing.
    """
    about = delivery.about
    if about.route is None or others.keys() != set(about.connects_to):
        raise InputError(
            f"a device cannot fetch by {about.name} so",
            got=f"connections to {', '.join(others) or 'no other party'}",
            allowed=f"connections to {', '.join(about.connects_to) or 'no other party'}"
            if about.route
            else "a delivery that is served",
            fix="name the parties of the delivery, or choose another",
        )
    parties = tuple(others[name] for name in about.connects_to)
    if about.route == "queries":
        from keyhole.delivery import pir_delivery_named
        from keyhole.device.private import PirFetch

        return PirFetch(pir_delivery_named(about.name), parties)
    if about.route == "sealed requests":
        from keyhole.device.relayed import RelayedFetch

        (relay,) = parties
        return RelayedFetch(relay.client, pinned)
    return fetch_at_home if about.route == "whole" else Device.fetch
