"""Pulls a round of an object store into a rounds directory, as on an edge replica.

Nothing that comes is believed: the manifest must give the round its name, sums must be those of the
manifest, and records must have those sums. Only then does the round get its place, and
`current.json` leads to it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path

from keyhole.errors import DamageError, InputError
from keyhole.files import make_directory, storage_errors, sync_directory, write_all
from keyhole.service.directory import (
    MANIFEST,
    CurrentRound,
    Shelf,
    locked_manifest,
    read_current,
    round_path,
    rounds_path,
    write_current,
    write_file,
)
from keyhole.service.mirror import (
    Meter,
    MirrorSettings,
    Moved,
    oldest_first,
    stored_current,
    work_through,
)
from keyhole.service.object_store import RoundStore, StoreSettings, open_store
from keyhole.service.publishing import Publisher
from keyhole.service.segments import (
    Progress,
    SegmentFiles,
    check_records,
    check_sums,
    list_segments,
)
from keyhole.wire.manifest import MAX_BYTES, Manifest, decode_manifest, name_round

_PART = ".part-"  # a round of which something has been fetched; the next attempt goes on with it


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
        InputError: the URL or the credentials do not work, the directory has a newer round, or
            the manifest is of another version.
        ServiceError: the store does not answer.
        StorageError: the disk refuses, or somebody else writes to the directory.
    """
    settings = settings or MirrorSettings()
    source = open_store(url, store)
    current = stored_current(source)
    encoded = source.get(f"rounds/{current.round}/{MANIFEST}", MAX_BYTES)
    manifest = _checked_manifest(encoded, current)
    with Publisher(directory):  # nobody else writes, and what a killed writer left is gone
        _refuse_going_back(directory, current, settings)
        segments = list_segments(manifest)
        meter = Meter(sum(sum(files.sizes.values()) for files in segments), progress)
        place = round_path(directory, current.round)
        if (place / MANIFEST).exists() and not settings.is_anew:
            meter.skip(meter.total)
        else:
            part = _fetch_segments(source, place, segments, meter, settings.workers)
            write_file(part / MANIFEST, encoded, durable=True)
            _put(directory, part, place)
        write_current(directory, current, durable=True)
        removed = _remove_older(rounds_path(directory), current, settings.keep)
    return Moved(current.round, current.number, meter.moved, meter.known, removed)


def _fetch_segments(
    source: RoundStore, place: Path, segments: list[SegmentFiles], meter: Meter, workers: int
) -> Path:
    """Fetches all segments beside the rounds; returns where they are."""
    part = place.with_name(_PART + place.name)
    for path in place.parent.glob(_PART + "*"):
        if path != part:
            shutil.rmtree(path, ignore_errors=True)
    make_directory(part)
    for files in segments:
        make_directory((part / files.records).parent)

    def fetch(files: SegmentFiles) -> None:
        if _is_fetched(part, files):
            meter.skip(sum(files.sizes.values()))
            return
        prefix = f"rounds/{place.name}"
        for name, check in ((files.sums, check_sums), (files.records, check_records)):
            _fetch_file(source, f"{prefix}/{name}", part / name, files.sizes[name], meter)
            check(part, files)

    work_through(fetch, segments, workers, meter)
    return part


def _is_fetched(part: Path, files: SegmentFiles) -> bool:
    """Whether an earlier attempt has fetched the segment, whole."""
    try:
        check_sums(part, files)
        check_records(part, files)
    except DamageError:
        return False
    return True


def _fetch_file(source: RoundStore, name: str, path: Path, size: int, meter: Meter) -> None:
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


def _put(directory: Path, part: Path, place: Path) -> None:
    """Gives a round its name once it is on the disk; services keep what they have open of it."""
    with storage_errors(place, "place"):
        for folder in (*part.glob("table-*"), part):
            sync_directory(folder)
        Shelf(directory).put(part, place)
        sync_directory(place.parent)


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


def _remove_older(rounds: Path, current: CurrentRound, keep: int) -> tuple[str, ...]:
    """Removes older rounds that no service holds."""
    older = oldest_first((path.name for path in rounds.iterdir()), before=current.number)
    surplus = older[: max(0, len(older) + 1 - keep)]
    return tuple(name for name in surplus if _remove(rounds / name))


def _remove(place: Path) -> bool:
    """Removes a round if no service holds it; without its name none can open it any more."""
    with locked_manifest(place, fcntl.LOCK_EX) as lock:
        if lock is None:
            return False
        gone = place.with_name(f".old-{place.name}")
        place.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)
        return True
