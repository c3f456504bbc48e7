"""Reads TensorFlow Federated's client files: EMNIST and Stack Overflow, as HDF5 or SQLite.

In an HDF5 file of a split the group "examples" holds a group for each client, and that a dataset
for each column. In SQLite, table `examples` has split_name, client_id and serialized_example_proto;
table `client_metadata` has client_id, split_name and num_examples. Text is tokenised already.

A tf.train.Example is decoded from the protobuf wire format:

    Example   { Features features = 1; }
    Features  { map<string, Feature> feature = 1; }       an entry is { key = 1; value = 2; }
    Feature   { oneof: BytesList = 1, FloatList = 2, Int64List = 3 }, each { repeated value = 1; }

A field starts with a varint `number << 3 | wire type`; numbers may come packed into one field or
one by one, and fields we do not know are passed over.
"""

from __future__ import annotations

import sqlite3
import struct
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from importlib import import_module
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias
from urllib.parse import quote

import numpy as np

from keyhole.arrays import Array
from keyhole.data.readers.source import TFF_FACTS as WRITERS_FACTS
from keyhole.data.readers.source import (
    Examples,
    Post,
    Progress,
    Source,
    SourceClient,
    bad_file,
    class_names,
    reading,
    to_examples,
)
from keyhole.errors import InputError

FACTS = {
    "source": "Stack Overflow of TensorFlow Federated, sentences of questions and answers by user",
    "licence": "CC BY-SA 3.0",
}


def to_post(tokens: str, title: str, tags: str) -> Post:
    """Returns one sentence as a post.

    >>> to_post("use a dict", "Which map ?", "python|hash").title
    ['which', 'map', '?']
    """
    words = tokens.lower().split()
    named = [tag for tag in tags.split("|") if tag]
    return Post(words, [len(words)] if words else [], title.lower().split(), named)


Feature: TypeAlias = list[bytes] | Array
"""The values of one feature: texts, float32 (n,), or int64 (n,)."""

_VARINT, _BYTES, _FIXED32 = 0, 2, 5
_FIXED = {1: 8, _FIXED32: 4}  # wire type -> bytes
_MAX_VARINT = 10  # bytes of 64 bits, seven in each


def decode_example(message: bytes, path: Path, wanted: Sequence[str] = ()) -> dict[str, Feature]:
    """Decodes one message.

    Args:
        path: the file it is from, for the error.
        wanted: the features to decode, which saves the time of others; all where it is empty.

    >>> decode_example(bytes.fromhex("0a0c0a0a0a017812051a030a0107"), Path("f"))
    {'x': array([7])}
    """
    if not isinstance(message, bytes):  # a column of SQLite holds values of any type
        got = f"a message of {type(message).__name__}"
        raise bad_file(path, got, "serialized tf.train.Example")
    try:
        entries = [_entry(e) for part in _contents(message) for e in _contents(part)]
        return {name: _feature(value) for name, value in entries if not wanted or name in wanted}
    except ValueError as error:
        raise bad_file(path, error, "serialized tf.train.Example") from error


def _entry(entry: bytes) -> tuple[str, bytes]:
    """One entry of the map; a missing key or value is the empty one."""
    name, feature = b"", b""
    for number, wire, value in _fields(entry):
        if wire == _BYTES and number == 1:
            name = value
        elif wire == _BYTES and number == 2:
            feature = value
    return name.decode(), feature


def _feature(feature: bytes) -> Feature:
    """The last of the lists counts, as in every oneof."""
    found: Feature = []
    for number, wire, value in _fields(feature):
        if wire != _BYTES or number not in (1, 2, 3):
            continue
        if number == 1:
            found = _contents(value)
        else:
            found = _floats(value) if number == 2 else _integers(value)
    return found


def _floats(values: bytes) -> Array:
    parts = []
    for number, wire, value in _fields(values):
        if number == 1 and wire in (_BYTES, _FIXED32):
            if len(value) % 4:
                raise ValueError(f"{len(value)} bytes of floats")
            parts.append(value)
    return np.frombuffer(b"".join(parts), "<f4")


def _integers(values: bytes) -> Array:
    found: list[int] = []
    for number, wire, value in _fields(values):
        if number != 1:
            continue
        if wire == _VARINT:
            found.append(struct.unpack("<Q", value)[0])
        elif wire == _BYTES:
            at = 0
            while at < len(value):
                integer, at = _varint(value, at)
                found.append(integer)
    return np.array(found, np.uint64).view(np.int64)  # negative numbers are two's complement


def _contents(data: bytes) -> list[bytes]:
    """The contents of every field 1 that holds bytes; all that we look into has that number."""
    return [value for number, wire, value in _fields(data) if number == 1 and wire == _BYTES]


