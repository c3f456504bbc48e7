"""Opens a dataset by path or by name in the folder KEYHOLE_DATA, or makes one from a seed.

A file is imported the first time that it is opened.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from inspect import signature
from pathlib import Path
from typing import Any, Literal

from keyhole.data import cache as store
from keyhole.data.cache import find_imported, find_source, import_source
from keyhole.data.federated import Dataset
from keyhole.data.posts import make_posts
from keyhole.data.readers.source import Progress, bad_file
from keyhole.data.synthetic import make_ratings
from keyhole.data.tables import from_files
from keyhole.data.writers import make_writers
from keyhole.errors import InputError

SHARED = {
    "femnist": "femnist.npz",
    "femnist_mini": "femnist_mini.npz",
    "movielens_small": "movielens_small.npz",
    "stackexchange": "stackexchange.jsonl.xz",
    "stackexchange_mini": "stackexchange_mini.jsonl.xz",
}
"""Files that go by a bare name: name -> the file in the folder KEYHOLE_DATA."""


def data_folder() -> Path | None:
    """Returns the folder that the environment variable KEYHOLE_DATA names."""
    folder = os.environ.get("KEYHOLE_DATA")
    return Path(folder) if folder else None


def locate(source: str | Path) -> Path:
    """Returns the path of a source; a bare name is looked up in the folder KEYHOLE_DATA only."""
    name, folder = str(source), data_folder()
    if name in SHARED and folder is None:
        raise InputError(
            f"no dataset {name!r}: got no environment variable KEYHOLE_DATA; expected the folder "
            f"that holds {SHARED[name]}; set KEYHOLE_DATA, give the path of a file, or make it "
            f"from public files: keyhole data make {name} FROM (docs/data.md says from which)"
        )
    path = folder / SHARED[name] if folder and name in SHARED else Path(source)
    if name in SHARED and not path.exists():
        raise InputError(
            f"no dataset {name!r}: got no file {path}; expected one; make it from public files: "
            f"keyhole data make {name} FROM (docs/data.md says from which), or leave --data out "
            "for synthetic data"
        )
    if not path.exists():
        raise InputError(
            f"no dataset {name!r}: got no file {path}; expected a path, an imported dataset, or "
            f"one of {', '.join(SHARED)}; give the path of a file, or a name of `keyhole data list`"
        )
    return path


def open_dataset(
    source: str | Path, *, cache: Path | None = None, progress: Progress | None = None
) -> Dataset:
    """Opens client data from any file we can read; the first time it is imported to the cache.

    Args:
        source: a file or directory of a known format, or the bare name of a file in the folder
            KEYHOLE_DATA, such as "femnist"; where there is no such file, the name of an imported
            dataset, of several the latest.
        cache: the folder of imported data, else `cache_root()`.
        progress: called with what is done and how much there is while data is imported.

    Returns:
        a dataset whose arrays are memory maps.

    Raises:
        InputError: there is no such file, or it is not whole.
        StorageError: the disk refuses the cache.
    """
    return store.load(import_dataset(source, cache=cache, progress=progress))


def import_dataset(
    source: str | Path,
    *,
    cache: Path | None = None,
    progress: Progress | None = None,
    hashing: Progress | None = None,
) -> Path:
    """Returns the directory of a dataset in the cache, which is made where it is missing.
    `hashing` is called with the bytes that are hashed and how many there are, before `progress`."""
    root = cache or store.cache_root()
    if (found := find_current(source, root)) is not None:
        return found
    path = locate(source)
    tell, tell_hashing = (each or (lambda done, total: None) for each in (progress, hashing))
    return import_source(path, find_source(path), root, tell, tell_hashing)


@dataclass(frozen=True)
class OwnFile:
    """A table of your own in a file, and what its columns are, as in `from_files`.

    Args:
        share: of the examples or clients that are held out to test on.
        by: how, as in `Dataset.hold_out`, with the column of times `time`.
        name: of the dataset; None for that of the file.
    """

    path: Path
    client: str
    inputs: Mapping[str, str]
    target: str | None = None
    share: float = 0.1
    by: Literal["client", "time", "within"] = "client"
    time: str | None = None
    name: str | None = None

    @property
    def called(self) -> str:
        """The name of the dataset."""
        return self.name or self.path.name.partition(".")[0]

    @property
    def declared(self) -> str:
        """All that decides what is kept, beside the bytes of the file."""
        keys = ", ".join(f"{column} = {space}" for column, space in self.inputs.items())
        time = f" of {self.time}" if self.time else ""
        return (
            f"client {self.client}; inputs {keys or 'none'}; target {self.target or 'none'}; "
            f"{self.share:g} held out by {self.by}{time}"
        )

    def read(self, progress: Progress | None = None) -> Dataset:
        """Reads the file and splits its examples."""
        said: dict[str, Any] = {"client": self.client, "inputs": self.inputs, "target": self.target}
        made = from_files(self.path, name=self.called, progress=progress, **said)
        return made.hold_out(self.share, self.by, column=self.time)


def import_table(
    own: OwnFile,
    *,
    cache: Path | None = None,
    progress: Progress | None = None,
    hashing: Progress | None = None,
) -> tuple[Path, bool]:
    """Returns the directory of a table of your own in the cache, and whether it was there."""
    root, quiet = cache or store.cache_root(), lambda done, total: None
    if not own.path.is_file() or own.path.suffix not in store.TABLES:
        what = f"a name that ends in {own.path.suffix!r}" if own.path.is_file() else "no such file"
        expected = f"a file that ends in {', '.join(store.TABLES)}"
        raise bad_file(own.path, what, expected, fix="convert it, or name another")
    if set(own.called) & set("/\\:\0") or own.called.startswith("."):
        raise InputError(
            f"a dataset cannot be called so: got {own.called!r}; expected a name without / and :; "
            "choose another"
        )
    if (found := find_imported(own.path, root, own.declared)) is not None and (
        store.read_manifest(found).name == own.called
    ):
        return found, True
    made = store.import_own(
        own.path, own.called, own.declared, lambda: own.read(progress), root, hashing or quiet
    )
    return made, False


def find_current(source: str | Path, root: Path) -> Path | None:
    """Returns the directory of a dataset that need not be imported, if there is one.

    A file comes first, since it may have changed; without one it is what has this name.
    """
    try:
        path = locate(source)
    except InputError:
        if (named := _find_named(source, root)) is None:
            raise
        return named
    return find_imported(path, root)


def list_datasets(cache: Path | None = None) -> list[store.DatasetManifest]:
    """Returns what is imported, by name."""
    return list(store.manifests(cache or store.cache_root()).values())


def find_dataset(source: str | Path, *, cache: Path | None = None) -> Path:
    """Returns the directory of a dataset that is imported already, by its name, of several the
    latest, or its source."""
    root = cache or store.cache_root()
    found = _find_named(source, root) or find_imported(locate(source), root)
    if found is None:
        raise InputError(
            f"{source} is not imported: got a file that was not read yet, or has changed since; "
            f"expected an imported dataset; run: keyhole data import {source}"
        )
    return found


def verify(source: str | Path, *, cache: Path | None = None) -> store.DatasetManifest:
    """Computes the checksums of an imported dataset again, and of the files it came from.

    Returns:
        what was verified. Files of the source that are gone are left out.

    Raises:
        InputError: it is not imported, or a file is not what it was.
    """
    return store.verify(find_dataset(source, cache=cache))


def _find_named(source: str | Path, root: Path) -> Path | None:
    """The latest import of this name."""
    named = [d for d, manifest in store.manifests(root).items() if manifest.name == str(source)]
    return max(named, key=lambda d: d.stat().st_mtime) if named else None


GENERATOR = "1"
"""Version of the makers: raised when the same arguments give other bytes."""

_MAKERS: dict[str, Callable[..., Dataset]] = {
    "writers": make_writers,
    "posts": make_posts,
    "ratings": make_ratings,
}


SYNTHETIC_KINDS = tuple(_MAKERS)
"""Kinds of data that `make_synthetic` makes."""


def make_synthetic(kind: str, seed: int, **sizes: int) -> Dataset:
    """Returns the dataset named "synthetic" of a kind.

    Args:
        kind: "writers", "posts" or "ratings".
        seed: 0 or more.
        sizes: such as `users`; see `make_writers`, `make_posts` and `make_ratings`.

    Returns:
        a dataset whose facts have the seed, every size and the version of the generator, so that
        datasets that differ in an argument differ in their facts.

    Raises:
        InputError: there is no such kind or size, or a size is out of range.

    >>> make_synthetic("ratings", 7, users=3).kind
    'ratings'
    >>> make_synthetic("ratings", 7, movies=3)
    Traceback (most recent call last):
    keyhole.errors.InputError: synthetic ratings have no such size: got movies; expected ...
    """
    if kind not in _MAKERS:
        raise InputError(
            f"no such kind of synthetic data: got {kind!r}; expected {', '.join(_MAKERS)}; choose "
            "one of them"
        )
    allowed = [name for name in signature(_MAKERS[kind]).parameters if name != "seed"]
    unknown = sorted(sizes.keys() - set(allowed))
    if unknown:
        raise InputError(
            f"synthetic {kind} have no such size: got {', '.join(unknown)}; expected "
            f"{', '.join(allowed)}; name one of these or none"
        )
    made = _MAKERS[kind](seed, **sizes)
    given = signature(_MAKERS[kind]).bind(seed, **sizes)
    given.apply_defaults()
    arguments = {name: str(value) for name, value in given.arguments.items()}
    return replace(made, facts={**made.facts, **arguments, "generator": GENERATOR})
