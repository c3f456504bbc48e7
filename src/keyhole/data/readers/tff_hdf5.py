"""TensorFlow Federated's HDF5 client files: EMNIST and Stack Overflow, one file for each split.

In each file the group "examples" holds a group for each client, and that a dataset for each column.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from keyhole.data.readers.stackoverflow import FACTS as POSTS_FACTS
from keyhole.data.readers.stackoverflow import to_post
from keyhole.data.readers.writers import TFF_FACTS as WRITERS_FACTS
from keyhole.data.readers.writers import class_names, to_examples
from keyhole.data.source import Client, Examples, Post, Progress, Source, bad_file, reading
from keyhole.errors import InputError

__all__ = ["find"]

_ENDINGS = {"train": "_train.h5", "validation": "_held_out.h5", "test": "_test.h5"}
_GROUP = "examples"
_WHOLE = "a whole HDF5 file of TensorFlow Federated"


def find(path: Path) -> Source | None:
    """Returns the source of which this path is one file, or the directory."""
    stem = _stem(path)
    if stem is None:
        return None
    files = {split: stem.with_name(stem.name + end) for split, end in _ENDINGS.items()}
    has_pixels = "pixels" in _columns(_existing(files["train"]))
    needed = ("train", "test") if has_pixels else ("train", "validation", "test")
    chosen = {split: _existing(files[split]) for split in needed}
    read = partial(_read, chosen, _to_writer if has_pixels else _to_posts)
    paths = tuple(chosen.values())
    if has_pixels:
        return Source(stem.name, "writers", paths, WRITERS_FACTS, read, class_names)
    return Source(stem.name, "posts", paths, POSTS_FACTS, read)


def _stem(path: Path) -> Path | None:
    """The common beginning of the files: fed_emnist of fed_emnist_test.h5."""
    if path.is_file():
        for end in _ENDINGS.values():
            if path.name.endswith(end):
                return path.with_name(path.name.removesuffix(end))
        return None
    trains = sorted(path.glob(f"*{_ENDINGS['train']}"))
    if len(trains) > 1:
        found = ", ".join(file.name for file in trains)
        raise bad_file(path, got=found, allowed="one dataset", fix="give the path of one file")
    return _stem(trains[0]) if trains else None


def _existing(path: Path) -> Path:
    if not path.is_file():
        fix = "put all files of the dataset in one folder"
        raise bad_file(path, got="no such file", allowed="a file for each split", fix=fix)
    return path


def _columns(path: Path) -> set[str]:
    """The columns of the first client."""
    with reading(path, _WHOLE), _h5py().File(path) as file:
        clients = _group(path, file, _GROUP)
        first = next(iter(clients), None)
        columns: set[str] = set() if first is None else set(_group(path, clients, first))
    if not columns & {"pixels", "tokens"}:
        raise bad_file(path, got=f"columns {sorted(columns)}", allowed="pixels or tokens")
    return columns


def _read(files: Mapping[str, Path], convert: Any, progress: Progress) -> Iterator[Client]:
    """Yields clients by name, each with all its splits: words are ranked by users."""
    with ExitStack() as stack:
        groups = {}
        for split, path in files.items():
            with reading(path, _WHOLE):
                groups[split] = _group(path, stack.enter_context(_h5py().File(path)), _GROUP)
        ids = {split: set(group) for split, group in groups.items()}
        everyone = sorted(set().union(*ids.values()))
        for done, client_id in enumerate(everyone, 1):
            splits = {}
            for split, path in files.items():
                if client_id in ids[split]:
                    with reading(path, _WHOLE):
                        splits[split] = convert(path, _group(path, groups[split], client_id))
            yield Client(client_id, splits)
            progress(done, len(everyone))


def _to_writer(path: Path, group: Any) -> Examples:
    pixels, labels = (_array(path, group, name)[()] for name in ("pixels", "label"))
    return to_examples(path, pixels, labels)


def _to_posts(path: Path, group: Any) -> Sequence[Post]:
    columns = [_texts(path, group, name) for name in ("tokens", "title", "tags")]
    if len({len(column) for column in columns}) != 1:
        found = f"{[len(column) for column in columns]} rows"
        raise bad_file(path, got=found, allowed="as many tokens as titles and tags")
    return [to_post(*row) for row in zip(*columns, strict=True)]


def _group(path: Path, parent: Any, name: str) -> Any:
    """The group of this name; HDF5 lets an array have the name as well."""
    found = parent[name]
    if not isinstance(found, _h5py().Group):
        raise bad_file(path, got=f"{name!a} that is no group", allowed=_WHOLE)
    return found


def _array(path: Path, group: Any, name: str) -> Any:
    """The array of this name, not read yet."""
    found = group[name]
    if not isinstance(found, _h5py().Dataset):
        raise bad_file(path, got=f"{name!a} that is no array", allowed=_WHOLE)
    return found


def _texts(path: Path, group: Any, name: str) -> list[str]:
    """The texts of a column. One text alone would be read letter by letter."""
    found = _array(path, group, name)
    if _h5py().check_string_dtype(found.dtype) is None:
        raise bad_file(path, got=f"{name} of {found.dtype}", allowed="an array of texts")
    if found.shape is None or len(found.shape) != 1:
        raise bad_file(path, got=f"{name} of shape {found.shape}", allowed="an array of rank 1")
    return [row.decode() for row in found[()]]


def _h5py() -> ModuleType:
    """Returns h5py, which is needed for these files alone."""
    try:
        return import_module("h5py")
    except ImportError as error:
        raise InputError(
            "HDF5 files need h5py",
            got="no package h5py",
            allowed="h5py of the extra tff",
            fix="run: pip install 'keyhole[tff]'",
        ) from error
