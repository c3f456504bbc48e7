"""Choices made of choices: keys that all hold, random others, buckets, and one choice per space."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyhole.errors import InputError, KeySpaceError
from keyhole.keys.budget import keys_within, share_of_keys
from keyhole.keys.choice import ClientContext, KeyContext, KeyCounts, KeyUsers, choose_with
from keyhole.keys.sampled import count_buckets, every, independent, whole_buckets
from keyhole.keys.structured import CHOICES, always, random_own, top, with_negatives
from keyhole.primitives.keyspace import Buckets, KeySpace
from tests.helpers import LAYOUTS, SEEDS, grid
from tests.keys.test_choices import COUNTS, NUMBERS, rng, within

SHARES = st.floats(0, 0.99)


@given(counts=COUNTS, m=NUMBERS, seed=SEEDS, data=st.data())
def test_keys_that_all_hold_come_first_and_count(counts, m, seed, data):
    every_key = st.integers(0, counts.space.num_keys - 1)
    first = data.draw(st.lists(every_key, unique=True, max_size=5))
    keys = always(first, top)(within(counts, m, seed)).tolist()
    rest = [k for k in top(within(counts, counts.space.num_keys)).tolist() if k not in first]
    assert keys == (first + rest)[:m]


@given(counts=COUNTS, seed=SEEDS)
def test_random_keys_fill_up_what_the_first_ones_leave(counts, seed):
    n = counts.space.num_keys
    for m in range(n + 1):
        assert len(always([n - 1], independent)(within(counts, m, seed))) == m
    assert sorted(always([n - 1], every)(within(counts, n, seed)).tolist()) == list(range(n))


def test_a_first_key_out_of_range_is_refused():
    with pytest.raises(KeySpaceError, match=r"got 5; expected 0\.\.4"):
        always([5], top)(within(KeyCounts.none(KeySpace("word", 5)), 3))


@given(counts=COUNTS, m=NUMBERS, share=SHARES, seed=SEEDS)
def test_negatives_follow_the_chosen_keys_and_are_others(counts, m, share, seed):
    sampled = round(share * m)
    chosen = top(within(counts, m - sampled))
    keys = with_negatives(top, share)(within(counts, m, seed))
    np.testing.assert_array_equal(keys[: len(chosen)], chosen)
    assert len(keys) - len(chosen) == min(sampled, counts.space.num_keys - len(chosen))
    assert len(np.unique(keys)) == len(keys)


def test_negatives_are_uniform_over_all_keys_that_were_not_chosen():
    """Two of the 8 others: each with probability 1/4; five standard deviations of a count."""
    counts, draws, generator = KeyCounts.of(KeySpace("word", 10), np.array([7, 2])), 3000, rng(3)
    choose = with_negatives(top, 0.5)
    found = np.concatenate([choose(KeyContext(counts, 4, generator))[2:] for _ in range(draws)])
    keys, occurs = np.unique(found, return_counts=True)
    assert keys.tolist() == [0, 1, 3, 4, 5, 6, 8, 9]
    assert np.all(np.abs(occurs - draws / 4) < 5 * (draws * 3 / 16) ** 0.5)


def test_negatives_of_a_huge_space_cost_nothing():
    counts = KeyCounts.of(KeySpace("word", 2**63), np.array([2**63 - 1, 0]))
    keys = with_negatives(top, 0.5)(within(counts, 100))
    assert len(np.unique(keys)) == 52


@pytest.mark.parametrize("share", [-0.1, 1, 1.5, float("nan")])
def test_a_share_of_negatives_leaves_room_for_own_keys(share):
    with pytest.raises(InputError, match="at least 0, below 1"):
        with_negatives(top, share)


@given(counts=COUNTS, is_striped=st.booleans(), data=st.data())
def test_buckets_conserve_counts(counts, is_striped, data):
    size = data.draw(st.integers(1, counts.space.num_keys))
    buckets = Buckets(counts.space, size, is_striped)
    by_bucket = count_buckets(counts, buckets)
    occurs = dict(zip(counts.keys.tolist(), counts.counts.tolist(), strict=True))
    for bucket, count in zip(by_bucket.keys, by_bucket.counts, strict=True):
        assert count == sum(occurs.get(k, 0) for k in buckets.members(int(bucket)))
    assert by_bucket.counts.sum() == counts.counts.sum()
    assert by_bucket.space == buckets.space
    assert np.all(np.diff(by_bucket.keys) > 0)


@given(counts=COUNTS, is_striped=st.booleans(), seed=SEEDS, data=st.data())
def test_whole_buckets_fit_and_hold_the_top_bucket(counts, is_striped, seed, data):
    size = data.draw(st.integers(1, counts.space.num_keys))
    m = data.draw(st.integers(size, 2 * counts.space.num_keys))
    buckets = Buckets(counts.space, size, is_striped)
    keys = whole_buckets(top, buckets)(within(counts, m, seed))
    assert len(keys) <= m
    assert len(np.unique(keys)) == len(keys)
    chosen = top(within(count_buckets(counts, buckets), m // size))
    assert keys.tolist() == [k for b in chosen.tolist() for k in buckets.members(b)]


def test_buckets_of_one_key_are_the_keys():
    counts = KeyCounts.of(KeySpace("word", 10), np.array([4, 4, 9, 1, 1, 1]))
    np.testing.assert_array_equal(
        whole_buckets(top, Buckets(counts.space, 1))(within(counts, 2)),
        top(within(counts, 2)),
    )


def test_a_client_that_cannot_hold_a_bucket_is_named():
    word = KeySpace("word", 10)
    choose = whole_buckets(top, Buckets(word, 4))
    with pytest.raises(InputError, match="got 3 keys per client; expected 4 or more"):
        choose(within(KeyCounts.none(word), 3))
    assert choose(within(KeyCounts.none(word), 0)).tolist() == []


@grid(
    "name, choice",
    [name for name, layout in LAYOUTS.items() if layout.spaces],
    sorted(CHOICES.keys() - {"all"}),
)
@given(seed=SEEDS, data=st.data())
def test_budgets_hold_through_any_choice(name, choice, seed, data):
    layout = LAYOUTS[name]
    minimum, limit = (
        layout.client_bytes(**{s.name: n(s) for s in layout.spaces})
        for n in (lambda s: 1, lambda s: s.num_keys)
    )
    model_bytes = data.draw(st.integers(minimum, limit))

    def count_keys(own):
        return {s.name: KeyCounts.of(s, own % s.num_keys) for s in layout.spaces}

    choose = choose_with({s.name: CHOICES[choice] for s in layout.spaces}, count_keys)
    users = KeyUsers.among(1, lambda client: np.arange(20), count_keys)
    limit = keys_within(layout, model_bytes)
    keys = choose(np.arange(20), ClientContext(limit, rng(seed), norms={}, users=users))
    assert layout.client_bytes(**{z.space.name: len(z) for z in keys.values()}) <= model_bytes


def test_what_is_drawn_in_one_space_does_not_depend_on_data_in_another():
    word, neuron = KeySpace("word", 50), KeySpace("neuron", 50)
    choose = choose_with(
        {"word": random_own, "neuron": independent},
        lambda own: {"word": KeyCounts.of(word, own), "neuron": KeyCounts.none(neuron)},
    )
    limit = {"word": 5, "neuron": 10}
    few, many = (choose(np.arange(n), ClientContext(limit, rng(7))) for n in (1, 40))
    assert few["neuron"] == many["neuron"]


def test_the_same_random_numbers_do_not_choose_the_same_keys_of_two_spaces():
    first, second = KeySpace("first", 1000), KeySpace("second", 1000)
    choose = choose_with(
        {"first": independent, "second": independent},
        lambda _: {"first": KeyCounts.none(first), "second": KeyCounts.none(second)},
    )
    keys = choose(None, ClientContext({"first": 20, "second": 20}, rng(0)))
    assert list(keys["first"]) != list(keys["second"])


def test_a_share_of_keys_is_at_least_one_and_at_most_all():
    spaces = [KeySpace("word", 10_004), KeySpace("neuron", 2048), KeySpace("expert", 3)]
    assert share_of_keys(spaces, 0.1) == {"word": 1000, "neuron": 205, "expert": 1}
    assert share_of_keys(spaces, 1) == {s.name: s.num_keys for s in spaces}
    for alpha in (0, -1, 1.01):
        with pytest.raises(InputError, match="above 0, at most 1"):
            share_of_keys(spaces, alpha)
