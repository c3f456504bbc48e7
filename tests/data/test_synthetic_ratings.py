"""Laws of the synthetic ratings: popular items, and taste of low rank."""

import numpy as np
import pytest

from keyhole.data.synthetic import RANK, make_ratings


@pytest.fixture(scope="module")
def data():
    return make_ratings(3)


def test_columns_keep_the_contract(data):
    for part in data.splits.values():
        item, half_stars = part.columns["item"], part.columns["half_stars"]
        assert item.shape == half_stars.shape == (part.num_examples,)
        assert (item.dtype, half_stars.dtype) == (np.int32, np.uint8)
        assert item.min() >= 0
        assert item.max() < len(data.names["items"]) == 3000
        assert half_stars.min() >= 1
        assert half_stars.max() <= 10


def test_each_user_tests_on_the_last_tenth(data):
    train, test = data.splits["train"], data.splits["test"]
    assert len(train) == len(test) == 600
    total = train.counts + test.counts
    assert total.min() >= 20
    assert total.max() <= 200
    assert np.array_equal(test.counts, total // 10)


def test_few_ratings_still_leave_one_to_test_on():
    data = make_ratings(3, users=5, items=10, min_ratings=2, max_ratings=3)
    assert data.splits["test"].counts.tolist() == [1] * 5


def test_nobody_rates_an_item_twice(data):
    for i in range(600):
        items = np.concatenate([part.client(i)["item"] for part in data.splits.values()])
        assert len(np.unique(items)) == len(items)


def test_a_tenth_of_the_items_gets_most_of_the_ratings(data):
    """Even popularity would give it a tenth."""
    counts = np.sort(np.bincount(data.splits["train"].columns["item"], minlength=3000))[::-1]
    assert counts[:300].sum() > 0.4 * counts.sum()


def test_all_half_stars_are_used_and_none_rules(data):
    shares = np.bincount(data.splits["train"].columns["half_stars"], minlength=11)[1:]
    assert shares.min() > 0
    assert shares.max() < 0.3 * shares.sum()


def test_taste_has_the_rank_that_was_asked_for():
    """Where everybody rates everything, biases taken out, RANK singular values stand out."""
    users, items = 300, 60
    data = make_ratings(3, users=users, items=items, min_ratings=items, max_ratings=items)
    table = np.zeros((users, items))
    for i in range(users):
        for part in data.splits.values():
            table[i, part.client(i)["item"]] = part.client(i)["half_stars"]
    assert table.min() >= 1  # all are rated
    table -= table.mean(axis=1, keepdims=True)
    table -= table.mean(axis=0, keepdims=True)
    values = np.linalg.svd(table, compute_uv=False)
    gaps = values[:-1] / values[1:]
    assert gaps[: 2 * RANK].argmax() == RANK - 1
    assert gaps[RANK - 1] > 1.4
