"""Makes the data files of the experiments from what their sources publish.

| file | from |
|---|---|
| femnist, femnist_mini | LEAF's FEMNIST, or NIST Special Database 19 (by_class and by_write) |
| stackexchange, stackexchange_mini | folders of Stack Exchange dumps: Posts.xml, Comments.xml |
| movielens_small | GroupLens' ml-latest-small, as a folder or a .zip file |

The files have the formats of `docs/data.md`, and `open_dataset` reads them.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import lzma
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from keyhole.arrays import Array
from keyhole.data.open import SHARED
from keyhole.data.readers.dumps import DumpedText, read_site
from keyhole.data.readers.json_files import find_leaf
from keyhole.data.readers.source import CLASSES, Progress, bad_file, reading
from keyhole.errors import InputError
from keyhole.files import replacing, storage_errors
from keyhole.parts import near_miss

_WRITERS, _IMAGES = 100, 100  # of femnist_mini: writers, and max training images of each
_USERS, _MIN_POSTS, _MAX_POSTS = 250, 8, 20  # of stackexchange_mini
_CHARACTERS = {"stackexchange": 2000, "stackexchange_mini": 500}  # that a text is cut at
_TEST = 10  # of NIST's own files one image in this many is to test on


def make_file(
    name: str, sources: Sequence[str | Path], folder: Path, progress: Progress | None = None
) -> Path:
    """Writes one of the files that go by a bare name; returns its path.

    Args:
        name: such as "femnist_mini".
        sources: what its source publishes, unpacked: see the top of this module.
        folder: where it goes, usually that of KEYHOLE_DATA.
        progress: called with what is done and how much there is.

    Raises:
        InputError: there is no such file to make, a source is not what it should be, or the file
            is there already.
    """
    if name not in _MAKERS:
        raise InputError(
            f"no such file can be made: got {name!r}; expected one of {', '.join(_MAKERS)}; "
            f"{near_miss(name, _MAKERS)}"
        )
    path = folder / SHARED[name]
    if path.exists():
        raise InputError(
            f"{path} is there already: got a file; expected none; remove it, or choose another "
            "folder"
        )
    made = _MAKERS[name](name, [Path(each) for each in sources], progress or (lambda *_: None))
    with storage_errors(path, "write"):
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(path) as descriptor, open(descriptor, "wb", closefd=False) as file:
            file.write(made)
    return path


def _one(sources: Sequence[Path], expected: str) -> Path:
    if len(sources) != 1 or not sources[0].exists():
        got = ", ".join(map(str, sources)) or "nothing"
        raise InputError(
            f"the file is made from one source that is there: got {got}; expected {expected}; see "
            "docs/data.md for where to get it"
        )
    return sources[0]


def _npz(arrays: Mapping[str, Array]) -> bytes:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, allow_pickle=False, **arrays)
    return buffer.getvalue()


def _make_movielens(name: str, sources: Sequence[Path], progress: Progress) -> bytes:
    """All ratings; users are MovieLens' numbers minus 1, items the rows of movies.csv."""
    path = _one(sources, "the folder or the .zip file of ml-latest-small")
    movies = _csv(path, "movies.csv", ("movieId", "title", "genres"))
    ratings = _csv(path, "ratings.csv", ("userId", "movieId", "rating", "timestamp"))
    tags = _csv(path, "tags.csv", ("userId", "movieId", "tag", "timestamp"))
    with reading(path, "numbers of MovieLens"):
        ids = np.array([int(each) for each in movies["movieId"]], np.int32)
        place = {number: at for at, number in enumerate(ids.tolist())}
        stars = np.array([float(each) for each in ratings["rating"]])
        if not np.isin(stars, np.arange(1, 11) / 2).all():
            raise ValueError("a rating that is no half star from 0.5 to 5")
        arrays = {
            **_events(ratings, place, ""),
            "half_stars": (2 * stars).astype(np.uint8),
            "item_movielens_id": ids,
            "item_title": np.array(movies["title"]),
            "item_genres": np.array(movies["genres"]),
            **_events(tags, place, "tag_"),
            "tag_text": np.array(tags["tag"] or [""])[: len(tags["tag"])],
        }
    progress(1, 1)
    return _npz(arrays)


