"""Reads FEMNIST and MovieLens from one NumPy archive each, checked before it is used.

FEMNIST has images sorted by writer and a byte that says train or test; MovieLens has one entry for
each rating.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from keyhole.arrays import Array
from keyhole.data.readers.source import (
    FEMNIST_FACTS,
    Progress,
    Source,
    SourceClient,
    bad_file,
    class_names,
    reading,
    to_examples,
)


def names_in(path: Path) -> set[str]:
    """Returns the names of the arrays in a .npz file without reading them."""
    with reading(path, "a whole .npz file"), zipfile.ZipFile(path) as archive:
        return {name.removesuffix(".npy") for name in archive.namelist()}


def load_arrays(
    path: Path, kinds: Mapping[str, str], ranks: Mapping[str, tuple[int, ...]] | None = None
) -> dict[str, Array]:
    """Returns arrays of a .npz file.

    Args:
        kinds: name -> the dtype kinds it may have, such as "ui" for whole numbers.
        ranks: name -> the ranks it may have, where that is not 1.
    """
    missing = sorted(kinds.keys() - names_in(path))
    if missing:
        raise bad_file(path, f"no array {', '.join(missing)}", f"{', '.join(kinds)}")
    with reading(path, "a whole .npz file"), np.load(path, allow_pickle=False) as archive:
        arrays = {name: archive[name] for name in kinds}
    for name, array in arrays.items():
        _check_array(path, name, array, kinds[name], (ranks or {}).get(name, (1,)))
    return arrays


def _check_array(path: Path, name: str, array: object, kinds: str, ranks: tuple[int, ...]) -> None:
    """Demands an array of one of these kinds and ranks."""
    if not isinstance(array, np.ndarray):  # a member of the archive that is no .npy file
        raise bad_file(path, f"{name} of {type(array).__name__}", "an array")
    if array.dtype.kind not in kinds:
        expected = " or ".join(_SAID[kind] for kind in kinds)
        raise bad_file(path, f"{name} of {array.dtype}", expected)
    if array.ndim not in ranks:
        expected = f"an array of rank {' or '.join(map(str, ranks))}"
        raise bad_file(path, f"{name} of shape {array.shape}", expected)


_SAID = {"u": "unsigned integers", "i": "integers", "U": "text", "b": "booleans"}


_WRITER_KINDS = {"images": "u", "labels": "ui", "client": "ui", "split": "ui", "writer": "U"}
_RANKS = {"images": (2, 3)}  # (n, 784) or (n, 28, 28)
_SPLITS = ("train", "test")


def find_femnist(path: Path) -> Source | None:
    """Returns the source at this path if it is such a file."""
    if path.suffix != ".npz" or not path.is_file() or "images" not in names_in(path):
        return None
    read = partial(_read_writers, path)
    return Source(path.stem, "writers", (path,), FEMNIST_FACTS, read, class_names)


def _read_writers(path: Path, progress: Progress) -> Iterator[SourceClient]:
    arrays = load_arrays(path, _WRITER_KINDS, _RANKS)
    _check_writers(path, arrays)
    writers = arrays["writer"]
    ends = np.searchsorted(arrays["client"], np.arange(len(writers)), side="right")
    start = 0
    for number, end in enumerate(ends.tolist()):
        yield SourceClient(str(writers[number]), _writer_splits(path, arrays, slice(start, end)))
        start = end
        progress(number + 1, len(writers))


def _writer_splits(path: Path, arrays: dict[str, Array], at: slice) -> dict[str, dict[str, Array]]:
    """The examples of one writer by split; a split without any is left out."""
    images, labels, split = (arrays[name][at] for name in ("images", "labels", "split"))
    return {
        name: to_examples(path, images[split == code], labels[split == code])
        for code, name in enumerate(_SPLITS)
        if (split == code).any()
    }


def _check_writers(path: Path, arrays: dict[str, Array]) -> None:
    lengths = {name: len(arrays[name]) for name in ("images", "labels", "client", "split")}
    if len(set(lengths.values())) != 1:
        raise bad_file(path, f"arrays of lengths {lengths}", "one entry for each image")
    if len(set(arrays["writer"].tolist())) != len(arrays["writer"]):
        raise bad_file(path, "a writer's name twice", "each writer once")
    client, split = arrays["client"].astype(np.int64), arrays["split"]
    if (np.diff(client) < 0).any() or (len(client) and not 0 <= client[0] <= client[-1]):
        raise bad_file(path, "clients out of order", "images sorted by client")
    if len(client) and client[-1] >= len(arrays["writer"]):
        found = f"client {client[-1]} of {len(arrays['writer'])} writers"
        raise bad_file(path, found, "clients below the number of writers")
    if not np.isin(split, (0, 1)).all():
        raise bad_file(path, f"split {split.max()}", "0 for train, 1 for test")


_RATING_KINDS = dict.fromkeys(("user", "item", "half_stars", "timestamp"), "ui")
_RATING_KINDS |= {"item_title": "U"}
_MAX = 10  # half stars: five stars
_TEST_SHARE = 10  # the last tenth of a user's ratings
_RATING_FACTS = {
    "source": "MovieLens of GroupLens",
    "licence": "research use only, no commercial use (GroupLens)",
    "cite": "Harper & Konstan, The MovieLens Datasets: History and Context, ACM TiiS 5(4), 2015",
}


def find_movielens(path: Path) -> Source | None:
    """Returns the source at this path if it is such a file."""
    if path.suffix != ".npz" or not path.is_file() or "half_stars" not in names_in(path):
        return None

    def names() -> Mapping[str, Sequence[str]]:
        return {"items": load_arrays(path, {"item_title": "U"})["item_title"].tolist()}

    return Source(path.stem, "ratings", (path,), _RATING_FACTS, partial(_read_ratings, path), names)


def _read_ratings(path: Path, progress: Progress) -> Iterator[SourceClient]:
    arrays = load_arrays(path, _RATING_KINDS)
    _check_ratings(path, arrays)
    order = np.lexsort((arrays["timestamp"], arrays["user"]))  # stable: ties stay in file order
    users, starts = np.unique(arrays["user"][order], return_index=True)
    for number, at in enumerate(np.split(order, starts[1:])):
        yield SourceClient(str(users[number]), _rating_splits(arrays, at))
        progress(number + 1, len(users))


def _rating_splits(arrays: Mapping[str, Array], at: Array) -> dict[str, dict[str, Array]]:
    """The ratings of one user, who goes to test with the last ones, one at least."""
    cut = len(at) - max(1, len(at) // _TEST_SHARE)
    parts = {"train": at[:cut], "test": at[cut:]}
    return {
        name: {"item": arrays["item"][part], "half_stars": arrays["half_stars"][part]}
        for name, part in parts.items()
        if len(part)
    }


def _check_ratings(path: Path, arrays: Mapping[str, Array]) -> None:
    lengths = {name: len(arrays[name]) for name in ("user", "item", "half_stars", "timestamp")}
    if len(set(lengths.values())) != 1 or 0 in lengths.values():
        raise bad_file(path, f"arrays of lengths {lengths}", "one entry a rating")
    items, stars = arrays["item"], arrays["half_stars"]
    if items.min() < 0 or items.max() >= len(arrays["item_title"]):
        found = f"items from {items.min()} to {items.max()}"
        raise bad_file(path, found, f"{len(arrays['item_title'])} items")
    if stars.min() < 1 or stars.max() > _MAX:
        found = f"half stars from {stars.min()} to {stars.max()}"
        raise bad_file(path, found, f"1 to {_MAX}")
