"""The names of all ways of delivery."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, TypeAlias, get_args

from keyhole.private.pir.terms import Scheme

__all__ = ["DELIVERIES", "PIR_SCHEMES", "PRIVATE_DELIVERIES", "DeliveryName"]

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

PIR_SCHEMES: Mapping[DeliveryName, Scheme] = MappingProxyType(
    {"pir": "two-server", "pir-chor": "chor", "pir-one-server": "one-server"}
)
"""Way -> its scheme of private information retrieval; the other ways have none."""
