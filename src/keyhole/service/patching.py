"""Makes the files of a table, from those of an earlier round where that takes less time.

Where it is known what changed since an earlier round, its base, only that is written. If the base
is spare, which means that nobody reads it and nobody will, its files are taken over and written to.
If it may still be read, files without a change get a second name, and the others are copied. Of the
base's tree, the leaves that change and all nodes beside their way to the root are checked against
its root; the new root follows from them. So leaves of records that are not written stay what they
were: damage to the base does not become the truth of a new round.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from keyhole.arrays import KeyArray
from keyhole.crypto.merkle import (
    HASH_BYTES,
    HashArray,
    Tree,
    TreeShape,
    hash_leaves,
    prove,
    root_of,
)
from keyhole.delivery.records import RecordArray
from keyhole.delivery.sources import SliceSource
from keyhole.files import storage_errors
from keyhole.server.rows import copy_rows
from keyhole.service.segments import (
    CHUNK,
    Job,
    SegmentWriter,
    copy_file,
    cut_segments,
    opened,
    records_path,
    stored_rows,
    tree_bytes,
    tree_path,
)
from keyhole.wire.manifest import SegmentInfo, TableInfo

_OPEN = 4  # files that are open at once for each thread; between such groups, threads wait


@dataclass(frozen=True)
class BaseTable:
    """A table of an earlier round."""

    directory: Path
    is_spare: bool  # whether its files may be taken
    # as its manifest has it; None if nothing but the files' pages is of use
    info: TableInfo | None = None
    # the keys whose records differ now, ascending
    changed: KeyArray = field(default_factory=lambda: np.empty(0, np.int64))

    def holds(self, place: int, span: tuple[int, int]) -> bool:
        """Returns whether the segment at a place holds the same keys, and its file is there."""
        if self.info is None or place >= len(self.info.segments) or not self.info.record_bytes:
            return False
        found, path = self.info.segments[place], records_path(self.directory, place)
        is_same = (found.first, found.count) == span
        return is_same and _size_of(path) == found.count * self.info.record_bytes

    def changed_in(self, span: tuple[int, int]) -> KeyArray:
        """Returns the changed keys of a segment."""
        low, high = np.searchsorted(self.changed, [span[0], span[0] + span[1]])
        return self.changed[low:high]

    def may_take(self, path: Path) -> bool:
        """Returns whether a file may be written to: it is spare, and no other round has it."""
        return self.is_spare and path.exists() and path.stat().st_nlink == 1


@dataclass(frozen=True)
class _Ways:
    """How each segment of a table comes about, by place."""

    whole: dict[int, tuple[int, int]]  # written: first key and count
    patched: dict[int, tuple[int, int]]
    kept: dict[int, tuple[int, int]]

    @staticmethod
    def of(source: SliceSource, spans: Sequence[tuple[int, int]], base: BaseTable | None) -> _Ways:
        """Returns the way that takes the least time."""
        ways = _Ways({}, {}, {})
        for place, span in enumerate(spans):
            if base is None or not base.holds(place, span):
                ways.whole[place] = span
                continue
            count, taken = (
                len(base.changed_in(span)),
                base.may_take(records_path(base.directory, place)),
            )
            if not count:
                ways.kept[place] = span
            elif 2 * count > span[1] or (not taken and stored_rows(source) is not None):
                ways.whole[place] = span
            else:
                ways.patched[place] = span
        return ways

    def changed(self, base: BaseTable) -> KeyArray:
        """Returns the keys whose leaves are made again, ascending."""
        found = {place: np.arange(first, first + n) for place, (first, n) in self.whole.items()}
        found |= {place: base.changed_in(span) for place, span in self.patched.items()}
        none = np.empty(0, np.int64)
        return np.concatenate([none, *(found[place] for place in sorted(found))])


def write_table(
    writer: SegmentWriter,
    source: SliceSource,
    directory: Path,
    info: TableInfo,
    base: BaseTable | None = None,
) -> TableInfo:
    """Writes the segments of a table and its tree; returns it with both. The bytes do not depend on
    `base`, an earlier round's, whose files may be gone afterwards if it is spare."""
    spans = cut_segments(info.num_keys, info.record_bytes, writer.settings.segment_bytes)
    ways = _Ways.of(source, spans, base)
    keys = None if base is None or not (ways.patched or ways.kept) else ways.changed(base)
    if keys is not None and not _is_sound(base, info.num_keys, keys):
        ways, keys = _Ways(dict(enumerate(spans)), {}, {}), None
    path = tree_path(directory)
    with storage_errors(path, "write"):
        tree = _open_tree(directory, info.num_keys, base, is_kept=keys is not None)
    for place, span in ways.kept.items():
        assert base is not None
        _keep(writer, directory, place, span, base)
    for place, span in ways.patched.items():
        assert base is not None
        _patch_segment(writer, source, directory, place, span, base, tree)
    _write_whole(writer, source, directory, ways.whole, base, tree)
    if keys is None:
        tree.join()
    else:
        tree.join_above(keys)
    writer.finish(path)
    return msgspec.structs.replace(
        info, root=tree.root.hex(), segments=tuple(SegmentInfo(*span) for span in spans)
    )


