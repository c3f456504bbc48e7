"""Whatever kills a run, recovering it gives the bytes of a run that was never interrupted."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from keyhole.errors import InputError, StorageError
from keyhole.server import store as store_module
from keyhole.server.log import DeltaLog
from keyhole.server.row_sums import RowUpdate
from keyhole.server.store import create_store, recover
from tests.helpers import LAYOUTS, ROOT
from tests.server.test_snapshots import LAYOUT, contents, train, trained
from tests.server.test_state import random_updates


def updates_of(step, layout=LAYOUT):
    """What `train` applies as step + 1."""
    return random_updates(layout, np.random.default_rng(step), share=0.3)


def commit(store, state, steps):
    for _ in range(steps):
        store.commit(state, updates_of(state.steps), f"after {state.steps + 1}".encode())


def start(directory, kind="lazy", keep=2):
    state = trained(kind, steps=0)
    return create_store(directory, state, b"start", keep), state


def uninterrupted(steps, kind="lazy"):
    return contents(trained(kind, steps=steps))


def names(directory):
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("kind", ["dense", "lazy"])
@pytest.mark.parametrize("snapshot_after", [(), (3,), (3, 5), (1, 2, 3, 4, 7), (7,)])
def test_recovery_equals_the_uninterrupted_run(tmp_path, kind, snapshot_after):
    store, state = start(tmp_path, kind)
    for step in range(1, 8):
        commit(store, state, 1)
        if step in snapshot_after:
            store.snapshot(state, f"after {step}".encode())
    store.close()
    found = recover(tmp_path, LAYOUT)
    assert contents(found.state) == uninterrupted(7, kind)
    assert (found.metadata, found.notes) == (b"after 7", ())
    commit(found.store, found.state, 2)
    found.store.close()
    assert contents(recover(tmp_path, LAYOUT).state) == uninterrupted(9, kind)


def test_an_empty_run_is_recovered_with_its_metadata(tmp_path):
    start(tmp_path)[0].close()
    found = recover(tmp_path, LAYOUT)
    assert (found.state.steps, found.metadata) == (0, b"start")


def test_the_last_snapshots_and_their_logs_are_kept(tmp_path):
    store, state = start(tmp_path)
    for _ in range(4):
        commit(store, state, 2)
        store.snapshot(state)
    assert names(tmp_path) == [
        "log-000000000006.khl",
        "log-000000000008.khl",
        "snapshot-000000000006.khs",
        "snapshot-000000000008.khs",
    ]


@pytest.mark.parametrize("damage", ["torn", "flipped", "foreign", "empty", "gone"])
def test_the_snapshot_before_a_bad_one_is_used_and_nothing_is_lost(tmp_path, damage):
    store, state = start(tmp_path)
    for _ in range(3):
        commit(store, state, 2)
        store.snapshot(state)
    commit(store, state, 1)
    store.close()
    newest = tmp_path / "snapshot-000000000006.khs"
    data = newest.read_bytes()
    bad = {
        "torn": data[: len(data) // 2],
        "flipped": data[:-200] + bytes([data[-200] ^ 1]) + data[-199:],
        "foreign": b"GIF89a" * 30,
        "empty": b"",
    }
    if damage == "gone":
        newest.unlink()
    else:
        newest.write_bytes(bad[damage])
    found = recover(tmp_path, LAYOUT)
    assert contents(found.state) == uninterrupted(7)
    assert [newest.name in note for note in found.notes] == ([] if damage == "gone" else [True])


def test_no_good_snapshot_is_an_error_that_says_why(tmp_path):
    store, _ = start(tmp_path)
    store.close()
    (tmp_path / "snapshot-000000000000.khs").write_bytes(b"?")
    with pytest.raises(StorageError, match="holds no snapshot that can be used: got snapshot-0"):
        recover(tmp_path, LAYOUT)
    with pytest.raises(StorageError, match="holds no snapshot that can be used: got none"):
        recover(tmp_path / "new", LAYOUT)


def test_a_torn_log_is_cut_and_reported(tmp_path):
    store, state = start(tmp_path)
    commit(store, state, 3)
    store.close()
    log = tmp_path / "log-000000000000.khl"
    os.truncate(log, log.stat().st_size - 1)
    found = recover(tmp_path, LAYOUT)
    assert contents(found.state) == uninterrupted(2)
    assert len(found.notes) == 1
    assert "unfinished entry after step 2" in found.notes[0]
    commit(found.store, found.state, 3)
    found.store.close()
    again = recover(tmp_path, LAYOUT)
    assert (contents(again.state), again.notes) == (uninterrupted(5), ())


def test_a_damaged_log_is_an_error_and_can_be_given_up_from_there(tmp_path):
    store, state = start(tmp_path)
    commit(store, state, 5)
    store.close()
    log = tmp_path / "log-000000000000.khl"
    data = bytearray(log.read_bytes())
    data[len(data) // 2] ^= 1
    log.write_bytes(data)
    with pytest.raises(StorageError, match=r"last good step 2.*recover\(..., until=2\)"):
        recover(tmp_path, LAYOUT)
    found = recover(tmp_path, LAYOUT, until=2)
    assert contents(found.state) == uninterrupted(2)
    commit(found.store, found.state, 1)
    found.store.close()
    assert contents(recover(tmp_path, LAYOUT).state) == uninterrupted(3)


def test_giving_up_steps_drops_later_snapshots_and_logs(tmp_path):
    store, state = start(tmp_path, keep=3)
    for _ in range(2):
        commit(store, state, 3)
        store.snapshot(state)
    commit(store, state, 1)
    store.close()
    found = recover(tmp_path, LAYOUT, until=4)
    assert contents(found.state) == uninterrupted(4)
    commit(found.store, found.state, 4)
    found.store.close()
    assert contents(recover(tmp_path, LAYOUT).state) == uninterrupted(8)


def test_a_log_that_is_missing_is_noticed(tmp_path):
    store, state = start(tmp_path)
    for _ in range(3):
        commit(store, state, 2)
        store.snapshot(state)
    commit(store, state, 1)
    store.close()
    (tmp_path / "log-000000000004.khl").unlink()
    (tmp_path / "snapshot-000000000006.khs").unlink()
    with pytest.raises(StorageError, match="misses steps: got step 7 after 4"):
        recover(tmp_path, LAYOUT)


class Death(BaseException):
    """The process dies here."""


STAGES = ["save_snapshot", "create_log", "DeltaLog.open", "sync_directory", "_numbered"]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("when", ["before", "after"])
def test_dying_between_any_two_stages_of_a_snapshot_loses_nothing(
    tmp_path, monkeypatch, stage, when
):
    store, state = start(tmp_path)
    commit(store, state, 2)
    store.snapshot(state)
    commit(store, state, 2)
    store.snapshot(state)
    commit(store, state, 1)
    owner, name = (DeltaLog, "open") if stage == "DeltaLog.open" else (store_module, stage)
    real = getattr(owner, name)

    def dying(*args):
        if when == "after":
            real(*args)
        raise Death

    monkeypatch.setattr(owner, name, dying)
    with pytest.raises(Death):
        store.snapshot(state)
    monkeypatch.undo()
    store.close()
    found = recover(tmp_path, LAYOUT)
    assert contents(found.state) == uninterrupted(5)
    commit(found.store, found.state, 2)
    found.store.snapshot(found.state)
    commit(found.store, found.state, 1)
    found.store.close()
    assert contents(recover(tmp_path, LAYOUT).state) == uninterrupted(8)


def test_a_refused_update_reaches_neither_log_nor_state(tmp_path):
    store, state = start(tmp_path)
    commit(store, state, 1)
    before = (tmp_path / "log-000000000000.khl").read_bytes()
    broken = [RowUpdate(u.keys, u.rows * np.float32("nan")) for u in updates_of(1)]
    with pytest.raises(InputError):
        store.commit(state, broken)
    assert (tmp_path / "log-000000000000.khl").read_bytes() == before
    assert contents(state)[0] == 1


def test_a_state_that_went_its_own_way_is_refused(tmp_path):
    store, state = start(tmp_path)
    train(state, 1)
    with pytest.raises(StorageError, match="takes steps in order: got step 2 after 0"):
        commit(store, state, 1)


def test_a_directory_serves_one_process_at_a_time(tmp_path):
    store, _ = start(tmp_path)
    with pytest.raises(StorageError, match="is in use"):
        recover(tmp_path, LAYOUT)
    store.close()
    recover(tmp_path, LAYOUT).store.close()
    with pytest.raises(StorageError, match="holds a run already"):
        start(tmp_path)
    with pytest.raises(StorageError, match="written for another layout"):
        recover(tmp_path, LAYOUTS["rows"])
    with pytest.raises(InputError, match="too few snapshots"):
        recover(tmp_path, LAYOUT, keep=0)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 64 kB; where none can be mounted, the test is left out."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)]
    if not shutil.which("mount") or subprocess.run(mount, check=False).returncode:
        pytest.skip("mounting needs rights that this process does not have")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_stops_commits_and_snapshots_and_nothing_is_lost(small_disk):
    store, state = start(small_disk / "run")
    commit(store, state, 2)
    filler = small_disk / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            pass
    with pytest.raises(StorageError, match="No space left on device"):
        commit(store, state, 100)
    reached = state.steps
    with pytest.raises(StorageError, match="cannot write snapshot"):
        store.snapshot(state)
    store.close()
    found = recover(small_disk / "run", LAYOUT)
    assert contents(found.state) == uninterrupted(reached)
    with pytest.raises(StorageError, match="No space left on device"):
        commit(found.store, found.state, 100)
    filler.unlink()
    commit(found.store, found.state, 3)
    found.store.snapshot(found.state)
    commit(found.store, found.state, 1)
    total = found.state.steps
    found.store.close()
    again = recover(small_disk / "run", LAYOUT)
    again.store.close()
    assert contents(again.state) == uninterrupted(total)


RUN = """
import sys
from pathlib import Path
from keyhole.server.store import recover
from tests.server.test_store import LAYOUT, commit
found = recover(Path(sys.argv[1]), LAYOUT)
print("ready", flush=True)
while True:
    commit(found.store, found.state, 1)
    print(found.state.steps, flush=True)
    if sys.argv[2] == "snapshot" or found.state.steps % 7 == 0:
        found.store.snapshot(found.state)
"""


@pytest.mark.slow
@pytest.mark.parametrize("during", ["append", "snapshot"])
def test_a_run_killed_at_any_moment_goes_on_with_the_same_bytes(tmp_path, during):
    """Eight times over: kill -9 after some milliseconds, recover, go on where it was."""
    directory = tmp_path / "run"
    start(directory)[0].close()
    moments = random.Random(during)
    command = [sys.executable, "-c", RUN, str(directory), during]
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    for _ in range(8):
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
            assert process.stdout.readline() == b"ready\n"
            time.sleep(moments.uniform(0.001, 0.08))
            process.send_signal(signal.SIGKILL)
            acknowledged = [int(line) for line in process.stdout.read().split()]
        found = recover(directory, LAYOUT)
        assert found.state.steps >= max(acknowledged, default=0)
        assert contents(found.state) == uninterrupted(found.state.steps)
        found.store.close()
    assert found.state.steps > 0
