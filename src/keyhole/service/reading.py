"""Reads rounds from a directory in any number of processes while a publisher writes to it.

Slices are one gather from memory-mapped segments for each request. Segments are mapped read-only
behind one another, so that many of them are one array.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from keyhole.arrays import KeyArray
from keyhole.crypto.merkle import HASH_BYTES, Tree, TreeShape, hash_leaves
from keyhole.delivery.records import RecordArray
from keyhole.errors import KeySpaceError, NotFoundError, StorageError, TooLateError
from keyhole.files import storage_errors
from keyhole.server.rows import all_within, copy_rows, partition
from keyhole.service.directory import (
    CURRENT,
    MANIFEST,
    locked_manifest,
    read_cohort,
    read_current,
    read_manifest,
    read_signature,
    round_path,
)
from keyhole.service.segments import records_path, table_path, tree_bytes, tree_path
from keyhole.wire.assignment import NO_ROUND, Current, Fetched, OpenRound
from keyhole.wire.manifest import TableInfo, number_of

Mapped = NDArray[np.uint8]
"""The bytes of a file, which cannot be written to."""

_FIXED = 0x10  # MAP_FIXED of Linux and the BSDs; Python's module has no name for it


def map_files(paths: Sequence[Path], sizes: Sequence[int]) -> tuple[tuple[Mapped, ...], bool]:
    """Returns the bytes of each file, and whether they follow each other in memory: so that the
    whole is one array, every file but the last must end with a page."""
    total = sum(sizes)
    is_one = len(sizes) > 1 and all(size % mmap.PAGESIZE == 0 for size in sizes[:-1])
    if not is_one or not total:
        return tuple(_map(p, s) for p, s in zip(paths, sizes, strict=True)), len(sizes) == 1
    # Addresses are set aside first; the files then take their places. Python gives all of them back
    # when nobody has an array in them any more.
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    region = np.frombuffer(mmap.mmap(-1, total, flags=private, prot=mmap.PROT_READ), np.uint8)
    found, at = [], 0
    for path, size in zip(paths, sizes, strict=True):
        found.append(region[at : at + size])
        if size:
            _map(path, size, found[-1].ctypes.data)
        at += size
    return tuple(found), True


def _map(path: Path, size: int, address: int | None = None) -> Mapped:
    """The bytes of a file, at an address that is this process's own, or anywhere."""
    with storage_errors(path, "read"):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            found = os.fstat(descriptor).st_size
            if found != size:
                raise StorageError(
                    f"{path.name} cannot be served: got {found} bytes; expected {size} bytes, as "
                    "published; publish the round again"
                )
            if not size:
                return np.empty(0, np.uint8)
            if address is None:
                return np.frombuffer(mmap.mmap(descriptor, size, prot=mmap.PROT_READ), np.uint8)
            _map_at(descriptor, size, address)
            return np.empty(0, np.uint8)
        finally:
            os.close(descriptor)


def _map_at(descriptor: int, size: int, address: int) -> None:
    """mmap(2) with an address, which Python's does not take."""
    call = ctypes.CDLL(None, use_errno=True).mmap
    call.restype = ctypes.c_void_p
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
    got = call(address, size, mmap.PROT_READ, mmap.MAP_SHARED | _FIXED, descriptor, 0)
    if got != address:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


_STREAM_FROM = 8 << 20  # bytes of an answer; below, the socket still finds it in the cache
_VERIFY_AT_ONCE = 4 << 20  # bytes


