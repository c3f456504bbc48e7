"""Describes what a reader makes of a file: a source that was found, and the clients it yields.

All files of handwriting have 62 characters and images of 28 x 28 pixels; they are checked here.
"""

from __future__ import annotations

import lzma
import sqlite3
import string
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from keyhole.arrays import Array
from keyhole.errors import InputError

Progress: TypeAlias = Callable[[int, int], None]
"""Called as work goes on with what is done and how much there is, in clients or bytes."""


@dataclass(frozen=True)
class Post:
    """One text as words.

    Args:
        sentences: the length of each sentence; they add up to the number of words.
    """

    words: Sequence[str]
    sentences: Sequence[int]
    title: Sequence[str]
    tags: Sequence[str]


Examples: TypeAlias = Mapping[str, Array] | Sequence[Post]
"""Examples of one client: arrays by column, or posts."""


@dataclass(frozen=True)
class SourceClient:
    """All that a source holds of one client.

    Args:
        splits: "train", "validation" or "test" -> its examples there.
    """

    client_id: str
    splits: Mapping[str, Examples]


@dataclass(frozen=True)
class Source:
    """Files that one reader knows, found but not read yet.

    Args:
        facts: "source", "licence" and whatever else explains the data.
        read: yields its clients. A client of posts comes once, with all its splits, because words
            are ranked by users.
        names: what numbers stand for, where the files say so.
        unit: what progress counts, "clients" or "bytes".
    """

    name: str
    kind: Kind
    files: tuple[Path, ...]
    facts: Mapping[str, str]
    read: Callable[[Progress], Iterator[SourceClient]]
    names: Callable[[], Mapping[str, Sequence[str]]] = dict
    unit: Literal["bytes", "clients"] = "clients"


def bad_file(
    path: Path, got: object, allowed: object, fix: str = "get the file again, or choose another"
) -> InputError:
    """Returns the error of a file that is not what it should be."""
    return InputError(f"cannot use {path}: got {got}; expected {allowed}; {fix}")


_BUILT_IN = OSError, EOFError, ValueError, KeyError, RuntimeError
_BROKEN = *_BUILT_IN, lzma.LZMAError, zlib.error, zipfile.BadZipFile, sqlite3.Error


@contextmanager
def reading(path: Path, allowed: str) -> Iterator[None]:
    """Turns what libraries say about a broken file into one InputError that names it."""
    try:
        yield
    except _BROKEN as error:
        said = " ".join(str(error).split()) or type(error).__name__
        raise bad_file(path, said, allowed) from error


Kind: TypeAlias = Literal["writers", "posts", "ratings"]
"""What the examples are, and so which columns there are (see `Dataset`)."""


CLASSES = string.digits + string.ascii_uppercase + string.ascii_lowercase
"""The character of each label, as in LEAF and TensorFlow Federated."""

FEMNIST_FACTS = {
    "source": "FEMNIST of LEAF (Caldas et al. 2018): NIST Special Database 19 by writer",
    "licence": "public domain (NIST)",
}
TFF_FACTS = {
    "source": "Federated EMNIST of TensorFlow Federated: NIST Special Database 19 by writer",
    "licence": "public domain (NIST)",
}

_SIDE = 28


def class_names() -> Mapping[str, Sequence[str]]:
    """Returns the names of labels for a dataset of writers."""
    return {"classes": list(CLASSES)}


def to_examples(path: Path, pixels: Any, labels: Any) -> dict[str, Array]:
    """Returns columns of one writer from what a file holds.

    Args:
        pixels: (n, 28, 28) or (n, 784), uint8, or floats from 0 (ink) to 1 (paper).
        labels: (n,) whole numbers below 62.

    >>> to_examples(Path("f"), np.ones((1, 784)), [3])["pixels"][0, 0, :2].tolist()
    [255, 255]
    """
    images, classes = _array(path, pixels), _array(path, labels).reshape(-1)
    if images.size != len(classes) * _SIDE * _SIDE or len(images) != len(classes):
        expected = f"an image of {_SIDE} x {_SIDE} for each label"
        raise bad_file(path, f"{images.shape} for {len(classes)} labels", expected)
    if classes.dtype.kind not in "iu" or not _within(classes, len(CLASSES) - 1):
        raise bad_file(path, _range(classes, "labels"), "whole numbers from 0 to 61")
    return {
        "pixels": _to_bytes(path, images).reshape(-1, _SIDE, _SIDE),
        "label": classes.astype(np.uint8),
    }


def _array(path: Path, values: Any) -> Array:
    try:
        array = np.asarray(values)
    except ValueError:  # rows of unequal length
        array = np.empty(0, object)
    if array.dtype.kind not in "iufb" or array.ndim == 0:
        raise bad_file(path, "images or labels that are no array", "arrays of numbers")
    return array


def _to_bytes(path: Path, images: Array) -> Array:
    """Floats from 0 to 1 become bytes from 0 to 255."""
    if images.dtype == np.uint8:
        return images
    if not _within(images, 1):
        raise bad_file(path, _range(images, "pixels"), "floats from 0 to 1")
    return np.rint(images * 255.0).astype(np.uint8)


def _within(values: Array, limit: float) -> bool:
    """NaN is not within."""
    return values.size == 0 or bool((values.min() >= 0) & (values.max() <= limit))


def _range(values: Array, what: str) -> str:
    return f"{what} of {values.dtype} from {values.min()} to {values.max()}"
