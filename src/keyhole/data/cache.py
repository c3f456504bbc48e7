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
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from keyhole.arrays import Array
from keyhole.data.columns import (
    COLUMNS,
    Texts,
    file_stem,
    write_clients,
    write_dataset,
    write_texts,
)
from keyhole.data.federated import Column, Dataset, FederatedData, Ragged
from keyhole.data.own import OWN
from keyhole.data.readers import archives, json_files, tff
from keyhole.data.readers.source import Progress, Source, bad_file, reading
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


TABLES = (".csv", ".jsonl", ".npz", ".parquet")
"""Files of your own that `import_own` takes."""


def find_source(path: Path) -> Source:
    """Returns the source at a path, found but not read."""
    for find in FORMATS.values():
        if (source := find(path)) is not None:
            return source
    fix = "see docs/data.md for the names of the files"
    if path.suffix in TABLES:
        fix = f"if it is a table of your own: keyhole data import {path.name} --client COLUMN"
    if path.suffix == ".lzma":
        fix = f"unpack it first: unlzma {path.name}"
    if path.is_dir():
        inside = sorted(file.name for file in path.iterdir())[:3]
        found = f"a directory of {', '.join(inside) or 'nothing'}"
    else:
        found = f"a file of no known format, {path.stat().st_size} bytes"
    raise bad_file(path, found, ", ".join(FORMATS), fix=fix)


VERSION = 2
"""Version of the layout of the files; another version is imported again."""

_AGAIN = "import the source again: keyhole data import"
_PIECE = 1 << 20  # bytes read at a time for a checksum


@dataclass(frozen=True)
class DatasetManifest:
    """What a directory of the cache holds.

    Args:
        sources: for each file of the source its path, bytes, mtime_ns and sha256.
        splits: split -> how many clients and examples.
        files: array file -> its bytes and sha256.
        columns: column -> whether its rows are of unequal length.
        inputs: as in `Dataset`, and so is `target`.
    """

    name: str
    kind: str
    origin: str
    sources: Sequence[Mapping[str, Any]]
    facts: Mapping[str, str]
    splits: Mapping[str, Mapping[str, int]]
    names: Sequence[str]
    files: Mapping[str, Mapping[str, Any]]
    columns: Mapping[str, bool]
    inputs: Mapping[str, str]
    target: str | None
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
    except (TypeError, RecursionError) as error:
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
        "kind": manifest.kind in [*COLUMNS, OWN],  # a list can be asked for what has no hash
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
        "columns": isinstance(manifest.columns, dict)
        and all(isinstance(is_ragged, bool) for is_ragged in manifest.columns.values()),
        "inputs": isinstance(manifest.inputs, dict)
        and manifest.inputs.keys() <= set(manifest.columns)
        and all(isinstance(space, str) for space in manifest.inputs.values()),
        "target": manifest.target is None or isinstance(manifest.target, str),
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
    splits = {split: _open_split(directory, manifest.columns, split) for split in manifest.splits}
    names = {
        what: Texts(_open_ragged(directory, file_stem("names", what))) for what in manifest.names
    }
    said = manifest.facts, manifest.inputs, manifest.target
    return Dataset(manifest.name, manifest.kind, splits, names, *said)


