"""Scans: kernels equal their plain twins, and what they read follows from shapes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyhole.crypto.cuckoo import Placement
from keyhole.delivery.pir.scan import plain_scan_buckets, plain_scan_rows, scan_buckets, scan_rows
from keyhole.errors import ShapeError

FEW, MANY = (1, 2, 4), (5, 6, 33)  # queries: either side of where tables begin to pay


def random_rows(num_keys, words, seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 2**64, (num_keys, words), dtype=np.uint64)


def random_bits(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def count_bits(bits, positions):
    return np.unpackbits(bits, axis=-1, count=positions, bitorder="little")


def test_a_scan_adds_the_rows_whose_bits_are_set():
    rows = np.array([[1, 2], [4, 8], [16, 32]], np.uint64)
    for repeat in (1, 9):  # little bit order: 0b011 is rows 0 and 1
        found = scan_rows(rows, np.full((repeat, 1), 0b011, np.uint8))
        np.testing.assert_array_equal(found, [[5, 10]] * repeat)


@given(
    st.integers(1, 200), st.integers(1, 40), st.sampled_from(FEW + MANY), st.integers(0, 2**32 - 1)
)
def test_whole_scans_equal_their_plain_twin(num_keys, words, queries, seed):
    rows, bits = random_rows(num_keys, words, seed), random_bits(queries, -(-num_keys // 8))
    np.testing.assert_array_equal(scan_rows(rows, bits), plain_scan_rows(rows, bits))


@given(
    st.integers(1, 300),
    st.integers(3, 40),
    st.integers(1, 20),
    st.sampled_from(FEW + MANY),
    st.integers(0, 2**32 - 1),
)
def test_bucket_scans_equal_their_plain_twin(num_keys, buckets, words, queries, seed):
    placement = Placement(num_keys, buckets)
    rows, members = random_rows(num_keys, words, seed), placement.members()
    bits = random_bits(queries, buckets, -(-placement.bucket_size // 8), seed=seed)
    expected = plain_scan_buckets(rows, members, bits)
    np.testing.assert_array_equal(scan_buckets(rows, members, bits), expected)


@pytest.mark.parametrize("queries", [1, 32])
@pytest.mark.parametrize("words", [258, 257, 256, 10])
def test_rows_of_2_kilobytes_and_of_64_bytes_with_a_tag_equal_the_twin(words, queries):
    rows, bits = random_rows(1003, words), random_bits(queries, 126)
    np.testing.assert_array_equal(scan_rows(rows, bits), plain_scan_rows(rows, bits))


@pytest.mark.parametrize("queries", FEW + MANY)
def test_scans_are_linear_in_the_bits(queries):
    rows = random_rows(333, 9)
    one, other = random_bits(queries, 42, seed=1), random_bits(queries, 42, seed=2)
    np.testing.assert_array_equal(
        scan_rows(rows, one) ^ scan_rows(rows, other), scan_rows(rows, one ^ other)
    )


@pytest.mark.parametrize("queries", [1, 8])
@pytest.mark.parametrize("key", [0, 7, 8, 31, 32, 99])
def test_a_unit_vector_fetches_its_row(key, queries):
    rows = random_rows(100, 5)
    unit = np.packbits(np.arange(104) == key, bitorder="little")[None].repeat(queries, axis=0)
    np.testing.assert_array_equal(scan_rows(rows, unit), rows[[key] * queries])


@pytest.mark.parametrize("queries", [1, 8])
def test_bits_beyond_the_last_row_are_ignored(queries):
    rows = random_rows(13, 3)
    bits = np.full((queries, 2), 255, np.uint8)
    total = np.bitwise_xor.reduce(rows, axis=0)
    np.testing.assert_array_equal(scan_rows(rows, bits), [total] * queries)


@pytest.mark.parametrize("queries", [1, 8])
def test_rows_are_not_changed_and_need_not_be_writable(queries):
    rows = random_rows(50, 9)
    before = rows.copy()
    rows.setflags(write=False)
    scan_rows(rows, random_bits(queries, 7))
    np.testing.assert_array_equal(rows, before)


def test_no_queries_have_no_answers():
    assert scan_rows(random_rows(5, 2), np.empty((0, 1), np.uint8)).shape == (0, 2)


# What is read


@pytest.mark.parametrize("queries", FEW)
def test_few_queries_read_exactly_the_rows_of_their_bits(queries):
    rows, bits, visits = random_rows(777, 4), random_bits(queries, 98), np.zeros(777, np.int64)
    scan_rows(rows, bits, visits)
    np.testing.assert_array_equal(visits, count_bits(bits, 777).sum(axis=0))


@pytest.mark.parametrize("bits", [0, 255, None])
def test_many_queries_read_every_row_once_whatever_their_bits(bits):
    asked = random_bits(40, 98) if bits is None else np.full((40, 98), bits, np.uint8)
    visits = np.zeros(777, np.int64)
    scan_rows(random_rows(777, 4), asked, visits)
    assert (visits == 1).all()


def test_one_batch_reads_exactly_the_rows_of_its_bits_in_every_bucket():
    placement, visits = Placement(500, 40), np.zeros(500, np.int64)
    members, bits = placement.members(), random_bits(1, 40, -(-placement.bucket_size // 8))
    scan_buckets(random_rows(500, 4), members, bits, visits)
    chosen = (count_bits(bits[0], placement.bucket_size) == 1) & (members >= 0)
    np.testing.assert_array_equal(visits, np.bincount(members[chosen], minlength=500))


@pytest.mark.parametrize("bits", [0, 255])
def test_many_batches_read_every_row_once_in_each_sub_table(bits):
    placement, visits = Placement(500, 40), np.zeros(500, np.int64)
    asked = np.full((5, 40, -(-placement.bucket_size // 8)), bits, np.uint8)
    scan_buckets(random_rows(500, 4), placement.members(), asked, visits)
    assert (visits == 3).all()


# What is refused


def bad_rows():
    rows, bits = random_rows(16, 4), random_bits(1, 2)
    return {
        "rows of other numbers": (rows.astype(np.int64), bits),
        "rows of one dimension": (rows[0], bits),
        "rows with gaps": (rows[:, ::2], bits),
        "no rows": (rows[:0], bits[:, :0]),
        "too few bits": (rows, bits[:, :1]),
        "too many bits": (rows, random_bits(1, 3)),
        "bits of other numbers": (rows, bits.astype(np.int8)),
        "bits of one dimension": (rows, bits[0]),
        "visits of another length": (rows, bits, np.zeros(3, np.int64)),
    }


@pytest.mark.parametrize("name", bad_rows())
def test_arrays_that_do_not_fit_are_refused(name):
    with pytest.raises(ShapeError, match="do not fit together in a scan"):
        scan_rows(*bad_rows()[name])


def bad_buckets():
    rows, members, bits = random_rows(16, 4), Placement(16, 4).members(), random_bits(1, 4, 2)
    return {
        "members of 64 bits": (rows, members.astype(np.int64), bits),
        "a member beyond the rows": (rows[:8], members, bits),
        "bits for other buckets": (rows, members, bits[:, :3]),
        "bits of two dimensions": (rows, members, bits[0]),
        "no members": (rows, members[:0], bits[:, :0]),
    }


@pytest.mark.parametrize("name", bad_buckets())
def test_buckets_that_do_not_fit_are_refused(name):
    with pytest.raises(ShapeError, match="do not fit together in a scan"):
        scan_buckets(*bad_buckets()[name])
