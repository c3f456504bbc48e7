"""The three ways of section 3.2, in process. They deliver the same bytes and differ in cost.

Slices of a cut model are rows of the server's tables, so each way gathers the same rows; the costs
are counted from what the way would have to compute and send. With a coding, clients train on what
their coded slices stand for.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from keyhole.arrays import Array, KeyArray
from keyhole.delivery.base import PARTIES, Cost, Delivered, DeliveryName
from keyhole.delivery.records import (
    PLAIN,
    Coding,
    Demand,
    count_asked,
    count_distinct,
    cut_parts,
    demand_of,
    model_bytes,
    records_of,
)
from keyhole.primitives.keyspace import key_bytes
from keyhole.primitives.layout import Layout, select_rows
from keyhole.primitives.placement import ClientValue, map_clients_later
from keyhole.server.state import ServerState


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
    demand = demand_of(state.layout, keys)
    every = {space.name: space.num_keys for space in state.layout.spaces}
    whole = model_bytes(state.layout, records_of(state.layout, coding), every)
    cost = Cost(
        bytes_down=dict.fromkeys(demand, whole),
        bytes_up=dict.fromkeys(demand, 0),
        select_calls=count_asked(state.layout, demand),
        cache_hits=0,
        distinct_slices=count_distinct(state.layout, demand),
        seen_by=PARTIES["broadcast"].seen_by,
    )
    return _deliver(state, keys, cost, coding)


def on_demand(state: ServerState, keys: ClientValue[Any], coding: Coding = PLAIN) -> Delivered:
    """Option 2: clients send their keys, each distinct slice is computed once and kept for the
    round."""
    demand = demand_of(state.layout, keys)
    return _deliver(state, keys, _served(state.layout, demand, 0, "on-demand", coding), coding)


def pregenerated(state: ServerState, keys: ClientValue[Any], coding: Coding = PLAIN) -> Delivered:
    """Option 3: all slices are computed before the round, and clients fetch theirs."""
    demand = demand_of(state.layout, keys)
    return _deliver(state, keys, pregenerated_cost(state.layout, demand, coding), coding)


def pregenerated_cost(layout: Layout, demand: Demand, coding: Coding = PLAIN) -> Cost:
    """What option 3 costs.

    Args:
        layout: the model and its cuts.
        demand: client -> its keys by the name of their key space.
        coding: of the cut parts.
    """
    every = sum(part.space.num_keys for part in cut_parts(layout))
    return _served(layout, demand, every, "pregenerated", coding)


def _deliver(state: ServerState, keys: ClientValue[Any], cost: Cost, coding: Coding) -> Delivered:
    source = state if coding == PLAIN else _CodedRows(state, coding)
    # A cohort's sub-models are not held together; clients train while others are selected for.
    return Delivered(map_clients_later(partial(select_rows, source), keys), keys, cost, source)


class _CodedRows:
    """The numbers that coded slices stand for."""

    def __init__(self, state: ServerState, coding: Coding) -> None:
        self.layout = state.layout
        self._state = state
        self._tables = records_of(state.layout, coding)

    def rows(self, part: int, keys: KeyArray) -> Array:
        """Implements `RowSource.rows`."""
        table = self._tables[part]
        return table.decode_rows(table.encode_rows(self._state.rows(part, keys), keys))


def _served(
    layout: Layout, demand: Demand, computed: int, way: DeliveryName, coding: Coding
) -> Cost:
    """The cost of a way in which clients ask a server for slices: those that were computed before,
    or, if none were, each when it is first asked for."""
    tables = records_of(layout, coding)
    asked, distinct = count_asked(layout, demand), count_distinct(layout, demand)
    return Cost(
        bytes_down={
            c: model_bytes(layout, tables, {name: len(keys) for name, keys in z.items()})
            for c, z in demand.items()
        },
        bytes_up={c: key_bytes(z.values()) for c, z in demand.items()},
        select_calls=computed or distinct,
        cache_hits=asked if computed else asked - distinct,
        distinct_slices=distinct,
        seen_by=PARTIES[way].seen_by,
    )
