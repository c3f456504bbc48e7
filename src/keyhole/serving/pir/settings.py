"""What an operator decides about private retrieval: which server this is, and how much it takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

from keyhole.errors import InputError, NotFoundError
from keyhole.private.pir.answered import MOST_QUERIES
from keyhole.private.pir.terms import Scheme
from keyhole.serving.manifest import Manifest, TableInfo

__all__ = ["ROLES", "PirSettings", "Role", "keys_of_round", "most_keys_of_table"]


@dataclass(frozen=True)
class Role:
    """Which server a service is; it has one role, since whoever held both would learn every key.

    Args:
        scheme: how slices are retrieved.
        server: 0 or 1 of two; 0 where there is one.
    """

    scheme: Scheme
    server: int


ROLES: Mapping[str, Role] = {
    "0": Role("two-server", 0),
    "1": Role("two-server", 1),
    "one": Role("one-server", 0),
}
"""Roles by the names that operators give them."""


@dataclass(frozen=True)
class PirSettings:
    """Private retrieval at one service.

    Args:
        role: which server this is.
        most_keys: keys of one query, where the manifest does not say how many a client chooses.
            Where it does, that number holds: devices compare.
        most_keys_of: the same by the name of a table.
        most_bytes: of memory for the tables of all rounds that are kept; a scan works on top of it.
        together: queries that one pass answers at most.
        scans: passes that run at one time, over different tables.
        most_queries: that a table answers and remembers, so that none is answered twice; every
            further one is refused, until a new round brings a new table. A million take 17 MB, and
            at times twice that, for each table that is asked so often, on top of `most_bytes`.

    Raises:
        InputError: a number is not above 0.
    """

    role: Role
    most_keys: int | None = None
    most_keys_of: Mapping[str, int] = field(default_factory=dict)
    most_bytes: int = 4 << 30
    together: int = 64
    scans: int = 1
    most_queries: int = MOST_QUERIES

    def __post_init__(self) -> None:
        numbers = [*self.most_keys_of.values(), self.most_bytes, self.together, self.scans]
        numbers.append(self.most_queries)
        if self.most_keys is not None:
            numbers.append(self.most_keys)
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


def most_keys_of_table(settings: PirSettings, manifest: Manifest, table: TableInfo) -> int:
    """How many keys every query of a table is padded to: public, and the same for all devices.

    Raises:
        NotFoundError: neither the manifest nor the operator says how many.
    """
    told = keys_of_round(manifest, table)
    if told is None:
        told = settings.most_keys_of.get(table.name, settings.most_keys)
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
