"""Imports datasets once and keeps them on disk: a directory of arrays and a manifest for each.

A directory appears under its name when it is whole: it is built in `.work` and renamed. So a killed
import leaves nothing that could be mistaken for a dataset; the next import removes it.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from keyhole.arrays import Array
from keyhole.data.columns import COLUMNS, Texts, write_clients, write_texts
from keyhole.data.federated import Column, Dataset, FederatedData, Ragged
from keyhole.data.readers import archives, json_files, tff
from keyhole.data.readers.source import Kind, Progress, Source, bad_file, reading
from keyhole.errors import InputError
from keyhole.files import storage_errors

FORMATS = {
    "FEMNIST .npz": archives.find_femnist,
    "MovieLens .npz": archives.find_movielens,
    "Stack Exchange .jsonl.xz": json_files.find_stackexchange,
    "TensorFlow Federated _train.h5": tff.find_hdf5,
    "TensorFlow Federated .sqlite": tff.find_sqlite,
    "LEAF .json": json_files.find_leaf,
}
"""Each returns the source at a path, or None if it does not know what is there."""


def find_source(path: Path) -> Source:
    """Returns the source at a path, found but not read."""
    for find in FORMATS.values():
        if (source := find(path)) is not None:
            return source
    fix = "see docs/data.md for the names of the files"
    if path.suffix == ".lzma":
        fix = f"unpack it first: unlzma {path.name}"
    if path.is_dir():
        inside = sorted(file.name for file in path.iterdir())[:3]
        found = f"a directory of {', '.join(inside) or 'nothing'}"
    else:
        found = f"a file of no known format, {path.stat().st_size} bytes"
    raise bad_file(path, found, ", ".join(FORMATS), fix=fix)


VERSION = 1
"""Of the layout of the files; another version is imported again."""

_AGAIN = "import the source again: keyhole data import"
_PIECE = 1 << 20  # bytes read at a time for a checksum


@dataclass(frozen=True)
class DatasetManifest:
    """What a directory of the cache holds.

    Args:
        sources: for each file of the source its path, bytes, mtime_ns and sha256.
        splits: split -> how many clients and examples.
        files: array file -> its bytes and sha256.
    """

    name: str
    kind: Kind
    origin: str
    sources: Sequence[Mapping[str, Any]]
    facts: Mapping[str, str]
    splits: Mapping[str, Mapping[str, int]]
    names: Sequence[str]
    files: Mapping[str, Mapping[str, Any]]
    version: int = VERSION

    @property
    def num_bytes(self) -> int:
        """Bytes of all array files."""
        return sum(int(file["bytes"]) for file in self.files.values())


def cache_root() -> Path:
    """Returns the folder of imported datasets: KEYHOLE_CACHE, or keyhole in the user's cache."""
    if chosen := os.environ.get("KEYHOLE_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "keyhole"


def hash_file(path: Path, on_piece: Callable[[int], None] | None = None) -> str:
    """Returns the SHA-256 of a file; `on_piece` is told how many bytes are done."""
    digest, done = sha256(), 0
    with reading(path, "a file that can be read"), path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
            done += len(piece)
            if on_piece is not None:
                on_piece(done)
    return digest.hexdigest()


@contextmanager
def workplace(root: Path, key: str) -> Iterator[Path]:
    """Gives an empty directory to build in, to one process at a time; it is gone afterwards."""
    work = root / ".work"
    work.mkdir(parents=True, exist_ok=True)
    with _locked(work / f"{key}.lock", wait=True):
        _sweep(work)
        directory = work / key
        _clear(directory)
        directory.mkdir()
        try:
            yield directory
        finally:
            _clear(directory)


def _write_manifest(directory: Path, target: Path, manifest: DatasetManifest) -> None:
    """Puts a manifest in the place of a dataset's own at once; it is written in `directory`."""
    written = directory / "manifest.json.new"
    written.write_text(json.dumps(asdict(manifest), indent=1))
    written.replace(target / "manifest.json")


def _old(directory: Path) -> Path:
    """Where a damaged dataset goes when another takes its place."""
    return directory.with_name(f"{directory.name}.old")


def _clear(directory: Path) -> None:
    """Removes a workplace, and what it has replaced."""
    for path in (directory, _old(directory)):
        shutil.rmtree(path, ignore_errors=True)


def manifests(root: Path) -> dict[Path, DatasetManifest]:
    """Returns the manifests of all datasets in a cache, by directory; others are passed over."""
    found = {}
    for path in sorted(root.glob("[!.]*/manifest.json")):
        with suppress(OSError, ValueError):
            found[path.parent] = _parse(path.read_text())
    return found


def read_manifest(directory: Path) -> DatasetManifest:
    """Returns the manifest of one dataset, after a look at the size of every file."""
    with reading(directory / "manifest.json", f"a manifest of version {VERSION}; {_AGAIN}"):
        manifest = _parse((directory / "manifest.json").read_text())
    for name, file in manifest.files.items():
        path = directory / name
        size = path.stat().st_size if path.exists() else "no file"
        if size != file["bytes"]:
            raise bad_file(path, f"{size}", f"{file['bytes']} bytes", fix=_AGAIN)
    return manifest


def _parse(text: str) -> DatasetManifest:
    """The manifest in a text; ValueError where it is something else."""
    try:
        manifest = DatasetManifest(**json.loads(text))
    except TypeError as error:
        raise ValueError("fields of something else") from error
    if manifest.version != VERSION:
        raise ValueError(f"version {manifest.version}")
    if wrong := [name for name, is_right in _fields(manifest).items() if not is_right]:
        raise ValueError(f"another content of {', '.join(wrong)}")
    return manifest


def _fields(manifest: DatasetManifest) -> dict[str, bool]:
    """Whether each field holds what is read from it."""
    sources, splits, files = manifest.sources, manifest.splits, manifest.files
    return {
        "name": isinstance(manifest.name, str),
        "kind": manifest.kind in list(COLUMNS),  # a list can be asked for what has no hash
        "origin": isinstance(manifest.origin, str),
        "sources": isinstance(sources, list)
        and all(_holds(file, path=str, bytes=int, mtime_ns=int, sha256=str) for file in sources),
        "facts": _holds(manifest.facts, licence=str, sha256=str)
        and all(isinstance(fact, str) for fact in manifest.facts.values()),
        "splits": _holds(splits, train=dict)
        and all(_holds(sizes, clients=int, examples=int) for sizes in splits.values()),
        "names": isinstance(manifest.names, list)
        and all(isinstance(what, str) for what in manifest.names),
        "files": isinstance(files, dict)
        and all(_holds(file, bytes=int, sha256=str) for file in files.values()),
    }


def _holds(found: object, **kinds: type) -> bool:
    """Whether this is an object of JSON with these members."""
    return isinstance(found, dict) and all(
        isinstance(found.get(name), kind) for name, kind in kinds.items()
    )


def verify(directory: Path) -> DatasetManifest:
    """Computes the checksums of a dataset again, and of the files it came from that are there;
    returns its manifest."""
    manifest = read_manifest(directory)
    again = f"import it again: keyhole data import {manifest.origin}"
    files = [(directory / name, file["sha256"], _AGAIN) for name, file in manifest.files.items()]
    sources = [(Path(file["path"]), file["sha256"], again) for file in manifest.sources]
    for path, expected, fix in files + [source for source in sources if source[0].exists()]:
        if (found := hash_file(path)) != expected:
            raise bad_file(path, f"sha256 {found}", expected, fix=fix)
    return manifest


def load(directory: Path) -> Dataset:
    """Opens a dataset; arrays are memory maps, read as they are used."""
    manifest = read_manifest(directory)
    splits = {split: _open_split(directory, manifest.kind, split) for split in manifest.splits}
    names = {what: Texts(_open_ragged(directory, f"names.{what}")) for what in manifest.names}
    return Dataset(manifest.name, manifest.kind, splits, names, manifest.facts)


def _open_split(directory: Path, kind: Kind, split: str) -> FederatedData:
    columns: dict[str, Column] = {}
    for name, (_, shape) in COLUMNS[kind].items():
        stem = f"{split}.{name}"
        columns[name] = (
            _open_ragged(directory, stem) if shape is None else _open(directory / f"{stem}.npy")
        )
    offsets = _open(directory / f"{split}.offsets.npy")
    ids = Texts(_open_ragged(directory, f"{split}.client_ids"))
    return FederatedData(ids, offsets[:-1], offsets[1:], columns)


def _open_ragged(directory: Path, stem: str) -> Ragged:
    values, offsets = (_open(directory / f"{stem}.{part}.npy") for part in ("values", "offsets"))
    return Ragged(values, offsets)


def _open(path: Path) -> Array:
    """A plain array over the map: slices of it are arrays like any other."""
    with reading(path, "a whole .npy file"):
        return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))


