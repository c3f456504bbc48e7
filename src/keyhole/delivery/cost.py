"""What a delivery costs and who sees what: reported with the slices, by every way alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from keyhole.delivery.leakage import Learned
from keyhole.primitives.layout import RowSource
from keyhole.primitives.placement import ClientValue
from keyhole.server.state import ServerState
from keyhole.types import ClientId, Tree

__all__ = ["Cost", "Delivered", "Delivery"]


@dataclass(frozen=True)
class Cost:
    """The cost of delivering one round.

    Args:
        bytes_down: bytes of slices that each client received.
        bytes_up: bytes of keys that each client sent to receive them.
        select_calls: slices that were computed, one for each call of the select function.
        cache_hits: slices that were asked for and found computed.
        distinct_slices: how many different slices of cut parts the cohort asked for.
        seen_by: party -> what it learns of a client's keys while slices are delivered.
    """

    bytes_down: Mapping[ClientId, int]
    bytes_up: Mapping[ClientId, int]
    select_calls: int
    cache_hits: int
    distinct_slices: int
    seen_by: Mapping[str, Learned]


@dataclass(frozen=True)
class Delivered:
    """Sub-models on the clients, and their cost.

    Args:
        submodels: of each client; may be computed when it is read, so read before the next step.
        keys: those that the sub-model holds, in order: what the client asked for, but for keys that
            a private way could not place in its query. The client trains without those.
        cost: of the round.
        source: where the rows of sub-models are read, so that they can be selected elsewhere; None
            where what a client received is not a function of its keys.
    """

    submodels: ClientValue[Tree]
    keys: ClientValue[Any]
    cost: Cost
    source: RowSource | None = None


Delivery: TypeAlias = Callable[[ServerState, ClientValue[Any]], Delivered]
"""`deliver(state, keys)`: keys are each client's `Keys`, one for each key space."""
