"""Makes segments from those of an earlier round: only the records that changed are written.

An earlier round is a base. If it is spare, which means that nobody reads it and nobody will, its
files are taken over and written to. If it may still be read, files without a change get a second
name, and the others are copied. Sums of records that are not written stay what they were, so that
damage to the base does not become the truth of a new round.
"""

from __future__ import annotations

import errno
import mmap
import os
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path

import msgspec
import numpy as np

from keyhole.arrays import KeyArray
from keyhole.delivery.records import RecordArray
from keyhole.delivery.sources import SliceSource
from keyhole.files import storage_errors
from keyhole.server.checksums import sum_records
from keyhole.server.rows import copy_rows
from keyhole.service.segments import (
    Job,
    SegmentWriter,
    cut_segments,
    is_contiguous,
    records_path,
    sums_path,
    sync_path,
)
from keyhole.wire.manifest import SegmentInfo, TableInfo
from keyhole.wire.messages import Sums

_OPEN = 4  # files that are open at once for each thread; between such groups, threads wait
_STRETCH = 4 << 20  # bytes of a file that one thread takes at a time


@dataclass(frozen=True)
class BaseTable:
    """A table of an earlier round."""

    directory: Path
    is_spare: bool  # whether they may be taken
    # as its manifest has them; empty if nothing but the files' pages is of use
    segments: tuple[SegmentInfo, ...] = ()
    changed: KeyArray | None = None  # the keys whose records differ now, ascending

    @staticmethod
    def of(
        directory: Path, is_spare: bool, old: TableInfo | None, new: TableInfo, changed: KeyArray
    ) -> BaseTable:
        """A base for table `new`; of one that holds something else, only pages are of use."""
        if old is None or _without_segments(old) != _without_segments(new):
            return BaseTable(directory, is_spare)
        return BaseTable(directory, is_spare, old.segments, changed)

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
    """Writes every segment of a table; the bytes do not depend on `base`.

    Args:
        base: an earlier round's; its files may be gone afterwards if it is spare.
    """
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
    if 2 * len(keys) > count or (not is_taken and is_contiguous(source)):
        return None
    path = records_path(directory, place)
    with storage_errors(path, "write"):
        if is_taken:
            records_path(base.directory, place).rename(path)
        else:
            _copy_file(records_path(base.directory, place), path)
        target = _mapped(path, count, source.records.record_bytes)
        writer.run(_patch_jobs(source, target, sums, span, keys))
    return writer.finish(directory, place, span, sums)


def _mapped(path: Path, count: int, length: int) -> RecordArray:
    """The records of a file, to write to.

    Every write() takes the file's lock and enters its journal, which at 2 KB takes four times as
    long as a page fault. Room for all pages is on the disk already, so none can fail for want of
    it; on a file system that writes elsewhere what it overwrites, a full disk ends the process,
    and the round before stays.
    """
    descriptor = os.open(path, os.O_RDWR)
    try:
        os.posix_fallocate(descriptor, 0, count * length)
        pages = mmap.mmap(descriptor, count * length)
        return np.frombuffer(pages, np.uint8).reshape(count, length)
    finally:
        os.close(descriptor)


def _patch_jobs(
    source: SliceSource, target: RecordArray, sums: Sums, span: tuple[int, int], keys: KeyArray
) -> list[Job]:
    """One job for each stretch of keys that has a change; the rest count as done with them."""
    first, count = span
    at_once = max(1, _STRETCH // max(source.records.record_bytes, 1))
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
    if len(data) != old.count * 8 or sha256(data).hexdigest() != old.sums_sha256:
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
    done.set_result(old if writer.settings.strong else _without_digest(old))
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


def _copy_file(source: Path, target: Path) -> None:
    """Copies inside the system, to blocks of its own: shared ones could not be written in place."""
    reading = os.open(source, os.O_RDONLY)
    try:
        writing = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            at, size = 0, os.fstat(reading).st_size
            os.posix_fallocate(writing, 0, size)
            while at < size:
                if not (taken := os.sendfile(writing, reading, at, size - at)):
                    raise _ended()
                at += taken
        finally:
            os.close(writing)
    finally:
        os.close(reading)


def _ended() -> OSError:
    return OSError(errno.EIO, "the file ends too early")


def _without_digest(segment: SegmentInfo) -> SegmentInfo:
    return SegmentInfo(segment.first, segment.count, segment.sums_sha256)


def _without_segments(info: TableInfo) -> TableInfo:
    return msgspec.structs.replace(info, segments=())
