"""The two-phase union: equal to plain sums and to sketches, and what it leaks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyhole.aggregation.masked.method import run_secagg
from keyhole.aggregation.masked.params import SecAggSettings
from keyhole.aggregation.masked.sketch import SketchShape, decode, encode
from keyhole.aggregation.masked.union import (
    UnionTerms,
    lay_out,
    mark,
    read_off,
    sum_over_union,
    union_of,
)
from keyhole.errors import InputError, KeySpaceError, MalformedError, ShapeError

RINGS = [16, 32]


def terms_of(bits=32, num_keys=100, width=2, clients=10, **others):
    return UnionTerms(num_keys, width, clients, bits, allows_leak=True, **others)


def without(*lost):
    """A vector sum in which some clients drop."""
    return lambda vectors: sum(vector for client, vector in vectors.items() if client not in lost)


def inputs_of(terms, sets, seed=0):
    """Rows without a zero in them: a row that stays zero is nobody's."""
    rng = np.random.default_rng(seed)
    return {
        client: (
            np.array(keys, np.int64),
            rng.integers(1, 2**15, (len(keys), terms.width)).astype(terms.dtype),
        )
        for client, keys in enumerate(sets)
    }


SETS = st.lists(st.lists(st.integers(0, 99), max_size=8, unique=True), min_size=1, max_size=10)


@given(SETS, st.sampled_from(RINGS))
def test_both_phases_give_what_a_sketch_gives(sets, bits):
    terms = terms_of(bits)
    inputs = inputs_of(terms, sets)
    shape = SketchShape(100, 2, 100, bytes(16), bits, spare=5000)
    sketches = sum(encode(shape, keys, rows) for keys, rows in inputs.values())
    expected = decode(shape, sketches, len(sets))
    found = sum_over_union(terms, inputs, without(), without())
    np.testing.assert_array_equal(found.keys, expected.keys)
    np.testing.assert_array_equal(found.counts, expected.counts)
    np.testing.assert_array_equal(found.rows, expected.rows)


@given(SETS.filter(lambda sets: len(sets) > 1), st.sampled_from(RINGS))
def test_the_union_leaks_the_keys_that_only_a_client_between_the_phases_had(sets, bits):
    # Client 0 is counted and drops. The server sees sums alone, and reads its own keys off them.
    terms = terms_of(bits)
    found = sum_over_union(terms, inputs_of(terms, sets), without(), without(0))
    read_by_the_server = set(found.keys[~found.rows.any(axis=1)].tolist())
    assert read_by_the_server == set(sets[0]).difference(*sets[1:])


def test_a_sketch_does_not_have_this_leak():
    # Asked once, a client is in the sum or not: the total does not depend on the keys of one lost.
    shape = SketchShape(100, 2, 50, bytes(16), 32, spare=5000)
    terms = terms_of()
    totals = []
    for lost in ([1, 2, 3], [70, 71]):
        inputs = inputs_of(terms, [[5, 6], [6, 7], lost])
        sketches = {client: encode(shape, *both) for client, both in inputs.items()}
        totals.append(without(2)(sketches))
    np.testing.assert_array_equal(*totals)


def masked_sum(lost=()):
    """The real thing: clients that are lost have shared their secrets and send no vector."""

    def add(vectors):
        settings = SecAggSettings(bytes(16), len(vectors), len(vectors[0]), 32)
        return run_secagg(settings, vectors, dict.fromkeys(lost, "after_shares")).total

    return add


SHARED = [[1, 2], [2, 3], [3, 4], [4, 5, 6], [1, 6, 9]]


def test_the_leak_is_there_under_a_secure_sum_too():
    terms = terms_of()
    found = sum_over_union(terms, inputs_of(terms, SHARED), masked_sum(), masked_sum([4]))
    assert found.keys[~found.rows.any(axis=1)].tolist() == [9]


def test_sketches_under_a_secure_sum_decode_to_the_sum_of_the_survivors():
    terms, shape = terms_of(), SketchShape(100, 2, 20, bytes(16), 32, spare=5000)
    inputs = inputs_of(terms, SHARED)
    total = masked_sum([4])({client: encode(shape, *both) for client, both in inputs.items()})
    stayed = {client: both for client, both in inputs.items() if client != 4}
    expected = sum_over_union(terms, stayed, without(), without())
    found = decode(shape, total, 4)
    assert found.keys.tolist() == expected.keys.tolist() == [1, 2, 3, 4, 5, 6]
    np.testing.assert_array_equal(found.counts, expected.counts)
    np.testing.assert_array_equal(found.rows, expected.rows)


def test_a_least_count_takes_rare_keys_out_of_the_union_and_tells_the_client():
    terms = terms_of(min_count=2)
    inputs = inputs_of(terms, [[1, 2], [2, 4], [3, 2, 4]])
    union = union_of(terms, without()({c: mark(terms, k) for c, (k, _) in inputs.items()}), 3)
    assert union.keys.tolist() == [2, 4]
    vector, is_kept = lay_out(union, *inputs[2])
    assert is_kept.tolist() == [False, True, True]
    np.testing.assert_array_equal(vector.reshape(2, 2), inputs[2][1][1:])
    # The leak is smaller, not closed: both clients of key 4 drop, and key 4 stays zero.
    found = sum_over_union(terms, inputs, without(), without(1, 2))
    assert found.keys[~found.rows.any(axis=1)].tolist() == [4]


def test_nobody_with_a_key_is_an_empty_union():
    terms = terms_of()
    found = sum_over_union(terms, inputs_of(terms, [[], []]), without(), without())
    assert found.keys.shape == (0,)
    assert found.rows.shape == (0, 2)


def test_it_is_off_unless_the_leak_is_allowed():
    with pytest.raises(InputError, match="leaks the keys of clients that drop"):
        UnionTerms(100, 2, 10)


@pytest.mark.parametrize(
    "wrong", [{"num_keys": 0}, {"width": 0}, {"clients": 0}, {"bits": 8}, {"min_count": 0}]
)
def test_impossible_terms_are_refused(wrong):
    with pytest.raises(InputError, match="a two-phase union that cannot be"):
        terms_of(**wrong)


def test_more_marks_than_clients_are_refused():
    terms = terms_of()
    counts = mark(terms, np.array([3])) * np.uint32(4)
    assert union_of(terms, counts, 4).counts.tolist() == [4]
    with pytest.raises(MalformedError, match="more marks than clients: got 1 such keys"):
        union_of(terms, counts, 3)


@pytest.mark.parametrize("keys", [[-1], [100], [5, 5], [[1]], [1.0]], ids=str)
def test_keys_that_cannot_be_marked_are_refused(keys):
    with pytest.raises(KeySpaceError, match="keys that cannot be marked"):
        mark(terms_of(), np.array(keys))
    union = union_of(terms_of(), mark(terms_of(), np.array([5])), 1)
    with pytest.raises(KeySpaceError, match="keys that cannot be marked"):
        lay_out(union, np.array(keys), np.ones((len(keys), 2), np.uint32))


def test_vectors_of_another_shape_or_ring_are_refused():
    terms = terms_of()
    union = union_of(terms, mark(terms, np.array([3])), 1)
    with pytest.raises(ShapeError, match="a sum that does not fit"):
        union_of(terms, np.zeros(99, np.uint32), 1)
    with pytest.raises(ShapeError, match="a sum that does not fit"):
        read_off(union, np.zeros(2, np.uint16))
    with pytest.raises(ShapeError, match="rows that do not fit"):
        lay_out(union, np.array([3]), np.zeros((1, 3), np.uint32))
    assert repr(union) == "Union(1 keys)"
