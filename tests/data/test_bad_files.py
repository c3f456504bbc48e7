"""A wrong or half file is one error that names it: what was found, what is expected, what to do."""

import json
import lzma
import zipfile

import h5py
import numpy as np
import pytest

from keyhole.data.open import list_datasets, open_dataset
from keyhole.errors import InputError
from tests.data import files


def cut(path, share=0.5):
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    return path


def femnist(**changes):
    return lambda folder: files.write_femnist(folder / "femnist.npz", **changes)


def movielens(**changes):
    return lambda folder: files.write_movielens(folder / "movies.npz", **changes)


def posts(*records):
    return lambda folder: files.write_stackexchange(folder / "posts.jsonl.xz", records)


def lines(text):
    def write(folder):
        (folder / "posts.jsonl.xz").write_bytes(lzma.compress(text))
        return folder / "posts.jsonl.xz"

    return write


def sqlite(rows, counts=None):
    return lambda folder: files.write_sqlite(folder / "some.sqlite", rows, counts)


def plain(name, content=b"not what it says"):
    def write(folder):
        (folder / name).write_bytes(content)
        return folder / name

    return write


def emnist_without(split):
    def write(folder):
        files.write_emnist_hdf5(folder)
        (folder / f"fed_emnist_{split}.h5").unlink()
        return folder / f"fed_emnist_{'test' if split == 'train' else 'train'}.h5"

    return write


def emnist_with(**columns):
    """The first writer's group with other columns; None removes one."""

    def write(folder):
        path = files.write_emnist_hdf5(folder)
        with h5py.File(path, "a") as file:
            group = file["examples/f0001_10"]
            for name, values in columns.items():
                del group[name]
                if values is not None:
                    group[name] = values
        return path

    return write


def stackoverflow_with(**columns):
    """The first user's group with other columns; a function makes one in the group."""

    def write(folder):
        path = files.write_stackoverflow_hdf5(folder)
        with h5py.File(path, "a") as file:
            group = file["examples/0010"]
            for name, values in columns.items():
                del group[name]
                if callable(values):
                    values(group)
                else:
                    group[name] = values
        return path

    return write


def hdf5_with(place, values):
    """EMNIST with an array where a group should be."""

    def write(folder):
        path = files.write_emnist_hdf5(folder)
        with h5py.File(path, "a") as file:
            del file[place]
            file[place] = values
        return path

    return write


def npz_of_raw_bytes(folder):
    path = files.write_movielens(folder / "movies.npz", user=None)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("user", "no array")
    return path


def stackoverflow_without_held_out(folder):
    path = files.write_stackoverflow_hdf5(folder)
    (folder / "stackoverflow_held_out.h5").unlink()
    return path


def two_datasets(folder):
    files.write_emnist_hdf5(folder)
    files.write_stackoverflow_hdf5(folder)
    return folder


def leaf(change):
    """LEAF with one file changed by a function of its content, which may return text."""

    def write(folder):
        files.write_leaf(folder / "leaf")
        path = sorted((folder / "leaf" / "train").iterdir())[0]
        content = change(json.loads(path.read_text()))
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return folder / "leaf"

    return write


def leaf_without_test(folder):
    files.write_leaf(folder)
    for path in (folder / "test").iterdir():
        path.unlink()
    return folder


def leaf_with_a_writer_twice(folder):
    files.write_leaf(folder)
    first = sorted((folder / "train").iterdir())[0]
    (folder / "train" / "again.json").write_text(first.read_text())
    return folder


