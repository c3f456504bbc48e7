"""Every format is written small and read back equal."""

import sys

import numpy as np
import pytest

from keyhole.data.open import open_dataset
from keyhole.errors import InputError
from tests.data import files


def write_emnist_sqlite(folder):
    return files.write_sqlite(folder / "emnist_all.sqlite", files.emnist_rows())


def write_stackoverflow_sqlite(folder):
    return files.write_sqlite(folder / "stackoverflow.sqlite", files.stackoverflow_rows())


def write_leaf_pair(folder):
    files.write_leaf(folder / "many")
    for split in ("train", "test"):
        names = sorted((folder / "many" / split).glob("*0001_10*"))
        names[0].rename(folder / f"one_{split}.json")
    return folder / "one_test.json"


WRITER_FILES = {
    "archive": lambda folder: files.write_femnist(folder / "femnist.npz"),
    "hdf5": files.write_emnist_hdf5,
    "hdf5 folder": lambda folder: files.write_emnist_hdf5(folder).parent,
    "sqlite": write_emnist_sqlite,
    "leaf": files.write_leaf,
}

POST_FILES = {"hdf5": files.write_stackoverflow_hdf5, "sqlite": write_stackoverflow_sqlite}


@pytest.fixture
def opened(tmp_path):
    def open_(write):
        folder = tmp_path / "source"
        folder.mkdir()
        return open_dataset(write(folder), cache=tmp_path / "cache")

    return open_


@pytest.mark.parametrize("write", WRITER_FILES.values(), ids=WRITER_FILES)
def test_writers_are_read_back(opened, write):
    dataset = opened(write)
    assert dataset.kind == "writers"
    assert dataset.splits.keys() == files.WRITERS.keys()
    for split, clients in files.WRITERS.items():
        data = dataset.splits[split]
        assert list(data.client_ids) == list(clients)
        for number, labels in enumerate(clients.values()):
            columns = data.client(number)
            assert columns["label"].tolist() == labels
            assert columns["pixels"].dtype == np.uint8
            np.testing.assert_array_equal(columns["pixels"], files.images(labels))
    assert dataset.names["classes"][36] == "a"
    assert dataset.facts["licence"]


def test_a_pair_of_leaf_files_is_found_by_one_of_them(opened):
    dataset = opened(write_leaf_pair)
    assert dataset.splits["train"].client(0)["label"].tolist() == [3, 61]
    assert dataset.splits["test"].client(0)["label"].tolist() == [0]


def words_of(dataset, split, client):
    """The posts of a client as text again."""
    data = dataset.splits[split]
    columns = data.client(list(data.client_ids).index(client))
    names = {"words": "words", "title": "words", "tags": "tags"}
    return [
        tuple(
            [dataset.names[names[column]][number] for number in columns[column][row]]
            for column in ("words", "title", "tags")
        )
        for row in range(len(columns["words"]))
    ]


@pytest.mark.parametrize("write", POST_FILES.values(), ids=POST_FILES)
def test_posts_of_tensorflow_federated_are_read_back(opened, write):
    dataset = opened(write)
    for split, clients in files.POSTS.items():
        assert list(dataset.splits[split].client_ids) == list(clients)
        for client, rows in clients.items():
            assert words_of(dataset, split, client) == [
                (tokens.split(), title.lower().split(), tags.split("|"))
                for tokens, title, tags in rows
            ]
    sentences = dataset.splits["train"].columns["sentences"]
    assert [sentences[i].tolist() for i in range(3)] == [[5], [3], [3]]


@pytest.mark.parametrize("write", POST_FILES.values(), ids=POST_FILES)
def test_a_user_of_two_splits_counts_once(opened, write):
    """Users of the words: a 0010 0021 0030; map 0021 0030; then one user each, by alphabet.

    "sort" is in two splits of 0010, so it has one user. "other" stands in a title alone: none.
    Tags: map 0021 0030; then c++ 0021, list 0010, python 0010 (twice, in two splits).
    """
    dataset = opened(write)
    once = ["how", "is", "it", "list", "sort", "to", "use"]
    assert list(dataset.names["words"]) == ["a", "map", *once, "other"]
    assert list(dataset.names["tags"]) == ["map", "c++", "list", "python"]


def test_stack_exchange_is_split_by_user(opened):
    records = [
        files.stack_record(10, "Test it. Twice!", "A title", ["x"]),
        files.stack_record(11, "check"),
        files.stack_record(12, "one\ntwo words"),
        files.stack_record(12, "three"),
    ]
    dataset = opened(lambda folder: files.write_stackexchange(folder / "s.jsonl.xz", records))
    ids = {split: list(data.client_ids) for split, data in dataset.splits.items()}
    assert ids == {"test": ["10"], "validation": ["11"], "train": ["12"]}
    assert words_of(dataset, "test", "10") == [(["test", "it", "twice"], ["a", "title"], ["x"])]
    assert dataset.splits["test"].columns["sentences"][0].tolist() == [2, 1]
    assert dataset.splits["train"].columns["sentences"][0].tolist() == [1, 2]
    assert words_of(dataset, "train", "12")[1] == (["three"], [], [])


def test_ratings_are_split_by_time(opened):
    """21 ratings give two to test; the file's last two are the oldest, so 17 and 18 are newest."""
    dataset = opened(lambda folder: files.write_movielens(folder / "movies.npz"))
    train, test = dataset.splits["train"], dataset.splits["test"]
    assert list(train.client_ids) == ["0"]  # the other has one rating, and that is to test on
    assert train.client(0)["item"].tolist() == [19, 20, *range(17)]
    assert test.client(0)["item"].tolist() == [17, 18]
    assert test.client(0)["half_stars"].tolist() == [8, 9]
    assert test.client(1)["item"].tolist() == [0]
    assert dataset.names["items"][20] == "Movie 20"


def test_without_h5py_the_error_says_what_to_install(tmp_path, monkeypatch):
    path = files.write_emnist_hdf5(tmp_path)
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(InputError, match=r"pip install 'keyhole\[tff\]'"):
        open_dataset(path, cache=tmp_path / "cache")
