"""Writes slice files: records of a table in segments, a sum of each beside them.

    table-T/seg-N.bin    consecutive records, raw
    table-T/seg-N.sum    their sums, little-endian uint64

Records are read, summed and written in chunks that stay in the cache, by several threads, each in
a file of its own: in one file they would wait for its lock. Where a file of an earlier round can be
had, its pages are written over: new pages take several times as long.

Where it is known what changed since an earlier round, its base, only that is written. If the base
is spare, which means that nobody reads it and nobody will, its files are taken over and written to.
If it may still be read, files without a change get a second name, and the others are copied. Sums
of records that are not written stay what they were, so that damage to the base does not become the
truth of a new round.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from hashlib import file_digest, sha256
from itertools import chain, zip_longest
from math import gcd, lcm
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from keyhole.arrays import KeyArray
from keyhole.delivery.records import RecordArray
from keyhole.delivery.sources import SliceSource, StateSource
from keyhole.errors import InputError
from keyhole.files import Buffer, storage_errors
from keyhole.server.checksums import sum_records
from keyhole.server.rows import copy_rows
from keyhole.server.tables import DenseTable
from keyhole.wire.manifest import SegmentInfo, TableInfo
from keyhole.wire.messages import Sums

Progress: TypeAlias = Callable[[int, int], None]
"""Told how much is done, of how much: records that are written, or bytes that are copied."""

Job: TypeAlias = tuple[Callable[[], None], int]
"""A piece of work for one thread, and how many records it is."""

SEGMENT = 64 << 20
"""Most bytes of a file: the disk takes the first ones while the last are made."""

SUM_BYTES = 8
"""Of one record, in a file of sums."""

CHUNK = 4 << 20  # bytes that stay in a cache between sum and write
_CHUNKS = 2  # that one thread takes at a time
_PAGE = 4096  # of most systems
_OPEN = 4  # files that are open at once for each thread; between such groups, threads wait


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
    limit = max(1, segment_bytes // max(record_bytes, SUM_BYTES))
    # Files that end with a page can be mapped behind one another.
    even = lcm(_PAGE // gcd(record_bytes, _PAGE), _PAGE // SUM_BYTES)
    even = even if limit >= even else 1
    limit -= limit % even
    # A small rest would keep one thread busy and the others idle.
    count = -(-num_keys // max(1, -(-num_keys // limit)))
    count = max(1, count + -count % even)
    return [(first, min(count, num_keys - first)) for first in range(0, num_keys, count)]


def _stored_rows(source: SliceSource) -> NDArray[Any] | None:
    """The rows of an array that records are as they stand there: nothing is cheaper to read."""
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
    rows, records = _stored_rows(source), source.records
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
        """Writes whole segments side by side, over files of their names if there are such; `spans`
        has the first key and the count of each by its place."""
        read, length = range_reader(source), source.records.record_bytes
        step = max(1, CHUNK // max(length, 1))
        sums = {place: np.empty(count, np.uint64) for place, (_, count) in spans.items()}
        with storage_errors(directory, "write"), ExitStack() as opened:
            jobs: list[list[Job]] = []
            for place, (first, count) in spans.items():
                path = records_path(directory, place)
                descriptor = opened.enter_context(_opened(path, count * length))
                work = partial(_write, read, descriptor, first, sums[place], self.settings.durable)
                starts = range(0, count, _CHUNKS * step)
                parts = [range(at, min(at + starts.step, count), step) for at in starts]
                jobs.append([(partial(work, part), part.stop - part.start) for part in parts])
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


def _write(
    read: Callable[[int, int], RecordArray],
    descriptor: int,
    first: int,
    sums: Sums,
    durable: bool,
    part: range,
) -> None:
    """Reads, sums and writes a part of the segment that begins with key `first`, in chunks: the
    step of `part` is what stays in the cache."""
    length = 0
    for at in part:
        until = min(at + part.step, part.stop)
        records = read(first + at, first + until)
        length = records.shape[1]
        sum_records(records, sums[at:until])
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
    with storage_errors(path, "write"), path.open("rb") as file:
        if settings.durable:
            os.fsync(file.fileno())
        if settings.strong:
            digest = file_digest(file, "sha256").hexdigest()
    return SegmentInfo(*span, sums_sha256=sha256(data).hexdigest(), sha256=digest)


def sync_path(path: Path) -> None:
    """Makes a file durable, or the names in a directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _opened(path: Path, size: int) -> Iterator[int]:
    """A file to write at places, made to be of a size, with room for it on the disk."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        os.ftruncate(descriptor, size)
        if size:
            os.posix_fallocate(descriptor, 0, size)
        yield descriptor
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class BaseTable:
    """A table of an earlier round."""

    directory: Path
    is_spare: bool  # whether its files may be taken
    # as its manifest has them; empty if nothing but the files' pages is of use
    segments: tuple[SegmentInfo, ...] = ()
    changed: KeyArray | None = None  # the keys whose records differ now, ascending

    def segment(self, place: int, span: tuple[int, int]) -> SegmentInfo | None:
        """The segment that holds the same keys, if there is one."""
        if place >= len(self.segments):
            return None
        found = self.segments[place]
        return found if (found.first, found.count) == span else None


def write_table(
    writer: SegmentWriter,
    source: SliceSource,
    directory: Path,
    info: TableInfo,
    base: BaseTable | None = None,
) -> list[Future[SegmentInfo]]:
    """Writes every segment of a table; the bytes do not depend on `base`, an earlier round's, whose
    files may be gone afterwards if it is spare."""
    made: dict[int, Future[SegmentInfo]] = {}
    spans = cut_segments(info.num_keys, info.record_bytes, writer.settings.segment_bytes)
    for place, span in enumerate(spans):
        if base is not None and (old := base.segment(place, span)) is not None:
            patched = _patch_segment(writer, source, directory, place, base, old)
            if patched is not None:
                made[place] = patched
    left = [place for place in range(len(spans)) if place not in made]
    at_once = _OPEN * writer.settings.threads
    for start in range(0, len(left), at_once):
        places = left[start : start + at_once]
        if base is not None and base.is_spare:
            for place in places:
                _take_pages(base.directory, directory, place)
        made |= writer.write(source, directory, {place: spans[place] for place in places})
    return [made[place] for place in range(len(spans))]


def _patch_segment(
    writer: SegmentWriter,
    source: SliceSource,
    directory: Path,
    place: int,
    base: BaseTable,
    old: SegmentInfo,
) -> Future[SegmentInfo] | None:
    """A segment from the base's; None if writing it in full is right or takes less time."""
    first, count = span = (old.first, old.count)
    assert base.changed is not None
    low, high = np.searchsorted(base.changed, [first, first + count])
    keys = base.changed[low:high]
    sums = _trusted_sums(base.directory, place, old, source.records.record_bytes)
    wants_digest = writer.settings.strong
    if (
        not source.records.record_bytes
        or sums is None
        or (wants_digest and (len(keys) or old.sha256 is None))
    ):
        return None  # a digest of records that are not read again would be one of damage, too
    if not len(keys):
        return _adopt(writer, directory, place, base, old)
    is_taken = base.is_spare and _is_own(records_path(base.directory, place))
    if 2 * len(keys) > count or (not is_taken and _stored_rows(source) is not None):
        return None
    path, length = records_path(directory, place), source.records.record_bytes
    with storage_errors(path, "write"):
        if is_taken:
            records_path(base.directory, place).rename(path)
        else:
            _copy_file(records_path(base.directory, place), path, count * length)
        # Every write() takes the file's lock and enters its journal, which at 2 KB takes four times
        # as long as a page fault. Room for all pages is on the disk already, so none can fail for
        # want of it; on a file system that writes elsewhere what it overwrites, a full disk ends
        # the process, and the round before stays.
        with _opened(path, count * length) as descriptor:
            pages = mmap.mmap(descriptor, count * length)
        target = np.frombuffer(pages, np.uint8).reshape(count, length)
        writer.run(_patch_jobs(source, target, sums, span, keys))
    return writer.finish(directory, place, span, sums)


