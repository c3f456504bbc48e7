"""Assembly: a sub-model from the records of its slices, as the manifest lays it out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from keyhole import tree
from keyhole.delivery.records import RecordArray, Records
from keyhole.errors import InputError, KeySpaceError, NotFoundError
from keyhole.primitives.keyspace import Keys, KeySpace
from keyhole.primitives.layout import ClientKeys, Layout
from keyhole.serving.device.slice_query import Traffic
from keyhole.serving.manifest import Manifest, SegmentInfo
from keyhole.types import Array, Tree

__all__ = ["KnownRound", "Submodel", "WholeModel"]


@dataclass(frozen=True, repr=False)
class Submodel:
    """What a device received of a model.

    Args:
        model: the server's tree with shorter axes.
        keys: what it was selected with, by key space.
        traffic: what it cost.
    """

    model: Tree
    keys: Mapping[str, Keys]
    traffic: Traffic

    def __repr__(self) -> str:
        return f"Submodel({_counts(self.keys)}, {self.traffic.bytes_down} bytes received)"


@dataclass(frozen=True, repr=False)
class KnownRound:
    """A round whose manifest is here: what its tables hold, and how a model is made of them."""

    id: str
    manifest: Manifest

    def __repr__(self) -> str:
        return f"KnownRound({self.id}, {len(self.manifest.tables)} tables)"

    @cached_property
    def records(self) -> tuple[Records, ...]:
        """What the records of each table hold."""
        return tuple(table.records for table in self.manifest.tables)

    @cached_property
    def layout(self) -> Layout:
        """The model and its cuts.

        Raises:
            InputError: the tables of the round are of select functions.
        """
        layout = self.manifest.layout
        if layout is None:
            raise InputError(
                f"round {self.id} does not hold a model that is cut",
                got="tables of select functions",
                allowed="tables of a model",
                fix="fetch its slices table by table, with fetch_slices",
            )
        return layout

    def table(self, name: str) -> int:
        """The place of a table.

        Raises:
            NotFoundError: the round has no such table.
        """
        names = [table.name for table in self.manifest.tables]
        if name not in names:
            raise NotFoundError(
                f"round {self.id} has no such table",
                got=repr(name),
                allowed=", ".join(names),
                fix="name one of them",
            )
        return names.index(name)

    def segment(self, table: int, place: int) -> SegmentInfo:
        """A segment of a table.

        Raises:
            NotFoundError: the table has no such segment.
        """
        info = self.manifest.tables[table]
        if not 0 <= place < len(info.segments):
            raise NotFoundError(
                f"table {info.name!r} of round {self.id} has no such segment",
                got=place,
                allowed=f"0..{len(info.segments) - 1}" if info.segments else "none",
                fix="name one of them, or ask for slices with fetch_slices",
            )
        return info.segments[place]

    def keys_of_table(self, place: int, keys: Any) -> Keys:
        """Keys of one table, checked."""
        table = self.manifest.tables[place]
        return KeySpace(table.name, table.num_keys).keys(keys)

    def keys_by_space(self, keys: Mapping[str, Any] | ClientKeys) -> dict[str, Keys]:
        """A device's keys by key space, checked; given by name, or as `Keys`.

        Raises:
            KeySpaceError: a key space is missing or foreign, or keys are outside it.
        """
        if not isinstance(keys, Mapping):
            return self.layout.keys_by_space(keys)
        names = {space.name for space in self.layout.spaces}
        if keys.keys() != names:
            raise KeySpaceError(
                "keys do not match the cuts",
                got=", ".join(sorted(keys)) or "none",
                allowed=", ".join(sorted(names)) or "none",
                fix="pass keys of each key space of the manifest",
            )
        return {s.name: s.keys(_plain(keys[s.name])) for s in self.layout.spaces}

    def assemble(self, records: Sequence[RecordArray], keys: Mapping[str, Keys]) -> Tree:
        """The sub-model from the records of each part, in the order of `part.keys_of(keys)`."""
        leaves: dict[str, Array] = {}
        for part, table, found in zip(self.layout.parts, self.records, records, strict=True):
            counts = [len(keys[factor.name]) for factor in part.product.factors]
            leaves |= part.from_rows(table.decode_rows(found), counts)
        return tree.unflatten(self.layout.structure, leaves)


@dataclass(frozen=True, repr=False)
class WholeModel:
    """A round that a device has downloaded entirely: it selects at home, and nobody learns a key.

    Args:
        round: what its tables hold.
        tables: the records of each, (K, record_bytes).
        traffic: what the download cost.
    """

    round: KnownRound
    tables: tuple[RecordArray, ...]
    traffic: Traffic

    def __repr__(self) -> str:
        size = sum(table.nbytes for table in self.tables)
        return f"WholeModel(round {self.round.id}, {len(self.tables)} tables, {size} bytes)"

    def select(self, keys: Mapping[str, Any] | ClientKeys) -> Submodel:
        """The sub-model of any keys; costs no further traffic."""
        chosen = self.round.keys_by_space(keys)
        places = [part.keys_of(chosen).array for part in self.round.layout.parts]
        records = [table[z] for table, z in zip(self.tables, places, strict=True)]
        return Submodel(self.round.assemble(records, chosen), chosen, self.traffic)

    def slices(self, table: str, keys: Any) -> dict[str, Array]:
        """The slices of any keys of one table, path -> (m, *shape)."""
        place = self.round.table(table)
        z = self.round.keys_of_table(place, keys).array
        return self.round.records[place].decode(self.tables[place][z])


def _plain(keys: Any) -> Any:
    return keys.array if isinstance(keys, Keys) else keys


def _counts(keys: Mapping[str, Keys]) -> str:
    return ", ".join(f"{len(z)} of {name!r}" for name, z in keys.items()) or "nothing selected"
