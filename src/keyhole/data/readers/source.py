"""Describes what a reader makes of a file: a source that was found, and the clients it yields."""

from __future__ import annotations

import json
import lzma
import sqlite3
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

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


def _no_names() -> Mapping[str, Sequence[str]]:
    return {}


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
    names: Callable[[], Mapping[str, Sequence[str]]] = _no_names
    unit: Literal["bytes", "clients"] = "clients"


def bad_file(path: Path, *, got: object, allowed: object, fix: str = "") -> InputError:
    """Returns the error of a file that is not what it should be."""
    fix = fix or "get the file again, or choose another"
    return InputError(f"cannot use {path}: got {got}; expected {allowed}; {fix}")


_BROKEN = (
    OSError,
    EOFError,
    ValueError,
    KeyError,
    RuntimeError,
    lzma.LZMAError,
    zlib.error,
    zipfile.BadZipFile,
    json.JSONDecodeError,
    sqlite3.Error,
)


@contextmanager
def reading(path: Path, allowed: str) -> Iterator[None]:
    """Turns what libraries say about a broken file into one InputError that names it."""
    try:
        yield
    except _BROKEN as error:
        said = " ".join(str(error).split()) or type(error).__name__
        raise bad_file(path, got=said, allowed=allowed) from error


Kind: TypeAlias = Literal["writers", "posts", "ratings"]
"""What the examples are, and so which columns there are (see `Dataset`)."""
