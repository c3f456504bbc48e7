"""Keeps slices of earlier rounds on a device, so that only what changed is sent again.

A device names the records that it holds, by eight bytes of their leaves, and the service answers
with those that are others now. What is held counts like what arrives: the proof covers both. Names
show the service which of the keys asked for the device has fetched before, and when they last
changed: a device that shall not be recognised takes no cache.
"""

from __future__ import annotations

import struct
import threading
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from keyhole.arrays import KeyArray
from keyhole.crypto.merkle import HASH_BYTES, HashArray, hash_leaves
from keyhole.delivery.records import RecordArray, Records
from keyhole.device.fetch import Held
from keyhole.errors import InputError
from keyhole.files import checksum, make_directory, replacing, storage_errors, write_all

_Rounds: TypeAlias = NDArray[np.int64]

_SUFFIX = ".slices"
_NO_LIMIT = 1 << 62
_HEAD = struct.Struct("<4s32sQQI")  # version, table, records, bytes of each, CRC-32 of the index
_VERSION = b"KHC2"
_INDEX_BYTES = 16 + HASH_BYTES  # of a record: its key, when it was last used, its leaf


@dataclass(frozen=True)
class _Table:
    """The records of one table, by ascending key."""

    keys: KeyArray
    used: _Rounds
    leaves: HashArray
    records: RecordArray

    @property
    def nbytes(self) -> int:
        """Memory, and space on the disk."""
        return self.records.nbytes + _INDEX_BYTES * len(self.keys)

    def take(self, places: NDArray[np.int64] | NDArray[np.bool_]) -> _Table:
        """Returns some of the records."""
        return _Table(
            self.keys[places], self.used[places], self.leaves[places], self.records[places]
        )


