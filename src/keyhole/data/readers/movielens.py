"""MovieLens in one NumPy archive: one entry for each rating."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from keyhole.data.readers.npz import load_arrays, names_in
from keyhole.data.source import Client, Progress, Source, bad_file
from keyhole.types import Array

__all__ = ["find"]

_KINDS = {"user": "ui", "item": "ui", "half_stars": "ui", "timestamp": "ui", "item_title": "U"}
_MOST = 10  # half stars: five stars
_TEST_SHARE = 10  # the last tenth of a user's ratings
_FACTS = {
    "source": "MovieLens of GroupLens",
    "licence": "research use only, no commercial use (GroupLens)",
    "cite": "Harper & Konstan, The MovieLens Datasets: History and Context, ACM TiiS 5(4), 2015",
}


def find(path: Path) -> Source | None:
    """Returns the source at this path if it is such a file."""
    if path.suffix != ".npz" or not path.is_file() or "half_stars" not in names_in(path):
        return None
    names = partial(_names, path)
    return Source(path.stem, "ratings", (path,), _FACTS, partial(_read, path), names)


def _names(path: Path) -> Mapping[str, Sequence[str]]:
    return {"items": load_arrays(path, {"item_title": "U"})["item_title"].tolist()}


def _read(path: Path, progress: Progress) -> Iterator[Client]:
    arrays = load_arrays(path, _KINDS)
    _check(path, arrays)
    order = np.lexsort((arrays["timestamp"], arrays["user"]))  # stable: ties stay in file order
    users, starts = np.unique(arrays["user"][order], return_index=True)
    for number, at in enumerate(np.split(order, starts[1:])):
        yield Client(str(users[number]), _splits(arrays, at))
        progress(number + 1, len(users))


def _splits(arrays: Mapping[str, Array], at: Array) -> dict[str, dict[str, Array]]:
    """The ratings of one user, who goes to test with the last ones, one at least."""
    cut = len(at) - max(1, len(at) // _TEST_SHARE)
    parts = {"train": at[:cut], "test": at[cut:]}
    return {
        name: {"item": arrays["item"][part], "half_stars": arrays["half_stars"][part]}
        for name, part in parts.items()
        if len(part)
    }


def _check(path: Path, arrays: Mapping[str, Array]) -> None:
    lengths = {name: len(arrays[name]) for name in ("user", "item", "half_stars", "timestamp")}
    if len(set(lengths.values())) != 1 or 0 in lengths.values():
        raise bad_file(path, got=f"arrays of lengths {lengths}", allowed="one entry a rating")
    items, stars = arrays["item"], arrays["half_stars"]
    if items.min() < 0 or items.max() >= len(arrays["item_title"]):
        found = f"items from {items.min()} to {items.max()}"
        raise bad_file(path, got=found, allowed=f"{len(arrays['item_title'])} items")
    if stars.min() < 1 or stars.max() > _MOST:
        found = f"half stars from {stars.min()} to {stars.max()}"
        raise bad_file(path, got=found, allowed=f"1 to {_MOST}")