def _fields(data: bytes) -> list[tuple[int, int, bytes]]:
    """Number, wire type and bytes of each field; a varint becomes eight bytes."""
    found = []
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        wire = tag & 7
        if wire == _VARINT:
            integer, at = _varint(data, at)
            found.append((tag >> 3, wire, struct.pack("<Q", integer)))
            continue
        if wire == _BYTES:
            length, at = _varint(data, at)
        elif wire in _FIXED:
            length = _FIXED[wire]
        else:
            raise ValueError(f"wire type {wire}")
        if at + length > len(data):
            raise ValueError(f"a field of {length} bytes where {len(data) - at} are left")
        found.append((tag >> 3, wire, data[at : at + length]))
        at += length
    return found


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number at this place, modulo 2^64, and the place behind it."""
    if at < len(data) and data[at] < 0x80:  # nearly all are one byte
        return data[at], at + 1
    integer = 0
    for count in range(_MAX_VARINT):
        if at + count >= len(data):
            raise ValueError("a number that is cut short")
        byte = data[at + count]
        integer |= (byte & 0x7F) << (7 * count)
        if byte < 0x80:
            return integer & 0xFFFF_FFFF_FFFF_FFFF, at + count + 1
    raise ValueError(f"a number of more than {_MAX_VARINT} bytes")


_ENDINGS = {"train": "_train.h5", "validation": "_held_out.h5", "test": "_test.h5"}
_GROUP = "examples"
_WHOLE_HDF5 = "a whole HDF5 file of TensorFlow Federated"


def find_hdf5(path: Path) -> Source | None:
    """Returns the source of which this path is one file, or the directory."""
    stem = _stem(path)
    if stem is None:
        return None
    files = {split: stem.with_name(stem.name + end) for split, end in _ENDINGS.items()}
    has_pixels = "pixels" in _columns(_existing(files["train"]))
    needed = ("train", "test") if has_pixels else ("train", "validation", "test")
    chosen = {split: _existing(files[split]) for split in needed}
    read = partial(_read_hdf5, chosen, _hdf5_writer if has_pixels else _hdf5_posts)
    paths = tuple(chosen.values())
    if has_pixels:
        return Source(stem.name, "writers", paths, WRITERS_FACTS, read, class_names)
    return Source(stem.name, "posts", paths, FACTS, read)


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
        raise bad_file(path, found, "one dataset", fix="give the path of one file")
    return _stem(trains[0]) if trains else None


def _existing(path: Path) -> Path:
    if not path.is_file():
        fix = "put all files of the dataset in one folder"
        raise bad_file(path, "no such file", "a file for each split", fix=fix)
    return path


def _columns(path: Path) -> set[str]:
    """The columns of the first client."""
    with reading(path, _WHOLE_HDF5), _h5py().File(path) as file:
        clients = _group(path, file, _GROUP)
        first = next(iter(clients), None)
        columns: set[str] = set() if first is None else set(_group(path, clients, first))
    if not columns & {"pixels", "tokens"}:
        raise bad_file(path, f"columns {sorted(columns)}", "pixels or tokens")
    return columns


def _read_hdf5(
    files: Mapping[str, Path], convert: Any, progress: Progress
) -> Iterator[SourceClient]:
    """Yields clients by name, each with all its splits: words are ranked by users."""
    with ExitStack() as stack:
        groups = {}
        for split, path in files.items():
            with reading(path, _WHOLE_HDF5):
                groups[split] = _group(path, stack.enter_context(_h5py().File(path)), _GROUP)
        ids = {split: set(group) for split, group in groups.items()}
        everyone = sorted(set().union(*ids.values()))
        for done, client_id in enumerate(everyone, 1):
            splits = {}
            for split, path in files.items():
                if client_id in ids[split]:
                    with reading(path, _WHOLE_HDF5):
                        splits[split] = convert(path, _group(path, groups[split], client_id))
            yield SourceClient(client_id, splits)
            progress(done, len(everyone))


def _hdf5_writer(path: Path, group: Any) -> Examples:
    pixels, labels = (_array(path, group, name)[()] for name in ("pixels", "label"))
    return to_examples(path, pixels, labels)


def _hdf5_posts(path: Path, group: Any) -> Sequence[Post]:
    columns = [_texts(path, group, name) for name in ("tokens", "title", "tags")]
    if len({len(column) for column in columns}) != 1:
        found = f"{[len(column) for column in columns]} rows"
        raise bad_file(path, found, "as many tokens as titles and tags")
    return [to_post(*row) for row in zip(*columns, strict=True)]


def _group(path: Path, parent: Any, name: str) -> Any:
    """The group of this name; HDF5 lets an array have the name as well."""
    found = parent[name]
    if not isinstance(found, _h5py().Group):
        raise bad_file(path, f"{name!a} that is no group", _WHOLE_HDF5)
    return found


def _array(path: Path, group: Any, name: str) -> Any:
    """The array of this name, not read yet."""
    found = group[name]
    if not isinstance(found, _h5py().Dataset):
        raise bad_file(path, f"{name!a} that is no array", _WHOLE_HDF5)
    return found


def _texts(path: Path, group: Any, name: str) -> list[str]:
    """The texts of a column. One text alone would be read letter by letter."""
    found = _array(path, group, name)
    if _h5py().check_string_dtype(found.dtype) is None:
        raise bad_file(path, f"{name} of {found.dtype}", "an array of texts")
    if found.shape is None or len(found.shape) != 1:
        raise bad_file(path, f"{name} of shape {found.shape}", "an array of rank 1")
    return [row.decode() for row in found[()]]


def _h5py() -> ModuleType:
    """Returns h5py, which is needed for these files alone."""
    try:
        return import_module("h5py")
    except ImportError as error:
        raise InputError(
            "HDF5 files need h5py: got no package h5py; expected h5py of the extra tff; run: pip "
            "install 'keyhole[tff]'"
        ) from error


_WHOLE_SQLITE = "a whole SQLite file of TensorFlow Federated"
# EMNIST comes with digits alone and with all 62 characters; the paper has all.
_SPLITS = {"all_train": "train", "all_test": "test"}
_SPLITS |= {"train": "train", "heldout": "validation", "held_out": "validation", "test": "test"}
_COUNTS = "SELECT client_id, split_name, num_examples FROM client_metadata"
_WANTED = ("pixels", "label", "tokens", "title", "tags")
# In the order of the index on client_id, so that no split is sorted or held in memory.
_EXAMPLES = (
    "SELECT client_id, split_name, serialized_example_proto FROM examples ORDER BY client_id, rowid"
)


def find_sqlite(path: Path) -> Source | None:
    """Returns the source at this path if it is such a file."""
    if path.suffix != ".sqlite" or not path.is_file():
        return None
    with reading(path, _WHOLE_SQLITE), closing(_connect(path)) as connection:
        row = connection.execute("SELECT serialized_example_proto FROM examples").fetchone()
    features = decode_example(row[0], path) if row else {}
    if "pixels" in features:
        read = partial(_read_sqlite, path, _sqlite_writer)
        return Source(path.stem, "writers", (path,), WRITERS_FACTS, read, class_names)
    if "tokens" in features:
        return Source(
            path.stem, "posts", (path,), FACTS, partial(_read_sqlite, path, _sqlite_posts)
        )
    raise bad_file(path, f"features {sorted(features)}", "pixels or tokens")


def _connect(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"file:{quote(str(path.resolve()))}?mode=ro", uri=True)


def _read_sqlite(path: Path, convert: Any, progress: Progress) -> Iterator[SourceClient]:
    """Yields clients by name, each with all its splits: words are ranked by users."""
    with reading(path, _WHOLE_SQLITE), closing(_connect(path)) as connection:
        expected = Counter(
            {(client, split): count for client, split, count in connection.execute(_COUNTS)}
        )
        total = len({client for client, split in expected if split in _SPLITS})
        rows = (row for row in connection.execute(_EXAMPLES) if row[1] in _SPLITS)
        done = 0
        for client_id, found in groupby(rows, key=itemgetter(0)):
            yield SourceClient(str(client_id), _splits(path, convert, list(found), expected))
            done += 1
            progress(done, total)
    if done != total:
        raise bad_file(path, f"examples of {done} clients", f"{total} clients")


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
            raise bad_file(path, got, f"{said}, as in client_metadata")
    return {
        _SPLITS[split]: convert(path, [decode_example(m, path, _WANTED) for m in found])
        for split, found in messages.items()
    }


def _sqlite_writer(path: Path, examples: Sequence[dict[str, Feature]]) -> Examples:
    try:
        pixels = np.stack([np.asarray(example["pixels"]) for example in examples])
        labels = np.concatenate([np.asarray(example["label"]) for example in examples])
    except (KeyError, ValueError) as error:
        raise bad_file(path, error, "pixels and a label in each example") from error
    return to_examples(path, pixels, labels)


def _sqlite_posts(path: Path, examples: Sequence[dict[str, Feature]]) -> Examples:
    posts = []
    for example in examples:
        rows = [example.get(name) for name in ("tokens", "title", "tags")]
        if not all(isinstance(row, list) and len(row) == 1 for row in rows):
            found = f"features {sorted(example)}"
            raise bad_file(path, found, "one text each of tokens, title and tags")
        posts.append(to_post(*(row[0].decode() for row in rows if row is not None)))
    return posts
