"""The slices a device holds: found again, over restarts too, bounded, and never trusted blindly."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyhole.crypto.merkle import hash_leaves
from keyhole.delivery.records import Coding, RecordField, Records
from keyhole.device.cache import SliceCache
from keyhole.errors import InputError, StorageError

F4 = np.dtype("f4")
WORD = Records("word", 1000, (RecordField("w", (10,), F4),))
TAG = Records("tag", 1000, (RecordField("w", (10,), F4),))
RECORD = WORD.record_bytes + 48  # with key, last use and leaf


def records_of(keys, version=0, table=WORD):
    """A record that tells its key and version in every byte."""
    keys = np.asarray(keys, np.int64)
    seeds = (keys * 31 + version * 7)[:, None] + np.arange(table.record_bytes)
    return (seeds % 251).astype(np.uint8)


def keep(cache, keys, version=0, table=WORD):
    records = records_of(keys, version, table)
    cache.keep([(table, np.asarray(keys, np.int64), records, hash_leaves(records))])


def held(cache, keys, table=WORD):
    """Which of the keys are held."""
    found = cache.find(table, np.asarray(keys, np.int64))
    return [] if found is None else np.asarray(keys)[found.is_held].tolist()


KEYS = st.lists(st.integers(0, 999), max_size=20)


@given(st.lists(KEYS, max_size=5), KEYS)
def test_it_holds_the_newest_record_of_every_key(rounds, wanted):
    cache, newest = SliceCache(None), {}
    for version, keys in enumerate(rounds):
        keep(cache, keys, version)
        newest |= dict.fromkeys(keys, version)
    found = cache.find(WORD, np.array(wanted, np.int64))
    if found is None:
        assert not set(wanted) & newest.keys()
        return
    assert found.is_held.tolist() == [key in newest for key in wanted]
    for key, record, is_held in zip(wanted, found.records, found.is_held, strict=True):
        expected = records_of([key], newest[key])[0] if is_held else 0
        np.testing.assert_array_equal(record, expected)
    np.testing.assert_array_equal(
        found.leaves[found.is_held], hash_leaves(found.records[found.is_held])
    )
    assert not found.leaves[~found.is_held].any()


@given(st.lists(KEYS, max_size=5), st.integers(0, 30))
def test_it_keeps_within_its_bytes_and_the_last_rounds_longest(rounds, room):
    cache, used = SliceCache(None, room * RECORD), {}
    for number, keys in enumerate(rounds):
        keep(cache, keys)
        used |= dict.fromkeys(keys, number)
        assert cache.nbytes <= room * RECORD
        kept = held(cache, sorted(used))
        used = {key: used[key] for key in kept}
    every = {key: number for number, keys in enumerate(rounds) for key in keys}
    assert len(used) == min(room, len(every))
    forgotten = [number for key, number in every.items() if key not in used]
    assert max(forgotten, default=-1) <= min(used.values(), default=len(rounds))


def test_fetching_a_slice_again_keeps_it():
    cache = SliceCache(None, 3 * RECORD)
    keep(cache, [1])
    keep(cache, [2])
    keep(cache, [1, 3])
    keep(cache, [4])
    assert held(cache, [1, 2, 3, 4]) == [1, 3, 4]


def test_rounds_of_all_tables_count_together():
    cache = SliceCache(None, 3 * RECORD)
    keep(cache, [1, 2], table=TAG)
    keep(cache, [3, 4])
    assert len(held(cache, [1, 2], TAG)) == 1
    assert held(cache, [3, 4]) == [3, 4]


@pytest.mark.parametrize(
    "other",
    [
        TAG,
        Records("word", 999, WORD.fields),
        Records("word", 1000, WORD.fields, Coding("half")),
        Records("word", 1000, (RecordField("v", (10,), F4),)),
        Records("word", 1000, (RecordField("w", (5, 2), F4),)),
    ],
)
def test_tables_of_another_name_or_shape_are_others(other):
    cache = SliceCache(None)
    keep(cache, [1])
    assert held(cache, [1], other) == []
    assert held(cache, [1]) == [1]


def test_slices_shorter_than_their_names_are_worth_are_not_kept():
    small = Records("word", 9, (RecordField("w", (2,), F4),))
    cache = SliceCache(None)
    keep(cache, [1], table=small)
    assert held(cache, [1], small) == []
    cache = SliceCache(None, min_record=0)
    keep(cache, [1], table=small)
    assert held(cache, [1], small) == [1]


def test_what_is_held_survives_a_restart(tmp_path):
    cache = SliceCache(tmp_path / "cache")
    keep(cache, [5, 3])
    keep(cache, [9], table=TAG)
    again = SliceCache(tmp_path / "cache", 3 * RECORD)
    assert held(again, [3, 4, 5]) == [3, 5]
    np.testing.assert_array_equal(again.find(WORD, np.array([5])).records, records_of([5]))
    keep(again, [1, 2])  # the order of rounds survives as well
    assert held(again, [3, 5]) == []
    assert held(again, [9], TAG) == [9]


def test_a_table_that_has_to_go_takes_its_file_along(tmp_path):
    cache = SliceCache(tmp_path, 2 * RECORD)
    keep(cache, [1, 2], table=TAG)
    keep(cache, [3, 4])
    assert len(list(tmp_path.iterdir())) == 1
    for made in (cache, SliceCache(tmp_path)):
        assert held(made, [1, 2], TAG) == []
        assert held(made, [3, 4]) == [3, 4]


def test_a_cache_without_room_keeps_nothing(tmp_path):
    cache = SliceCache(tmp_path, RECORD - 1)
    keep(cache, [1, 2])
    assert repr(cache) == "SliceCache(0 slices of 0 tables)"
    assert list(tmp_path.iterdir()) == []


def test_slices_that_have_not_changed_are_not_written_again(tmp_path):
    cache = SliceCache(tmp_path)
    keep(cache, [1, 2, 3])
    (path,) = tmp_path.iterdir()
    before = path.stat().st_ino
    keep(cache, [3, 1, 1])
    assert path.stat().st_ino == before
    keep(cache, [3], version=1)
    assert path.stat().st_ino != before
    np.testing.assert_array_equal(
        SliceCache(tmp_path).find(WORD, np.array([3])).records, records_of([3], 1)
    )


def test_only_the_owner_may_look(tmp_path):
    SliceCache(tmp_path / "cache")
    assert (tmp_path / "cache").stat().st_mode & 0o077 == 0
    (tmp_path / "open").mkdir(0o755)
    keep(SliceCache(tmp_path / "open"), [1, 2, 3])
    (path,) = (tmp_path / "open").iterdir()
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_file_with_any_byte_flipped_or_missing_is_removed(tmp_path):
    keep(SliceCache(tmp_path), [5, 3])
    (path,) = tmp_path.iterdir()
    good = path.read_bytes()
    assert len(good) == 56 + 2 * RECORD
    damaged = [good[:n] + bytes([good[n] ^ 0x10]) + good[n + 1 :] for n in range(len(good))]
    damaged += [good[:n] for n in range(len(good))] + [good + b"x"]
    for data in damaged:
        path.write_bytes(data)
        assert held(SliceCache(tmp_path), [5, 3]) == []
        assert not path.exists()
    path.write_bytes(good)
    assert held(SliceCache(tmp_path), [5, 3]) == [5, 3]


def test_half_written_files_do_not_count(tmp_path):
    keep(SliceCache(tmp_path), [5])
    (path,) = tmp_path.iterdir()
    path.rename(path.with_name(path.name + ".tmp"))
    assert held(SliceCache(tmp_path), [5]) == []


def test_a_full_disk_is_told_and_what_was_kept_stays(tmp_path, monkeypatch):
    cache = SliceCache(tmp_path)
    keep(cache, [5])

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.writev", full)
        with pytest.raises(StorageError, match="No space left"):
            keep(cache, [6])
    assert held(SliceCache(tmp_path), [5, 6]) == [5]


def test_printing_shows_counts_and_no_keys():
    cache = SliceCache(None)
    keep(cache, [777, 778])
    assert repr(cache) == "SliceCache(2 slices of 1 tables)"


@pytest.mark.parametrize("bad", [{"max_bytes": -1}, {"min_record": -1}])
def test_sizes_are_checked(bad):
    with pytest.raises(InputError, match="cache"):
        SliceCache(None, **bad)
