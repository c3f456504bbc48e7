"""The array files of a dataset, written from the clients that a reader yields."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, cast

import numpy as np

from keyhole.data.federated import Kind
from keyhole.data.npy import ArrayFile, RaggedFile
from keyhole.data.source import Client, Examples, Post
from keyhole.data.texts import encode_texts
from keyhole.data.vocabulary import Lexicon, renumber_file
from keyhole.types import Array

__all__ = ["COLUMNS", "write_clients", "write_texts"]

COLUMNS: Mapping[Kind, Mapping[str, tuple[Any, tuple[int, ...] | None]]] = {
    "writers": {"pixels": (np.uint8, (28, 28)), "label": (np.uint8, ())},
    "posts": dict.fromkeys(("words", "title", "tags", "sentences"), (np.int32, None)),
    "ratings": {"item": (np.int32, ()), "half_stars": (np.uint8, ())},
}
"""For each kind: column -> dtype and shape of one row; None is a row of any length."""


def write_clients(
    directory: Path, kind: Kind, clients: Iterable[Client]
) -> tuple[dict[str, dict[str, int]], dict[str, list[str]]]:
    """Writes the array files of all splits; memory holds one client and the lexicon.

    A client has a place in the splits where it has examples, and in no other.

    Returns:
        split -> {"clients": how many, "examples": how many}, and the names of words and tags.
    """
    splits: dict[str, _Split] = {}
    words, tags = Lexicon(), Lexicon()
    try:
        for client in clients:
            present = {name: rows for name, rows in client.splits.items() if _num_rows(rows)}
            columns = _number(present, words, tags) if kind == "posts" else present
            for name, examples in columns.items():
                if name not in splits:
                    splits[name] = _Split(directory, name, kind)
                splits[name].add(client.client_id, cast("Mapping[str, Any]", examples))
    finally:
        for split in splits.values():
            split.close()
    counts = {name: split.sizes for name, split in splits.items()}
    if kind != "posts":
        return counts, {}
    return counts, _rank(directory, list(splits), words, tags)


def _num_rows(examples: Examples) -> int:
    return len(next(iter(examples.values())) if isinstance(examples, Mapping) else examples)


def write_texts(directory: Path, stem: str, texts: Sequence[str]) -> None:
    """Writes texts as a pair of array files."""
    rows = encode_texts(texts)  # before a file is open: it refuses half a character
    file = RaggedFile(directory, stem, np.uint8)
    file.append(rows.values, rows.lengths)
    file.close()


class _Split:
    """The array files of one split while clients are added."""

    def __init__(self, directory: Path, name: str, kind: Kind) -> None:
        self._ids = RaggedFile(directory, f"{name}.client_ids", np.uint8)
        self._offsets = ArrayFile(directory / f"{name}.offsets.npy", np.int64)
        self._offsets.append(np.zeros(1, np.int64))
        self._columns: dict[str, ArrayFile | RaggedFile] = {
            column: RaggedFile(directory, f"{name}.{column}", dtype)
            if shape is None
            else ArrayFile(directory / f"{name}.{column}.npy", dtype, shape)
            for column, (dtype, shape) in COLUMNS[kind].items()
        }
        self.sizes = {"clients": 0, "examples": 0}

    def add(self, client_id: str, examples: Mapping[str, Any]) -> None:
        """Appends the examples of one client; rows of unequal length are (values, lengths)."""
        counts = set()
        for name, file in self._columns.items():
            if isinstance(file, RaggedFile):
                file.append(*examples[name])
                counts.add(len(examples[name][1]))
            else:
                file.append(examples[name])
                counts.add(len(examples[name]))
        assert len(counts) == 1, "as many entries in each column"
        self.sizes["clients"] += 1
        self.sizes["examples"] += counts.pop()
        self._offsets.append(np.array([self.sizes["examples"]]))
        text = encode_texts([client_id])
        self._ids.append(text.values, text.lengths)

    def close(self) -> None:
        """Finishes all files."""
        for file in (self._ids, self._offsets, *self._columns.values()):
            file.close()


def _number(
    splits: Mapping[str, Examples], words: Lexicon, tags: Lexicon
) -> dict[str, dict[str, tuple[Array, list[int]]]]:
    """Numbers the words and tags of one user's posts, and counts the user once for each.

    Words of titles get a number but no user: a title on an answer is somebody else's.
    """
    numbered = {}
    for name, examples in splits.items():
        posts = cast("Sequence[Post]", examples)
        numbered[name] = {
            "words": _flat([post.words for post in posts], words),
            "title": _flat([post.title for post in posts], words),
            "tags": _flat([post.tags for post in posts], tags),
            "sentences": _lengths(posts),
        }
    for column, lexicon in (("words", words), ("tags", tags)):
        parts = [columns[column][0] for columns in numbered.values()]
        lexicon.count_user(np.concatenate([np.empty(0, np.int32), *parts]))
    return numbered


def _flat(rows: Sequence[Sequence[str]], lexicon: Lexicon) -> tuple[Array, list[int]]:
    return lexicon.number(chain.from_iterable(rows)), [len(row) for row in rows]


def _lengths(posts: Sequence[Post]) -> tuple[Array, list[int]]:
    values = np.fromiter(chain.from_iterable(post.sentences for post in posts), np.int32)
    return values, [len(post.sentences) for post in posts]


def _rank(
    directory: Path, splits: Sequence[str], words: Lexicon, tags: Lexicon
) -> dict[str, list[str]]:
    """The second pass: provisional numbers on disk become ranks."""
    names = {}
    for what, lexicon, columns in (("words", words, ("words", "title")), ("tags", tags, ("tags",))):
        names[what], ranks = lexicon.rank()
        for split in splits:
            for column in columns:
                renumber_file(directory / f"{split}.{column}.values.npy", ranks)
    return names
