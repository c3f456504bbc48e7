"""Slice files: what is written is what the source says, and what is mapped is what was written."""

import asyncio
import gc
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyhole.crypto.merkle import Tree, hash_leaves
from keyhole.delivery.records import Coding, RecordField, Records
from keyhole.delivery.sources import FunctionSource, sources_of
from keyhole.errors import InputError, KeySpaceError, NotFoundError, StorageError
from keyhole.server.optimizers import SGD, Adam
from keyhole.service import segments as slice_files
from keyhole.service.patching import BaseTable, write_table
from keyhole.service.reading import open_table
from keyhole.service.segments import SegmentWriter, WriteSettings, cut_segments, range_reader
from keyhole.wire.manifest import table_info
from tests.service.small_rounds import flip, small_state, step

KEYS = 23


def random_source(length=6, coding="plain", seed=0, num_keys=KEYS):
    values = np.random.default_rng(seed).integers(0, 100, (num_keys, length), np.uint8)
    fields = (RecordField(".", (length,), np.dtype(np.uint8)),)
    records = Records("row", num_keys, fields, Coding(coding, 3))
    return FunctionSource(records, values, lambda x, keys: {".": x[keys]})


def write(source, directory, base=None, **settings):
    info = table_info(source.records)
    with SegmentWriter(WriteSettings(**{"durable": False, **settings})) as writer:
        return write_table(writer, source, directory, info, base)


def all_records(source):
    return source.read(np.arange(source.records.num_keys))


@pytest.mark.parametrize("coding", ["plain", "half", "uint8", "uint4"])
@given(
    length=st.integers(0, 9),
    segment_bytes=st.integers(30, 300),
    chunk=st.integers(1, 100),
    threads=st.integers(1, 3),
    keys=st.lists(st.integers(0, KEYS - 1), max_size=30),
)
def test_what_is_written_is_what_is_fetched(coding, length, segment_bytes, chunk, threads, keys):
    source = random_source(max(length, int(coding != "plain")), coding)
    keys = np.array(keys, np.int64)
    with TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(slice_files, "CHUNK", chunk)
        info = write(source, Path(name), segment_bytes=segment_bytes, threads=threads)
        table = open_table(Path(name), info)
        fetched = asyncio.run(table.fetch(keys))
        expected = all_records(source)
        np.testing.assert_array_equal(fetched.records, expected[keys])
        np.testing.assert_array_equal(table.tree.nodes[keys], hash_leaves(expected)[keys])
        table.verify(threads)
        whole = b"".join(table.segment(i) for i in range(len(info.segments)))
        assert whole == expected.tobytes()
        tree = Tree.of(hash_leaves(expected))
        assert (Path(name) / "tree.bin").read_bytes() == tree.nodes.tobytes()
        assert info.root == table.tree.root.hex() == tree.root.hex()


