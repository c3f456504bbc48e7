"""Laws of key spaces: every mapping between them comes back, also at the edge of int64."""

from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import keyhole as kh
from keyhole.errors import KeySpaceError

LAST = 2**63 - 1

# Shapes of key spaces whose product is at most 2^63, several of them exactly there or just below.
FACTORS = st.one_of(
    st.lists(st.integers(1, 2000), min_size=1, max_size=5),
    st.sampled_from(
        [
            [2**63],
            [1, 2**63],
            [2**63, 1],
            [2**31, 2**32],
            [2**32, 2**31],
            [3, 2**61],
            [7, 7, 1317624576693539401 // 7],
            [3037000499, 3037000499],
            [LAST],
        ]
    ),
).map(lambda sizes: [kh.KeySpace(f"axis{i}", size) for i, size in enumerate(sizes)])


def edge_keys(space):
    """Keys at both ends and anywhere between."""
    last = space.num_keys - 1
    return st.one_of(st.just(0), st.just(last), st.integers(0, last))


@given(st.data())
def test_product_keys_split_into_what_was_joined(data):
    factors = data.draw(FACTORS)
    product = kh.Product(tuple(factors))
    size = data.draw(st.integers(0, 4))
    keys = [
        factor.keys(data.draw(st.lists(edge_keys(factor), min_size=size, max_size=size)))
        for factor in factors
    ]
    assert list(product.split(product.join(*keys))) == keys


@given(st.data())
def test_split_product_keys_join_to_what_they_were(data):
    product = kh.Product(tuple(data.draw(FACTORS)))
    keys = product.space.keys(data.draw(st.lists(edge_keys(product.space), max_size=4)))
    assert product.join(*product.split(keys)) == keys


@given(FACTORS)
def test_the_last_product_key_is_the_tuple_of_last_keys(factors):
    product = kh.Product(tuple(factors))
    (key,) = product.join(*(f.keys([f.num_keys - 1]) for f in factors))
    assert key == prod(f.num_keys for f in factors) - 1


def test_the_largest_key_is_the_largest_int64():
    space = kh.KeySpace("everything", 2**63)
    assert space.keys([LAST]).array.tolist() == [np.iinfo(np.int64).max]


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_mixed_radix_counts_as_nested_loops_do(sizes):
    factors = tuple(kh.KeySpace(f"axis{i}", size) for i, size in enumerate(sizes))
    product = kh.Product(factors)
    every = product.grid(*(f.all_keys() for f in factors))
    assert every == product.space.all_keys()
    assert np.ravel_multi_index([k.array for k in product.split(every)], sizes).tolist() == list(
        range(prod(sizes))
    )


@pytest.mark.parametrize(
    ("num_keys", "length"), [(2, 63), (2**21, 3), (2**63, 1), (10, 18), (1, 9)]
)
@given(data=st.data())
def test_sequences_come_back_from_their_one_key(num_keys, length, data):
    sequences = kh.Sequences(kh.KeySpace("item", num_keys), length)
    items = st.lists(edge_keys(sequences.items), min_size=length, max_size=length)
    keys = sequences.items.keys(data.draw(items))
    (key,) = sequences.join(keys)
    assert sequences.split(key) == keys


@given(
    st.data(),
    st.sampled_from([1, 2, 10, 97, 2**32 + 1, LAST, 2**63]),
    st.booleans(),
)
def test_keys_come_back_from_their_bucket_and_place(data, num_keys, striped):
    items = kh.KeySpace("item", num_keys)
    size = data.draw(st.one_of(st.just(1), st.just(num_keys), st.integers(1, num_keys)))
    buckets = kh.Buckets(items, size, striped)
    keys = items.keys(data.draw(st.lists(edge_keys(items), max_size=5)))
    bucket, place = buckets.split(keys)
    assert buckets.join(bucket, place) == keys
    assert all(p < size for p in place.tolist())


@given(st.integers(1, 60), st.data(), st.booleans())
def test_buckets_share_out_every_key_once(num_keys, data, striped):
    size = data.draw(st.integers(1, num_keys))
    buckets = kh.Buckets(kh.KeySpace("item", num_keys), size, striped)
    members = [list(buckets.members(b)) for b in buckets.space.all_keys()]
    assert sorted(k for bucket in members for k in bucket) == list(range(num_keys))
    assert all(1 <= len(bucket) <= size for bucket in members)


@pytest.mark.parametrize(
    "too_large",
    [
        lambda: kh.Product((kh.KeySpace("a", 2**32), kh.KeySpace("b", 2**32))).space,
        lambda: kh.Sequences(kh.KeySpace("a", 10), 19).space,
        lambda: kh.KeySpace("a", 2**63 + 1),
    ],
)
def test_spaces_beyond_int64_are_refused(too_large):
    with pytest.raises(KeySpaceError, match="from 1 to 2\\^63"):
        too_large()
