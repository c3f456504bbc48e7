"""The real files: counts as their README gives them, and opened quickly."""

import lzma

import numpy as np
import pytest

from keyhole.data.open import open_dataset
from tests.helpers import shared_file


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def sizes(dataset):
    return {name: (len(data), data.num_examples) for name, data in dataset.splits.items()}


def test_femnist_mini(cache):
    path = shared_file("femnist_mini.npz")
    dataset = open_dataset(path, cache=cache)
    assert sizes(dataset) == {"train": (100, 8294), "test": (100, 1598)}
    labels = np.concatenate([data.columns["label"] for data in dataset.splits.values()])
    assert np.bincount(labels, minlength=62).min() >= 63
    with np.load(path) as arrays:
        is_train = arrays["split"] == 0
        found = dataset.splits["train"].columns["pixels"]
        np.testing.assert_array_equal(found, arrays["images"][is_train])


def test_stackexchange_mini(cache):
    path = shared_file("stackexchange_mini.jsonl.xz")
    dataset = open_dataset(path, cache=cache)
    total = np.array(list(sizes(dataset).values())).sum(axis=0)
    assert total.tolist() == [250, 3690]
    assert len(dataset.names["tags"]) == 612
    for data in dataset.splits.values():
        words, sentences = data.columns["words"], data.columns["sentences"]
        sums = np.add.reduceat(sentences.values, sentences.offsets[:-1])
        np.testing.assert_array_equal(sums, words.lengths)
    assert "the" in dataset.names["words"][:20]
    with lzma.open(path) as lines:
        assert sum(1 for _ in lines) == 3690


def test_words_are_numbered_by_users(cache):
    dataset = open_dataset(shared_file("stackexchange_mini.jsonl.xz"), cache=cache)
    for column, names in (("words", "words"), ("tags", "tags")):
        users = np.zeros(len(dataset.names[names]), int)
        for data in dataset.splits.values():
            for i in range(len(data)):
                users[np.unique(data.client(i)[column].flat)] += 1
        assert (np.diff(users) <= 0).all()


def test_movielens(cache):
    dataset = open_dataset(shared_file("movielens_small.npz"), cache=cache)
    counts = sizes(dataset)
    assert counts["train"][0] == counts["test"][0] == 610
    assert counts["train"][1] + counts["test"][1] == 100_836
    assert len(dataset.names["items"]) == 9742
    assert dataset.splits["test"].counts.min() >= 1


@pytest.mark.slow
def test_stackexchange(cache):
    dataset = open_dataset(shared_file("stackexchange.jsonl.xz"), cache=cache)
    total = np.array(list(sizes(dataset).values())).sum(axis=0)
    assert total.tolist() == [19_645, 109_427]
    assert len(dataset.names["tags"]) == 3607


@pytest.mark.slow
def test_femnist(cache):
    dataset = open_dataset(shared_file("femnist.npz"), cache=cache)
    assert sizes(dataset) == {"train": (710, 64_740), "test": (704, 8379)}
