"""What an operator decides about private retrieval: which server this is, and how much it takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

from keyhole.errors import InputError, NotFoundError
from keyhole.private.pir.terms import Scheme
from keyhole.serving.manifest import Manifest, TableInfo

__all__ = ["ROLES", "PirSettings", "Role", "most_keys_of_table"]


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
        most_keys: keys of one query, for tables that `most_keys_of` does not name; None takes what
            the manifest says a client chooses.
        most_keys_of: the same by the name of a table.
        most_bytes: of memory for the tables of all rounds that are kept; a scan works on top of it.
        together: queries that one pass answers at most.
        scans: passes that run at one time, over different tables.

    Raises:
        InputError: a number is not above 0.
    """

    role: Role
    most_keys: int | None = None
    most_keys_of: Mapping[str, int] = field(default_factory=dict)
    most_bytes: int = 4 << 30
    together: int = 64
    scans: int = 1

    def __post_init__(self) -> None:
        numbers = [*self.most_keys_of.values(), self.most_bytes, self.together, self.scans]
        if self.most_keys is not None:
            numbers.append(self.most_keys)
        if min(numbers) < 1:
            raise InputError(
                "settings of private retrieval that let nobody in",
                got=f"{min(numbers)}",
                allowed="1 or more",
                fix="raise it",
            )


def most_keys_of_table(settings: PirSettings, manifest: Manifest, table: TableInfo) -> int:
    """How many keys every query of a table is padded to: public, and the same for all devices.

    A table that several key spaces cut is asked for every combination of a device's keys.

    Raises:
        NotFoundError: neither the operator nor the manifest says how many.
    """
    told = settings.most_keys_of.get(table.name, settings.most_keys)
    if told is None:
        per_client = manifest.settings.get("keys_per_client")
        counts = [_count(per_client, name) for name in (table.factors or ("",))]
        if not all(counts):
            raise NotFoundError(
                f"table {table.name!r} cannot be retrieved from in private",
                got="a round that does not say how many keys a client chooses",
                allowed="keys_per_client of each key space in the settings of the round",
                fix="publish it with them, or serve with --pir-keys",
            )
        told = prod(counts)
    return min(told, table.num_keys)


def _count(per_client: object, name: str) -> int:
    """Keys of one key space; 0 where the settings, which can hold anything, do not say."""
    count = per_client.get(name) if isinstance(per_client, dict) else None
    return max(count, 0) if type(count) is int else 0
