"""Private ways: option 3 with slices that a client retrieves without saying which (section 6).

All of them are alike but for the retrieval itself. Every slice of every cut part is made before
the round; what everyone receives is sent to everyone, and so is a part of which clients take every
key; of the others each client retrieves the slices it wants. What a client asks for is padded to
the most that any client may ask for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from keyhole.arrays import ClientId, KeyArray
from keyhole.delivery.base import Cost, Delivered, Learned
from keyhole.delivery.pir.messages import Retrieved
from keyhole.delivery.records import (
    PLAIN,
    Coding,
    Demand,
    RecordArray,
    assemble,
    count_asked,
    count_distinct,
    cut_parts,
    demand_of,
    keep_found,
    records_of,
)
from keyhole.primitives.layout import Layout, max_keys_of
from keyhole.primitives.placement import ClientValue
from keyhole.server.state import ServerState


@dataclass(frozen=True)
class PrivateTable:
    """One table of a round, to be retrieved from.

    Args:
        round_id: of the round and its table, in the form of a service's rounds. No other round and
            table of one run has it; those of another run do.
        records: all of them, (K, record_bytes).
        max_keys: m, to which every request is padded.
    """

    round_id: str
    records: RecordArray
    max_keys: int


@dataclass
class Tally:
    """Bytes that each client received and sent."""

    down: dict[ClientId, int] = field(default_factory=dict)
    up: dict[ClientId, int] = field(default_factory=dict)

    def add(self, client: ClientId, down: int = 0, up: int = 0) -> None:
        """Counts bytes of one client."""
        self.down[client] = self.down.get(client, 0) + down
        self.up[client] = self.up.get(client, 0) + up


class Retrieval(Protocol):
    """How slices of one table reach clients without anybody learning too much."""

    @property
    def seen_by(self) -> Mapping[str, Learned]:
        """Party -> what it learns."""
        ...

    def retrieve(
        self, table: PrivateTable, wanted: Mapping[ClientId, KeyArray], tally: Tally
    ) -> Mapping[ClientId, Retrieved]:
        """Returns what each client finds of the keys it wants.

        Args:
            table: to retrieve from.
            wanted: keys of each client.
            tally: what it costs is added here.
        """
        ...


@dataclass(frozen=True)
class PrivateWay:
    """A delivery of pre-generated slices by private retrieval.

    Equal in bytes to `pregenerated`, but for keys that found no place in a query: those are left
    out of `Delivered.keys`.

    Args:
        retrieval: how.
        keys_per_client: key space -> the most keys that a client may ask for; public.
        coding: of the cut parts.
    """

    retrieval: Retrieval
    keys_per_client: Mapping[str, int]
    coding: Coding = PLAIN

    def __call__(self, state: ServerState, keys: ClientValue[Any]) -> Delivered:
        """Delivers one round."""
        layout = state.layout
        demand, tally = demand_of(layout, keys), Tally()
        tables = records_of(layout, self.coding)
        limit = max_keys_of(layout, self.keys_per_client)
        found: dict[ClientId, list[Retrieved]] = {client: [] for client in demand}
        for client in demand:
            tally.add(client)
        for place, (part, records) in enumerate(zip(layout.parts, tables, strict=True)):
            every = np.arange(part.space.num_keys)
            table = PrivateTable(
                f"{state.steps}-{place:016x}",
                records.encode_rows(state.rows(place, every), every),
                limit[place],
            )
            wanted = {c: part.keys_of(z).array for c, z in demand.items()}
            # A part of which clients take every key, or none, has nothing to hide.
            is_private = 0 < limit[place] < part.space.num_keys
            retrieve = self.retrieval.retrieve if is_private else _send_all
            for client, got in retrieve(table, wanted, tally).items():
                found[client].append(got)
        return self._delivered(layout, keys, demand, found, tally)

    def _delivered(
        self,
        layout: Layout,
        keys: ClientValue[Any],
        demand: Demand,
        found: Mapping[ClientId, list[Retrieved]],
        tally: Tally,
    ) -> Delivered:
        tables = records_of(layout, self.coding)
        submodels, kept = {}, {}
        for client, got in found.items():
            records, left = keep_found(
                layout, [g.records for g in got], [g.is_found for g in got], demand[client]
            )
            submodels[client] = assemble(layout, tables, records, left)
            kept[client] = tuple(left[space.name] for space in layout.spaces)
        cost = Cost(
            bytes_down=tally.down,
            bytes_up=tally.up,
            select_calls=sum(part.space.num_keys for part in cut_parts(layout)),
            cache_hits=count_asked(layout, demand),
            distinct_slices=count_distinct(layout, demand),
            seen_by=self.retrieval.seen_by,
        )
        cohort = keys.cohort
        return Delivered(ClientValue(cohort, submodels), ClientValue(cohort, kept), cost)


def _send_all(
    table: PrivateTable, wanted: Mapping[ClientId, KeyArray], tally: Tally
) -> dict[ClientId, Retrieved]:
    """Every client receives the table and takes from it what it wants: nobody learns a key."""
    found = {}
    for client, keys in wanted.items():
        tally.add(client, down=table.records.nbytes if table.max_keys else 0)
        found[client] = Retrieved(table.records[keys], np.ones(len(keys), bool))
    return found
