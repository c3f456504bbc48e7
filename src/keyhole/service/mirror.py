"""Pushes a round of a rounds directory to an object store, and pulls one, as an edge replica does.

Trees and segments go first, then the manifest, then `current.json`: anyone who reads it finds
everything that it leads to. An upload that breaks off leaves objects that nobody is led to; doing
it again continues it. Files are copied in several threads, which end together.

Nothing that is pulled is believed: the manifest must give the round its name, trees must have the
roots of the manifest, and records must be those of the leaves. Only then does the round get its
place.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import TypeVar

import numpy as np

from keyhole.crypto.merkle import HASH_BYTES, Tree, TreeShape, hash_leaves
from keyhole.crypto.signatures import SIGNATURE_BYTES
from keyhole.errors import DamageError, InputError, NotFoundError, StorageError
from keyhole.files import make_directory, storage_errors, sync_directory, write_all
from keyhole.service.directory import (
    CURRENT,
    MANIFEST,
    SIGNATURE,
    CurrentRound,
    Shelf,
    decode_current,
    encode_current,
    locked_manifest,
    read_current,
    read_manifest,
    read_signature,
    remove_round,
    round_path,
    rounds_path,
    write_current,
    write_file,
)
from keyhole.service.object_store import MUTABLE, RoundStore, StoreSettings, open_store
from keyhole.service.publishing import Publisher
from keyhole.service.segments import Progress, records_path, table_path, tree_bytes, tree_path
from keyhole.wire.manifest import (
    MAX_BYTES,
    Manifest,
    SegmentInfo,
    TableInfo,
    decode_round,
    name_round,
    number_of,
)

_MAX_CURRENT = 1 << 16  # bytes
_BLOCK = 4 << 20  # bytes that are read at once: they stay in the cache while they are summed
_PART = ".part-"  # a round of which something has been fetched; the next attempt goes on with it


@dataclass(frozen=True)
class MirrorSettings:
    """How rounds are copied."""

    keep: int = 2  # how many rounds remain at the target, the current one included
    workers: int = 4  # files that are copied at the same time
    is_anew: bool = False  # also copies what seems to be there
    may_go_back: bool = False  # lets a store's newer round be replaced by an older one

    def __post_init__(self) -> None:
        if self.keep < 1 or self.workers < 1:
            raise InputError(
                f"too few rounds to keep, or workers: got keep={self.keep}, "
                f"workers={self.workers}; expected 1 or more; raise the number"
            )


@dataclass(frozen=True)
class Moved:
    """What a push or a pull did."""

    round: str  # that is now current at the target
    number: int
    bytes_moved: int  # that were sent or fetched
    bytes_known: int  # that were there already
    removed: tuple[str, ...]  # older rounds that were removed


@dataclass
class _Meter:
    """Counts bytes over threads, and stops those that move them."""

    total: int  # all bytes of the copy
    # is told of the bytes done, from several threads but one at a time
    progress: Progress | None
    moved: int = 0
    known: int = 0
    is_stopped: bool = False
    _lock: Lock = field(default_factory=Lock)

    def add(self, moved: int = 0, known: int = 0) -> None:
        """Counts bytes that were moved, or were there; CancelledError if another copy failed."""
        if self.is_stopped:
            raise CancelledError
        with self._lock:
            self.moved += moved
            self.known += known
            if self.progress is not None:
                self.progress(self.moved + self.known, self.total)


_Item = TypeVar("_Item", "TreeFile", "SegmentFile")


def _work_through(
    work: Callable[[_Item], None], items: Sequence[_Item], workers: int, meter: _Meter
) -> None:
    """Does the work for all files in several threads; the first error ends all of them."""
    failed: list[BaseException] = []

    def attempt(item: _Item) -> None:
        try:
            if not meter.is_stopped:
                work(item)
        except BaseException as error:  # noqa: BLE001 - raised again below
            failed.append(error)
            meter.is_stopped = True

    with ThreadPoolExecutor(workers, "keyhole-mirror") as pool:
        try:
            list(pool.map(attempt, items))
        except BaseException:  # an interrupt of this thread
            meter.is_stopped = True
            raise
    if failed:
        raise failed[0]


@dataclass(frozen=True)
class TreeFile:
    """The tree of a table, and the name of its file below the directory of the round."""

    info: TableInfo
    name: str

    @property
    def size(self) -> int:
        """The length of the file."""
        return tree_bytes(self.info.num_keys)

    def check(self, directory: Path) -> None:
        """Checks all nodes: they must lead from the leaves to the root of the manifest."""
        path = directory / self.name
        _check_size(path, self.size)
        tree = _map_tree(path, self.info)
        if tree.root.hex() != self.info.root:
            raise _damage(path, "another root", "that of the manifest")
        if not np.array_equal(Tree.of(tree.level(0)).nodes, tree.nodes):
            raise _damage(path, "nodes that are not those of its leaves", "the tree as published")


@dataclass(frozen=True)
class SegmentFile:
    """A segment, and the name of its file below the directory of the round."""

    tree: TreeFile
    info: SegmentInfo
    name: str

    @property
    def size(self) -> int:
        """The length of the file."""
        return self.info.count * self.tree.info.record_bytes

    def check(self, directory: Path) -> None:
        """Checks the records against their leaves, in a tree that has been checked."""
        path, length, count = directory / self.name, self.tree.info.record_bytes, self.info.count
        _check_size(path, self.size)
        leaves = _map_tree(directory / self.tree.name, self.tree.info).nodes[self.info.first :]
        at_once = max(1, _BLOCK // max(1, length))
        bad = 0
        with path.open("rb") as records:
            for first in range(0, count, at_once):
                stop = min(first + at_once, count)
                block = np.frombuffer(records.read((stop - first) * length), np.uint8)
                found = hash_leaves(block.reshape(stop - first, length))
                bad += int(np.any(found != leaves[first:stop], axis=1).sum())
        if bad:
            raise _damage(path, f"{bad} records that differ from their leaves", "none")


def _list_files(manifest: Manifest) -> tuple[list[TreeFile], list[SegmentFile]]:
    """The trees and segments of a round; tables that are computed on demand have none."""
    trees, segments = [], []
    for place, info in enumerate(manifest.tables):
        if info.segments:
            folder = table_path(Path(), place)
            tree = TreeFile(info, tree_path(folder).as_posix())
            trees.append(tree)
            segments += [
                SegmentFile(tree, segment, records_path(folder, number).as_posix())
                for number, segment in enumerate(info.segments)
            ]
    return trees, segments


def _map_tree(path: Path, info: TableInfo) -> Tree:
    shape = TreeShape(info.num_keys)
    nodes = np.memmap(path, np.uint8, "r", shape=(shape.num_nodes, HASH_BYTES))
    return Tree(shape, np.asarray(nodes))


def _check_size(path: Path, size: int) -> None:
    found = path.stat().st_size if path.is_file() else None
    if found != size:
        raise _damage(path, "no file" if found is None else f"{found} bytes", f"{size} bytes")


def _damage(path: Path, got: str, allowed: str) -> DamageError:
    return DamageError(
        f"{path.parent.name}/{path.name} is damaged: got {got}; expected {allowed}; publish, push "
        "or pull the round again"
    )


def stored_current(store: RoundStore) -> CurrentRound:
    """Returns the current round of a store."""
    data = store.get(CURRENT, _MAX_CURRENT)
    try:
        return decode_current(data)
    except InputError as error:
        raise DamageError(
            f"{CURRENT} of {store.place} is damaged: got {error.got}; expected {error.allowed}; "
            "push a round again"
        ) from error


def oldest_first(names: Iterable[str], before: int) -> list[str]:
    """Returns those names that are of rounds before a number, the oldest first.

    >>> names = [f"{number}-{64 * '0'}" for number in (11, 10, 9)]
    >>> oldest_first([*names, ".part-0", "8-0"], before=11) == [names[2], names[1]]
    True
    """
    found = [(number, name) for name in names if (number := number_of(name)) is not None]
    return [name for number, name in sorted(found) if number < before]


def push_round(
    directory: Path,
    url: str,
    *,
    store: StoreSettings | None = None,
    settings: MirrorSettings | None = None,
    progress: Progress | None = None,
) -> Moved:
    """Stores the current round of a rounds directory under a URL, and makes it current there.

    Objects of this round that are there already with the right length are left alone, so an
    upload that broke off goes on where it was. Local files are checked before they are sent: a
    segment that is not what the manifest says is not sent.
    """
    settings = settings or MirrorSettings()
    current = _find_current(directory)  # before a folder is made for what it does not have
    target = open_store(url, store)
    local = round_path(directory, current.round)
    # As a service does: the publisher cannot take the round away meanwhile.
    with locked_manifest(local, fcntl.LOCK_SH) as lock:
        if lock is None:
            raise NotFoundError(
                f"round {current.number} is being removed: got a manifest that is gone or locked; "
                "expected a round that stays; push again: a newer round is there"
            )
        named, manifest, encoded = read_manifest(lock)
        if named != current.round:
            raise StorageError(
                f"{MANIFEST} of round {current.number} is damaged: got the content of {named}; "
                f"expected that of {current.round}; publish the round again"
            )
        _refuse_going_back(target, current, settings)
        meter = _send_files(target, local, manifest, settings, progress)
        signature = read_signature(local)
        if signature is not None:
            target.put(f"rounds/{current.round}/{SIGNATURE}", signature)
        target.put(f"rounds/{current.round}/{MANIFEST}", encoded)
        _refuse_going_back(target, current, settings)  # the upload may have taken an hour
        target.put(CURRENT, encode_current(current), MUTABLE)
    removed = _remove_older(target, current, settings.keep)
    return Moved(current.round, current.number, meter.moved, meter.known, removed)


def _find_current(directory: Path) -> CurrentRound:
    current = read_current(directory)
    if current is None:
        raise NotFoundError(
            f"no round has been published here: got {directory} without {CURRENT}; expected a "
            "rounds directory; run keyhole publish first, or check the path"
        )
    return current


def _send_files(
    target: RoundStore,
    local: Path,
    manifest: Manifest,
    settings: MirrorSettings,
    progress: Progress | None,
) -> _Meter:
    """Sends what is not there, several files at a time."""
    prefix = f"rounds/{local.name}"
    there = {} if settings.is_anew else target.sizes(prefix)
    trees, segments = _list_files(manifest)
    meter = _Meter(sum(f.size for f in trees) + sum(f.size for f in segments), progress)

    def send(file: TreeFile | SegmentFile) -> None:
        if there.get(f"{prefix}/{file.name}") == file.size:
            meter.add(known=file.size)
            return
        if isinstance(file, SegmentFile):
            file.check(local)
        target.put(f"{prefix}/{file.name}", local / file.name)
        meter.add(file.size)

    for tree in trees:  # records are compared with their leaves, whether these are sent or not
        tree.check(local)
    _work_through(send, trees, settings.workers, meter)
    _work_through(send, segments, settings.workers, meter)
    return meter


def _refuse_going_back(target: RoundStore, current: CurrentRound, settings: MirrorSettings) -> None:
    try:
        found = stored_current(target)
    except NotFoundError:
        return
    if found.number > current.number and not settings.may_go_back:
        raise InputError(
            f"the store has a newer round: got round {found.number} there, {current.number} here; "
            "expected a round that is not older; pull from the store, or go back on purpose "
            "(--back)"
        )


def _remove_older(target: RoundStore, current: CurrentRound, keep: int) -> tuple[str, ...]:
    """Removes rounds before the current one, but for the newest whole ones.

    The manifest goes first: a round without one is not a round. What is newer than the current
    round may be an upload under way, and stays.
    """
    rounds: dict[str, list[str]] = {}
    for name in target.sizes("rounds"):
        rounds.setdefault(name.split("/")[1], []).append(name)
    older = oldest_first(rounds, before=current.number)
    whole = [name for name in older if f"rounds/{name}/{MANIFEST}" in rounds[name]]
    kept = whole[max(0, len(whole) + 1 - keep) :]
    gone = [name for name in older if name not in kept]
    for name in gone:
        manifest = f"rounds/{name}/{MANIFEST}"
        target.delete(sorted(rounds[name], key=lambda item: item != manifest))
    return tuple(gone)


def fetch_round(
    url: str,
    directory: Path,
    *,
    store: StoreSettings | None = None,
    settings: MirrorSettings | None = None,
    progress: Progress | None = None,
) -> Moved:
    """Fetches the current round of a store into a rounds directory, and makes it current there.

    Segments that an earlier attempt has fetched are kept if they are undamaged. If the store holds
    something else than was pushed, the directory stays as it was.
    """
    settings = settings or MirrorSettings()
    source = open_store(url, store)
    current = stored_current(source)
    encoded = source.get(f"rounds/{current.round}/{MANIFEST}", MAX_BYTES)
    if (found := name_round(encoded, current.number)) != current.round:
        raise DamageError(
            f"the manifest of round {current.number} is damaged: got {found}; expected "
            f"{current.round}; push the round again"
        )
    files = _list_files(decode_round(encoded, current.number))
    with Publisher(directory):  # nobody else writes, and what a killed writer left is gone
        _refuse_older_pull(directory, current, settings)
        meter = _Meter(sum(f.size for f in files[0]) + sum(f.size for f in files[1]), progress)
        place = round_path(directory, current.round)
        if (place / MANIFEST).exists() and not settings.is_anew:
            meter.add(known=meter.total)
        else:
            part = _fetch_files(source, place, files, meter, settings.workers)
            with suppress(NotFoundError):  # a trainer need not sign
                signature = source.get(f"rounds/{current.round}/{SIGNATURE}", SIGNATURE_BYTES)
                write_file(part / SIGNATURE, signature, durable=True)
            write_file(part / MANIFEST, encoded, durable=True)
            _place_round(directory, part, place)
        write_current(directory, current, durable=True)
        removed = _remove_older_local(rounds_path(directory), current, settings.keep)
    return Moved(current.round, current.number, meter.moved, meter.known, removed)


def _fetch_files(
    source: RoundStore,
    place: Path,
    files: tuple[list[TreeFile], list[SegmentFile]],
    meter: _Meter,
    workers: int,
) -> Path:
    """Fetches trees, then segments, beside the rounds; returns where they are."""
    part = place.with_name(_PART + place.name)
    for path in place.parent.glob(_PART + "*"):
        if path != part:
            shutil.rmtree(path, ignore_errors=True)
    make_directory(part)
    for tree in files[0]:
        make_directory((part / tree.name).parent)

    def fetch(file: TreeFile | SegmentFile) -> None:
        with suppress(DamageError):  # an earlier attempt may have fetched it, whole
            file.check(part)
            meter.add(known=file.size)
            return
        name = f"rounds/{place.name}/{file.name}"
        _fetch_file(source, name, part / file.name, file.size, meter)
        file.check(part)

    _work_through(fetch, files[0], workers, meter)
    _work_through(fetch, files[1], workers, meter)
    return part


def _fetch_file(source: RoundStore, name: str, path: Path, size: int, meter: _Meter) -> None:
    """Fetches one file and waits until the disk has it; half a file does not stay."""
    chunks = source.stream(name, size)  # before any room is taken: is there such an object?
    with storage_errors(path, "write"), path.open("wb", buffering=0) as file:
        try:
            if size:  # a full disk shows before anything is fetched
                os.posix_fallocate(file.fileno(), 0, size)
            for chunk in chunks:
                write_all(file.fileno(), [chunk])
                meter.add(len(chunk))
            os.fsync(file.fileno())
        except BaseException:
            path.unlink(missing_ok=True)
            raise


def _place_round(directory: Path, part: Path, place: Path) -> None:
    """Gives a round its name once it is on the disk; services keep what they have open of it."""
    with storage_errors(place, "place"):
        for folder in (*part.glob("table-*"), part):
            sync_directory(folder)
        Shelf(directory).put(part, place)
        sync_directory(place.parent)


def _refuse_older_pull(directory: Path, current: CurrentRound, settings: MirrorSettings) -> None:
    found = read_current(directory)
    if found is not None and found.number > current.number and not settings.may_go_back:
        raise InputError(
            f"the directory has a newer round: got round {found.number} here, {current.number} in "
            "the store; expected a round that is not older; push to the store first, or go back on "
            "purpose (--back)"
        )


def _remove_older_local(rounds: Path, current: CurrentRound, keep: int) -> tuple[str, ...]:
    """Removes older rounds that no service holds."""
    older = oldest_first((path.name for path in rounds.iterdir()), before=current.number)
    gone = []
    for name in older[: max(0, len(older) + 1 - keep)]:
        with locked_manifest(rounds / name, fcntl.LOCK_EX) as lock:
            if lock is not None:
                remove_round(rounds / name)
                gone.append(name)
    return tuple(gone)
