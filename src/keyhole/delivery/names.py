"""The names of all ways of delivery."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

__all__ = ["DELIVERIES", "PRIVATE_DELIVERIES", "DeliveryName"]

DeliveryName: TypeAlias = Literal[
    "broadcast",
    "on-demand",
    "pregenerated",
    "relay",
    "pir",
    "pir-chor",
    "pir-one-server",
    "enclave",
]
"""A way of delivery: the paper's options 1, 2 and 3, and the private ways over option 3."""

DELIVERIES: tuple[DeliveryName, ...] = get_args(DeliveryName)
"""All of them, the plain ones first."""

PRIVATE_DELIVERIES: tuple[DeliveryName, ...] = DELIVERIES[3:]
"""Those that keep something from somebody, and ask for slices all the same."""
