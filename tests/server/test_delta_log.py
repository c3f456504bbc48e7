"""The delta log returns what was appended, cuts a torn end, and refuses what is damaged."""

import os
import resource

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyhole.errors import StorageError
from keyhole.server.log import DeltaLog, Entry, create_log, read_log
from keyhole.server.row_sums import RowUpdate
from tests.helpers import LAYOUTS, SEEDS

LAYOUT = LAYOUTS["rows with a broadcast bias"]
HEADER = 64


def entry(step, seed=0, layout=LAYOUT):
    rng = np.random.default_rng([seed, step])
    updates = []
    for part in layout.parts:
        keys = np.flatnonzero(rng.random(part.space.num_keys) < 0.6)
        rows = rng.normal(size=(len(keys), part.slice_size)).astype(np.float32)
        updates.append(RowUpdate(keys, rows))
    return Entry(step, tuple(updates), f"round {step}".encode())


def write(path, entries, layout=LAYOUT, start=0):
    log = DeltaLog.open(path, create_log(path, layout, start))
    for each in entries:
        log.append(each)
    log.close()
    return path


def read(path, layout=LAYOUT, until=None):
    seen = []
    end = read_log(path, layout, seen.append, until)
    return seen, end


def as_bytes(entries):
    return [
        (e.step, e.metadata, [(u.keys.tobytes(), u.rows.tobytes()) for u in e.updates])
        for e in entries
    ]


@pytest.mark.parametrize("name", LAYOUTS)
@given(seed=SEEDS, count=st.integers(0, 4), start=st.integers(0, 2**40))
def test_what_was_appended_comes_back(tmp_path_factory, name, seed, count, start):
    path = tmp_path_factory.mktemp("log") / "log"
    entries = [entry(start + 1 + i, seed, LAYOUTS[name]) for i in range(count)]
    found, end = read(write(path, entries, LAYOUTS[name], start), LAYOUTS[name])
    assert as_bytes(found) == as_bytes(entries)
    assert (end.size, end.last_step, end.torn) == (path.stat().st_size, start + count, "")


def test_a_log_cut_at_any_byte_keeps_every_whole_entry(tmp_path):
    entries = [entry(step) for step in (1, 2, 3)]
    path = tmp_path / "log"
    ends = [HEADER, *(write(path, entries[:count]).stat().st_size for count in (1, 2, 3))]
    data = path.read_bytes()
    for size in range(len(data)):
        path.write_bytes(data[:size])
        if size < HEADER:
            with pytest.raises(StorageError, match="log is not a delta log"):
                read(path)
            continue
        found, end = read(path)
        whole = sum(size >= at for at in ends[1:])
        assert as_bytes(found) == as_bytes(entries[:whole])
        assert end.size == ends[whole]
        assert bool(end.torn) == (size not in ends)


def test_a_flipped_bit_is_found_wherever_it_is(tmp_path):
    """In the last entry it looks like a torn end and is reported as one; before, it is an error."""
    entries = [entry(step) for step in (1, 2, 3)]
    path = tmp_path / "log"
    write(path, entries[:2])
    last = path.stat().st_size
    data = write(path, entries).read_bytes()
    for at in range(len(data)):
        flipped = bytearray(data)
        flipped[at] ^= 1 << at % 8
        path.write_bytes(flipped)
        if at < last:
            with pytest.raises(StorageError, match=r"log (is|has|was)"):
                read(path)
        else:
            found, end = read(path)
            assert as_bytes(found) == as_bytes(entries[:2])
            assert "unfinished entry after step 2" in end.torn


def test_damage_names_the_entry_and_the_last_good_step(tmp_path):
    path = write(tmp_path / "log", [entry(step) for step in (41, 42, 43)], start=40)
    size = write(tmp_path / "one", [entry(41)], start=40).stat().st_size
    data = bytearray(path.read_bytes())
    data[size + 60] ^= 4
    path.write_bytes(data)
    with pytest.raises(StorageError, match=r"damaged in entry 2: got last good step 41"):
        read(path)
    found, end = read(path, until=41)
    assert [e.step for e in found] == [41]
    assert end.size == size


def test_a_torn_end_of_zeros_is_cut(tmp_path):
    """A file may have grown before its bytes reached the disk."""
    path = write(tmp_path / "log", [entry(1)])
    size = path.stat().st_size
    with path.open("ab") as file:
        file.write(bytes(5000))
    _, end = read(path)
    assert end.size == size
    log = DeltaLog.open(path, end)
    log.append(entry(2))
    log.close()
    assert as_bytes(read(path)[0]) == as_bytes([entry(1), entry(2)])


def test_foreign_files_are_refused(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(os.urandom(500))
    with pytest.raises(StorageError, match="log is not a delta log"):
        read(path)
    write(path, [entry(1)])
    with pytest.raises(StorageError, match="written for another layout"):
        read(path, LAYOUTS["rows"])
    with pytest.raises(StorageError, match="cannot read absent: got No such file"):
        read(tmp_path / "absent")


def test_steps_are_taken_in_order(tmp_path):
    path = tmp_path / "log"
    log = DeltaLog.open(path, create_log(path, LAYOUT, 0))
    log.append(entry(1))
    for step in (1, 3):
        with pytest.raises(StorageError, match=f"got step {step} after 1; expected step 2"):
            log.append(entry(step))
    log.append(entry(2))
    log.close()


def test_a_full_disk_loses_nothing_and_the_log_goes_on(tmp_path):
    """The limit on file size stands in for the disk: writes fail half-way through an entry."""
    path = tmp_path / "log"
    log = DeltaLog.open(path, create_log(path, LAYOUT, 0))
    log.append(entry(1))
    size = path.stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 50, before[1]))
    try:
        for _ in range(2):
            with pytest.raises(StorageError, match=r"cannot append to log: got File too large"):
                log.append(entry(2))
            assert path.stat().st_size == size
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    log.append(entry(2))
    log.close()
    assert as_bytes(read(path)[0]) == as_bytes([entry(1), entry(2)])