def _open_split(directory: Path, kinds: Mapping[str, bool], split: str) -> FederatedData:
    columns: dict[str, Column] = {}
    for name, is_ragged in kinds.items():
        stem = file_stem(split, name)
        columns[name] = (
            _open_ragged(directory, stem) if is_ragged else _open(directory / f"{stem}.npy")
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


DECLARED = "declared"
"""The fact that says what a file of your own was said to hold: client, inputs, target, split."""


def find_imported(path: Path, root: Path, declared: str | None = None) -> Path | None:
    """Returns the directory of a dataset that was imported from this path and is still current, of
    several the latest; only one that was `declared` so, where that is given.

    A file of the same path, size and time is taken to be the same: it is not read again.
    """
    origin = str(path.resolve())
    found = [
        directory
        for directory, manifest in manifests(root).items()
        if manifest.origin == origin
        and (declared is None or manifest.facts.get(DECLARED) == declared)
        and _is_current(path, manifest)
        and _is_whole(directory)
    ]
    return max(found, key=lambda directory: directory.stat().st_mtime, default=None)


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


@dataclass(frozen=True)
class _Written:
    """What array files hold that were written."""

    kind: str
    facts: Mapping[str, str]
    splits: Mapping[str, Mapping[str, int]]
    names: Sequence[str]
    columns: Mapping[str, bool]
    inputs: Mapping[str, str] = field(default_factory=dict)
    target: str | None = None


def import_source(
    path: Path, source: Source, root: Path, progress: Progress, hashing: Progress
) -> Path:
    """Imports a source, unless the same bytes are in the cache already, from whatever path.

    In that case the manifest learns where and of what time they are now, so that the next opening
    need not read them. `hashing` is called before `progress`, as bytes are hashed.
    """

    def write(directory: Path, digest: str) -> _Written:
        splits, named = write_clients(directory, source.kind, source.read(progress))
        if "train" not in splits:
            found = f"clients for {', '.join(splits) or 'nothing'}"
            raise bad_file(path, found, "clients to train on")
        names = {**source.names(), **named}
        _write_names(directory, names)
        columns = {name: shape is None for name, (_, shape) in COLUMNS[source.kind].items()}
        facts = {**source.facts, "sha256": digest}
        return _Written(source.kind, facts, splits, list(names), columns)

    return _keep(path, source.files, source.name, "", root, hashing, write)


def import_own(
    path: Path,
    name: str,
    declared: str,
    read: Callable[[], Dataset],
    root: Path,
    hashing: Progress,
) -> Path:
    """Imports a file of your own, unless its bytes are in the cache and were declared the same."""

    def write(directory: Path, digest: str) -> _Written:
        made = read()
        splits = write_dataset(directory, made)
        _write_names(directory, made.names)
        kinds = made.splits["train"].columns
        columns = {each: isinstance(column, Ragged) for each, column in kinds.items()}
        facts = {**made.facts, DECLARED: declared}
        return _Written(
            made.kind, facts, splits, list(made.names), columns, made.inputs, made.target
        )

    return _keep(path, (path,), name, declared, root, hashing, write)


def _keep(
    path: Path,
    sources: Sequence[Path],
    name: str,
    declared: str,
    root: Path,
    hashing: Progress,
    write: Callable[[Path, str], _Written],
) -> Path:
    """The directory of a dataset, which `write` fills where it is not whole."""
    files = _fingerprints(sources, hashing)
    digest = _digest(files)
    origin = str(path.resolve())
    told = sha256(f"{digest} {declared}".encode()).hexdigest() if declared else digest
    target = root / f"{name}-{told[:16]}"
    with storage_errors(target, "write"), workplace(root, target.name) as directory:
        if _is_whole(target):  # asked again: another process may have imported it meanwhile
            manifest = replace(read_manifest(target), origin=origin, sources=files)
            _write_manifest(directory, target, manifest)
            return target
        with _whole_characters(path):
            written = write(directory, digest)
        hashes = {
            file.name: {"bytes": file.stat().st_size, "sha256": hash_file(file)}
            for file in sorted(directory.iterdir())
        }
        manifest = DatasetManifest(
            name=name, origin=origin, sources=files, files=hashes, **vars(written)
        )
        _write_manifest(directory, directory, manifest)
        if target.exists():  # damaged
            target.rename(_old(directory))
        directory.rename(target)
    return target


def _write_names(directory: Path, names: Mapping[str, Sequence[str]]) -> None:
    for what, rows in names.items():
        write_texts(directory, file_stem("names", what), rows)


@contextmanager
def _whole_characters(path: Path) -> Iterator[None]:
    """Names the file where a text holds half of a pair of surrogates, as JSON and NumPy may."""
    try:
        yield
    except UnicodeEncodeError as error:
        near = ascii(error.object[max(0, error.start - 20) : error.end + 20])
        allowed = "text of whole Unicode characters"
        raise bad_file(path, f"the text {near}", allowed) from error


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
