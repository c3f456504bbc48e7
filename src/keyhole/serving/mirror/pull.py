"""Pulling: a round of an object store becomes one of a rounds directory, as on an edge replica.

Nothing that comes is believed: the manifest must give the round its name, sums must be those of the
manifest, and records must have those sums. Only then does the round get its place, and
`current.json` leads to it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from keyhole.errors import DamageError, InputError, StorageError
from keyhole.server.files import make_directory, storage_errors, sync_directory
from keyhole.serving.files.round_files import (
    CURRENT,
    MANIFEST,
    CurrentRound,
    locked_manifest,
    read_current,
    rounds_path,
    write_current,
    write_file,
)
from keyhole.serving.files.segment_check import (
    SegmentFiles,
    check_records,
    check_sums,
    list_segments,
)
from keyhole.serving.manifest import Manifest, decode_manifest, name_round
from keyhole.serving.mirror.moving import (
    Meter,
    MirrorSettings,
    Moved,
    Progress,
    decode_current,
    oldest_first,
    work_through,
)
from keyhole.serving.mirror.object_store import RoundStore, StoreSettings, open_store

__all__ = ["fetch_round"]

_MOST_MANIFEST = 256 << 20  # bytes: a million segments
_MOST_CURRENT = 1 << 16


def fetch_round(
    url: str,
    directory: Path,
    *,
    store: StoreSettings | None = None,
    settings: MirrorSettings | None = None,
    progress: Progress | None = None,
) -> Moved:
    """Fetches the current round of a store into a rounds directory, and makes it current there.

    Segments that an earlier attempt has fetched are kept if they are undamaged.

    Args:
        url: s3://bucket/prefix, file:///directory and the like.
        directory: a rounds directory; made if it is missing.
        store: how to reach the store.
        settings: how many rounds to keep in the directory, and so on.
        progress: is told of the bytes done, and of how many.

    Raises:
        NotFoundError: the store has no round.
        DamageError: what the store holds is not what was pushed; the directory is as it was.
        InputError: the URL or the credentials do not work, or the directory has a newer
            round.
        ServiceError: the store does not answer.
        StorageError: the disk refuses, or somebody else writes to the directory.
    """
    settings = settings or MirrorSettings()
    source = open_store(url, store)
    current = decode_current(source.get(CURRENT, _MOST_CURRENT), source.place)
    encoded = source.get(f"rounds/{current.round}/{MANIFEST}", _MOST_MANIFEST)
    manifest = _checked_manifest(encoded, current)
    make_directory(rounds_path(directory))
    with _only_writer(directory):
        _refuse_going_back(directory, current, settings)
        meter = _place_round(
            source, rounds_path(directory), current.round, encoded, manifest, settings, progress
        )
        write_current(directory, current, durable=True)
        removed = _remove_older(rounds_path(directory), current, settings.keep)
    return Moved(current.round, current.number, meter.moved, meter.known, removed)


def _place_round(
    source: RoundStore,
    rounds: Path,
    name: str,
    encoded: bytes,
    manifest: Manifest,
    settings: MirrorSettings,
    progress: Progress | None,
) -> Meter:
    """Fetches a round beside the others and renames it once it is whole and on the disk."""
    segments = list_segments(manifest)
    meter = Meter(sum(sum(files.sizes.values()) for files in segments), progress)
    place, new = rounds / name, rounds / f".new-{name}"
    if (place / MANIFEST).exists() and not settings.is_anew:
        meter.skip(meter.total)
        return meter
    _clear(rounds, but=new)
    for files in segments:
        make_directory((new / files.records).parent)

    def fetch(files: SegmentFiles) -> None:
        _fetch_segment(source, new, files, meter)

    work_through(fetch, segments, settings.workers, meter)
    write_file(new / MANIFEST, encoded, durable=True)
    with storage_errors(place, "place"):
        for folder in {(new / files.records).parent for files in segments}:
            sync_directory(folder)
        if place.exists():  # is_anew: services that serve the old files keep them until they look
            place.rename(rounds / f".old-{name}")
        new.rename(place)
        sync_directory(rounds)
    _clear(rounds)
    return meter


def _fetch_segment(source: RoundStore, new: Path, files: SegmentFiles, meter: Meter) -> None:
    try:
        check_sums(new, files)
        check_records(new, files)
    except DamageError:  # not there, or not whole
        pass
    else:
        meter.skip(sum(files.sizes.values()))
        return
    prefix = f"rounds/{new.name.removeprefix('.new-')}"
    _fetch_file(source, f"{prefix}/{files.sums}", new / files.sums, files, meter)
    check_sums(new, files)
    _fetch_file(source, f"{prefix}/{files.records}", new / files.records, files, meter)
    check_records(new, files)


def _fetch_file(
    source: RoundStore, name: str, path: Path, files: SegmentFiles, meter: Meter
) -> None:
    """Fetches one file and waits until the disk has it."""
    size = files.sizes[files.sums if path.suffix == ".sum" else files.records]
    with storage_errors(path, "write"), path.open("wb") as file:
        if size:  # a full disk shows before anything is fetched
            os.posix_fallocate(file.fileno(), 0, size)
        for chunk in source.stream(name, size):
            file.write(chunk)
            meter.add(len(chunk))
        file.flush()
        os.fsync(file.fileno())


def _checked_manifest(encoded: bytes, current: CurrentRound) -> Manifest:
    if name_round(encoded, current.number) != current.round:
        raise DamageError(
            f"the manifest of round {current.number} is damaged",
            got=name_round(encoded, current.number),
            allowed=current.round,
            fix="push the round again",
        )
    return decode_manifest(encoded)


def _refuse_going_back(directory: Path, current: CurrentRound, settings: MirrorSettings) -> None:
    found = read_current(directory)
    if found is not None and found.number > current.number and not settings.may_go_back:
        raise InputError(
            "the directory has a newer round",
            got=f"round {found.number} here, {current.number} in the store",
            allowed="a round that is not older",
            fix="push to the store first, or go back on purpose (--back)",
        )


@contextmanager
def _only_writer(directory: Path) -> Iterator[None]:
    with storage_errors(directory, "lock"), (directory / "publisher.lock").open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StorageError(
                f"{directory.name} has a publisher already",
                got="its lock",
                allowed="one publisher or pull at a time",
                fix="wait for it to end",
            ) from error
        yield


def _remove_older(rounds: Path, current: CurrentRound, keep: int) -> tuple[str, ...]:
    """Removes older rounds that no service holds."""
    older = oldest_first((path.name for path in rounds.iterdir()), before=current.number)
    gone = [name for name in older[: max(0, len(older) + 1 - keep)] if _take_away(rounds / name)]
    _clear(rounds)
    return tuple(gone)


def _take_away(place: Path) -> bool:
    """Renames a round that no service holds, so that none can open it any more."""
    with locked_manifest(place, fcntl.LOCK_EX) as lock:
        if lock is not None:
            place.rename(place.with_name(f".old-{place.name}"))
        return lock is not None


def _clear(rounds: Path, but: Path | None = None) -> None:
    """Removes what no name leads to: rounds taken away, and attempts at other rounds."""
    for path in [*rounds.glob(".old-*"), *rounds.glob(".new-*")]:
        if path != but:
            shutil.rmtree(path, ignore_errors=True)