def _patch_jobs(
    source: SliceSource, target: RecordArray, sums: Sums, span: tuple[int, int], keys: KeyArray
) -> list[Job]:
    """One job for each stretch of keys that has a change; the rest count as done with them."""
    first, count = span
    at_once = max(1, CHUNK // max(source.records.record_bytes, 1))
    edges = np.append(np.arange(first, first + count, at_once), first + count)
    cuts = np.searchsorted(keys, edges)
    jobs: list[Job] = []
    waiting = 0
    for place in range(len(edges) - 1):
        waiting += int(edges[place + 1] - edges[place])
        if cuts[place] < cuts[place + 1]:
            mine = keys[cuts[place] : cuts[place + 1]]
            jobs.append((partial(_patch, source, target, sums, first, mine), waiting))
            waiting = 0
    work, records = jobs.pop()
    return [*jobs, (work, records + waiting)]


def _patch(
    source: SliceSource, target: RecordArray, sums: Sums, first: int, keys: KeyArray
) -> None:
    """Writes the records of `keys`, ascending, and their sums."""
    records = source.read(keys)
    sums[keys - first] = sum_records(records)
    low, high = int(keys[0]), int(keys[-1]) + 1
    slots = keys - low
    numbers = np.empty(high - low, np.int64)  # of the records that belong to `slots`
    numbers[slots] = np.arange(len(keys))
    copy_rows(records, numbers, slots, target[low - first : high - first], False)


def _trusted_sums(directory: Path, place: int, old: SegmentInfo, length: int) -> Sums | None:
    """The sums of a base's segment; None unless both files are as its manifest says."""
    try:
        if records_path(directory, place).stat().st_size != old.count * length:
            return None
        data = sums_path(directory, place).read_bytes()
    except OSError:
        return None
    if len(data) != old.count * SUM_BYTES or sha256(data).hexdigest() != old.sums_sha256:
        return None
    return np.frombuffer(bytearray(data), "<u8")


def _adopt(
    writer: SegmentWriter, directory: Path, place: int, base: BaseTable, old: SegmentInfo
) -> Future[SegmentInfo] | None:
    """A segment in which nothing changed: the same files, under a name of the new round."""
    try:
        for path in (records_path, sums_path):
            if base.is_spare:
                path(base.directory, place).rename(path(directory, place))
            else:
                path(directory, place).hardlink_to(path(base.directory, place))
            if writer.settings.durable:  # the base need not have been
                sync_path(path(directory, place))
    except OSError:  # not every file system has second names
        for path in (records_path, sums_path):
            path(directory, place).unlink(missing_ok=True)
        return None
    writer.count(old.count)
    done: Future[SegmentInfo] = Future()
    digest = old.sha256 if writer.settings.strong else None
    done.set_result(msgspec.structs.replace(old, sha256=digest))
    return done


def _take_pages(source: Path, target: Path, place: int) -> None:
    """Moves spare files to where they are going to be written over, if no other round has them."""
    for path in (records_path, sums_path):
        old = path(source, place)
        if old.exists() and _is_own(old):
            with storage_errors(old, "take over"):
                old.rename(path(target, place))


def _is_own(path: Path) -> bool:
    """Whether a file has no other name: else it belongs to another round, too."""
    return path.stat().st_nlink == 1


def _copy_file(source: Path, target: Path, size: int) -> None:
    """Copies inside the system, to blocks of its own: shared ones could not be written in place."""
    at = 0
    with source.open("rb") as reading, _opened(target, size) as writing:
        while at < size:
            if not (taken := os.sendfile(writing, reading.fileno(), at, size - at)):
                raise OSError(errno.EIO, "the file ends too early")
            at += taken
