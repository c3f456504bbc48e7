"""FEMNIST in one NumPy archive: images sorted by writer, a byte that says train or test."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from keyhole.data.readers.npz import load_arrays, names_in
from keyhole.data.readers.writers import class_names, to_examples
from keyhole.data.source import Client, Progress, Source, bad_file
from keyhole.types import Array

__all__ = ["find"]

_KINDS = {"images": "u", "labels": "ui", "client": "ui", "split": "ui", "writer": "U"}
_RANKS = {"images": (2, 3)}  # (n, 784) or (n, 28, 28)
_SPLITS = ("train", "test")
_FACTS = {
    "source": "FEMNIST of LEAF (Caldas et al. 2018): NIST Special Database 19 by writer",
    "licence": "public domain (NIST)",
}


def find(path: Path) -> Source | None:
    """Returns the source at this path if it is such a file."""
    if path.suffix != ".npz" or not path.is_file() or "images" not in names_in(path):
        return None
    return Source(path.stem, "writers", (path,), _FACTS, partial(_read, path), class_names)


def _read(path: Path, progress: Progress) -> Iterator[Client]:
    arrays = load_arrays(path, _KINDS, _RANKS)
    _check(path, arrays)
    writers = arrays["writer"]
    ends = np.searchsorted(arrays["client"], np.arange(len(writers)), side="right")
    start = 0
    for number, end in enumerate(ends.tolist()):
        yield Client(str(writers[number]), _splits(path, arrays, slice(start, end)))
        start = end
        progress(number + 1, len(writers))


def _splits(path: Path, arrays: dict[str, Array], at: slice) -> dict[str, dict[str, Array]]:
    """The examples of one writer by split; a split without any is left out."""
    images, labels, split = (arrays[name][at] for name in ("images", "labels", "split"))
    return {
        name: to_examples(path, images[split == code], labels[split == code])
        for code, name in enumerate(_SPLITS)
        if (split == code).any()
    }


def _check(path: Path, arrays: dict[str, Array]) -> None:
    lengths = {name: len(arrays[name]) for name in ("images", "labels", "client", "split")}
    if len(set(lengths.values())) != 1:
        raise bad_file(path, got=f"arrays of lengths {lengths}", allowed="one entry for each image")
    if len(set(arrays["writer"].tolist())) != len(arrays["writer"]):
        raise bad_file(path, got="a writer's name twice", allowed="each writer once")
    client, split = arrays["client"].astype(np.int64), arrays["split"]
    if (np.diff(client) < 0).any() or (len(client) and not 0 <= client[0] <= client[-1]):
        raise bad_file(path, got="clients out of order", allowed="images sorted by client")
    if len(client) and client[-1] >= len(arrays["writer"]):
        found = f"client {client[-1]} of {len(arrays['writer'])} writers"
        raise bad_file(path, got=found, allowed="clients below the number of writers")
    if not np.isin(split, (0, 1)).all():
        raise bad_file(path, got=f"split {split.max()}", allowed="0 for train, 1 for test")
