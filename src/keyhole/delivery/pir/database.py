"""Describes a table that is retrieved from, and the params that a client and its servers agree on.

Params are public. They name the model, by the digest of its manifest, and the root under which the
rows of the table lie; so does every query and every reply, since each carries their digest.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from hashlib import sha256
from types import MappingProxyType
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from keyhole.crypto.codec import read_facts
from keyhole.delivery.base import PrivateTable, PublicTable, making_seconds
from keyhole.delivery.paths import fill_rows, path_bytes
from keyhole.errors import InputError, ShapeError, StaleError
from keyhole.pricing import Speeds, Workload

Scheme: TypeAlias = Literal["one-server", "two-server"]
"""How slices are retrieved."""

_MAGIC = b"KHT3"
_FORM = struct.Struct("<4sB3x16s32s32sQQQ")
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
    """

    scheme: Scheme
    round: bytes
    model: bytes
    root: bytes
    num_keys: int
    row_bytes: int
    max_keys: int

    def __post_init__(self) -> None:
        if self.scheme not in _SCHEMES:
            raise InputError(
                f"no such scheme of private retrieval: got {self.scheme!r}; expected "
                f"{', '.join(_SCHEMES)}; take one of them"
            )
        PublicTable(*astuple(self)[1:])  # checks the rest

    @staticmethod
    def of(scheme: Scheme, table: PublicTable) -> PirParams:
        """Returns the params of a table."""
        return PirParams(scheme, *astuple(table))

    @cached_property
    def digest(self) -> bytes:
        """32 bytes that stand for all of it in every message."""
        return sha256(self.encode()).digest()

    def public(self, scheme: Scheme) -> PublicTable:
        """Returns what they say of a table that is retrieved from by a scheme."""
        check_scheme(self, scheme)
        return PublicTable(*astuple(self)[1:])

    def encode(self) -> bytes:
        """Returns the params as a client fetches them."""
        _, *rest = astuple(self)
        return _FORM.pack(_MAGIC, _SCHEMES[self.scheme], *rest)

    @staticmethod
    def decode(data: bytes) -> PirParams:
        """Returns the params that `data` holds."""
        return read_facts(data, "params of private retrieval", _unpack)


def numbers_only(scheme: Scheme, num_keys: int, row_bytes: int, max_keys: int) -> PirParams:
    """Params of public numbers alone; names and digests do not change a length."""
    return PirParams(scheme, bytes(16), bytes(32), bytes(32), num_keys, row_bytes, max_keys)


def params_of_load(scheme: Scheme, load: Workload) -> PirParams:
    """Params of the numbers of a workload."""
    row_bytes = load.slice_bytes + path_bytes(load.num_keys)
    return numbers_only(scheme, load.num_keys, row_bytes, load.keys_per_client)


def _unpack(data: bytes) -> PirParams:
    _, scheme, *rest = _FORM.unpack(data)
    names = [name for name, number in _SCHEMES.items() if number == scheme]
    return PirParams(names[0], *rest)


_WORD = 8  # bytes
_LINE = 64  # bytes: rows of the same cache lines on every run


def rows_bytes(num_keys: int, row_bytes: int) -> int:
    """Returns the number of bytes of the rows of a database, known before it is made."""
    return num_keys * _words(row_bytes) * _WORD


@dataclass(frozen=True, repr=False)
class Database:
    """A table as a server scans it.

    Args:
        public: what everybody knows of it.
        rows: (K, words) uint64, little-endian: slice, path, zeros up to a whole word.
    """

    public: PublicTable
    rows: NDArray[np.uint64]

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
        records = table.records
        if records.ndim != 2 or records.dtype != np.uint8 or not records.size:
            raise ShapeError(
                f"slices do not fit a database: got {records.dtype} {records.shape}; "
                "expected uint8 (num_keys, record_bytes), one or more; pass records as rows of "
                "bytes"
            )
        num_keys, row_bytes, words = table.num_keys, table.row_bytes, _words(table.row_bytes)
        raw = np.empty(num_keys * words * _WORD + _LINE, np.uint8)
        start = -raw.ctypes.data % _LINE
        rows = raw[start : start + num_keys * words * _WORD].view("<u8").reshape(num_keys, words)
        cells = rows.view(np.uint8)
        fill_rows(table.tree, records, cells[:, :row_bytes])
        cells[:, row_bytes:] = 0
        rows.setflags(write=False)
        return Database(table.public, rows)


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


def replying_seconds(load: Workload, speeds: Speeds, rows: int, row_bytes: int) -> float:
    """Returns the CPU seconds for putting rows into the reply of each client, and the check of its
    frame."""
    return load.cohort * rows * row_bytes / speeds.reply