def _sweep(work: Path) -> None:
    """Removes what killed imports have left: directories whose lock nobody holds."""
    for directory in [path for path in work.iterdir() if path.is_dir()]:
        with _locked(work / f"{directory.name.removesuffix('.old')}.lock", wait=False) as is_ours:
            if is_ours:
                shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def _locked(path: Path, wait: bool) -> Iterator[bool]:
    """Holds a lock that ends with the process; says whether it was had."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def find_imported(path: Path, root: Path) -> Path | None:
    """Returns the directory of a dataset that was imported from this path and is still current.

    A file of the same path, size and time is taken to be the same: it is not read again.
    """
    origin = str(path.resolve())
    for directory, manifest in manifests(root).items():
        if manifest.origin == origin and _is_current(path, manifest) and _is_whole(directory):
            return directory
    return None


def _is_current(path: Path, manifest: DatasetManifest) -> bool:
    """Whether the files are as they were; a directory may also have got another file."""
    for file in manifest.sources:
        try:
            status = Path(file["path"]).stat()
        except OSError:
            return False
        if (status.st_size, status.st_mtime_ns) != (file["bytes"], file["mtime_ns"]):
            return False
    known = {file["path"] for file in manifest.sources}
    return not path.is_dir() or known == {str(f.resolve()) for f in find_source(path).files}


def import_source(
    path: Path, source: Source, root: Path, progress: Progress, hashing: Progress
) -> Path:
    """Imports a source, unless the same bytes are in the cache already, from whatever path.

    In that case the manifest learns where and of what time they are now, so that the next opening
    need not read them. `hashing` is called before `progress`, as bytes are hashed.
    """
    files = _fingerprints(source.files, hashing)
    digest = _digest(files)
    origin = str(path.resolve())
    target = root / f"{source.name}-{digest[:16]}"
    with storage_errors(target, "write"), workplace(root, target.name) as directory:
        if _is_whole(target):  # asked again: another process may have imported it meanwhile
            manifest = replace(read_manifest(target), origin=origin, sources=files)
            _write_manifest(directory, target, manifest)
        else:
            splits, names = _write(directory, path, source, progress)
            manifest = DatasetManifest(
                name=source.name,
                kind=source.kind,
                origin=origin,
                sources=files,
                facts={**source.facts, "sha256": digest},
                splits=splits,
                names=names,
                files={
                    file.name: {"bytes": file.stat().st_size, "sha256": hash_file(file)}
                    for file in sorted(directory.iterdir())
                },
            )
            _write_manifest(directory, directory, manifest)
            if target.exists():  # damaged
                target.rename(_old(directory))
            directory.rename(target)
    return target


def _write(
    directory: Path, path: Path, source: Source, progress: Progress
) -> tuple[dict[str, dict[str, int]], list[str]]:
    """Writes all array files; returns the counts of the splits and what has names."""
    try:
        splits, names = write_clients(directory, source.kind, source.read(progress))
        if "train" not in splits:
            found = f"clients for {', '.join(splits) or 'nothing'}"
            raise bad_file(path, found, "clients to train on")
        texts = {**source.names(), **names}
        for what, rows in texts.items():
            write_texts(directory, f"names.{what}", rows)
    except UnicodeEncodeError as error:  # half of a pair of surrogates, which JSON and NumPy hold
        near = ascii(error.object[max(0, error.start - 20) : error.end + 20])
        allowed = "text of whole Unicode characters"
        raise bad_file(path, f"the text {near}", allowed) from error
    return splits, list(texts)


def _fingerprints(files: Sequence[Path], hashing: Progress) -> list[dict[str, Any]]:
    """Of each file its path, bytes, mtime_ns and sha256."""
    found: list[dict[str, Any]] = []
    for path in files:
        with reading(path, "a file that can be read"):
            status = path.stat()
        size, time = status.st_size, status.st_mtime_ns
        found.append({"path": str(path.resolve()), "bytes": size, "mtime_ns": time})
    total, before = sum(file["bytes"] for file in found), 0
    for path, file in zip(files, found, strict=True):

        def tell(done: int, start: int = before) -> None:
            hashing(start + done, total)

        file["sha256"] = hash_file(path, tell)
        before += file["bytes"]
    return found


def _digest(files: Sequence[Mapping[str, Any]]) -> str:
    """The checksum of the one file, or of the list of checksums."""
    if len(files) == 1:
        return str(files[0]["sha256"])
    lines = "".join(f"{file['sha256']}  {Path(file['path']).name}\n" for file in files)
    return sha256(lines.encode()).hexdigest()


def _is_whole(directory: Path) -> bool:
    try:
        read_manifest(directory)
    except InputError:
        return False
    return True
