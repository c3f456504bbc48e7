"""Importing: a source is read once, and its arrays, checksums and counts go to the cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from keyhole.data import cache
from keyhole.data.columns import write_clients, write_texts
from keyhole.data.readers.find import find_source
from keyhole.data.source import Progress, Source, bad_file, reading
from keyhole.errors import InputError

__all__ = ["find_imported", "import_source"]


def find_imported(path: Path, root: Path) -> Path | None:
    """Returns the directory of a dataset that was imported from this path and is still current.

    A file of the same path, size and time is taken to be the same: it is not read again.
    """
    origin = str(path.resolve())
    for directory, manifest in cache.manifests(root).items():
        if manifest.origin == origin and _is_current(path, manifest) and _is_whole(directory):
            return directory
    return None


def _is_current(path: Path, manifest: cache.Manifest) -> bool:
    """Whether the files are as they were; a directory may also have got another file."""
    if not all(map(_is_unchanged, manifest.sources)):
        return False
    if not path.is_dir():
        return True
    known = {file["path"] for file in manifest.sources}
    return known == {str(file.resolve()) for file in find_source(path).files}


def import_source(
    path: Path, source: Source, root: Path, progress: Progress, hashing: Progress
) -> Path:
    """Imports a source, unless the same bytes are in the cache already, from whatever path.

    In that case the manifest learns where and of what time they are now, so that the next opening
    need not read them.

    Args:
        path: where the source was found.
        source: what was found there.
        root: of the cache.
        progress: called as clients are read.
        hashing: called before, as bytes are hashed.

    Returns:
        the directory of the dataset.

    Raises:
        InputError: a file of the source is not whole, or not what it should be.
        StorageError: the disk refuses the cache.
    """
    from keyhole.server.files import storage_errors  # loads numba, which opening does not need

    files = _fingerprints(source.files, hashing)
    digest = _digest(files)
    origin = str(path.resolve())
    target = root / f"{source.name}-{digest[:16]}"
    with storage_errors(target, "write"), cache.workplace(root, target.name) as directory:
        if _is_whole(target):  # asked again: another process may have imported it meanwhile
            manifest = replace(cache.read_manifest(target), origin=origin, sources=files)
            cache.write_manifest(directory, target, manifest)
        else:
            splits, names = _write(directory, path, source, progress)
            manifest = cache.Manifest(
                name=source.name,
                kind=source.kind,
                origin=origin,
                sources=files,
                facts={**source.facts, "sha256": digest},
                splits=splits,
                names=names,
                files=_checksums(directory),
            )
            cache.publish(directory, target, manifest)
    return target


def _write(
    directory: Path, path: Path, source: Source, progress: Progress
) -> tuple[dict[str, dict[str, int]], list[str]]:
    """Writes all array files; returns the counts of the splits and what has names."""
    with _whole_characters(path):
        splits, names = write_clients(directory, source.kind, source.read(progress))
        if "train" not in splits:
            found = f"clients for {', '.join(splits) or 'nothing'}"
            raise bad_file(path, got=found, allowed="clients to train on")
        texts = {**source.names(), **names}
        for what, rows in texts.items():
            write_texts(directory, f"names.{what}", rows)
    return splits, list(texts)


@contextmanager
def _whole_characters(path: Path) -> Iterator[None]:
    """Refuses a text with half of a pair of surrogates, which JSON and NumPy can hold."""
    try:
        yield
    except UnicodeEncodeError as error:
        near = ascii(error.object[max(0, error.start - 20) : error.end + 20])
        allowed = "text of whole Unicode characters"
        raise bad_file(path, got=f"the text {near}", allowed=allowed) from error


def _checksums(directory: Path) -> dict[str, dict[str, Any]]:
    return {
        file.name: {"bytes": file.stat().st_size, "sha256": cache.hash_file(file)}
        for file in sorted(directory.iterdir())
    }


def _fingerprints(files: Sequence[Path], hashing: Progress) -> list[dict[str, Any]]:
    """Of each file its path, bytes, mtime_ns and sha256."""
    found, before = [_status(file) for file in files], 0
    total = sum(status["bytes"] for status in found)
    for file, status in zip(files, found, strict=True):
        status["sha256"] = cache.hash_file(file, partial(_add, hashing, before, total))
        before += status["bytes"]
    return found


def _status(file: Path) -> dict[str, Any]:
    with reading(file, "a file that can be read"):
        status = file.stat()
    size, time = status.st_size, status.st_mtime_ns
    return {"path": str(file.resolve()), "bytes": size, "mtime_ns": time}


def _add(hashing: Progress, before: int, total: int, done: int) -> None:
    """Tells of bytes of one file as bytes of all."""
    hashing(before + done, total)


def _digest(files: Sequence[Mapping[str, Any]]) -> str:
    """The checksum of the one file, or of the list of checksums."""
    if len(files) == 1:
        return str(files[0]["sha256"])
    lines = "".join(f"{file['sha256']}  {Path(file['path']).name}\n" for file in files)
    return sha256(lines.encode()).hexdigest()


def _is_unchanged(file: Mapping[str, Any]) -> bool:
    try:
        status = Path(file["path"]).stat()
    except OSError:
        return False
    return (status.st_size, status.st_mtime_ns) == (file["bytes"], file["mtime_ns"])


def _is_whole(directory: Path) -> bool:
    try:
        cache.read_manifest(directory)
    except InputError:
        return False
    return True