def _events(table: Mapping[str, list[str]], place: Mapping[int, int], to: str) -> dict[str, Array]:
    """User, item and time of each row."""
    users = np.array([int(each) - 1 for each in table["userId"]], np.int64)
    items = np.array([place[int(each)] for each in table["movieId"]], np.int64)
    small = np.uint16 if max(users.max(initial=0), len(place)) < 2**16 else np.uint32
    when = np.array([int(each) for each in table["timestamp"]], np.int64)
    return {
        f"{to}user": users.astype(small),
        f"{to}item": items.astype(small),
        f"{to}timestamp": when,
    }


def _csv(path: Path, file: str, columns: tuple[str, ...]) -> dict[str, list[str]]:
    """The columns of one file of a folder or a .zip file."""
    with reading(path, f"{file} of MovieLens with {', '.join(columns)}"):
        if path.is_dir():
            text = (path / file).read_text("utf-8-sig")
        else:
            with zipfile.ZipFile(path) as archive:
                inside = [each for each in archive.namelist() if Path(each).name == file]
                if not inside:
                    raise ValueError(f"no {file}")
                text = archive.read(inside[0]).decode("utf-8-sig")
        rows = list(csv.DictReader(io.StringIO(text, newline="")))
        if any(row.get(column) is None for row in rows for column in columns):
            raise ValueError(f"{file} without one of {', '.join(columns)}")
        return {column: [row[column] for row in rows] for column in columns}


def _make_femnist(name: str, sources: Sequence[Path], progress: Progress) -> bytes:
    """All writers, or those with most different characters."""
    path = _one(sources, "LEAF's folder with train and test, or NIST's with by_class and by_write")
    if (path / "by_write").is_dir() and (path / "by_class").is_dir():
        writers = _nist_writers(path, progress)
    elif (leaf := find_leaf(path)) is not None:
        writers = {}
        for client in leaf.read(progress):
            for split, examples in client.splits.items():
                found: Any = examples
                writers.setdefault(client.client_id, {})[split] = found
    else:
        raise bad_file(path, "neither", "LEAF's train and test, or NIST's by_class and by_write")
    if name == "femnist_mini":
        order = sorted(writers, key=lambda who: (-_different(writers[who]), who))
        writers = {who: _fewer(writers[who]) for who in order[:_WRITERS]}
    return _npz(_writer_arrays({who: writers[who] for who in sorted(writers)}))


_Splits = dict[str, dict[str, Array]]
"""The examples of one writer: "train" and "test" -> pixels and label."""


def _different(splits: _Splits) -> int:
    """How many different characters somebody wrote."""
    return len({label for examples in splits.values() for label in examples["label"].tolist()})


def _fewer(splits: _Splits) -> _Splits:
    """At most some training images, as even over the characters as there are."""
    if "train" not in splits:
        return splits
    label = splits["train"]["label"]
    order = np.argsort(label, kind="stable")
    counts = np.bincount(label)
    nth = np.empty(len(label), np.int64)  # of its character
    nth[order] = np.arange(len(label)) - (np.cumsum(counts) - counts)[label[order]]
    kept = np.sort(np.lexsort((label, nth))[:_IMAGES])
    return {**splits, "train": {each: column[kept] for each, column in splits["train"].items()}}


def _writer_arrays(writers: Mapping[str, _Splits]) -> dict[str, Array]:
    """The arrays of a file of writers."""
    parts: dict[str, list[Array]] = {"images": [], "labels": [], "client": [], "split": []}
    for number, splits in enumerate(writers.values()):
        for code, split in enumerate(("train", "test")):
            if split in splits:
                count = len(splits[split]["label"])
                parts["images"].append(splits[split]["pixels"])
                parts["labels"].append(splits[split]["label"])
                parts["client"].append(np.full(count, number, np.uint16))
                parts["split"].append(np.full(count, code, np.uint8))
    arrays = {each: np.concatenate(found) for each, found in parts.items()}
    whole = {"complete": np.ones(len(writers), bool), "classes": np.array(list(CLASSES))}
    return {**arrays, "writer": np.array(list(writers)), **whole}


