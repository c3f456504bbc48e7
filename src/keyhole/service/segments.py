"""Writes and checks slice files: records of a table in segments, a sum of each beside them.

    table-T/seg-N.bin    consecutive records, raw
    table-T/seg-N.sum    their sums, little-endian uint64

Records are read, summed and written in chunks that stay in the cache, by several threads, each in
a file of its own: in one file they would wait for its lock. Where a file of an earlier round can be
had, its pages are written over: new pages take several times as long.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from hashlib import sha256
from itertools import chain, zip_longest
from math import gcd, lcm
from pathlib import Path
from typing import TypeAlias

import numpy as np

from keyhole.delivery.records import RecordArray
from keyhole.delivery.sources import SliceSource, StateSource
from keyhole.errors import DamageError, InputError
from keyhole.files import Buffer, storage_errors
from keyhole.server.checksums import sum_records
from keyhole.server.tables import DenseTable
from keyhole.wire.manifest import Manifest, SegmentInfo
from keyhole.wire.messages import Sums

Progress: TypeAlias = Callable[[int, int], None]
"""Told how much is done, of how much: records that are written, or bytes that are copied."""

Job: TypeAlias = tuple[Callable[[], None], int]
"""A piece of work for one thread, and how many records it is."""

SEGMENT = 64 << 20
"""Most bytes of a file: the disk takes the first ones while the last are made."""

CHUNK = 4 << 20  # bytes that stay in a cache between sum and write
_CHUNKS = 2  # that one thread takes at a time
_SUM_BYTES = 8
_PAGE = 4096  # of most systems


@dataclass(frozen=True)
class WriteSettings:
    """How a round is written."""

    threads: int = 2  # that share the work; the bytes do not depend on it
    segment_bytes: int = SEGMENT  # most bytes of records, or of sums, in one file
    durable: bool = True  # whether files are on the disk before the round appears
    strong: bool = False  # whether the manifest has a SHA-256 of the records, too

    def __post_init__(self) -> None:
        for name in ("threads", "segment_bytes"):
            if getattr(self, name) < 1:
                raise InputError(
                    f"{name} is too small: got {getattr(self, name)}; expected 1 or more; leave it "
                    "out"
                )


def table_path(round_directory: Path, table: int) -> Path:
    """Where the segments of a table lie."""
    return round_directory / f"table-{table}"


def records_path(table_directory: Path, segment: int) -> Path:
    """The file of a segment's records."""
    return table_directory / f"seg-{segment}.bin"


def sums_path(table_directory: Path, segment: int) -> Path:
    """The file of their sums."""
    return table_directory / f"seg-{segment}.sum"


