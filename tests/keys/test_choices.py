"""Every way to choose keys: distinct, in range, within its number, a function of its arguments."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyhole.errors import InputError
from keyhole.keys.choice import (
    KeyContext,
    KeyCounts,
    KeyTable,
    KeyUsers,
    draw_distinct,
    facts_of,
    needs,
)
from keyhole.keys.sampled import every, independent, nested, rolling, rolling_by
from keyhole.keys.structured import (
    CHOICES,
    always,
    choice_named,
    importance,
    random_own,
    random_top,
    tf_idf,
    tf_idf_by,
    top,
    with_negatives,
)
from keyhole.primitives.keyspace import KeySpace
from tests.helpers import SEEDS

STRUCTURED = {"top": top, "random": random_own, "random-top": random_top}
DRAWN = {
    **STRUCTURED,
    "independent": independent,
    "special words first": always([0], top),
    "special words before random ones": always([0], independent),
    "with negatives": with_negatives(top, 0.4),
    "all of it": with_negatives(always([0], random_top), 0.3),
    "rolling": rolling,
    "rolling by five": rolling_by(5),
    "nested": nested,
}
OTHERS = ("rolling", "nested", "importance", "tf-idf")  # of other papers


@st.composite
def key_counts(draw, max_keys=30):
    """What a client may know: any space, any keys of it, none included."""
    space = KeySpace("word", draw(st.integers(1, max_keys)))
    occurrences = draw(st.lists(st.integers(0, space.num_keys - 1), max_size=60))
    return KeyCounts.of(space, np.array(occurrences, np.int64))


COUNTS, NUMBERS = key_counts(), st.integers(0, 40)


def rng(seed):
    return np.random.default_rng(seed)


def within(counts, m, seed=0):
    """What a client knows that may hold m keys."""
    return KeyContext(counts, m, rng(seed))


@pytest.mark.parametrize("choice", DRAWN.values(), ids=DRAWN)
@given(counts=COUNTS, m=NUMBERS, seed=SEEDS)
def test_a_choice_is_of_distinct_keys_within_its_number(choice, counts, m, seed):
    keys = choice(within(counts, m, seed))
    assert keys.dtype == np.int64
    assert len(counts.space.keys(keys)) <= m  # raises if out of range
    assert len(np.unique(keys)) == len(keys)


@pytest.mark.parametrize("choice", DRAWN.values(), ids=DRAWN)
@given(counts=COUNTS, m=NUMBERS, seed=SEEDS)
def test_a_choice_is_a_function_of_its_arguments(choice, counts, m, seed):
    before = counts.keys.copy(), counts.counts.copy()
    np.testing.assert_array_equal(choice(within(counts, m, seed)), choice(within(counts, m, seed)))
    np.testing.assert_array_equal((counts.keys, counts.counts), before)


@pytest.mark.parametrize("choice", STRUCTURED.values(), ids=STRUCTURED)
@given(counts=COUNTS, m=NUMBERS, seed=SEEDS)
def test_structured_keys_are_the_clients_own_and_as_many_as_it_has(choice, counts, m, seed):
    keys = choice(within(counts, m, seed))
    assert set(keys) <= set(counts.keys)
    assert len(keys) == min(m, len(counts.keys))


@pytest.mark.parametrize("choice", [top, random_own, independent, rolling, nested])
@given(counts=COUNTS, m=NUMBERS, seed=SEEDS)
def test_fewer_keys_are_the_first_of_more(choice, counts, m, seed):
    fewer, more = (choice(within(counts, n, seed)) for n in (m, m + 1))
    np.testing.assert_array_equal(fewer, more[:m])


@given(counts=COUNTS, m=NUMBERS)
def test_top_keys_occur_at_least_as_often_as_those_left_out(counts, m):
    occurs = dict(zip(counts.keys.tolist(), counts.counts.tolist(), strict=True))
    chosen = top(within(counts, m)).tolist()
    by_hand = sorted(occurs, key=lambda key: (-occurs[key], key))
    assert chosen == by_hand[:m]


@given(counts=COUNTS, m=NUMBERS, seed=SEEDS)
def test_random_top_keys_are_among_the_top_twice_as_many(counts, m, seed):
    assert set(random_top(within(counts, m, seed))) <= set(top(within(counts, 2 * m)))


@given(counts=COUNTS)
def test_all_keys_are_all_keys(counts):
    everything = counts.space.all_keys().array
    np.testing.assert_array_equal(every(within(counts, counts.space.num_keys)), everything)
    assert set(independent(within(counts, counts.space.num_keys))) == set(everything)


def test_all_keys_do_not_fit_a_client_that_may_hold_fewer():
    with pytest.raises(InputError, match="got 2 keys per client; expected 3"):
        every(within(KeyCounts.none(KeySpace("filter", 3)), 2))


def test_independent_keys_are_uniform_as_sets_and_in_order():
    """Chi-square over the 6 * 5 = 30 ordered pairs: 29 degrees of freedom, mean 29 and standard
    deviation sqrt(58) = 7.6, so below 29 + 4 * 7.6 unless a pair is favoured."""
    counts, draws, generator = KeyCounts.none(KeySpace("filter", 6)), 6000, rng(1)
    found = np.zeros((6, 6))
    for _ in range(draws):
        first, second = independent(KeyContext(counts, 2, generator))
        found[first, second] += 1
    assert np.all(np.diag(found) == 0)
    expected = draws / 30
    pairs = found[~np.eye(6, dtype=bool)]
    assert np.sum((pairs - expected) ** 2 / expected) < 29 + 4 * 58**0.5


def rolled(choice, num_keys, m, rounds):
    """How often each key is chosen in some rounds, by two clients that choose alike."""
    found = np.zeros(num_keys, int)
    for t in range(rounds):
        counts = KeyCounts.of(KeySpace("neuron", num_keys), np.array([t % num_keys]))
        one, other = (choice(KeyContext(counts, m, rng(c), round=t, client=c)) for c in (0, 1))
        np.testing.assert_array_equal(one, other)
        found[one] += 1
    return found.tolist()


@pytest.mark.parametrize(("num_keys", "m"), [(12, 3), (12, 12), (7, 3), (5, 1)])
def test_a_rolling_window_chooses_every_key_equally_often(num_keys, m):
    """In K rounds, one key at a time; in K / m rounds where it moves by its width."""
    assert rolled(rolling, num_keys, m, num_keys) == [m] * num_keys
    if num_keys % m == 0:
        assert rolled(rolling_by(m), num_keys, m, num_keys // m) == [1] * num_keys


@given(counts=COUNTS, small=NUMBERS, large=NUMBERS, t=st.integers(0, 100))
def test_the_keys_of_a_smaller_device_begin_those_of_a_larger_one(counts, small, large, t):
    for choice in (nested, rolling):
        few, many = (choice(KeyContext(counts, m, rng(0), round=t)) for m in sorted((small, large)))
        np.testing.assert_array_equal(few, many[: len(few)])
    held = min(large, counts.space.num_keys)
    assert nested(KeyContext(counts, large, rng(0), round=t)).tolist() == list(range(held))


def test_a_window_goes_on_past_the_last_key_of_the_largest_space():
    counts = KeyCounts.none(KeySpace("row", 2**63))
    keys = rolling(KeyContext(counts, 3, rng(0), round=2**63 - 2)).tolist()
    assert keys == [2**63 - 2, 2**63 - 1, 0]
    with pytest.raises(InputError, match="step"):
        rolling_by(0)


def weighed(counts, m, norms=None, users=None, clients=7):
    """What a client knows in a run that keeps norms, where clients have keys in common."""
    everyone = [counts.keys] + [np.array(users or [], np.int64)] * (clients - 1)
    known = KeyUsers.among(
        clients, everyone.__getitem__, lambda own: {"word": KeyCounts.of(SPACE, own)}
    )
    moved = sorted((norms or {}).items())
    table = KeyTable(*(np.array([each[i] for each in moved], kind) for i, kind in enumerate("lf")))
    return KeyContext(counts, m, rng(0), norms=table, users=known)


SPACE = KeySpace("word", 30)
OWN = KeyCounts.of(SPACE, np.array([4, 4, 4, 8, 8, 15, 16, 16, 23]))


@pytest.mark.parametrize("users", [[], [4, 8, 15, 16, 23], list(range(30))])
@pytest.mark.parametrize("m", [0, 2, 4, 9])
def test_tf_idf_is_top_where_all_keys_have_as_many_users(m, users):
    """One client has them, or all: where all do, every weight is 0 and counts decide."""
    context = weighed(OWN, m, users=users)
    assert tf_idf(context).tolist() == top(context).tolist()


def test_tf_idf_prefers_what_others_do_not_have():
    """Keys 4 and 16 belong to all seven clients, which weighs log(7 / 7) = 0."""
    context = weighed(OWN, 4, users=[4, 16])
    assert tf_idf(context).tolist() == [8, 15, 23, 4]
    users = np.ones(30)
    users[[4, 16]] = 7
    assert tf_idf_by(users, 7)(context).tolist() == [8, 15, 23, 4]


def test_importance_prefers_rows_that_moved_and_then_frequent_ones():
    assert importance(weighed(OWN, 3, {15: 0.5, 23: 2.0, 1: 9.0})).tolist() == [23, 15, 4]
    context = weighed(OWN, 3)
    assert importance(context).tolist() == top(context).tolist()


def test_importance_of_keys_that_data_do_not_name_fills_up_at_random():
    context = weighed(KeyCounts.none(SPACE), 6, {15: 0.5, 23: 2.0})
    chosen = importance(context).tolist()
    assert chosen[:2] == [23, 15]
    assert len(set(chosen)) == 6


@pytest.mark.parametrize("choice", [importance, tf_idf])
def test_a_choice_that_lacks_what_it_needs_says_so(choice):
    for wrapped in (choice, always([0], choice), with_negatives(choice, 0.5)):
        assert facts_of(wrapped) == facts_of(choice) != ()
        with pytest.raises(InputError, match="this choice of 'word' needs"):
            wrapped(within(OWN, 3))


@pytest.mark.parametrize("fact", ["norm", "Users", "", 3])
def test_a_fact_that_no_run_tells_is_refused_where_a_choice_is_marked(fact):
    with pytest.raises(InputError, match=f"got {fact!r}; expected norms or users; "):
        needs("users", fact)


def test_random_own_keys_are_uniform():
    """Each of 5 keys is among 2 of 5 with probability 0.4; five standard deviations of a count."""
    counts = KeyCounts.of(KeySpace("word", 100), np.array([3, 3, 3, 9, 27, 81, 82]))
    draws, generator = 3000, rng(2)
    found = np.concatenate([random_own(KeyContext(counts, 2, generator)) for _ in range(draws)])
    occurs = np.unique(found, return_counts=True)[1]
    assert np.all(np.abs(occurs - 0.4 * draws) < 5 * (draws * 0.4 * 0.6) ** 0.5)


@pytest.mark.parametrize("num_keys", [10**9, 10**12, 2**63])
def test_the_cost_of_independent_keys_does_not_grow_with_their_space(num_keys):
    """CPU time: a list of 10^9 keys alone takes seconds, of more it does not fit in memory."""
    start = time.process_time()
    keys = independent(within(KeyCounts.none(KeySpace("row", num_keys)), 1000))
    assert time.process_time() - start < 0.5
    assert len(np.unique(keys)) == 1000
    assert keys.max() > num_keys // 2


@given(below=st.integers(0, 40), count=NUMBERS, seed=SEEDS)
def test_a_draw_is_the_beginning_of_a_shuffle(below, count, seed):
    everything = draw_distinct(below, below, rng(seed))
    assert sorted(everything.tolist()) == list(range(below))
    np.testing.assert_array_equal(draw_distinct(below, count, rng(seed)), everything[:count])


def test_choices_have_the_names_of_the_papers():
    assert list(CHOICES) == ["top", "random", "random-top", "independent", "all", *OTHERS]
    assert choice_named("Top") is top


def test_a_name_that_is_no_choice_is_refused_with_those_that_are():
    message = "got 'best'; expected top, random, random-top, independent, all, rolling, nested"
    with pytest.raises(InputError, match=message):
        choice_named("best")