def _nist_writers(path: Path, progress: Progress) -> dict[str, _Splits]:
    """Images by writer, as LEAF prepares them: by_write has no labels, so the same bytes are looked
    up in by_class, whose folders are named by the character's code in hexadecimal."""
    labels = {}
    with reading(path, "folders of by_class that are named by codes of characters, such as 30"):
        for file in path.glob("by_class/*/hsf_[0-9]/*.png"):
            labels[_md5(file)] = CLASSES.index(chr(int(file.parts[-3], 16)))
    files: dict[str, list[Path]] = {}
    for file in sorted(path.glob("by_write/hsf_*/*/*/*.png")):
        files.setdefault(file.parts[-3], []).append(file)
    if not labels or not files:
        got = f"{len(labels)} images by class and {len(files)} writers"
        raise bad_file(path, got, "by_class/30/hsf_0/*.png and by_write/hsf_0/*/*/*.png")
    writers: dict[str, _Splits] = {}
    for number, (writer, images) in enumerate(files.items()):
        found = [(file, labels[mark]) for file in images if (mark := _md5(file)) in labels]
        if found:
            writers[writer] = _cut_writer([_scaled(file) for file, _ in found], found)
        progress(number + 1, len(files))
    return writers


def _cut_writer(pixels: list[Array], found: list[tuple[Path, int]]) -> _Splits:
    label = np.array([each for _, each in found], np.uint8)
    is_test = np.arange(len(label)) % _TEST == _TEST - 1
    sides = {"train": ~is_test, "test": is_test}
    images = np.stack(pixels)
    return {
        name: {"pixels": images[side], "label": label[side]}
        for name, side in sides.items()
        if side.any()
    }


def _md5(path: Path) -> bytes:
    """A mark by which the same image is found again; nobody's safety rests on it."""
    return hashlib.md5(path.read_bytes(), usedforsecurity=False).digest()


def _scaled(path: Path) -> Array:
    """An image of NIST in grey, 28 x 28, as LEAF's data_to_json.py scales it."""
    from PIL import Image  # comes with matplotlib

    with reading(path, "a PNG file of NIST"), Image.open(path) as image:
        scaled = image.convert("L").resize((28, 28), Image.Resampling.LANCZOS)
        return np.asarray(scaled, np.uint8).copy()


def _make_stackexchange(name: str, sources: Sequence[Path], progress: Progress) -> bytes:
    """Posts of all users, or questions and answers of those who wrote most; sorted by user."""
    if not sources:
        _one(sources, "one folder or more, each with the Posts.xml of a site")
    total = sum(file.stat().st_size for site in sources for file in site.glob("*.xml"))
    by_user: dict[tuple[str, int], list[DumpedText]] = {}
    done = 0
    for site in sources:
        for record in read_site(site, _CHARACTERS[name], with_comments=name == "stackexchange"):
            by_user.setdefault((record["site"], record["site_user"]), []).append(record)
        done += sum(file.stat().st_size for file in site.glob("*.xml"))
        progress(done, total)
    if name == "stackexchange_mini":
        often = {who: posts for who, posts in by_user.items() if len(posts) >= _MIN_POSTS}
        chosen = sorted(often, key=lambda who: (-len(often[who]), who))[:_USERS]
        by_user = {who: often[who] for who in chosen}
    if not by_user:
        expected = f"{_MIN_POSTS} posts of one user" if name.endswith("mini") else "posts"
        raise bad_file(sources[0], "too few posts of users", expected)
    limit = _MAX_POSTS if name == "stackexchange_mini" else None
    return lzma.compress(b"".join(_lines(by_user, limit)))


def _lines(
    by_user: Mapping[tuple[str, int], list[DumpedText]], limit: int | None
) -> Iterator[bytes]:
    for number, who in enumerate(sorted(by_user)):
        for record in sorted(by_user[who], key=lambda each: (each["date"], each["post"]))[:limit]:
            line = json.dumps({"user": number, **record}, ensure_ascii=False)
            yield f"{line}\n".encode("utf-8", "replace")


_MAKERS: dict[str, Callable[[str, Sequence[Path], Progress], bytes]] = {
    "femnist": _make_femnist,
    "femnist_mini": _make_femnist,
    "movielens_small": _make_movielens,
    "stackexchange": _make_stackexchange,
    "stackexchange_mini": _make_stackexchange,
}
MADE = tuple(_MAKERS)
"""Names of the files that can be made."""
