"""TensorFlow Federated's SQLite client files: emnist_all.sqlite and stackoverflow.sqlite.

Table `examples` has split_name, client_id and serialized_example_proto; table `client_metadata` has
client_id, split_name and num_examples.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from keyhole.data.readers.stackoverflow import FACTS as POSTS_FACTS
from keyhole.data.readers.stackoverflow import to_post
from keyhole.data.readers.tf_example import Feature, decode_example
from keyhole.data.readers.writers import TFF_FACTS as WRITERS_FACTS
from keyhole.data.readers.writers import class_names, to_examples
from keyhole.data.source import Client, Examples, Progress, Source, bad_file, reading

__all__ = ["find"]

_WHOLE = "a whole SQLite file of TensorFlow Federated"
# EMNIST comes with digits alone and with all 62 characters; the paper has all.
_SPLITS = {"all_train": "train", "all_test": "test"}
_SPLITS |= {"train": "train", "heldout": "validation", "held_out": "validation", "test": "test"}
_COUNTS = "SELECT client_id, split_name, num_examples FROM client_metadata"
_WANTED = ("pixels", "label", "tokens", "title", "tags")
# In the order of the index on client_id, so that no split is sorted or held in memory.
_EXAMPLES = (
    "SELECT client_id, split_name, serialized_example_proto FROM examples ORDER BY client_id, rowid"
)


def find(path: Path) -> Source | None:
    """Returns the source at this path if it is such a file."""
    if path.suffix != ".sqlite" or not path.is_file():
        return None
    with reading(path, _WHOLE), closing(_connect(path)) as connection:
        row = connection.execute("SELECT serialized_example_proto FROM examples").fetchone()
    features = decode_example(row[0], path) if row else {}
    if "pixels" in features:
        read = partial(_read, path, _to_writer)
        return Source(path.stem, "writers", (path,), WRITERS_FACTS, read, class_names)
    if "tokens" in features:
        return Source(path.stem, "posts", (path,), POSTS_FACTS, partial(_read, path, _to_posts))
    raise bad_file(path, got=f"features {sorted(features)}", allowed="pixels or tokens")


def _connect(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"file:{quote(str(path.resolve()))}?mode=ro", uri=True)


def _read(path: Path, convert: Any, progress: Progress) -> Iterator[Client]:
    """Yields clients by name, each with all its splits: words are ranked by users."""
    with reading(path, _WHOLE), closing(_connect(path)) as connection:
        expected = Counter(
            {(client, split): count for client, split, count in connection.execute(_COUNTS)}
        )
        total = len({client for client, split in expected if split in _SPLITS})
        rows = (row for row in connection.execute(_EXAMPLES) if row[1] in _SPLITS)
        done = 0
        for client_id, found in groupby(rows, key=itemgetter(0)):
            yield Client(str(client_id), _splits(path, convert, list(found), expected))
            done += 1
            progress(done, total)
    if done != total:
        raise bad_file(path, got=f"examples of {done} clients", allowed=f"{total} clients")


def _splits(
    path: Path, convert: Any, rows: Sequence[tuple[str, str, bytes]], expected: Counter[Any]
) -> dict[str, Examples]:
    """The examples of one client by split, as many as the file says there are."""
    messages: dict[str, list[bytes]] = {}
    for _, split, message in rows:
        messages.setdefault(split, []).append(message)
    for split in _SPLITS:  # also those without a row, which may be what a half file has lost
        found, said = len(messages.get(split, ())), expected[rows[0][0], split]
        if found != said:
            got = f"a client of {found} examples in {split}"
            raise bad_file(path, got=got, allowed=f"{said}, as in client_metadata")
    return {
        _SPLITS[split]: convert(path, [decode_example(m, path, _WANTED) for m in found])
        for split, found in messages.items()
    }


def _to_writer(path: Path, examples: Sequence[dict[str, Feature]]) -> Examples:
    try:
        pixels = np.stack([np.asarray(example["pixels"]) for example in examples])
        labels = np.concatenate([np.asarray(example["label"]) for example in examples])
    except (KeyError, ValueError) as error:
        raise bad_file(path, got=error, allowed="pixels and a label in each example") from error
    return to_examples(path, pixels, labels)


def _to_posts(path: Path, examples: Sequence[dict[str, Feature]]) -> Examples:
    posts = []
    for example in examples:
        rows = [example.get(name) for name in ("tokens", "title", "tags")]
        if not all(isinstance(row, list) and len(row) == 1 for row in rows):
            found = f"features {sorted(example)}"
            raise bad_file(path, got=found, allowed="one text each of tokens, title and tags")
        posts.append(to_post(*(row[0].decode() for row in rows if row is not None)))
    return posts
