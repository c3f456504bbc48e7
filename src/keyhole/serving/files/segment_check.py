"""Whether the files of a segment are those that the manifest tells of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np

from keyhole.errors import DamageError
from keyhole.server.record_sums import sum_records
from keyhole.serving.files.slice_files import records_path, sums_path, table_path
from keyhole.serving.manifest import Manifest, SegmentInfo

__all__ = ["SUM_BYTES", "SegmentFiles", "check_records", "check_sums", "list_segments"]

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
    """Checks the file of sums against the manifest.

    Raises:
        DamageError: it is not the one that was published.
    """
    path = directory / files.sums
    _check_size(path, files.sizes[files.sums])
    if _digest(path) != files.info.sums_sha256:
        raise _damage(path, "another SHA-256", "that of the manifest")


def check_records(directory: Path, files: SegmentFiles) -> None:
    """Checks the records against their sums, which have been checked, and their digest if any.

    Raises:
        DamageError: a record differs.
    """
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
        f"{path.parent.name}/{path.name} is damaged",
        got=got,
        allowed=allowed,
        fix="publish, push or pull the round again",
    )
