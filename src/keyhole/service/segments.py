"""Writes slice files: records of a table in segments, and the tree that binds them.

    table-T/seg-N.bin    consecutive records, raw
    table-T/tree.bin     all nodes of the table's Merkle tree, 32 bytes each: leaves, then levels

Records are read, hashed and written in chunks that stay in the cache, by several threads, each in
a file of its own: in one file they would wait for its lock. Where a file of an earlier round can be
had, its pages are written over: new pages take several times as long.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain, zip_longest
from math import gcd
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from keyhole.crypto.merkle import HASH_BYTES, HashArray, TreeShape, hash_leaves
from keyhole.delivery.records import RecordArray
from keyhole.delivery.sources import SliceSource, StateSource
from keyhole.errors import InputError
from keyhole.files import Buffer, storage_errors
from keyhole.server.tables import DenseTable

Progress: TypeAlias = Callable[[int, int], None]
"""Told how much is done, of how much: records that are written, or bytes that are copied."""

Job: TypeAlias = tuple[Callable[[], None], int]
"""A piece of work for one thread, and how many records it is."""

SEGMENT = 64 << 20
"""Most bytes of a file: the disk takes the first ones while the last are made."""

CHUNK = 4 << 20  # bytes that stay in a cache between hash and write
_CHUNKS = 2  # that one thread takes at a time
_PAGE = 4096  # of most systems
_MIN_RECORD = 8  # bytes that a record counts for: empty ones fill no file


@dataclass(frozen=True)
class WriteSettings:
    """How a round is written."""

    threads: int = 2  # that share the work; the bytes do not depend on it
    segment_bytes: int = SEGMENT  # most bytes of records in one file
    durable: bool = True  # whether files are on the disk before the round appears

    def __post_init__(self) -> None:
        for name in ("threads", "segment_bytes"):
            if getattr(self, name) < 1:
                raise InputError(
                    f"{name} is too small: got {getattr(self, name)}; expected 1 or more; leave it "
                    "out"
                )


def table_path(round_directory: Path, table: int) -> Path:
    """Returns where the segments of a table lie."""
    return round_directory / f"table-{table}"


def records_path(table_directory: Path, segment: int) -> Path:
    """Returns the file of a segment's records."""
    return table_directory / f"seg-{segment}.bin"


def tree_path(table_directory: Path) -> Path:
    """Returns the file of a table's tree."""
    return table_directory / "tree.bin"


def tree_bytes(num_keys: int) -> int:
    """Returns the length of that file."""
    return TreeShape(num_keys).num_nodes * HASH_BYTES


