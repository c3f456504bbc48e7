"""Delivers slices in the clear, by the three options of section 3.2 of the paper, in process.

Slices of a cut model are rows of the server's tables, so each option gathers the same rows and
delivers the same bytes; the costs are counted from what it would have to compute and send, the
proofs that slices belong to the round included. With a coding, clients train on what their coded
slices stand for: fewer bytes, and numbers that are right on average. What everyone receives stays
plain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from keyhole.about import Leak
from keyhole.arrays import Array, KeyArray, Tree
from keyhole.crypto.merkle import HASH_BYTES, TreeShape, find_siblings, proof_length
from keyhole.delivery.base import (
    KEYS_AND_WHOSE,
    NOTHING,
    Cost,
    Delivered,
    DeliveryAbout,
    Price,
    making_seconds,
)
from keyhole.delivery.records import (
    PLAIN,
    Coding,
    Demand,
    count_asked,
    count_distinct,
    cut_parts,
    model_bytes,
    records_of,
)
from keyhole.pricing import Speeds, Workload
from keyhole.primitives.keyspace import bytes_of_keys, key_bytes
from keyhole.primitives.layout import KeysBySpace, Layout, select_rows

if TYPE_CHECKING:
    from keyhole.server.state import ServerState

_BROADCAST = DeliveryAbout(
    name="broadcast",
    title="broadcast",
    leaks=MappingProxyType({"server": NOTHING}),
    rests_on="None: everyone receives the same bytes.",
    route="whole",
)
_ON_DEMAND = DeliveryAbout(
    name="on-demand",
    title="on demand",
    leaks=MappingProxyType({"server": KEYS_AND_WHOSE}),
    rests_on=(
        "None is made: the server is trusted with every client's keys, and to give all of them one "
        "model."
    ),
    is_bound=False,
)
_PREGENERATED = DeliveryAbout(
    name="pregenerated",
    title="in the clear",
    leaks=MappingProxyType({"slice server": KEYS_AND_WHOSE, "mirrors and CDNs": KEYS_AND_WHOSE}),
    rests_on="None is made: anyone who gives out slices is trusted with every client's keys.",
)

DEFAULT_SERVED: str = _PREGENERATED.name
"""How devices fetch unless they are told otherwise."""


@dataclass(frozen=True)
class Broadcast:
    """Option 1: everyone receives the whole model and selects at home. Nobody learns a key."""

    coding: Coding = PLAIN
    about: DeliveryAbout = field(default=_BROADCAST, init=False, repr=False)

    def for_run(
        self, keys_per_client: Mapping[str, int], *, allow_simulation: bool = False
    ) -> Broadcast:
        """Returns itself: a run has nothing to say."""
        return self

    def price(self, load: Workload, speeds: Speeds) -> Price:
        """Prices the whole table, which caches can give out."""
        down = load.table_bytes + load.broadcast_bytes
        (server,) = self.about.leaks
        return Price(
            self.about, down, 0, {server: 0.0}, 0.0, load.table_bytes, 0, is_cacheable=True
        )

    def deliver(self, state: ServerState, keys: Demand) -> Delivered:
        """Delivers one round."""
        every = {space.name: space.num_keys for space in state.layout.spaces}
        whole = model_bytes(state.layout, records_of(state.layout, self.coding), every)
        cost = Cost(
            bytes_down=dict.fromkeys(keys, whole),
            bytes_up=dict.fromkeys(keys, 0),
            select_calls=count_asked(state.layout, keys),
            cache_hits=0,
            distinct_slices=count_distinct(state.layout, keys),
            leaks=self.about.leaks,
        )
        return _deliver(state, keys, cost, self.coding)


@dataclass(frozen=True)
class OnDemand:
    """Option 2: clients send their keys; each distinct slice is computed once and kept for the
    round."""

    coding: Coding = PLAIN
    about: DeliveryAbout = field(default=_ON_DEMAND, init=False, repr=False)

    def for_run(
        self, keys_per_client: Mapping[str, int], *, allow_simulation: bool = False
    ) -> OnDemand:
        """Returns itself: a run has nothing to say."""
        return self

    def price(self, load: Workload, speeds: Speeds) -> Price:
        """Prices slices that are made when they are asked for."""
        made = load.distinct_keys * load.slice_bytes
        copied = made + load.cohort * load.asked_bytes
        (server,) = self.about.leaks
        return Price(
            self.about,
            *_clear_bytes(load),
            {server: copied / speeds.gather},
            0.0,
            load.table_bytes + made,
            load.distinct_keys,
        )

    def deliver(self, state: ServerState, keys: Demand) -> Delivered:
        """Delivers one round."""
        cost = _served(state.layout, keys, 0, self.about.leaks, self.coding)
        return _deliver(state, keys, cost, self.coding)


@dataclass(frozen=True)
class Pregenerated:
    """Option 3: all slices are computed before the round, and clients fetch theirs."""

    coding: Coding = PLAIN
    about: DeliveryAbout = field(default=_PREGENERATED, init=False, repr=False)

    def for_run(
        self, keys_per_client: Mapping[str, int], *, allow_simulation: bool = False
    ) -> Pregenerated:
        """Returns itself: a run has nothing to say."""
        return self

    def price(self, load: Workload, speeds: Speeds) -> Price:
        """Prices slices that are made once, and given out by the slice server or its caches."""
        server = next(iter(self.about.leaks))
        shape = TreeShape(load.num_keys)
        proof = HASH_BYTES * round(shape.mean_proof(load.keys_per_client))
        return Price(
            self.about,
            *_clear_bytes(load, proof),
            {server: load.cohort * (load.asked_bytes + proof) / speeds.gather},
            0.0,
            load.table_bytes + shape.num_nodes * HASH_BYTES,
            load.num_keys,
            {server: making_seconds(load, speeds)},
            is_cacheable=True,
            proof_bytes=proof,
        )

    def cost(self, layout: Layout, demand: Demand) -> Cost:
        """Returns what a round costs in which clients ask for `demand`."""
        every = sum(part.space.num_keys for part in cut_parts(layout))
        return _served(layout, demand, every, self.about.leaks, self.coding)

    def deliver(self, state: ServerState, keys: Demand) -> Delivered:
        """Delivers one round."""
        cost = self.cost(state.layout, keys)
        return _deliver(state, keys, cost, self.coding)


def _clear_bytes(load: Workload, proof: int = 0) -> tuple[int, int]:
    """What a client receives, and sends to name its keys."""
    up = bytes_of_keys(load.keys_per_client, load.num_keys)
    return load.asked_bytes + proof + load.broadcast_bytes, up


def _deliver(state: ServerState, keys: Demand, cost: Cost, coding: Coding) -> Delivered:
    source = state if coding == PLAIN else _CodedRows(state, coding)
    # A cohort's sub-models are not held together; clients train while others are selected for.
    select = state.lend if coding == PLAIN else partial(select_rows, source)
    return Delivered(_Selected(select, keys), keys, cost, source)


class _Selected(Mapping[int, Tree]):
    """Sub-models, each selected when it is read, each time that it is."""

    def __init__(self, select: Callable[[KeysBySpace], Tree], keys: Demand) -> None:
        self._select, self._keys = select, keys

    def __getitem__(self, client: int) -> Tree:
        return self._select(self._keys[client])

    def __iter__(self) -> Iterator[int]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


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


def _proof_bytes(layout: Layout, keys: KeysBySpace) -> int:
    """Returns the number of bytes of what leads from the slices of a client to the roots of their
    tables."""
    find_siblings.load()  # a cohort has many clients
    return HASH_BYTES * sum(
        proof_length(TreeShape(part.space.num_keys), np.sort(part.keys_of(keys).array))
        for part in cut_parts(layout)
    )


def _served(
    layout: Layout, demand: Demand, computed: int, leaks: Mapping[str, Leak], coding: Coding
) -> Cost:
    """The cost of asking a server for slices: those that were computed before, or, if none were,
    each when it is first asked for."""
    tables = records_of(layout, coding)
    asked, distinct = count_asked(layout, demand), count_distinct(layout, demand)
    return Cost(
        bytes_down={
            c: model_bytes(layout, tables, {name: len(keys) for name, keys in z.items()})
            + (_proof_bytes(layout, z) if computed else 0)  # on demand there is no root
            for c, z in demand.items()
        },
        bytes_up={c: key_bytes(z.values()) for c, z in demand.items()},
        select_calls=computed or distinct,
        cache_hits=asked if computed else asked - distinct,
        distinct_slices=distinct,
        leaks=leaks,
    )
