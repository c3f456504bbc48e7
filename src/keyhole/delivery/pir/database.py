"""Describes a table that is retrieved from, and the params that a client and its servers agree on.

Params are public. They name the model, by the digest of its manifest, and the root under which the
rows of the table lie; so does every query and every reply, since each carries their digest.

Params with popular keys stand for two tables under params of their own, that of the popular keys
and the whole one; `popular.py` retrieves from both.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from hashlib import blake2b, sha256
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from keyhole.arrays import empty_on_line
from keyhole.crypto.codec import read_facts
from keyhole.delivery.base import PrivateTable, PublicTable, making_seconds
from keyhole.delivery.paths import fill_rows, path_bytes, with_paths
from keyhole.delivery.popular import PopularKeys
from keyhole.errors import InputError, ShapeError, StaleError
from keyhole.pricing import Speeds, Workload

Scheme: TypeAlias = Literal["one-server", "two-server"]
"""How slices are retrieved."""

_MAGIC = b"KHT3"
_FORM = struct.Struct("<4sBB2x16s32s32sQQQ")
_SCHEMES: Mapping[Scheme, int] = MappingProxyType({"one-server": 1, "two-server": 2})


@dataclass(frozen=True)
class PirParams:
    """The public facts of one table that is retrieved from in private.

    Anything that an observer can see depends on these and on nothing else.

    Args:
        round: 16 bytes: which table of which round.
        model: 32 bytes: the digest of the round's manifest.
        root: 32 bytes: of the tree over all slices.
        row_bytes: of a slice and its path.
        popular: keys that a small table holds beside it.
        single: whether each key lies in one place, as beside a table of popular keys.
    """

    scheme: Scheme
    round: bytes
    model: bytes
    root: bytes
    num_keys: int
    row_bytes: int
    max_keys: int
    popular: PopularKeys | None = None
    single: bool = False

    def __post_init__(self) -> None:
        if self.scheme not in _SCHEMES:
            raise InputError(
                f"no such scheme of private retrieval: got {self.scheme!r}; expected "
                f"{', '.join(_SCHEMES)}; take one of them"
            )
        _ = self._table  # checks the rest

    @staticmethod
    def of(scheme: Scheme, table: PublicTable, single: bool = False) -> PirParams:
        """Returns the params of a table."""
        facts: Any = [getattr(table, each) for each in _FACTS[1:]]
        return replace(PirParams(scheme, table.name, *facts), single=single)

    @property
    def _table(self) -> PublicTable:
        return PublicTable(*(getattr(self, each) for each in _FACTS))

    @cached_property
    def tables(self) -> tuple[PirParams, ...]:
        """The params of the tables that are asked: itself; or those of its popular keys, and those
        of the whole table for the other keys of a query, where there are any."""
        if self.popular is None:
            return (self,)
        name = blake2b(self.encode(), digest_size=16, person=b"keyhole-popular").digest()
        count, slots = self.popular.count, self.popular.slots
        popular = replace(self, round=name, num_keys=count, max_keys=slots, popular=None)
        if not (left := self.max_keys - slots):
            return (popular,)
        return popular, replace(self, round=name, max_keys=left, popular=None, single=True)

    @cached_property
    def digest(self) -> bytes:
        """32 bytes that stand for all of it in every message."""
        return sha256(self.encode()).digest()

    def public(self, scheme: Scheme) -> PublicTable:
        """Returns what they say of a table that is retrieved from by a scheme."""
        check_scheme(self, scheme)
        return self._table

    def encode(self) -> bytes:
        """Returns the params as a client fetches them."""
        facts = (getattr(self, each) for each in _FACTS[:-1])
        head = _FORM.pack(_MAGIC, _SCHEMES[self.scheme], self.single, *facts)
        return head if self.popular is None else head + self.popular.encode()

    @staticmethod
    def decode(data: bytes) -> PirParams:
        """Returns the params that `data` holds."""
        return read_facts(data, "params of private retrieval", _unpack)


_FACTS = tuple(each.name for each in fields(PirParams))[1:-1]
"""What a `PublicTable` says too, in its order; there the round is the name."""


def numbers_only(
    scheme: Scheme,
    num_keys: int,
    row_bytes: int,
    max_keys: int,
    popular: PopularKeys | None = None,
) -> PirParams:
    """Params of public numbers alone; names and digests do not change a length."""
    names = bytes(16), bytes(32), bytes(32)
    return PirParams(scheme, *names, num_keys, row_bytes, max_keys, popular)


def params_of_load(scheme: Scheme, load: Workload) -> PirParams:
    """Params of the numbers of a workload."""
    row_bytes = load.slice_bytes + path_bytes(load.num_keys)
    popular = None
    if load.popular is not None:
        count, slots = load.popular
        popular = PopularKeys(((0, count - 1),), slots)
    return numbers_only(scheme, load.num_keys, row_bytes, load.keys_per_client, popular)


def _unpack(data: bytes) -> PirParams:
    _, scheme, single, *rest = _FORM.unpack_from(data)
    names = [name for name, number in _SCHEMES.items() if number == scheme]
    popular = PopularKeys.decode(data[_FORM.size :]) if len(data) > _FORM.size else None
    facts: Any = [*rest, popular, bool(single)]
    return PirParams(names[0], *facts)


_WORD = 8  # bytes


def rows_bytes(num_keys: int, row_bytes: int) -> int:
    """Returns the number of bytes of the rows of a database, known before it is made."""
    return num_keys * _words(row_bytes) * _WORD


@dataclass(frozen=True, repr=False)
class Database:
    """A table as a server scans it.

    Args:
        public: what everybody knows of it.
        rows: (K, words) uint64, little-endian: slice, path, zeros up to a whole word.
        single: as in the params.
    """

    public: PublicTable
    rows: NDArray[np.uint64]
    single: bool = False

    def __repr__(self) -> str:
        return f"Database({self.num_keys} rows of {self.public.row_bytes} bytes)"

    @property
    def num_keys(self) -> int:
        """K."""
        return len(self.rows)

    def padded_to(self, max_keys: int) -> Database:
        """Returns the same rows, for queries of another number of keys."""
        return Database(replace(self.public, max_keys=min(max_keys, self.num_keys)), self.rows)

    @staticmethod
    def of(table: PrivateTable) -> Database:
        """Returns the database of a table, which is copied: key k is row k.

        >>> Database.of(PrivateTable.of("7", bytes(32), np.zeros((3, 10), np.uint8), 2))
        Database(3 rows of 10 bytes)
        """
        _check_records(table.records)
        rows = _rows(table.num_keys, table.row_bytes, partial(fill_rows, table.tree, table.records))
        return Database(table.public, rows)

    @staticmethod
    def all_of(table: PrivateTable, scheme: Scheme) -> tuple[Database, ...]:
        """Returns the database of a table, or of each of the two that popular keys make of it."""
        if table.popular is None:
            return (Database.of(table),)
        _check_records(table.records)
        popular, *others = PirParams.of(scheme, table.public).tables
        keys = table.popular.keys

        def fill(out: NDArray[np.uint8]) -> None:
            out[:] = with_paths(table.tree, keys, table.records[keys])

        small = Database(popular.public(scheme), _rows(len(keys), table.row_bytes, fill))
        whole = (Database.of(replace(table, popular=None)).rows for _ in others)
        pairs = zip(others, whole, strict=True)
        return small, *(Database(each.public(scheme), rows, each.single) for each, rows in pairs)


def _check_records(records: NDArray[np.uint8]) -> None:
    if records.ndim != 2 or records.dtype != np.uint8 or not records.size:
        raise ShapeError(
            f"slices do not fit a database: got {records.dtype} {records.shape}; "
            "expected uint8 (num_keys, record_bytes), one or more; pass records as rows of "
            "bytes"
        )


def _rows(
    num_keys: int, row_bytes: int, fill: Callable[[NDArray[np.uint8]], None]
) -> NDArray[np.uint64]:
    """Rows that `fill` writes, padded to whole words; on every run at the same cache lines."""
    rows = empty_on_line((num_keys, _words(row_bytes)), "<u8")
    cells = rows.view(np.uint8)
    fill(cells[:, :row_bytes])
    cells[:, row_bytes:] = 0
    rows.setflags(write=False)
    return rows


def _words(row_bytes: int) -> int:
    """The words of one row."""
    return -(-row_bytes // _WORD)


def check_scheme(params: PirParams, scheme: Scheme) -> None:
    """Raises StaleError if the params are of another scheme."""
    if params.scheme != scheme:
        raise StaleError(
            f"params of another scheme of private retrieval: got {params.scheme}; expected "
            f"{scheme}; check the URLs of the servers"
        )


def binding_seconds(load: Workload, speeds: Speeds) -> float:
    """Returns the CPU seconds for all slices, their tree, and a table of them with a path for
    each."""
    paths = load.num_keys * speeds.path_seconds + load.table_bytes / speeds.binding
    return making_seconds(load, speeds) + paths


def replying_seconds(cohort: int, speeds: Speeds, rows: int, row_bytes: int) -> float:
    """Returns the CPU seconds for putting rows into the reply of each client, and the check of its
    frame."""
    return cohort * rows * row_bytes / speeds.reply
