"""Reads Stack Exchange posts from compressed JSON lines, sorted by user.

Plain text is split into sentences and words here.
"""

from __future__ import annotations

import json
import lzma
import re
from collections.abc import Iterator
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from keyhole.data.readers.source import Post, Progress, Source, SourceClient, bad_file, reading

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
_FACTS = {
    "source": "Stack Exchange data dumps, plain text by user",
    "licence": "CC BY-SA (2.5, 3.0 or 4.0 by the date of the post)",
    "attribution": "by the users of the Stack Exchange network; the file names site, user and post",
}


def find_stackexchange(path: Path) -> Source | None:
    """Returns the source at this path if it is such a file."""
    if not path.name.endswith(_ENDING) or not path.is_file():
        return None
    name = path.name.removesuffix(_ENDING)
    return Source(name, "posts", (path,), _FACTS, partial(_read, path), unit="bytes")


def _read(path: Path, progress: Progress) -> Iterator[SourceClient]:
    total, last = path.stat().st_size, -1
    with path.open("rb") as file:
        for user, records in groupby(_records(path, file), key=lambda record: record["user"]):
            if user <= last:
                found = f"user {user} after user {last}"
                raise bad_file(path, found, "lines sorted by user")
            last = user
            yield SourceClient(str(user), {_split_of(user): [_post(record) for record in records]})
            progress(file.tell(), total)


def _split_of(user: int) -> str:
    """Unseen users are held out: one in ten to test on, one in ten to validate on."""
    return {0: "test", 1: "validation"}.get(user % 10, "train")


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


def _post(record: dict[str, Any]) -> Post:
    words, sentences = split_sentences(record["text"])
    return Post(words, sentences, split_words(record["title"]), record["tags"])