@given(num_keys=st.integers(1, 10**9), length=st.integers(0, 10**6), size=st.integers(10**4, 10**9))
def test_segments_hold_every_key_once_within_their_size(num_keys, length, size):
    size = max(size, num_keys * length // 1000)  # a thousand segments are enough to look at
    spans = cut_segments(num_keys, length, size)
    assert [first for first, _ in spans] == [i * spans[0][1] for i in range(len(spans))]
    assert sum(count for _, count in spans) == num_keys
    assert all(count * max(length, 8) <= max(size, length) for _, count in spans)


def test_segments_are_nearly_equal_so_that_threads_are():
    counts = [count for _, count in cut_segments(100_000, 2048, 64 << 20)]
    assert counts == [25_000] * 4  # whole pages: a multiple of 2 records


@pytest.mark.parametrize("optimizer", [SGD(0.1), Adam(0.1)], ids=["SGD", "Adam"])
@pytest.mark.parametrize("kind", ["dense", "lazy"])
@pytest.mark.parametrize("coding", ["plain", "uint8"])
def test_ranges_are_what_the_source_reads(optimizer, kind, coding):
    state = small_state(optimizer, kind)
    step(state)
    step(state, [1, 2])
    source = sources_of(state, Coding(coding))[1]
    found = range_reader(source)(2, 20)
    np.testing.assert_array_equal(found, source.read(np.arange(2, 20)))


@pytest.mark.parametrize("size_before", [0, 50, 138, 4000])
def test_the_pages_of_a_spare_file_are_written_over(tmp_path, size_before):
    source, spare, new = random_source(), tmp_path / "spare", tmp_path / "new"
    spare.mkdir()
    new.mkdir()
    (spare / "seg-0.bin").write_bytes(b"?" * size_before)
    before = (spare / "seg-0.bin").stat().st_ino
    write(source, new, BaseTable(spare, is_spare=True))
    assert (new / "seg-0.bin").read_bytes() == all_records(source).tobytes()
    assert (new / "seg-0.bin").stat().st_ino == before


def test_a_spare_file_with_a_second_name_is_left_alone(tmp_path):
    source, spare, new = random_source(), tmp_path / "spare", tmp_path / "new"
    spare.mkdir()
    new.mkdir()
    (spare / "seg-0.bin").write_bytes(b"precious")
    (tmp_path / "other").hardlink_to(spare / "seg-0.bin")
    write(source, new, BaseTable(spare, is_spare=True))
    assert (tmp_path / "other").read_bytes() == b"precious"
    assert (new / "seg-0.bin").read_bytes() == all_records(source).tobytes()


def test_progress_counts_every_record(tmp_path, monkeypatch):
    monkeypatch.setattr(slice_files, "CHUNK", 12)
    seen = []
    source = random_source()
    with SegmentWriter(WriteSettings(), KEYS, lambda *said: seen.append(said)) as writer:
        write_table(writer, source, tmp_path, table_info(source.records))
    assert seen == sorted(seen)
    assert seen[-1] == (KEYS, KEYS)
    assert len(seen) > 2


@pytest.mark.parametrize("name", ["seg-1.bin", "tree.bin"])
@pytest.mark.parametrize("damage", ["cut", "longer", "empty", "gone"])
def test_a_file_of_another_size_is_refused(tmp_path, name, damage):
    info = write(random_source(), tmp_path, segment_bytes=100)
    path = tmp_path / name
    if damage == "gone":
        path.unlink()
    else:
        size = path.stat().st_size
        os.truncate(path, {"cut": size - 1, "longer": size + 1, "empty": 0}[damage])
    with pytest.raises(StorageError, match=re.escape(name)):
        open_table(tmp_path, info)


def test_a_tree_of_another_root_is_refused_when_opened(tmp_path):
    info = write(random_source(), tmp_path, segment_bytes=100)
    flip(tmp_path / "tree.bin", -1)
    with pytest.raises(StorageError, match="got another root than the manifest has"):
        open_table(tmp_path, info)


def test_a_flipped_node_is_found_by_those_below_it(tmp_path):
    info = write(random_source(), tmp_path, segment_bytes=100)
    flip(tmp_path / "tree.bin", 32 * (KEYS + 2))
    with pytest.raises(StorageError, match="the tree of table 'row' cannot be served"):
        open_table(tmp_path, info).verify()


def test_every_flipped_record_is_found_by_its_leaf(tmp_path):
    info = write(random_source(), tmp_path, segment_bytes=100)
    for place, offset in ((0, 0), (0, 71), (1, 5)):
        flip(tmp_path / f"seg-{place}.bin", offset)
    with pytest.raises(StorageError, match="3 records of table 'row' cannot be served"):
        open_table(tmp_path, info).verify(2)


def test_a_fetched_record_still_has_the_leaf_it_was_published_with(tmp_path):
    source = random_source()
    info = write(source, tmp_path)
    flip(tmp_path / "seg-0.bin", 6 * 4)
    table, keys = open_table(tmp_path, info), np.array([4, 5])
    fetched, leaves = table.gather(keys), table.tree.nodes[keys]
    assert (leaves == hash_leaves(fetched.records)).all(axis=1).tolist() == [False, True]
    np.testing.assert_array_equal(leaves[0], hash_leaves(all_records(source))[4])


@pytest.mark.parametrize("keys", [[KEYS], [-1], [0, 2**62]])
@pytest.mark.parametrize("segment_bytes", [50, 10**6])
def test_keys_outside_the_table_are_refused_without_being_shown(tmp_path, keys, segment_bytes):
    table = open_table(tmp_path, write(random_source(), tmp_path, segment_bytes=segment_bytes))
    with pytest.raises(KeySpaceError, match=rf"some of {len(keys)} keys; expected 0..22"):
        table.gather(np.array(keys))


@pytest.mark.parametrize("place", [-1, 4])
def test_there_are_no_other_segments(tmp_path, place):
    table = open_table(tmp_path, write(random_source(), tmp_path, segment_bytes=48))
    assert len(table.info.segments) == 4
    with pytest.raises(NotFoundError, match="no such segment"):
        table.segment(place)


def test_segments_cannot_be_written_to(tmp_path):
    table = open_table(tmp_path, write(random_source(), tmp_path))
    assert table.segment(0).readonly
    assert not table.tree.nodes.flags.writeable


def test_a_source_that_fails_ends_the_writing_with_its_error(tmp_path, monkeypatch):
    monkeypatch.setattr(slice_files, "CHUNK", 6)

    def failing(x, keys):
        if 9 in keys:
            raise RuntimeError("no such luck")
        return {".": x[keys]}

    source = FunctionSource(random_source().records, random_source().server_value, failing)
    with pytest.raises(RuntimeError, match="no such luck"):
        write(source, tmp_path)


# Segments that end with a page are one array in memory, others are not.
@pytest.mark.parametrize(("length", "segment_bytes"), [(6, 999), (8, 4096), (8, 4100), (1, 4096)])
def test_many_threads_fetch_from_one_table(tmp_path, length, segment_bytes):
    source = random_source(length, num_keys=2000)
    table = open_table(tmp_path, write(source, tmp_path, segment_bytes=segment_bytes))
    assert len(table.info.segments) > 3
    expected = all_records(source)

    def fetch(seed):
        keys = np.random.default_rng(seed).integers(0, 2000, 200)
        return np.array_equal(table.gather(keys).records, expected[keys])

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(fetch, range(100)))


