"""Sums of records: the fast way is the definition, and damage shows."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyhole.errors import ShapeError
from keyhole.server.checksums import sum_records, sum_records_by_definition

ORDER = 2**64


def splitmix64(count, seed=0x6B6579686F6C6531):
    """The published generator, in Python's whole numbers."""
    outputs = []
    for _ in range(count):
        seed = (seed + 0x9E3779B97F4A7C15) % ORDER
        z = (seed ^ seed >> 30) * 0xBF58476D1CE4E5B9 % ORDER
        z = (z ^ z >> 27) * 0x94D049BB133111EB % ORDER
        outputs.append(z ^ z >> 31)
    return outputs


def sum_by_hand(record):
    """The formula of the module's docstring, word by word."""
    padded = record + bytes(-len(record) % 4)
    words = [1] + [int.from_bytes(padded[i : i + 4], "little") for i in range(0, len(padded), 4)]
    outputs = splitmix64(2 * len(words))
    a, b = (sum(c * w for c, w in zip(outputs[i::2], words, strict=True)) % ORDER for i in (0, 1))
    return (a >> 32) << 32 | b >> 32


def random_records(count, length, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, length), dtype=np.uint8)


@given(count=st.integers(0, 5), length=st.integers(0, 41), seed=st.integers(0, 2**32))
def test_both_ways_are_the_formula(count, length, seed):
    records = random_records(count, length, seed)
    by_hand = [sum_by_hand(record.tobytes()) for record in records]
    assert sum_records(records).tolist() == by_hand
    assert sum_records_by_definition(records).tolist() == by_hand


@pytest.mark.parametrize("length", [0, 1, 3, 4, 500, 2048, 2049])
def test_long_runs_of_records_equal_the_definition(length):
    records = random_records(1500, length)
    np.testing.assert_array_equal(sum_records(records), sum_records_by_definition(records))


def test_extreme_words_wrap_around():
    records = np.full((2, 4096), 255, np.uint8)
    assert sum_records(records).tolist() == [sum_by_hand(bytes([255]) * 4096)] * 2


@given(length=st.integers(1, 64), data=st.data())
def test_every_flipped_bit_changes_the_sum(length, data):
    record = random_records(1, length, data.draw(st.integers(0, 99)))
    flipped = record.copy()
    flipped[0, data.draw(st.integers(0, length - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert sum_records(record) != sum_records(flipped)


@pytest.mark.parametrize("length", [8, 7])
def test_records_may_be_read_only_unaligned_and_strided(length):
    expected = sum_records(random_records(6, length))
    frozen = random_records(6, length)
    frozen.flags.writeable = False
    shifted = np.empty(6 * length + 1, np.uint8)[1:].reshape(6, length)
    shifted[:] = frozen
    wide = np.zeros((6, length + 3), np.uint8)
    wide[:, :length] = frozen
    for records in (frozen, shifted, wide[:, :length], frozen[::-1][::-1]):
        np.testing.assert_array_equal(sum_records(records), expected)


def test_the_caller_s_records_stay_writeable():
    records = random_records(2, 8)
    sum_records(records)
    assert records.flags.writeable


def test_sums_are_written_where_asked():
    out = np.zeros(4, np.uint64)
    assert sum_records(random_records(2, 8), out[1:3]).base is out
    assert out.tolist() == [0, *sum_records(random_records(2, 8)).tolist(), 0]


@pytest.mark.parametrize(
    ("records", "out"),
    [
        (np.zeros(4, np.uint8), None),
        (np.zeros((2, 4), np.int8), None),
        (np.zeros((2, 4), np.uint8), np.zeros(3, np.uint64)),
        (np.zeros((2, 4), np.uint8), np.zeros(2, np.int64)),
        (np.zeros((2, 4), np.uint8), np.zeros(4, np.uint64)[::2]),
    ],
)
def test_what_does_not_fit_is_refused(records, out):
    with pytest.raises(ShapeError, match=r"expected .*uint\d+ of shape"):
        sum_records(records, out)
