"""The database: rows, tags and digest are exactly what docs/wire.md says."""

from hashlib import sha256

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyhole.delivery.base import name_of_round
from keyhole.delivery.pir.database import Database, tags_of
from keyhole.errors import ShapeError

ROUND = name_of_round("round 7")


def random_records(num_keys, record_bytes, seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (num_keys, record_bytes), dtype=np.uint8)


def hash_by_hand(round_name, key, record):
    text = round_name + int(key).to_bytes(8, "little") + record.tobytes()
    return sha256(b"keyhole-slice" + text).digest()


def tag_by_hand(round_name, key, record):
    return hash_by_hand(round_name, key, record)[:16]


@given(st.integers(0, 9), st.integers(0, 300))
def test_tags_are_sha_256_over_round_key_and_slice(count, record_bytes):
    records = random_records(count, record_bytes)
    keys = np.arange(count) * 2**33 + 5
    tags = tags_of(ROUND, keys, records)
    assert tags.shape == (count, 16)
    expected = [tag_by_hand(ROUND, key, record) for key, record in zip(keys, records, strict=True)]
    assert [tag.tobytes() for tag in tags] == expected


@pytest.mark.parametrize("record_bytes", [103, 104, 105, 231, 232, 233, 2048, 2049])
def test_tags_are_right_where_a_slice_fills_blocks_of_the_hash(record_bytes):
    records = random_records(7, record_bytes)
    for key, (tag, record) in enumerate(
        zip(tags_of(ROUND, np.arange(7), records), records, strict=True)
    ):
        assert tag.tobytes() == tag_by_hand(ROUND, key, record)


def test_a_tag_changes_with_the_round_the_key_and_every_byte():
    records = random_records(1, 40)
    tag = tags_of(ROUND, np.array([3]), records).tobytes()
    others = [tags_of(name_of_round("round 8"), np.array([3]), records).tobytes()]
    others += [tags_of(ROUND, np.array([4]), records).tobytes()]
    for i in range(40):
        changed = records.copy()
        changed[0, i] ^= 1
        others += [tags_of(ROUND, np.array([3]), changed).tobytes()]
    assert len({tag, *others}) == 43


def test_tags_of_records_with_gaps_are_those_of_their_bytes():
    wide = random_records(6, 80)
    np.testing.assert_array_equal(
        tags_of(ROUND, np.arange(3), wide[::2, 10:50]),
        tags_of(ROUND, np.arange(3), wide[::2, 10:50].copy()),
    )


@pytest.mark.parametrize("record_bytes", [1, 7, 8, 9, 64, 2048])
def test_a_row_is_slice_tag_and_zeros_up_to_a_word(record_bytes):
    records = random_records(11, record_bytes)
    database = Database.of(ROUND, records)
    words = -(-(record_bytes + 16) // 8)
    assert (database.rows.dtype, database.rows.shape) == (np.uint64, (11, words))
    zeros = bytes(8 * words - record_bytes - 16)
    for key, row in enumerate(database.rows.astype("<u8")):
        tag = tag_by_hand(ROUND, key, records[key])
        assert row.tobytes() == records[key].tobytes() + tag + zeros
    assert database.rows.ctypes.data % 64 == 0
    assert (database.num_keys, database.record_bytes, database.round) == (11, record_bytes, ROUND)


def test_the_digest_covers_round_sizes_and_whole_hashes_of_all_slices():
    """Not the tags: two tables with the same tags are found with 2^64 trials."""
    records = random_records(5, 12)
    facts = ROUND + (5).to_bytes(8, "little") + (12).to_bytes(8, "little")
    hashes = b"".join(hash_by_hand(ROUND, key, record) for key, record in enumerate(records))
    assert Database.of(ROUND, records).digest == sha256(facts + hashes).digest()


def test_any_changed_bit_of_any_slice_changes_the_digest():
    records = random_records(9, 3)
    digests = {Database.of(ROUND, records).digest}
    for bit in range(9 * 3 * 8):
        changed = records.copy()
        changed.reshape(-1)[bit // 8] ^= 1 << bit % 8
        digests.add(Database.of(ROUND, changed).digest)
    assert len(digests) == 9 * 3 * 8 + 1


def test_a_database_keeps_its_own_copy_that_nobody_writes_to():
    records = random_records(4, 8)
    database = Database.of(ROUND, records)
    before = database.rows.copy()
    records[:] = 0
    np.testing.assert_array_equal(database.rows, before)
    with pytest.raises(ValueError, match="read-only"):
        database.rows[0, 0] = 1


@pytest.mark.parametrize(
    ("round_name", "records"),
    [
        (bytes(15), random_records(3, 4)),
        (ROUND, random_records(3, 4).astype(np.int64)),
        (ROUND, random_records(3, 4)[0]),
        (ROUND, random_records(0, 4)),
        (ROUND, random_records(3, 0)),
    ],
)
def test_what_is_no_table_of_bytes_is_refused(round_name, records):
    with pytest.raises(ShapeError, match="cannot be made a database"):
        Database.of(round_name, records)


def test_tags_need_a_key_for_every_slice():
    with pytest.raises(ShapeError, match=r"\(2,\) keys for \(3, 4\) slices"):
        tags_of(ROUND, np.arange(2), random_records(3, 4))


def test_printing_a_database_shows_sizes_only():
    assert repr(Database.of(ROUND, random_records(4, 8))) == "Database(4 slices of 8 bytes)"