class MappedTable:
    """The segments of one table, mapped read-only. Made by `open_table`; implements `SliceTable`.

    `whole` is all records, if segments follow each other in memory.
    """

    def __init__(
        self,
        info: TableInfo,
        tree: Tree,
        records: tuple[RecordArray, ...],
        whole: RecordArray | None,
    ) -> None:
        self.info, self.tree = info, tree
        self._records, self._whole = records, whole
        self._per_segment = info.segments[0].count

    async def fetch(self, keys: KeyArray, out: RecordArray | None = None) -> Fetched:
        """Implements `SliceTable.fetch`."""
        return self.gather(keys, out)

    def gather(self, keys: KeyArray, out: RecordArray | None = None) -> Fetched:
        """Returns what `fetch` returns."""
        if not keys.flags.carray:  # kernels are compiled for such alone
            keys = keys.copy()
        if not all_within(keys, self.info.num_keys - 1):
            raise KeySpaceError(
                f"keys lie outside their table: got some of {len(keys)} keys; expected "
                f"0..{self.info.num_keys - 1}; make them with the key space of the manifest"
            )
        if out is None:
            out = np.empty((len(keys), self.info.record_bytes), np.uint8)
        streams = out.nbytes >= _STREAM_FROM
        if self._whole is None:
            self._gather(keys, out, streams)
        elif out.nbytes:
            copy_rows(self._whole, keys, None, out, streams)
        return Fetched(out)

    def _gather(self, keys: KeyArray, out: RecordArray, streams: bool) -> None:
        """Copies from several segments: each gets the occurrences that are its own."""
        order = np.empty(len(keys), np.int64)
        starts = partition(keys, self._per_segment, len(self._records), order)
        within = keys % self._per_segment
        for place in np.flatnonzero(np.diff(starts)):
            mine = order[starts[place] : starts[place + 1]]
            if out.nbytes:
                copy_rows(self._records[place], within, mine, out, streams)

    def segment(self, place: int) -> memoryview:
        """Implements `SliceTable.segment`."""
        self._check_place(place)
        return self._records[place].reshape(-1).data

    def verify(self, threads: int = 1) -> None:
        """Compares every record with its leaf, and every node with those below it."""
        at_once = max(1, _VERIFY_AT_ONCE // max(self.info.record_bytes, 1))
        pieces = [
            (records[at : at + at_once], segment.first + at)
            for records, segment in zip(self._records, self.info.segments, strict=True)
            for at in range(0, len(records), at_once)
        ]

        def count_wrong(piece: tuple[RecordArray, int]) -> int:
            records, first = piece
            leaves = self.tree.nodes[first : first + len(records)]
            return int(np.any(hash_leaves(records) != leaves, axis=1).sum())

        with ThreadPoolExecutor(threads) as pool:
            wrong = sum(pool.map(count_wrong, pieces))
        if wrong:
            raise _damaged(f"{wrong} records of table {self.info.name!r}", "their leaves differ")
        if not np.array_equal(Tree.of(self.tree.level(0)).nodes, self.tree.nodes):
            raise _damaged(f"the tree of table {self.info.name!r}", "other nodes than its leaves'")

    def _check_place(self, place: int) -> None:
        if not 0 <= place < len(self._records):
            raise NotFoundError(
                f"no such segment: got {place}; expected 0..{len(self._records) - 1}; take "
                "segments from the manifest"
            )


def open_table(directory: Path, info: TableInfo) -> MappedTable:
    """Maps the segments of a table and its tree, of the sizes and the root that the manifest has.

    Neither records nor nodes are read: `MappedTable.verify` does, and a device checks what it gets.
    """
    counts = [segment.count for segment in info.segments]
    if not counts or any(c != counts[0] for c in counts[:-1]) or counts[-1] > counts[0]:
        raise _damaged(f"the manifest of table {info.name!r}", "segments that do not fit the table")
    (nodes,), _ = map_files([tree_path(directory)], [tree_bytes(info.num_keys)])
    tree = Tree(TreeShape(info.num_keys), nodes.reshape(-1, HASH_BYTES))
    if tree.root.hex() != info.root:
        raise _damaged(f"the tree of table {info.name!r}", "another root than the manifest has")
    length = info.record_bytes
    files = [records_path(directory, place) for place in range(len(counts))]
    found, are_joined = map_files(files, [count * length for count in counts])
    records = tuple(f.reshape(c, length) for f, c in zip(found, counts, strict=True))
    return MappedTable(info, tree, records, _joined(records, info.num_keys) if are_joined else None)


def _joined(arrays: tuple[NDArray[Any], ...], count: int) -> NDArray[Any]:
    """Arrays that follow each other in memory as one, which keeps them all mapped."""
    first = arrays[0]
    return (
        first if len(arrays) == 1 else as_strided(first, (count, *first.shape[1:]), writeable=False)
    )


def _damaged(what: str, how: str) -> StorageError:
    return StorageError(
        f"{what} cannot be served: got {how}; expected files as they were published; publish the "
        "round again"
    )


_LOOK_EVERY = 0.05  # seconds between two looks at a file

_Stamp: TypeAlias = tuple[int, int, int]
"""What differs between two files that had one name: inode, time, size."""


@dataclass
class _Entry:
    """An open round, or why it cannot be opened."""

    number: int
    used: float
    looked: float
    stamp: _Stamp | None
    round: OpenRound | None = None
    error: StorageError | None = None
    holders: int = 0
    lock: ExitStack = field(default_factory=ExitStack)


class RoundsDirectory:
    """The rounds of a directory, opened when they are asked for; implements `RoundSource`.

    The current round and the one numbered before it stay open. An older one is closed, so that its
    publisher can take it away, once nobody has asked for it for a while: until then its files stay
    on the disk, besides the two rounds that are kept and the one that is spare. Rounds are looked
    at when `current` or `hold` is called, as probes of a service do.

    A round that was published again is opened again. Holders of the old one finish with it.

    Args:
        linger: seconds that an older round stays open without being used; a damaged one is looked
            at again after as long.
    """

    def __init__(
        self,
        directory: Path | str,
        linger: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory = Path(directory)
        self._linger, self._clock = linger, clock
        self._mutex = threading.RLock()
        self._entries: dict[str, _Entry] = {}
        self._current: Current | None = None
        self._stamp: _Stamp | None = None
        self._looked = -1e9

    def current(self, newest: bool = False) -> Current | None:
        """Implements `RoundSource.current`; at most a twentieth of a second old."""
        with self._mutex:
            if newest:
                self._look()
            self._refresh(self._clock())
            return self._current

    @contextmanager
    def hold(self, round_id: str) -> Iterator[OpenRound]:
        """Implements `RoundSource.hold`; what `segment` returned is not to outlive it."""
        with self._mutex:
            now = self._clock()
            with suppress(StorageError):  # `current` tells of it
                self._refresh(now)
            entry = self._find(round_id, now)
            if entry.round is None:
                # Each time with a traceback of its own, else it would grow with every request.
                raise (entry.error or _no_such_round()).with_traceback(None)
            entry.holders += 1
        try:
            yield entry.round
        finally:
            with self._mutex:
                entry.holders -= 1
                entry.used = self._clock()
                if not entry.holders and self._entries.get(round_id) is not entry:
                    entry.lock.close()  # it was published again

    def close(self) -> None:
        """Lets go of every round that nobody holds."""
        with self._mutex:
            for round_id in [name for name, entry in self._entries.items() if not entry.holders]:
                self._entries.pop(round_id).lock.close()

    def _refresh(self, now: float) -> None:
        """Looks at the current round, unless that was done just now, and closes what is idle."""
        if _is_due(self._looked, now):
            self._look()
            self._looked = now
            self._close_idle(now)

    def _look(self) -> None:
        """Reads the current round if its file is another one than at the last look."""
        stamp = _stamp_of(self._directory / CURRENT)
        if stamp is None:
            self._stamp = self._current = None
            return
        if stamp == self._stamp:
            return
        read = read_current(self._directory)
        if read is None:
            return
        directory = round_path(self._directory, read.round)
        cohort = read_cohort(directory)
        if cohort is None and not (directory / MANIFEST).exists():
            return  # a round that has gone already must not pass for one without a cohort
        self._current = Current(read.round, read.number, read.phase, cohort, read.trailing)
        self._stamp = stamp

    def _find(self, round_id: str, now: float) -> _Entry:
        entry = self._entries.get(round_id)
        if entry is not None and not self._is_stale(round_id, entry, now):
            return entry
        number = number_of(round_id)
        if number is None:
            raise _no_such_round()
        if entry is not None:
            del self._entries[round_id]
            if not entry.holders:
                entry.lock.close()
        stamp = _stamp_of(round_path(self._directory, round_id) / MANIFEST)
        entry = _Entry(number, now, now, stamp)
        try:
            entry.round = self._open(round_id, number, entry.lock)
        except StorageError as error:
            entry.lock.close()
            entry.error = error
        except BaseException:
            entry.lock.close()
            raise
        self._entries[round_id] = entry
        return entry

    def _is_stale(self, round_id: str, entry: _Entry, now: float) -> bool:
        """Whether a round was published again since it was opened; or damaged, a while ago."""
        if entry.error is not None and not 0 <= now - entry.used < self._linger:
            return True
        if not _is_due(entry.looked, now):
            return False
        entry.looked = now
        stamp = _stamp_of(round_path(self._directory, round_id) / MANIFEST)
        return stamp is not None and stamp != entry.stamp

    def _open(self, round_id: str, number: int, stack: ExitStack) -> OpenRound:
        directory = round_path(self._directory, round_id)
        lock = stack.enter_context(locked_manifest(directory, fcntl.LOCK_SH))
        if lock is None:
            current = self.current()
            if current is None or number > current.number:
                raise _no_such_round()
            raise TooLateError(
                f"round {number} has been removed: got round {number}; expected the current round, "
                f"{current.number}; take part in that one"
            )
        found, manifest, encoded = read_manifest(lock)
        if found != round_id:
            raise StorageError(
                "manifest.json is damaged: got the content of another round; expected the file as "
                "it was published; publish the round again"
            )
        tables = tuple(
            open_table(table_path(directory, place), info)
            for place, info in enumerate(manifest.tables)
        )
        return OpenRound(round_id, manifest, encoded, tables, read_signature(directory))

    def _close_idle(self, now: float) -> None:
        """Closes what is damaged, or older than the round before the current one, once idle."""
        oldest = -1 if self._current is None else self._current.number - 1
        for round_id, entry in list(self._entries.items()):
            entry.used = min(entry.used, now)  # the clock may have gone back
            is_kept = entry.number >= oldest and entry.error is None
            if not is_kept and not entry.holders and now - entry.used >= self._linger:
                self._entries.pop(round_id).lock.close()


def verify_round(opened: OpenRound, threads: int = 1) -> None:
    """Compares every record and node of a round that came from files with the roots."""
    for table in opened.tables:
        if isinstance(table, MappedTable):
            table.verify(threads)


def _is_due(looked: float, now: float) -> bool:
    """Whether to look again; also if the clock has gone back."""
    return not 0 <= now - looked < _LOOK_EVERY


def _stamp_of(path: Path) -> _Stamp | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _no_such_round() -> NotFoundError:
    return NotFoundError(
        f"{NO_ROUND}: got an identifier that no round has; expected those that were published; ask "
        "for the current round"
    )