def cut_segments(num_keys: int, record_bytes: int, segment_bytes: int) -> list[tuple[int, int]]:
    """Returns (first key, count) of each segment: equal counts, but for the last.

    >>> cut_segments(10, 100, 400)
    [(0, 4), (4, 4), (8, 2)]
    """
    limit = max(1, segment_bytes // max(record_bytes, _MIN_RECORD))
    # Files that end with a page can be mapped behind one another.
    even = _PAGE // gcd(record_bytes, _PAGE)
    even = even if limit >= even else 1
    limit -= limit % even
    # A small rest would keep one thread busy and the others idle.
    count = -(-num_keys // max(1, -(-num_keys // limit)))
    count = max(1, count + -count % even)
    return [(first, min(count, num_keys - first)) for first in range(0, num_keys, count)]


def stored_rows(source: SliceSource) -> NDArray[Any] | None:
    """Returns the rows of an array that records are as they stand there: nothing is cheaper to
    read."""
    if not isinstance(source, StateSource) or source.coding.kind != "plain":
        return None
    table = source.state.tables[source.place]
    if not isinstance(table, DenseTable) or table.optimizer.horizon:
        return None  # rows that still move are not stored as they read
    return table.slab.values


def range_reader(source: SliceSource) -> Callable[[int, int], RecordArray]:
    """Returns what reads the records of keys first to stop - 1: the bytes of `source.read`.

    They may be views of what the source holds, and are not to be kept.
    """
    rows, records = stored_rows(source), source.records
    if rows is None:
        return lambda first, stop: source.read(np.arange(first, stop))
    no_keys = np.empty(0, np.int64)  # plain rows do not depend on keys
    return lambda first, stop: records.encode_rows(rows[first:stop], no_keys)


def pwrite_all(descriptor: int, data: Buffer, offset: int) -> None:
    """Writes all of `data` at a place of a file; the system may take any part of it at a time."""
    left = memoryview(data).cast("B")
    while left.nbytes:
        written = os.pwrite(descriptor, left, offset)
        left, offset = left[written:], offset + written


class SegmentWriter:
    """Writes segments with a pool of threads. A context: when it ends, no thread is left."""

    def __init__(
        self, settings: WriteSettings, total: int = 0, progress: Progress | None = None
    ) -> None:
        self.settings = settings
        self._total, self._done, self._progress = total, 0, progress
        self._pool = ThreadPoolExecutor(settings.threads, "keyhole-write")
        # The disk takes one segment while the next is made.
        self._finisher = ThreadPoolExecutor(1, "keyhole-sync")
        self._finishing: list[Future[None]] = []

    def __enter__(self) -> SegmentWriter:
        """Starts nothing yet."""
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Waits for what is under way; after an error, what has not begun is dropped."""
        self._pool.shutdown(cancel_futures=kind is not None)
        self._finisher.shutdown(cancel_futures=kind is not None)

    def write(
        self,
        source: SliceSource,
        directory: Path,
        spans: Mapping[int, tuple[int, int]],
        leaves: HashArray,
    ) -> None:
        """Writes whole segments side by side, over files of their names if there are such, and
        their leaves; `spans` has the first key and the count of each by its place."""
        read, length = range_reader(source), source.records.record_bytes
        step = max(1, CHUNK // max(length, 1))
        with storage_errors(directory, "write"), ExitStack() as stack:
            jobs: list[list[Job]] = []
            for place, (first, count) in spans.items():
                path = records_path(directory, place)
                descriptor = stack.enter_context(opened(path, count * length))
                work = partial(_write, read, descriptor, first, leaves, self.settings.durable)
                starts = range(0, count, _CHUNKS * step)
                parts = [range(at, min(at + starts.step, count), step) for at in starts]
                jobs.append([(partial(work, part), part.stop - part.start) for part in parts])
            in_turns = chain.from_iterable(zip_longest(*jobs))
            self.run([job for job in in_turns if job is not None])
        for place in spans:
            self.finish(records_path(directory, place))

    def run(self, jobs: Sequence[Job]) -> None:
        """Does jobs in the pool's threads; all have ended when this returns or raises."""
        futures = {self._pool.submit(work): records for work, records in jobs}
        try:
            for future in as_completed(futures):
                future.result()
                self.count(futures[future])
        except BaseException:
            for future in futures:
                future.cancel()
            for future in futures:  # the file is closed next: nobody may still write to it
                if not future.cancelled():
                    future.exception()
            raise

    def count(self, records: int) -> None:
        """Counts records as done."""
        self._done += records
        if self._progress is not None:
            self._progress(self._done, self._total)

    def finish(self, path: Path) -> None:
        """Makes a file durable, while others are written; `settle` waits for it."""
        if self.settings.durable:
            self._finishing.append(self._finisher.submit(_finish, path))

    def settle(self) -> None:
        """Waits until every file that was finished is durable; raises what kept one from it."""
        for future in self._finishing:
            future.result()
        self._finishing.clear()


def _write(
    read: Callable[[int, int], RecordArray],
    descriptor: int,
    first: int,
    leaves: HashArray,
    durable: bool,
    part: range,
) -> None:
    """Reads, hashes and writes a part of the segment that begins with key `first`, in chunks: the
    step of `part` is what stays in the cache."""
    length = 0
    for at in part:
        until = min(at + part.step, part.stop)
        records = read(first + at, first + until)
        length = records.shape[1]
        leaves[first + at : first + until] = hash_leaves(records)
        pwrite_all(descriptor, records.reshape(-1).data, at * length)
    if durable and (start_sync := _start_sync()) is not None:
        # The disk begins now, not when it is waited for. A failure shows then.
        start_sync(descriptor, part.start * length, (part.stop - part.start) * length, 2)


@lru_cache(maxsize=1)  # a function of the system alone
def _start_sync() -> Callable[[int, int, int, int], int] | None:
    """sync_file_range(2), where there is one; its flag 2 is to begin writing without waiting."""
    call = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if call is not None:
        call.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return call


def _finish(path: Path) -> None:
    with storage_errors(path, "write"):
        sync_path(path)


def sync_path(path: Path) -> None:
    """Makes a file durable, or the names in a directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def opened(path: Path, size: int) -> Iterator[int]:
    """A file to write at places, made to be of a size, with room for it on the disk."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        os.ftruncate(descriptor, size)
        if size:
            os.posix_fallocate(descriptor, 0, size)
        yield descriptor
    finally:
        os.close(descriptor)


def copy_file(source: Path, target: Path, size: int) -> None:
    """Copies inside the system, to blocks of its own: shared ones could not be written in place."""
    at = 0
    with source.open("rb") as reading, opened(target, size) as writing:
        while at < size:
            if not (taken := os.sendfile(writing, reading.fileno(), at, size - at)):
                raise OSError(errno.EIO, "the file ends too early")
            at += taken
