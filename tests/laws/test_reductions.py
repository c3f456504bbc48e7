"""Laws of section 3.3: each reduced form delivers what the separate selects and broadcasts
deliver."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import keyhole as kh
from tests.helpers import key_lists, read, whole_numbers

ROW, COLUMN = kh.KeySpace("row", 7), kh.KeySpace("column", 4)
COHORTS = st.lists(key_lists(ROW), min_size=1, max_size=3).map(kh.at_clients)


def pick(x, k):
    return x[k]


def columns(x, k):
    return x[:, k]


@given(whole_numbers((3, 2)), COHORTS)
def test_broadcast_as_select_is_broadcast(x, keys):
    selected = read(kh.broadcast_as_select(kh.at_server(x), to=keys))
    assert selected.keys() == set(keys.cohort)
    for received in selected.values():
        np.testing.assert_array_equal(received, x)


@given(whole_numbers((7, 2)), whole_numbers((3,)), COHORTS)
def test_select_fused_with_broadcast_delivers_both(x, y, keys):
    fused = read(kh.select(kh.at_server((x, y)), keys, kh.fuse_broadcast(pick)))
    separate = read(kh.select(kh.at_server(x), keys, pick))
    for client, slices in fused.items():
        np.testing.assert_array_equal([a for a, _ in slices], separate[client])
        assert all(b is y for _, b in slices)


@given(
    whole_numbers((7, 2)),
    whole_numbers((2, 4)),
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3)), max_size=5),
)
def test_two_selects_fuse_over_the_product_space(x, y, pairs):
    product = kh.Product((ROW, COLUMN))
    first, second = ROW.keys([k for k, _ in pairs]), COLUMN.keys([k for _, k in pairs])
    joined = kh.at_clients([product.join(first, second)])
    fused = read(kh.select(kh.at_server((x, y)), joined, kh.fuse_selects(pick, columns, product)))[
        0
    ]
    one = read(kh.select(kh.at_server(x), kh.at_clients([first]), pick))[0]
    two = read(kh.select(kh.at_server(y), kh.at_clients([second]), columns))[0]
    np.testing.assert_array_equal([a for a, _ in fused], one)
    np.testing.assert_array_equal([b for _, b in fused], two)


@given(whole_numbers((7, 2)), st.lists(st.integers(0, 6), min_size=1, max_size=6))
def test_many_keys_are_one_key_of_a_larger_space(x, numbers):
    sequences = kh.Sequences(ROW, len(numbers))
    many = ROW.keys(numbers)
    one = kh.at_clients([sequences.join(many)])
    (slices,) = read(kh.select(kh.at_server(x), one, kh.many_as_one(pick, sequences)))[0]
    np.testing.assert_array_equal(
        slices, read(kh.select(kh.at_server(x), kh.at_clients([many]), pick))[0]
    )


@given(whole_numbers((7, 2)), key_lists(ROW), st.integers(1, 7), st.booleans())
def test_buckets_deliver_every_key_they_cover(x, keys, size, striped):
    buckets = kh.Buckets(ROW, size, striped)
    covering, (of_key, place) = buckets.covering(keys), buckets.split(keys)
    psi = kh.select_buckets(pick, buckets)
    received = read(kh.select(kh.at_server(x), kh.at_clients([covering]), psi))[0]
    by_bucket = dict(zip(covering, received, strict=True))
    for k, b, i in zip(keys, of_key, place.tolist(), strict=True):
        np.testing.assert_array_equal(by_bucket[b][i], x[k])


@given(whole_numbers((7, 2)), whole_numbers((3,)), key_lists(ROW))
def test_a_shared_part_behind_a_last_key_is_select_and_broadcast(x, shared, keys):
    space, psi = kh.shared_as_key(pick, ROW)
    with_last = kh.at_clients([kh.with_shared_key(keys, space)])
    *components, last = read(kh.select(kh.at_server((x, shared)), with_last, psi))[0]
    np.testing.assert_array_equal(
        components, read(kh.select(kh.at_server(x), kh.at_clients([keys]), pick))[0]
    )
    np.testing.assert_array_equal(last, shared)
