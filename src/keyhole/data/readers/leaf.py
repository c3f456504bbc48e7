"""Reads LEAF's FEMNIST: a directory with train/*.json and test/*.json.

A file holds "users", "num_samples", and "user_data": user -> {"x": images, "y": labels}.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from keyhole.data.readers.source import (
    Progress,
    Source,
    SourceClient,
    bad_file,
    class_names,
    reading,
    to_examples,
)

_SPLITS = ("train", "test")
_FACTS = {
    "source": "FEMNIST of LEAF (Caldas et al. 2018): NIST Special Database 19 by writer",
    "licence": "public domain (NIST)",
}


def find_leaf(path: Path) -> Source | None:
    """Returns the source of which this path is one file, or the directory."""
    files = _in_directory(path) if path.is_dir() else _beside(path)
    if files is None:
        return None
    for split in _SPLITS:
        if not files[split]:
            fix = "make both with LEAF's preprocess.sh"
            raise bad_file(path, f"no {split} file", "JSON files of both", fix=fix)
    everything = tuple(file for split in _SPLITS for file in files[split])
    read = partial(_read, files)
    return Source(_name(path), "writers", everything, _FACTS, read, class_names, "bytes")


def _in_directory(path: Path) -> dict[str, list[Path]] | None:
    if not any((path / split).is_dir() for split in _SPLITS):
        return None
    return {split: sorted((path / split).glob("*.json")) for split in _SPLITS}


def _beside(path: Path) -> dict[str, list[Path]] | None:
    """A file named for one split, and the one named alike for the other."""
    if path.suffix != ".json":
        return None
    for ours, other in (_SPLITS, _SPLITS[::-1]):
        if ours in path.name:
            partner = path.with_name(path.name.replace(ours, other))
            return {ours: [path], other: [partner] if partner.is_file() else []}
    return None


def _name(path: Path) -> str:
    """LEAF calls the directory `data`; its parent has the name of the dataset."""
    resolved = path.resolve()
    return (resolved.parent if resolved.name == "data" else resolved).stem


def _read(files: Mapping[str, Sequence[Path]], progress: Progress) -> Iterator[SourceClient]:
    total = sum(file.stat().st_size for split in _SPLITS for file in files[split])
    done = 0
    for split in _SPLITS:
        seen: set[str] = set()
        for file in files[split]:
            for user, examples in _users(file):
                if user in seen:
                    raise bad_file(file, f"writer {user} twice", "each writer once")
                seen.add(user)
                yield SourceClient(user, {split: examples})
            done += file.stat().st_size
            progress(done, total)


def _users(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields the writers of one file."""
    with reading(file, "a whole JSON file of LEAF"):
        content = json.loads(file.read_bytes(), parse_float=_Floats().__getitem__)
    if not _is_leaf(content):
        expected = "users, num_samples and user_data that agree"
        raise bad_file(file, "a JSON file of another shape", expected)
    for user, count in zip(content["users"], content["num_samples"], strict=True):
        data = content["user_data"].get(user)
        if not _is_user(data, count):
            raise bad_file(file, f"another number for {user}", f"{count} examples")
        if count:  # no images have no shape to check
            yield user, to_examples(file, data["x"], data["y"])


def _is_leaf(content: Any) -> bool:
    return (
        isinstance(content, dict)
        and isinstance(content.get("users"), list)
        and isinstance(content.get("num_samples"), list)
        and isinstance(content.get("user_data"), dict)
        and len(content["users"]) == len(content["num_samples"])
        and all(isinstance(user, str) for user in content["users"])
    )


def _is_user(data: Any, count: Any) -> bool:
    return (
        isinstance(data, dict)
        and isinstance(data.get("x"), list)
        and isinstance(data.get("y"), list)
        and len(data["y"]) == count
    )


class _Floats(dict[str, float]):
    """One object for each different float: pixels have 256 values, and a file millions of them."""

    def __missing__(self, text: str) -> float:
        self[text] = value = float(text)
        return value
