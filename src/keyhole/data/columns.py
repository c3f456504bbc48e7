"""Writes the arrays of a dataset row by row, and numbers words by how many users use them.

Words get a number when they are first met, so text can go to disk before the ranking is known; a
second pass over the numbers on disk puts the ranks in their place. Memory holds the words that
differ, never the text.

Many short texts lie in two arrays, so that names of words and clients can stay on disk.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, product
from pathlib import Path
from typing import Any, cast, overload
from urllib.parse import quote

import numpy as np
from numpy.lib import format as npy_format

from keyhole.arrays import Array
from keyhole.data.federated import Dataset, Ragged
from keyhole.data.readers.source import Examples, Kind, Post, SourceClient


class Texts(Sequence[str]):
    """A list of texts that are decoded when they are asked for.

    Args:
        rows: the UTF-8 bytes of each text, uint8.

    >>> names = Texts(encode_texts(["the", "naïve", ""]))
    >>> len(names), names[1], names[:2]
    (3, 'naïve', ['the', 'naïve'])
    """

    def __init__(self, rows: Ragged) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, at: int) -> str: ...
    @overload
    def __getitem__(self, at: slice) -> list[str]: ...
    def __getitem__(self, at: int | slice) -> str | list[str]:
        """Text `at`, or the texts of a slice as a list."""
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        number = at + len(self) if at < 0 else at
        if not 0 <= number < len(self):
            raise IndexError(f"text {at} of {len(self)}")  # what ends a loop over a sequence
        return bytes(self._rows[number]).decode()


def encode_texts(texts: Iterable[str]) -> Ragged:
    """Returns the UTF-8 bytes of each text."""
    encoded = [text.encode() for text in texts]
    offsets = np.zeros(len(encoded) + 1, np.int64)
    np.cumsum([len(text) for text in encoded], out=offsets[1:])
    return Ragged(np.frombuffer(b"".join(encoded), np.uint8), offsets)


_BUFFER = 1 << 20  # bytes; clients are small, so most appends do not reach the disk


class ArrayFile:
    """Appends rows to a .npy file; memory does not grow with the rows.

    Args:
        row_shape: the shape of one row, () for an array of rank 1.
    """

    def __init__(self, path: Path, dtype: Any, row_shape: tuple[int, ...] = ()) -> None:
        self.rows = 0
        self._dtype = np.dtype(dtype)
        self._row_shape = row_shape
        self._file = path.open("xb", buffering=_BUFFER)
        self._write_header()

    def append(self, rows: Array) -> None:
        """Adds rows at the end."""
        block = np.ascontiguousarray(rows, self._dtype)
        assert block.shape[1:] == self._row_shape, "rows of one shape"
        self._file.write(block.tobytes())
        self.rows += len(block)

    def close(self) -> None:
        """Writes the true length into the header, which has room for any."""
        if self._file.closed:
            return
        self._file.seek(0)
        self._write_header()
        self._file.close()

    def _write_header(self) -> None:
        descr = npy_format.dtype_to_descr(self._dtype)
        shape = (self.rows, *self._row_shape)
        header = {"descr": descr, "fortran_order": False, "shape": shape}
        npy_format.write_array_header_1_0(self._file, header)


class RaggedFile:
    """Appends rows of unequal length to a pair of .npy files: `stem.values`, `stem.offsets`."""

    def __init__(self, directory: Path, stem: str, dtype: Any) -> None:
        self._values = ArrayFile(directory / f"{stem}.values.npy", dtype)
        self._offsets = ArrayFile(directory / f"{stem}.offsets.npy", np.int64)
        self._offsets.append(np.zeros(1, np.int64))

    def append(self, values: Array, lengths: Array | list[int]) -> None:
        """Adds rows: their values one after the other, and the length of each."""
        ends = self._values.rows + np.cumsum(np.asarray(lengths, np.int64))
        assert len(values) == (ends[-1] - self._values.rows if len(ends) else 0)
        self._values.append(values)
        self._offsets.append(ends)

    def close(self) -> None:
        """Finishes both files."""
        self._values.close()
        self._offsets.close()


_BLOCK = 1 << 22  # numbers that are renumbered at a time


class Lexicon:
    """The words met so far and the number of users of each.

    >>> lexicon = Lexicon()
    >>> for text in ("b a", "c a a"):  # two users
    ...     lexicon.count_user(lexicon.number(text.split()))
    >>> words, ranks = lexicon.rank()
    >>> words, ranks.tolist()  # "b" came first and is second now
    (['a', 'b', 'c'], [1, 0, 2])
    """

    def __init__(self) -> None:
        self._numbers = _Numbers()
        self._users = np.zeros(1024, np.int64)

    def number(self, words: Iterable[str]) -> Array:
        """Returns the provisional number of each word, int32; new words get the next ones."""
        return np.fromiter(map(self._numbers.__getitem__, words), np.int32)

    def count_user(self, numbers: Array) -> None:
        """Counts one user for each different number: all that one user has written."""
        if len(self._numbers) > len(self._users):
            self._users = np.pad(self._users, (0, len(self._numbers)))
        self._users[np.unique(numbers)] += 1

    def rank(self) -> tuple[list[str], Array]:
        """Returns the words by falling number of users, then by alphabet; and the place of each."""
        words = list(self._numbers)
        users = self._users.tolist()
        order = sorted(range(len(words)), key=lambda i: (-users[i], words[i]))
        ranks = np.empty(len(words), np.int32)
        ranks[order] = np.arange(len(words), dtype=np.int32)
        return [words[i] for i in order], ranks


class _Numbers(dict[str, int]):
    """Gives a word that is not there the next number."""

    def __missing__(self, word: str) -> int:
        self[word] = number = len(self)
        return number


def renumber_file(path: Path, ranks: Array, block: int = _BLOCK) -> None:
    """Replaces every number in a .npy file by its rank, in place and block by block."""
    numbers = np.load(path, mmap_mode="r+")
    for start in range(0, len(numbers), block):
        numbers[start : start + block] = ranks[numbers[start : start + block]]
    numbers.flush()


COLUMNS: Mapping[Kind, Mapping[str, tuple[Any, tuple[int, ...] | None]]] = {
    "writers": {"pixels": (np.uint8, (28, 28)), "label": (np.uint8, ())},
    "posts": dict.fromkeys(("words", "title", "tags", "sentences"), (np.int32, None)),
    "ratings": {"item": (np.int32, ()), "half_stars": (np.uint8, ())},
}
"""For each kind: column -> dtype and shape of one row; None is a row of any length."""


def write_clients(
    directory: Path, kind: Kind, clients: Iterable[SourceClient]
) -> tuple[dict[str, dict[str, int]], dict[str, list[str]]]:
    """Writes the array files of all splits; memory holds one client and the lexicon.

    A client has a place in the splits where it has examples, and in no other.
    """
    splits: dict[str, _Split] = {}
    words, tags = Lexicon(), Lexicon()
    try:
        for client in clients:
            present = {
                name: rows
                for name, rows in client.splits.items()
                if len(next(iter(rows.values())) if isinstance(rows, Mapping) else rows)
            }
            columns = _number(present, words, tags) if kind == "posts" else present
            for name, examples in columns.items():
                if name not in splits:
                    splits[name] = _Split(directory, name, kind)
                splits[name].add(client.client_id, cast("Mapping[str, Any]", examples))
    finally:
        for split in splits.values():
            split.close()
    names = {}
    if kind == "posts":  # the second pass: provisional numbers on disk become ranks
        numbered = ("words", words, ("words", "title")), ("tags", tags, ("tags",))
        for what, lexicon, within in numbered:
            names[what], ranks = lexicon.rank()
            for part, column in product(splits, within):
                renumber_file(directory / f"{part}.{column}.values.npy", ranks)
    return {name: split.sizes for name, split in splits.items()}, names


def write_texts(directory: Path, stem: str, texts: Sequence[str]) -> None:
    """Writes texts as a pair of array files."""
    rows = encode_texts(texts)  # before a file is open: it refuses half a character
    file = RaggedFile(directory, stem, np.uint8)
    file.append(rows.values, rows.lengths)
    file.close()


def file_stem(split: str, column: str) -> str:
    """Returns how the files of a column begin; a column may have any name.

    >>> file_stem("train", "item"), file_stem("train", "a/b.values"), file_stem("test", "offsets")
    ('train.item', 'train.a%2Fb%2Evalues', 'test.%offsets')
    """
    escaped = quote(column, safe=" ").replace(".", "%2E")
    return f"{split}.%{escaped}" if escaped in ("client_ids", "offsets") else f"{split}.{escaped}"


def write_dataset(directory: Path, dataset: Dataset) -> dict[str, dict[str, int]]:
    """Writes the array files of data that are in memory; returns the counts of the splits."""
    for split, found in dataset.splits.items():
        data = found.compact()
        write_texts(directory, f"{split}.client_ids", data.client_ids)
        np.save(directory / f"{split}.offsets.npy", np.append(data.starts, data.num_examples))
        for name, column in data.columns.items():
            stem = file_stem(split, name)
            if isinstance(column, Ragged):
                np.save(directory / f"{stem}.values.npy", column.values)
                np.save(directory / f"{stem}.offsets.npy", column.offsets)
            else:
                np.save(directory / f"{stem}.npy", column)
    return {
        split: {"clients": len(data), "examples": data.num_examples}
        for split, data in dataset.splits.items()
    }


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
            "sentences": (
                np.fromiter(chain.from_iterable(post.sentences for post in posts), np.int32),
                [len(post.sentences) for post in posts],
            ),
        }
    for column, lexicon in (("words", words), ("tags", tags)):
        parts = [columns[column][0] for columns in numbered.values()]
        lexicon.count_user(np.concatenate([np.empty(0, np.int32), *parts]))
    return numbered


def _flat(rows: Sequence[Sequence[str]], lexicon: Lexicon) -> tuple[Array, list[int]]:
    return lexicon.number(chain.from_iterable(rows)), [len(row) for row in rows]