GOOD_EMNIST = files.emnist_rows()
BAD = {
    "no file": (lambda folder: folder / "absent.npz", "no file"),
    "unknown format": (plain("some.csv"), "no known format"),
    "packed database": (plain("emnist_all.sqlite.lzma"), "unlzma"),
    "empty folder": (lambda folder: folder, "a directory of nothing"),
    "npz of nothing": (plain("a.npz"), "not a zip file"),
    "npz of zero bytes": (plain("a.npz", b""), "zip file"),
    "npz cut short": (lambda f: cut(femnist()(f)), "not a zip file"),
    "femnist without labels": (femnist(labels=None), "no array labels"),
    "femnist of floats": (femnist(images=np.zeros((6, 28, 28))), "images of float64"),
    "femnist of other size": (femnist(images=np.zeros((6, 27, 28), np.uint8)), r"27, 28"),
    "femnist of pickles": (femnist(writer=np.array([{}, {}])), "pickle"),
    "label 62": (femnist(labels=np.full(6, 62)), "from 62 to 62"),
    "negative label": (femnist(labels=np.full(6, -1)), "from -1 to -1"),
    "fewer labels": (femnist(labels=np.zeros(5, np.uint8)), "'labels': 5"),
    "clients out of order": (femnist(client=np.array([0, 1, 0, 1, 1, 1])), "out of order"),
    "a writer without name": (femnist(writer=np.array(["f1"])), "client 1 of 1 writers"),
    "a writer twice": (femnist(writer=np.array(["f1", "f1"])), "twice"),
    "split 2": (femnist(split=np.full(6, 2)), "split 2"),
    "nobody to train on": (femnist(split=np.full(6, 1)), "clients for test"),
    "movielens without titles": (movielens(item_title=None), "no array item_title"),
    "eleven half stars": (movielens(half_stars=np.full(22, 11)), "to 11"),
    "item of no title": (movielens(item=np.full(22, 21)), "items from 21"),
    "fewer ratings": (movielens(item=np.zeros(3, int)), "'item': 3"),
    "femnist with a label of no rank": (femnist(labels=np.uint8(3)), r"labels of shape \(\)"),
    "femnist with images of no rank": (femnist(images=np.uint8(3)), r"images of shape \(\)"),
    "femnist with writers in a table": (
        femnist(writer=np.array([["f1"], ["f2"]])),
        r"writer of shape \(2, 1\)",
    ),
    "movielens with one number": (movielens(half_stars=np.uint8(3)), r"half_stars of shape \(\)"),
    "movielens in a table": (
        movielens(item=np.zeros((22, 2), np.uint16)),
        r"item of shape \(22, 2\)",
    ),
    "movielens with one title": (movielens(item_title=np.array("one")), "item_title of shape"),
    "npz of raw bytes": (npz_of_raw_bytes, "user of bytes"),
    "half a character in a title": (
        movielens(item_title=np.array(["\ud800", *"abcdefghijklmnopqrst"])),
        r"'\\ud800'",
    ),
    "xz of nothing": (plain("a.jsonl.xz"), "not supported"),
    "xz cut short": (
        lambda f: cut(posts(*[files.stack_record(i, "word " * i) for i in range(99)])(f)),
        "ended before",
    ),
    "half a line": (lines(b'{"user": 1, "te'), "Unterminated"),
    "line of another shape": (lines(b'{"user": 1}\n'), "line 1"),
    "no text in it": (lines(b"\xfd\xfd"), "decode"),
    "users out of order": (
        posts(files.stack_record(5, "a"), files.stack_record(3, "b")),
        "user 3 after user 5",
    ),
    "half a character in a tag": (
        posts(files.stack_record(2, "a", tags=["\ud83d"])),
        r"'\\ud83d'",
    ),
    "half a character in a name": (femnist(writer=np.array(["f1", "f\udc00"])), r"'f\\udc00'"),
    "no posts": (lines(b""), "clients for nothing"),
    "hdf5 of nothing": (plain("fed_emnist_train.h5"), "signature"),
    "hdf5 cut short": (lambda f: cut(files.write_emnist_hdf5(f)), "truncated"),
    "train without test": (emnist_without("test"), "no such file"),
    "test without train": (emnist_without("train"), "no such file"),
    "no held-out users": (stackoverflow_without_held_out, "no such file"),
    "two datasets in a folder": (two_datasets, "fed_emnist_train.h5, stackoverflow_train.h5"),
    "hdf5 without label": (emnist_with(label=None), "label"),
    "hdf5 with one label": (emnist_with(label=np.array([3])), "for 1 labels"),
    "hdf5 of other columns": (emnist_with(pixels=None), "columns"),
    "pixels of bytes as floats": (
        emnist_with(pixels=np.full((2, 28, 28), 255, np.float32)),
        "to 255.0",
    ),
    "pixels that are no number": (emnist_with(pixels=np.full((2, 28, 28), np.nan)), "nan"),
    "hdf5 of an array": (hdf5_with("examples", np.zeros(3)), "'examples' that is no group"),
    "hdf5 with an array for a client": (
        hdf5_with("examples/f0001_10", np.zeros(3)),
        "'f0001_10' that is no group",
    ),
    "hdf5 with an array for a later client": (
        hdf5_with("examples/f0002_11", np.float32(0)),
        "'f0002_11' that is no group",
    ),
    "hdf5 with a group for an array": (
        stackoverflow_with(title=lambda group: group.create_group("title")),
        "'title' that is no array",
    ),
    "hdf5 with one text": (stackoverflow_with(tokens="a b"), r"tokens of shape \(\)"),
    "hdf5 with no text": (
        stackoverflow_with(tokens=h5py.Empty(h5py.string_dtype())),
        "tokens of shape None",
    ),
    "hdf5 with numbers for texts": (
        stackoverflow_with(tokens=np.arange(2)),
        "tokens of int64",
    ),
    "sqlite of nothing": (plain("a.sqlite"), "not a database"),
    "sqlite without tables": (plain("a.sqlite", b""), "no such table"),
    "sqlite cut short": (
        lambda f: cut(files.write_sqlite(f / "some.sqlite", GOOD_EMNIST * 20), 0.7),
        "malformed",
    ),
    "sqlite of other features": (
        sqlite([("train", "a", files.encode_example({"x": [b""]}))]),
        r"features \['x'\]",
    ),
    "sqlite with half a message": (
        sqlite([*GOOD_EMNIST, ("all_train", "f0001_10", GOOD_EMNIST[0][2][:-1])]),
        "are left",
    ),
    "fewer examples than counted": (
        sqlite(GOOD_EMNIST, {("f0001_10", "all_train"): 7}),
        "a client of 2 examples in all_train",
    ),
    "a client without its test examples": (
        sqlite(
            [row for row in GOOD_EMNIST if row[:2] != ("all_test", "f0001_10")],
            {("f0001_10", "all_test"): 1},
        ),
        "a client of 0 examples in all_test.*1, as in client_metadata",
    ),
    "sqlite with text for a message": (
        sqlite([*GOOD_EMNIST, ("all_train", "f0001_10", "text")]),
        "a message of str",
    ),
    "fewer clients than counted": (
        sqlite(GOOD_EMNIST, {("f0003_12", "all_train"): 7}),
        "examples of 2 clients",
    ),
    "only splits we do not know": (
        sqlite([("other", "a", GOOD_EMNIST[0][2])]),
        "clients for nothing",
    ),
    "a post without tags": (
        sqlite([("train", "a", files.encode_example({"tokens": [b"a"], "title": [b""]}))]),
        "features",
    ),
    "json cut short": (leaf(lambda content: json.dumps(content)[:-9]), "Expecting"),
    "json of another shape": (leaf(lambda content: [content]), "another shape"),
    "json with one sample less": (
        leaf(lambda content: content | {"num_samples": [3]}),
        "3 examples",
    ),
    "json with a short image": (
        leaf(lambda c: c | {"user_data": {"f0001_10": {"x": [[1.0], [0, 1]], "y": [1, 2]}}}),
        "no array",
    ),
    "json of text": (
        leaf(lambda c: c | {"user_data": {"f0001_10": {"x": ["a", "b"], "y": [1, 2]}}}),
        "no array",
    ),
    "json of numbers": (
        leaf(lambda c: c | {"user_data": {"f0001_10": {"x": 1, "y": 2}}}),
        "another number for f0001_10",
    ),
    "half a character in a user": (
        leaf(
            lambda c: c | {"users": ["\ud800"], "user_data": {"\ud800": c["user_data"]["f0001_10"]}}
        ),
        r"'\\ud800'",
    ),
    "json of nameless writers": (leaf(lambda c: c | {"users": [[]]}), "another shape"),
    "leaf train without test": (leaf_without_test, "no test file"),
    "leaf with a writer twice": (leaf_with_a_writer_twice, "twice"),
}


@pytest.mark.parametrize(("write", "said"), BAD.values(), ids=BAD)
def test_a_bad_file_is_one_error_that_names_it(write, said, tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    cache = tmp_path / "cache"
    with pytest.raises(InputError, match=said) as caught:
        open_dataset(write(folder), cache=cache)
    assert str(folder) in str(caught.value)
    assert caught.value.allowed
    assert caught.value.fix
    assert "\n" not in str(caught.value)
    assert list_datasets(cache) == []
    assert not cache.exists() or not [path for path in cache.glob(".work/*") if path.is_dir()]
