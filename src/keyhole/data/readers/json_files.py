"""Reads data that are kept as JSON: FEMNIST of LEAF, and posts of Stack Exchange.

LEAF has a directory with train/*.json and test/*.json. A file holds "users", "num_samples", and
"user_data": user -> {"x": images, "y": labels}. Posts are compressed JSON lines, sorted by user;
their plain text is split into sentences and words here.
"""

from __future__ import annotations

import json
import lzma
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from keyhole.data.readers.source import (
    FEMNIST_FACTS,
    Post,
    Progress,
    Source,
    SourceClient,
    bad_file,
    class_names,
    reading,
    to_examples,
)

_SPLITS = ("train", "test")


def find_leaf(path: Path) -> Source | None:
    """Returns the source of which this path is one file, or the directory."""
    if path.is_dir():
        files = {split: sorted((path / split).glob("*.json")) for split in _SPLITS}
        is_leaf = any((path / split).is_dir() for split in _SPLITS)
    else:
        files = _beside(path)
        is_leaf = bool(files)
    if not is_leaf:
        return None
    for split in _SPLITS:
        if not files[split]:
            fix = "make both with LEAF's preprocess.sh"
            raise bad_file(path, f"no {split} file", "JSON files of train and test", fix=fix)
    everything = tuple(file for split in _SPLITS for file in files[split])
    read = partial(_read_leaf, files)
    resolved = path.resolve()  # LEAF calls the directory `data`; its parent has the dataset's name
    name = (resolved.parent if resolved.name == "data" else resolved).stem
    return Source(name, "writers", everything, FEMNIST_FACTS, read, class_names, "bytes")


def _beside(path: Path) -> dict[str, list[Path]]:
    """A file named for one split, and the one named alike for the other; empty for other files."""
    for ours, other in (_SPLITS, _SPLITS[::-1]):
        if path.suffix == ".json" and ours in path.name:
            partner = path.with_name(path.name.replace(ours, other))
            return {ours: [path], other: [partner] if partner.is_file() else []}
    return {}


def _read_leaf(files: Mapping[str, Sequence[Path]], progress: Progress) -> Iterator[SourceClient]:
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


# Letters and digits, held together by one of ' . + # - inside; c++ and c# keep their ends.
_WORD = re.compile(r"[^\W_]+(?:['.+#-][^\W_]+)*(?:\+\+|#)?")
# A full stop inside a word, as in node.js or 3.5, ends nothing.
_END = re.compile(r"[.!?]+(?=\W|$)|\n")


def split_words(text: str) -> list[str]:
    """Returns the words of a text in lower case.

    >>> split_words("Don't use C++ or node.js (v3.5)!")
    ["don't", 'use', 'c++', 'or', 'node.js', 'v3.5']
    """
    return _WORD.findall(_normal(text))


def split_sentences(text: str) -> tuple[list[str], list[int]]:
    """Returns the words of a text and the number of words of each sentence.

    A sentence ends at a line's end or at . ! or ? that no letter or digit follows.

    >>> split_sentences("It works. Does it? Yes")
    (['it', 'works', 'does', 'it', 'yes'], [2, 2, 1])
    """
    words: list[str] = []
    lengths = []
    for sentence in _END.split(_normal(text)):
        found = _WORD.findall(sentence)
        if found:
            words += found
            lengths.append(len(found))
    return words, lengths


def _normal(text: str) -> str:
    return text.lower().replace("\N{RIGHT SINGLE QUOTATION MARK}", "'")


_ENDING = ".jsonl.xz"
_FIELDS = {"user": int, "tags": list, "title": str, "text": str}
_POSTS_FACTS = {
    "source": "Stack Exchange data dumps, plain text by user",
    "licence": "CC BY-SA (2.5, 3.0 or 4.0 by the date of the post)",
    "attribution": "by the users of the Stack Exchange network; the file names site, user and post",
}


def find_stackexchange(path: Path) -> Source | None:
    """Returns the source at this path if it is such a file."""
    if not path.name.endswith(_ENDING) or not path.is_file():
        return None
    name = path.name.removesuffix(_ENDING)
    return Source(name, "posts", (path,), _POSTS_FACTS, partial(_read_posts, path), unit="bytes")


def _read_posts(path: Path, progress: Progress) -> Iterator[SourceClient]:
    total, last = path.stat().st_size, -1
    with path.open("rb") as file:
        for user, records in groupby(_records(path, file), key=lambda record: record["user"]):
            if user <= last:
                found = f"user {user} after user {last}"
                raise bad_file(path, found, "lines sorted by user")
            last = user
            # Unseen users are held out: one in ten to test on, one in ten to validate on.
            split = {0: "test", 1: "validation"}.get(user % 10, "train")
            posts = [
                Post(*split_sentences(record["text"]), split_words(record["title"]), record["tags"])
                for record in records
            ]
            yield SourceClient(str(user), {split: posts})
            progress(file.tell(), total)


def _records(path: Path, file: Any) -> Iterator[dict[str, Any]]:
    """Yields each line as a dict that has the fields we need."""
    with reading(path, "a whole .xz file of JSON lines"), lzma.open(file) as lines:
        for number, line in enumerate(lines, 1):
            record = json.loads(line)
            if not _is_record(record):
                expected = "an object with user, tags, title and text"
                raise bad_file(path, f"line {number}: {line[:60]!r}", expected)
            yield record


def _is_record(record: Any) -> bool:
    return (
        isinstance(record, dict)
        and all(isinstance(record.get(name), kind) for name, kind in _FIELDS.items())
        and all(isinstance(tag, str) for tag in record["tags"])
        and record["user"] >= 0
    )
