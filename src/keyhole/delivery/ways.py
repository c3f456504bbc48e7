"""The three ways of section 3.2, in process. They deliver the same bytes and differ in cost.

Slices of a cut model are rows of the server's tables, so each way gathers the same rows; the costs
are counted from what the way would have to compute and send. With a coding, clients train on what
their coded slices stand for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, Protocol, TypeAlias

import numpy as np

from keyhole import tree
from keyhole.delivery.cost import Cost, Delivered
from keyhole.delivery.records import PLAIN, Coding, records_of
from keyhole.primitives.keyspace import Keys
from keyhole.primitives.layout import ClientKeys, Layout
from keyhole.primitives.parts import Part
from keyhole.primitives.placement import ClientValue, map_clients, observe
from keyhole.server.state import ServerState
from keyhole.types import Array, ClientId, Tree

__all__ = [
    "Coded",
    "Demand",
    "Way",
    "broadcast",
    "key_bytes",
    "on_demand",
    "pregenerated",
    "pregenerated_cost",
]

_KEY_BYTES = 8  # an int64 on the wire

Demand: TypeAlias = Mapping[ClientId, Mapping[str, Keys]]
"""Each client's keys by the name of their key space."""


class Way(Protocol):
    """A delivery that can code slices."""

    def __call__(
        self, state: ServerState, keys: ClientValue[Any], coding: Coding = PLAIN
    ) -> Delivered:
        """Delivers one round."""
        ...


@dataclass(frozen=True)
class Coded:
    """A delivery of coded slices: fewer bytes, and numbers that are right on average.

    Args:
        way: `broadcast`, `on_demand` or `pregenerated`.
        coding: of the cut parts; what everyone receives stays plain.
    """

    way: Way
    coding: Coding

    def __call__(self, state: ServerState, keys: ClientValue[Any]) -> Delivered:
        """Delivers one round."""
        return self.way(state, keys, self.coding)


def broadcast(state: ServerState, keys: ClientValue[Any], coding: Coding = PLAIN) -> Delivered:
    """Option 1: everyone receives the whole model and selects at home. Nobody learns a key."""
    demand = _demand(state.layout, keys)
    whole = _bytes(state.layout, {s.name: s.num_keys for s in state.layout.spaces}, coding)
    cost = Cost(
        bytes_down=dict.fromkeys(demand, whole),
        bytes_up=dict.fromkeys(demand, 0),
        select_calls=_asked(state.layout, demand),
        cache_hits=0,
        distinct_slices=_distinct(state.layout, demand),
        seen_by={"server": "nothing"},
    )
    return _deliver(state, keys, cost, coding)


def on_demand(state: ServerState, keys: ClientValue[Any], coding: Coding = PLAIN) -> Delivered:
    """Option 2: clients send their keys, each distinct slice is computed once and kept for the
    round."""
    demand = _demand(state.layout, keys)
    asked, distinct = _asked(state.layout, demand), _distinct(state.layout, demand)
    cost = _served(state.layout, demand, distinct, asked - distinct, "server", coding)
    return _deliver(state, keys, cost, coding)


def pregenerated(state: ServerState, keys: ClientValue[Any], coding: Coding = PLAIN) -> Delivered:
    """Option 3: all slices are computed before the round, and clients fetch theirs."""
    demand = _demand(state.layout, keys)
    return _deliver(state, keys, pregenerated_cost(state.layout, demand, coding), coding)


def pregenerated_cost(layout: Layout, demand: Demand, coding: Coding = PLAIN) -> Cost:
    """What option 3 costs.

    Args:
        layout: the model and its cuts.
        demand: client -> its keys by the name of their key space.
        coding: of the cut parts.
    """
    every = sum(part.space.num_keys for part in _cut_parts(layout))
    return _served(layout, demand, every, _asked(layout, demand), "slice server", coding)


def key_bytes(keys: Iterable[Keys]) -> int:
    """The bytes that name keys on the wire; none where a client takes every key of a space."""
    return sum(_KEY_BYTES * len(z) for z in keys if len(z) < z.space.num_keys)


def _deliver(state: ServerState, keys: ClientValue[Any], cost: Cost, coding: Coding) -> Delivered:
    select = state.select if coding == PLAIN else partial(_select_coded, state, coding)
    return Delivered(map_clients(select, keys), cost)


def _select_coded(state: ServerState, coding: Coding, keys: ClientKeys) -> Tree:
    """What a client's coded slices stand for, as its sub-model."""
    chosen = state.layout.keys_by_space(keys)
    leaves: dict[str, Array] = {}
    for place, records in enumerate(records_of(state.layout, coding)):
        part = state.layout.parts[place]
        z = part.keys_of(chosen).array
        rows = records.decode_rows(records.encode_rows(state.rows(place, z), z))
        counts = [len(chosen[factor.name]) for factor in part.product.factors]
        leaves |= part.from_rows(rows, counts)
    return tree.unflatten(state.layout.structure, leaves)


def _served(
    layout: Layout, demand: Demand, calls: int, hits: int, server: str, coding: Coding
) -> Cost:
    """The cost of a way in which clients ask a server for slices."""
    return Cost(
        bytes_down={
            c: _bytes(layout, {name: len(keys) for name, keys in z.items()}, coding)
            for c, z in demand.items()
        },
        bytes_up={c: key_bytes(z.values()) for c, z in demand.items()},
        select_calls=calls,
        cache_hits=hits,
        distinct_slices=_distinct(layout, demand),
        seen_by={server: "keys and whose they are"},
    )


def _demand(layout: Layout, keys: ClientValue[Any]) -> Demand:
    """Each client's keys by the name of their key space."""
    return {client: layout.keys_by_space(z) for client, z in observe(keys).items()}


def _bytes(layout: Layout, counts: Mapping[str, int], coding: Coding) -> int:
    """The bytes of a sub-model with so many keys of each key space."""
    return sum(
        records.record_bytes * prod(counts[factor.name] for factor in part.product.factors)
        for part, records in zip(layout.parts, records_of(layout, coding), strict=True)
    )


def _asked(layout: Layout, demand: Demand) -> int:
    """How many slices of the cut parts the cohort asked for."""
    return sum(len(part.keys_of(z)) for part in _cut_parts(layout) for z in demand.values())


def _distinct(layout: Layout, demand: Demand) -> int:
    """How many different slices those are."""
    total = 0
    for part in _cut_parts(layout):
        asked = [part.keys_of(z).array for z in demand.values()]
        total += len(np.unique(np.concatenate(asked))) if asked else 0
    return total


def _cut_parts(layout: Layout) -> list[Part]:
    return [part for part in layout.parts if part.product.factors]