class SliceCache:
    """Slices by table and key. Threads may share it.

    A table is the same in two rounds if its name and the description of its records are.

    Args:
        directory: keeps them over restarts, one file per table; None keeps them in memory.
        max_bytes: of all slices; those whose last use is longest ago go first.
        min_record: bytes of a slice below which names would cost more than they save.
    """

    def __init__(
        self, directory: Path | None, max_bytes: int = 1 << 28, *, min_record: int = 32
    ) -> None:
        if max_bytes < 0 or min_record < 0:
            raise InputError(
                f"the size of a cache is out of range: got {max_bytes} bytes, slices from "
                f"{min_record}; expected 0 or more; choose other numbers"
            )
        self._directory, self._limit, self._minimum = directory, max_bytes, min_record
        self._tables: dict[str, _Table] = {}
        self._lock = threading.Lock()
        if directory is not None:
            is_new = not directory.is_dir()
            make_directory(directory)
            if is_new:  # which keys a device holds is nobody else's business, nor how many tables
                directory.chmod(0o700)
            for path in sorted(directory.glob(f"*{_SUFFIX}")):
                self._load(path)
        self._now = max((int(t.used.max(initial=0)) for t in self._tables.values()), default=0)

    def beside(self, name: str) -> SliceCache:
        """Returns a cache in a folder of this one's, in memory where this one is, that keeps slices
        of any size and forgets none."""
        folder = None if self._directory is None else self._directory / name
        return SliceCache(folder, _NO_LIMIT, min_record=0)

    def __repr__(self) -> str:
        with self._lock:
            count = sum(len(table.keys) for table in self._tables.values())
            return f"SliceCache({count} slices of {len(self._tables)} tables)"

    @property
    def nbytes(self) -> int:
        """Bytes of all slices, with what is needed to find them."""
        with self._lock:
            return sum(table.nbytes for table in self._tables.values())

    def find(self, table: Records, keys: KeyArray) -> Held | None:
        """Returns what is held of the records of `keys`; None if that is nothing."""
        with self._lock:
            known = self._tables.get(_identity(table))
        if known is None or not len(known.keys) or not len(keys):
            return None
        places = np.minimum(np.searchsorted(known.keys, keys), len(known.keys) - 1)
        is_held = known.keys[places] == keys
        if not is_held.any():
            return None
        records = known.records[places]
        leaves = known.leaves[places]
        records[~is_held] = leaves[~is_held] = 0
        return Held(records, leaves, is_held)

    def keep(self, found: list[tuple[Records, KeyArray, RecordArray, HashArray]]) -> None:
        """Keeps the slices of one round, and forgets old ones where there are too many.

        Args:
            found: of each table: what its records hold, keys, records and their leaves.
        """
        with self._lock:
            self._now += 1
            before = dict(self._tables)
            for table, keys, records, leaves in found:
                if table.record_bytes >= max(self._minimum, 1) and len(keys):
                    name = _identity(table)
                    self._tables[name] = self._merged(name, keys, records, leaves)
            self._forget()
            for name in before.keys() - self._tables.keys():
                if self._directory is not None:
                    path = self._directory / f"{name}{_SUFFIX}"
                    with storage_errors(path, "remove"):
                        path.unlink(missing_ok=True)
            for name, kept in self._tables.items():
                # That a record was used again is not worth a write: it waits for the next one.
                if name not in before or kept.records is not before[name].records:
                    self._save(name, kept)

    def _merged(self, name: str, keys: KeyArray, records: RecordArray, leaves: HashArray) -> _Table:
        fresh, places = np.unique(keys, return_index=True)
        new = _Table(fresh, np.full(len(fresh), self._now), leaves[places], records[places])
        old = self._tables.get(name)
        if old is None:
            return new
        found = np.minimum(np.searchsorted(old.keys, fresh), len(old.keys) - 1)
        if np.array_equal(old.keys[found], fresh) and np.array_equal(
            old.records[found], new.records
        ):
            used = old.used.copy()
            used[found] = self._now
            return replace(old, used=used)
        old = old.take(~np.isin(old.keys, fresh, assume_unique=True))
        both = _Table(
            np.concatenate([old.keys, new.keys]),
            np.concatenate([old.used, new.used]),
            np.concatenate([old.leaves, new.leaves]),
            np.concatenate([old.records, new.records]),
        )
        return both.take(np.argsort(both.keys, kind="stable"))

    def _forget(self) -> None:
        """Drops the slices of the rounds that are longest ago until the rest fits."""
        excess = sum(table.nbytes for table in self._tables.values()) - self._limit
        if excess <= 0:
            return
        tables = list(self._tables.items())
        used = np.concatenate([table.used for _, table in tables])
        cost = np.concatenate(
            [np.full(len(t.keys), t.records.shape[1] + _INDEX_BYTES) for _, t in tables]
        )
        order = np.argsort(used, kind="stable")
        is_kept = np.ones(len(used), bool)
        is_kept[order[: 1 + np.searchsorted(np.cumsum(cost[order]), excess)]] = False
        at = 0
        for name, table in tables:
            kept = is_kept[at : at + len(table.keys)]
            at += len(kept)
            if not kept.any():
                del self._tables[name]
            elif not kept.all():
                self._tables[name] = table.take(kept)

    def _save(self, name: str, table: _Table) -> None:
        if self._directory is None:
            return
        leaves = np.ascontiguousarray(table.leaves)
        index = [table.keys.astype("<i8"), table.used.astype("<i8"), leaves]
        check = checksum(*(column.data for column in index))
        count, length = table.records.shape
        head = _HEAD.pack(_VERSION, bytes.fromhex(name), count, length, check)
        records = np.ascontiguousarray(table.records)
        with replacing(self._directory / f"{name}{_SUFFIX}", secret=True) as descriptor:
            write_all(descriptor, [head, *(column.data for column in index), records.data])

    def _load(self, path: Path) -> None:
        """Reads a table; one that is damaged is removed, since it can be fetched again."""
        table = None
        with suppress(OSError, ValueError, struct.error):
            table = _read(path)
        if table is None:
            path.unlink(missing_ok=True)
        else:
            self._tables[path.name.removesuffix(_SUFFIX)] = table


def _identity(table: Records) -> str:
    """What tells the records of a table from others, in hex."""
    fields = [(f.path, f.shape, f.dtype.newbyteorder("<").str) for f in table.fields]
    coding = (table.coding.kind, table.coding.seed)
    return sha256(repr((table.name, table.num_keys, fields, coding)).encode()).hexdigest()


def _read(path: Path) -> _Table | None:
    """The table in a file; None, or an error of Python's, if that is not what the file holds."""
    data = np.fromfile(path, np.uint8)
    version, name, count, length, check = _HEAD.unpack_from(data.data)
    if version != _VERSION or path.name != f"{name.hex()}{_SUFFIX}":
        return None
    if len(data) != _HEAD.size + count * (_INDEX_BYTES + length):
        return None
    at = _HEAD.size
    if checksum(data[at : at + count * _INDEX_BYTES].data) != check:
        return None
    keys, used = (
        np.frombuffer(data, "<i8", count, at + 8 * count * place).astype("i8") for place in (0, 1)
    )
    leaves = data[at + 16 * count : at + count * _INDEX_BYTES].reshape(count, HASH_BYTES)
    records = data[at + count * _INDEX_BYTES :].reshape(count, length)
    if not (np.diff(keys) > 0).all() or not np.array_equal(hash_leaves(records), leaves):
        return None
    return _Table(keys, used, leaves, records)
