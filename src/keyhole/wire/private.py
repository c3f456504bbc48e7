"""Says what services and devices agree on for private retrieval: roles, paths, public numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from types import MappingProxyType

from keyhole.delivery import pir_deliveries
from keyhole.delivery.exchange import name_of_round
from keyhole.delivery.pir.database import PirParams
from keyhole.delivery.pir.messages import MAX_QUERIES
from keyhole.delivery.pir.way import PirDelivery
from keyhole.errors import (
    InputError,
    NotFoundError,
)
from keyhole.wire.manifest import Manifest, TableInfo


@dataclass(frozen=True)
class Role:
    """Which server a service is; it has one role, since anyone who held both would learn every key.

    Args:
        delivery: by private queries.
        server: its place among the servers of the delivery.
    """

    delivery: PirDelivery
    server: int


ROLES: Mapping[str, Role] = MappingProxyType(
    {
        str(server) if delivery.about.servers > 1 else "one": Role(delivery, server)
        for delivery in pir_deliveries()
        for server in range(delivery.about.servers)
    }
)
"""Roles by the names that operators give them: the place of a server, or `one`."""


@dataclass(frozen=True)
class PirSettings:
    """Private retrieval at one service.

    Args:
        role: which server this is.
        max_keys: keys of one query, where the manifest does not say how many a client chooses.
            Where it does, that number holds: devices compare.
        max_keys_of: the same by the name of a table.
        max_bytes: of memory for the tables of all rounds that are kept; a scan works on top of it.
        together: queries that one pass answers at most.
        scans: passes that run at one time, over different tables.
        max_queries: that a table answers and remembers, so that none is answered twice; every
            further one is refused, until a new round brings a new table. A million take 17 MB, and
            at times twice that, for each table that is asked so often, on top of `max_bytes`.

    Raises:
        InputError: a number is not above 0.
    """

    role: Role
    max_keys: int | None = None
    max_keys_of: Mapping[str, int] = field(default_factory=dict)
    max_bytes: int = 4 << 30
    together: int = 64
    scans: int = 1
    max_queries: int = MAX_QUERIES

    def __post_init__(self) -> None:
        numbers = [*self.max_keys_of.values(), self.max_bytes, self.together, self.scans]
        numbers.append(self.max_queries)
        if self.max_keys is not None:
            numbers.append(self.max_keys)
        if min(numbers) < 1:
            raise InputError(
                "settings of private retrieval that let nobody in",
                got=f"{min(numbers)}",
                allowed="1 or more",
                fix="raise it",
            )


def keys_of_round(manifest: Manifest, table: TableInfo) -> int | None:
    """How many slices of a table a client takes at most, as the round says: public.

    A table that several key spaces cut is asked for every combination of a client's keys.

    Returns:
        No more than there are; None where the round does not say.
    """
    per_client = manifest.settings.get("keys_per_client")
    counts = [_count(per_client, name) for name in (table.factors or ("",))]
    return min(prod(counts), table.num_keys) if all(counts) else None


def max_keys_of_table(settings: PirSettings, manifest: Manifest, table: TableInfo) -> int:
    """How many keys every query of a table is padded to: public, and the same for all devices.

    Raises:
        NotFoundError: neither the manifest nor the operator says how many.
    """
    told = keys_of_round(manifest, table)
    if told is None:
        told = settings.max_keys_of.get(table.name, settings.max_keys)
    if told is None:
        raise NotFoundError(
            f"table {table.name!r} cannot be retrieved from in private",
            got="a round that does not say how many keys a client chooses",
            allowed="keys_per_client of each key space in the settings of the round",
            fix="publish it with them, or serve with --pir-keys",
        )
    return min(told, table.num_keys)


def _count(per_client: object, name: str) -> int:
    """Keys of one key space; 0 where the settings, which can hold anything, do not say."""
    count = per_client.get(name) if isinstance(per_client, dict) else None
    return max(count, 0) if type(count) is int else 0


SERVER_HEADER = "keyhole-server"
"""The header of params that says which server gave them."""


def name_table(round_id: str, place: int) -> bytes:
    """The 16 bytes that stand for one table of a round in params, tags and messages."""
    return name_of_round(f"{round_id}/tables/{place}")


def held_bytes(delivery: PirDelivery, num_keys: int, record_bytes: int, max_keys: int) -> int:
    """What a server keeps in memory for a table of these public numbers."""
    numbers = num_keys, record_bytes, max_keys
    return delivery.held_bytes(PirParams(delivery.scheme, bytes(16), *numbers, bytes(32)))


GATEWAY_PATH = "/v1/gateway"


KEYS_PATH = "/v1/gateway/keys"


MAX_CONFIG = 1 << 16
"""Bytes of a list of key configurations."""


RELAY_PATH = "/v1/relay"


RELAY_KEYS_PATH = "/v1/relay/keys"
