"""The three ways of section 3.2, in process. They deliver the same bytes and differ in cost.

Slices of a cut model are rows of the server's tables, so each way gathers the same rows; the costs
are counted from what the way would have to compute and send.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np

from keyhole.delivery.cost import Cost, Delivered
from keyhole.primitives.keyspace import Keys
from keyhole.primitives.layout import Layout
from keyhole.primitives.parts import Part
from keyhole.primitives.placement import ClientValue, map_clients, observe
from keyhole.server.state import ServerState
from keyhole.types import ClientId

__all__ = ["broadcast", "key_bytes", "on_demand", "pregenerated"]

_KEY_BYTES = 8  # an int64 on the wire

_Demand: TypeAlias = Mapping[ClientId, Mapping[str, Keys]]


def broadcast(state: ServerState, keys: ClientValue[Any]) -> Delivered:
    """Option 1: everyone receives the whole model and selects at home. Nobody learns a key."""
    demand = _demand(state.layout, keys)
    whole = state.layout.client_bytes(**{s.name: s.num_keys for s in state.layout.spaces})
    cost = Cost(
        bytes_down=dict.fromkeys(demand, whole),
        bytes_up=dict.fromkeys(demand, 0),
        select_calls=_asked(state.layout, demand),
        cache_hits=0,
        distinct_slices=_distinct(state.layout, demand),
        seen_by={"server": "nothing"},
    )
    return _deliver(state, keys, cost)


def on_demand(state: ServerState, keys: ClientValue[Any]) -> Delivered:
    """Option 2: clients send their keys, each distinct slice is computed once and kept for the
    round."""
    demand = _demand(state.layout, keys)
    asked, distinct = _asked(state.layout, demand), _distinct(state.layout, demand)
    return _deliver(
        state, keys, _served(state.layout, demand, distinct, asked - distinct, "server")
    )


def pregenerated(state: ServerState, keys: ClientValue[Any]) -> Delivered:
    """Option 3: all slices are computed before the round, and clients fetch theirs."""
    demand = _demand(state.layout, keys)
    every = sum(part.space.num_keys for part in _cut_parts(state.layout))
    return _deliver(
        state,
        keys,
        _served(state.layout, demand, every, _asked(state.layout, demand), "slice server"),
    )


def key_bytes(keys: Iterable[Keys]) -> int:
    """The bytes that name keys on the wire; none where a client takes every key of a space."""
    return sum(_KEY_BYTES * len(z) for z in keys if len(z) < z.space.num_keys)


def _deliver(state: ServerState, keys: ClientValue[Any], cost: Cost) -> Delivered:
    return Delivered(map_clients(state.select, keys), cost)


def _served(layout: Layout, demand: _Demand, calls: int, hits: int, server: str) -> Cost:
    """The cost of a way in which clients ask a server for slices."""
    return Cost(
        bytes_down={c: _bytes_down(layout, z) for c, z in demand.items()},
        bytes_up={c: key_bytes(z.values()) for c, z in demand.items()},
        select_calls=calls,
        cache_hits=hits,
        distinct_slices=_distinct(layout, demand),
        seen_by={server: "keys and whose they are"},
    )


def _demand(layout: Layout, keys: ClientValue[Any]) -> _Demand:
    """Each client's keys by the name of their key space."""
    return {client: layout.keys_by_space(z) for client, z in observe(keys).items()}


def _bytes_down(layout: Layout, chosen: Mapping[str, Keys]) -> int:
    return layout.client_bytes(**{name: len(z) for name, z in chosen.items()})


def _asked(layout: Layout, demand: _Demand) -> int:
    """How many slices of the cut parts the cohort asked for."""
    return sum(len(part.keys_of(z)) for part in _cut_parts(layout) for z in demand.values())


def _distinct(layout: Layout, demand: _Demand) -> int:
    """How many different slices those are."""
    total = 0
    for part in _cut_parts(layout):
        asked = [part.keys_of(z).array for z in demand.values()]
        total += len(np.unique(np.concatenate(asked))) if asked else 0
    return total


def _cut_parts(layout: Layout) -> list[Part]:
    return [part for part in layout.parts if part.product.factors]