def _write_whole(
    writer: SegmentWriter,
    source: SliceSource,
    directory: Path,
    spans: Mapping[int, tuple[int, int]],
    base: BaseTable | None,
    tree: Tree,
) -> None:
    """Writes segments, a few files at a time."""
    at_once = _OPEN * writer.settings.threads
    for start in range(0, len(spans), at_once):
        places = list(spans)[start : start + at_once]
        for place in places:
            old = None if base is None else records_path(base.directory, place)
            if base is not None and old is not None and base.may_take(old):
                with storage_errors(old, "take over"):  # its pages are written over
                    old.rename(records_path(directory, place))
        writer.write(source, directory, {place: spans[place] for place in places}, tree.level(0))


def _is_sound(base: BaseTable | None, num_keys: int, keys: KeyArray) -> bool:
    """Whether the base's tree has the root of its manifest, as far as a change of the leaves of
    `keys` depends on it."""
    if base is None or base.info is None:
        return False
    path, shape = tree_path(base.directory), TreeShape(num_keys)
    if _size_of(path) != tree_bytes(num_keys):
        return False
    nodes = np.memmap(path, np.uint8, "r", shape=(shape.num_nodes, HASH_BYTES))
    tree = Tree(shape, np.asarray(nodes))
    if not len(keys):
        return tree.root.hex() == base.info.root
    root = root_of(shape, keys, tree.nodes[keys], prove(tree, keys))
    return root.hex() == base.info.root


def _open_tree(directory: Path, num_keys: int, base: BaseTable | None, is_kept: bool) -> Tree:
    """The file of a tree, to write to: the base's, a copy of it, or a new one."""
    path, size = tree_path(directory), tree_bytes(num_keys)
    old = None if base is None else tree_path(base.directory)
    if base is not None and old is not None and base.may_take(old):
        old.rename(path)
    elif old is not None and is_kept:
        copy_file(old, path, size)
    nodes = np.frombuffer(_map_to_write(path, size), np.uint8)
    return Tree(TreeShape(num_keys), nodes.reshape(-1, HASH_BYTES))


def _map_to_write(path: Path, size: int) -> mmap.mmap:
    """A file in memory. Every write() takes the file's lock and enters its journal, which at 2 KB
    takes four times as long as a page fault. Room for all pages is on the disk already, so none can
    fail for want of it; on a file system that writes elsewhere what it overwrites, a full disk ends
    the process, and the round before stays."""
    with opened(path, size) as descriptor:
        return mmap.mmap(descriptor, size)


def _patch_segment(
    writer: SegmentWriter,
    source: SliceSource,
    directory: Path,
    place: int,
    span: tuple[int, int],
    base: BaseTable,
    tree: Tree,
) -> None:
    """Makes a segment from the base's, and the leaves of what changed."""
    old, path = records_path(base.directory, place), records_path(directory, place)
    count, length = span[1], source.records.record_bytes
    with storage_errors(path, "write"):
        if base.may_take(old):
            old.rename(path)
        else:
            copy_file(old, path, count * length)
        target = np.frombuffer(_map_to_write(path, count * length), np.uint8)
        target = target.reshape(count, length)
        writer.run(_patch_jobs(source, target, tree.level(0), span, base.changed_in(span)))
    writer.finish(path)


def _patch_jobs(
    source: SliceSource,
    target: RecordArray,
    leaves: HashArray,
    span: tuple[int, int],
    keys: KeyArray,
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
            jobs.append((partial(_patch, source, target, leaves, first, mine), waiting))
            waiting = 0
    work, records = jobs.pop()
    return [*jobs, (work, records + waiting)]


def _patch(
    source: SliceSource, target: RecordArray, leaves: HashArray, first: int, keys: KeyArray
) -> None:
    """Writes the records of `keys`, ascending, and their leaves."""
    records = source.read(keys)
    leaves[keys] = hash_leaves(records)
    low, high = int(keys[0]), int(keys[-1]) + 1
    slots = keys - low
    numbers = np.empty(high - low, np.int64)  # of the records that belong to `slots`
    numbers[slots] = np.arange(len(keys))
    copy_rows(records, numbers, slots, target[low - first : high - first], False)


def _keep(
    writer: SegmentWriter, directory: Path, place: int, span: tuple[int, int], base: BaseTable
) -> None:
    """A segment in which nothing changed: the same file, under a name of the new round."""
    old, path = records_path(base.directory, place), records_path(directory, place)
    with storage_errors(path, "write"):
        try:
            if base.is_spare:
                old.rename(path)
            else:
                path.hardlink_to(old)
        except OSError:  # not every file system has second names
            copy_file(old, path, old.stat().st_size)
    writer.finish(path)  # the base need not have been durable
    writer.count(span[1])


def _size_of(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None