@pytest.mark.parametrize("segment_bytes", [4096, 10**6])
def test_what_was_taken_from_a_table_outlives_it(tmp_path, segment_bytes):
    source = random_source(8, num_keys=2000)
    table = open_table(tmp_path, write(source, tmp_path, segment_bytes=segment_bytes))
    last = len(table.info.segments) - 1
    taken, fetched = table.segment(last), table.gather(np.arange(2000))
    del table
    gc.collect()
    first = 1536 if last else 0
    assert bytes(taken) == all_records(source)[first:].tobytes()
    np.testing.assert_array_equal(fetched.records, all_records(source))


@pytest.mark.parametrize("place", [0, 1, 3])
def test_a_cut_file_among_those_mapped_together_is_refused(tmp_path, place):
    info = write(random_source(8, num_keys=2000), tmp_path, segment_bytes=4096)
    os.truncate(tmp_path / f"seg-{place}.bin", 1000)
    with pytest.raises(StorageError, match=rf"seg-{place}\.bin cannot be served: got 1000 bytes"):
        open_table(tmp_path, info)


@pytest.mark.parametrize("wrong", [{"threads": 0}, {"segment_bytes": 0}])
def test_settings_below_one_are_refused(wrong):
    with pytest.raises(InputError, match="expected 1 or more"):
        WriteSettings(**wrong)