def cut_segments(num_keys: int, record_bytes: int, segment_bytes: int) -> list[tuple[int, int]]:
    """Returns (first key, count) of each segment: equal counts, but for the last.

    >>> cut_segments(10, 100, 400)
    [(0, 4), (4, 4), (8, 2)]
    """
    limit = max(1, segment_bytes // max(record_bytes, _SUM_BYTES))
    # Files that end with a page can be mapped behind one another.
    even = lcm(_PAGE // gcd(record_bytes, _PAGE), _PAGE // _SUM_BYTES)
    even = even if limit >= even else 1
    limit -= limit % even
    # A small rest would keep one thread busy and the others idle.
    count = -(-num_keys // max(1, -(-num_keys // limit)))
    count = max(1, count + -count % even)
    return [(first, min(count, num_keys - first)) for first in range(0, num_keys, count)]


def is_contiguous(source: SliceSource) -> bool:
    """Whether records are rows of an array as they stand there: nothing is cheaper to read."""
    if not isinstance(source, StateSource):
        return False
    table = source.state.tables[source.place]
    return (
        isinstance(table, DenseTable)
        and not table.optimizer.horizon  # rows that still move are not stored as they read
        and source.coding.kind == "plain"
    )


def range_reader(source: SliceSource) -> Callable[[int, int], RecordArray]:
    """Returns what reads the records of keys first to stop - 1: the bytes of `source.read`.

    They may be views of what the source holds, and are not to be kept.
    """
    if not is_contiguous(source):
        return lambda first, stop: source.read(np.arange(first, stop))
    assert isinstance(source, StateSource)
    table, records = source.state.tables[source.place], source.records
    assert isinstance(table, DenseTable)
    rows, no_keys = table.slab.values, np.empty(0, np.int64)  # plain rows do not depend on keys
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

    def __enter__(self) -> SegmentWriter:
        """Starts nothing yet."""
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Waits for what is under way; after an error, what has not begun is dropped."""
        self._pool.shutdown(cancel_futures=kind is not None)
        self._finisher.shutdown(cancel_futures=kind is not None)

    def write(
        self, source: SliceSource, directory: Path, spans: Mapping[int, tuple[int, int]]
    ) -> dict[int, Future[SegmentInfo]]:
        """Writes whole segments side by side, over files of their names if there are such.

        Args:
            spans: place of a segment -> its first key and its count.
        """
        read, length = range_reader(source), source.records.record_bytes
        sums = {place: np.empty(count, np.uint64) for place, (_, count) in spans.items()}
        with storage_errors(directory, "write"), ExitStack() as opened:
            jobs = []
            for place, (first, count) in spans.items():
                size = count * length
                descriptor = opened.enter_context(_opened(records_path(directory, place), size))
                target = _Target(descriptor, first, sums[place], self.settings.durable)
                jobs.append(_jobs(read, length, target))
            in_turns = chain.from_iterable(zip_longest(*jobs))
            self.run([job for job in in_turns if job is not None])
        return {place: self.finish(directory, place, spans[place], sums[place]) for place in spans}

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

    def finish(
        self, directory: Path, place: int, span: tuple[int, int], sums: Sums
    ) -> Future[SegmentInfo]:
        """Writes the sums of a segment whose records are written; then both are made durable."""
        return self._finisher.submit(_finish, directory, place, span, sums, self.settings)


@dataclass(frozen=True)
class _Target:
    """A segment that is being written: its file, its first key, room for its sums."""

    descriptor: int
    first: int
    sums: Sums
    durable: bool


def _jobs(read: Callable[[int, int], RecordArray], length: int, target: _Target) -> list[Job]:
    """The work on one segment, in pieces."""
    count, step = len(target.sums), max(1, CHUNK // max(length, 1))
    starts = range(0, count, _CHUNKS * step)
    spans = [range(at, min(at + starts.step, count), step) for at in starts]
    return [(partial(_write, read, target, span), span.stop - span.start) for span in spans]


def _write(read: Callable[[int, int], RecordArray], target: _Target, span: range) -> None:
    """The records of a span of a segment: read, sum, write.

    `span` counts in chunks: its step is what stays in the cache.
    """
    length = 0
    for at in span:
        until = min(at + span.step, span.stop)
        records = read(target.first + at, target.first + until)
        length = records.shape[1]
        sum_records(records, target.sums[at:until])
        pwrite_all(target.descriptor, records.reshape(-1).data, at * length)
    if target.durable and (start_sync := _start_sync()) is not None:
        # The disk begins now, not when it is waited for. A failure shows then.
        start_sync(target.descriptor, span.start * length, (span.stop - span.start) * length, 2)


@lru_cache(maxsize=1)  # a function of the system alone
def _start_sync() -> Callable[[int, int, int, int], int] | None:
    """sync_file_range(2), where there is one; its flag 2 is to begin writing without waiting."""
    call = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if call is not None:
        call.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return call


def _finish(
    directory: Path, place: int, span: tuple[int, int], sums: Sums, settings: WriteSettings
) -> SegmentInfo:
    data = sums.astype("<u8", copy=False).data.cast("B")
    path = sums_path(directory, place)
    with storage_errors(path, "write"), _opened(path, data.nbytes) as descriptor:
        pwrite_all(descriptor, data, 0)
        if settings.durable:
            os.fsync(descriptor)
    path = records_path(directory, place)
    digest = None
    with storage_errors(path, "write"), _opened(path) as descriptor:
        if settings.durable:
            os.fsync(descriptor)
        if settings.strong:
            digest = _hash_file(descriptor)
    return SegmentInfo(*span, sums_sha256=sha256(data).hexdigest(), sha256=digest)


def sync_path(path: Path) -> None:
    """Makes a file durable, or the names in a directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _hash_file(descriptor: int) -> str:
    digest, buffer, at = sha256(), bytearray(CHUNK), 0
    while taken := os.preadv(descriptor, [buffer], at):
        digest.update(memoryview(buffer)[:taken])
        at += taken
    return digest.hexdigest()


@contextmanager
def _opened(path: Path, size: int | None = None) -> Iterator[int]:
    """A file to write at places, made to be of a size, with room for it on the disk."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        if size is not None:
            os.ftruncate(descriptor, size)
            if size:
                os.posix_fallocate(descriptor, 0, size)
        yield descriptor
    finally:
        os.close(descriptor)


SUM_BYTES = 8
"""Of one record, in a file of sums."""

_BLOCK = 4 << 20  # bytes that are read at once: they stay in the cache while they are summed


@dataclass(frozen=True)
class SegmentFiles:
    """A segment, and the names of its two files below the directory of the round."""

    info: SegmentInfo
    record_bytes: int
    records: str
    sums: str

    @property
    def sizes(self) -> dict[str, int]:
        """Name -> length of the files, sums first."""
        count = self.info.count
        return {self.sums: count * SUM_BYTES, self.records: count * self.record_bytes}


def list_segments(manifest: Manifest) -> list[SegmentFiles]:
    """Returns all segments of a round; tables that are computed on demand have none."""
    return [
        SegmentFiles(
            info,
            table.record_bytes,
            records_path(table_path(Path(), place), number).as_posix(),
            sums_path(table_path(Path(), place), number).as_posix(),
        )
        for place, table in enumerate(manifest.tables)
        for number, info in enumerate(table.segments)
    ]


def check_sums(directory: Path, files: SegmentFiles) -> None:
    """Checks the file of sums against the manifest."""
    path = directory / files.sums
    _check_size(path, files.sizes[files.sums])
    if _digest(path) != files.info.sums_sha256:
        raise _damage(path, "another SHA-256", "that of the manifest")


def check_records(directory: Path, files: SegmentFiles) -> None:
    """Checks the records against their sums, which have been checked, and their digest if any."""
    path = directory / files.records
    _check_size(path, files.sizes[files.records])
    if files.info.sha256 is not None and _digest(path) != files.info.sha256:
        raise _damage(path, "another SHA-256", "that of the manifest")
    at_once = max(1, _BLOCK // max(1, files.record_bytes))
    bad = 0
    with path.open("rb") as records, (directory / files.sums).open("rb") as sums:
        for first in range(0, files.info.count, at_once):
            count = min(at_once, files.info.count - first)
            block = np.frombuffer(records.read(count * files.record_bytes), np.uint8)
            known = np.frombuffer(sums.read(count * SUM_BYTES), "<u8")
            found = sum_records(block.reshape(count, files.record_bytes))
            bad += int(np.count_nonzero(found != known))
    if bad:
        raise _damage(path, f"{bad} records that differ from their sums", "none")


def _check_size(path: Path, size: int) -> None:
    found = path.stat().st_size if path.is_file() else None
    if found != size:
        raise _damage(path, "no file" if found is None else f"{found} bytes", f"{size} bytes")


def _digest(path: Path) -> str:
    digest = sha256()
    for block in _blocks(path):
        digest.update(block)
    return digest.hexdigest()


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            yield block


def _damage(path: Path, got: str, allowed: str) -> DamageError:
    return DamageError(
        f"{path.parent.name}/{path.name} is damaged: got {got}; expected {allowed}; publish, push "
        "or pull the round again"
    )
