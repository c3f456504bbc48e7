"""The update spool: the first upload wins, is whole, and stays."""

import multiprocessing
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from keyhole import files
from keyhole.errors import ConflictError, InputError, NotFoundError, StorageError, TooLateError
from keyhole.files import passing_file
from keyhole.service import spool as update_spool
from keyhole.service.spool import UpdateSpool
from tests.helpers import DIGEST, LONG
from tests.service.files.disks import leave_room
from tests.service.sockets import wait_for

ROUND = f"3-{DIGEST}"


@pytest.fixture
def spool(tmp_path):
    return UpdateSpool(tmp_path / "updates")


def test_an_upload_is_stored_once_and_known_afterwards(spool):
    assert spool.store(ROUND, "a", b"one") == "stored"
    assert spool.store(ROUND, "a", b"one") == "known"
    assert spool.store(ROUND, "b", b"") == "stored"
    assert (spool.devices(ROUND), spool.read(ROUND, "a")) == (["a", "b"], b"one")
    assert spool.has(ROUND, "a")
    assert not spool.has(ROUND, "c")


def test_other_bytes_of_the_same_device_are_refused_and_change_nothing(spool):
    spool.store(ROUND, "a", b"one")
    with pytest.raises(ConflictError):
        spool.store(ROUND, "a", b"two")
    assert spool.read(ROUND, "a") == b"one"


def test_only_the_owner_can_read_uploads(spool, tmp_path):
    spool.store(ROUND, "a", b"one")
    folder = tmp_path / "updates" / ROUND
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "a").stat().st_mode) == 0o600


def _race(directory, body, start, results):
    start.wait()
    try:
        results.put(UpdateSpool(directory).store(ROUND, "a", body))
    except ConflictError:
        results.put("conflict")


def test_of_many_threads_exactly_one_stores(spool):
    def store(body):
        try:
            return spool.store(ROUND, "a", body)
        except ConflictError:
            return "conflict"

    with ThreadPoolExecutor(8) as pool:
        told = sorted(pool.map(store, [b"one"] * 4 + [b"two"] * 4))
    assert told == ["conflict"] * 4 + ["known"] * 3 + ["stored"]


@pytest.mark.slow
def test_of_many_processes_exactly_one_stores(tmp_path):
    context = multiprocessing.get_context("spawn")
    start, results = context.Event(), context.Queue()
    bodies = [bytes([each]) * 100_000 for each in (1, 1, 2, 2)]
    processes = [
        context.Process(target=_race, args=(tmp_path / "updates", body, start, results))
        for body in bodies
    ]
    for process in processes:
        process.start()
    start.set()
    told = sorted(results.get(timeout=LONG) for _ in processes)
    for process in processes:
        process.join()
    assert told == ["conflict", "conflict", "known", "stored"]
    assert UpdateSpool(tmp_path / "updates").read(ROUND, "a") in bodies


def killed_while_storing(directory):
    """A process that dies with a part of an upload on the disk; returns the file that it leaves."""
    code = """if True:
        import os, sys
        from pathlib import Path
        from keyhole import files
        from keyhole.service.spool import UpdateSpool
        files.write_all = lambda *_: os.kill(os.getpid(), 9)
        UpdateSpool(Path(sys.argv[1])).store(sys.argv[2], "a", b"one")
    """
    done = subprocess.run([sys.executable, "-c", code, directory, ROUND], check=False, timeout=LONG)
    assert done.returncode == -9
    (left,) = (directory / ROUND).iterdir()
    return left


def test_a_process_killed_while_storing_leaves_no_upload(tmp_path):
    left = killed_while_storing(tmp_path / "updates")
    assert left.name.startswith(".")
    spool = UpdateSpool(tmp_path / "updates")
    assert not left.exists(), "what a crash leaves is swept at the next start"
    assert spool.devices(ROUND) == []
    assert spool.store(ROUND, "a", b"two") == "stored"


@pytest.mark.parametrize("end", [UpdateSpool.close, UpdateSpool.remove])
def test_what_a_crash_leaves_is_swept_with_its_round(spool, tmp_path, end):
    """By the process that lives on, while others store."""
    left = killed_while_storing(tmp_path / "updates")
    with passing_file(tmp_path / "updates" / ROUND, b"under way") as other:
        end(spool, ROUND)
        assert not left.exists()
        assert other.read_bytes() == b"under way"
    assert not other.exists()


def test_what_other_processes_are_storing_is_not_swept(spool, tmp_path):
    """Locks are of open files: within one process they hold as well."""
    spool.store(ROUND, "a", b"one")
    folder = tmp_path / "updates" / ROUND
    with passing_file(folder, b"under way") as other:
        UpdateSpool(tmp_path / "updates")
        (folder / "b").hardlink_to(other)
    assert spool.read(ROUND, "b") == b"under way"


def test_a_file_that_is_swept_before_it_is_locked_is_written_anew(tmp_path, monkeypatch):
    real, swept = files.fcntl.flock, []

    def flock(descriptor, kind):
        if not swept:
            swept.extend(tmp_path.iterdir())
            files.sweep(tmp_path)
            assert list(tmp_path.iterdir()) == []
        real(descriptor, kind)

    monkeypatch.setattr(files.fcntl, "flock", flock)
    with passing_file(tmp_path, b"whole") as made:
        assert made not in swept
        assert made.read_bytes() == b"whole"


def test_a_full_disk_is_told_and_leaves_nothing(small_disk):
    spool, body, told = UpdateSpool(small_disk / "updates"), b"one" * 3000, []
    spool.store(ROUND, "before", body)
    for pages in range(8):
        leave_room(small_disk, pages)
        try:
            spool.store(ROUND, f"device-{pages}", body)
        except StorageError as error:
            told.append(str(error))
        (small_disk / "filler").unlink()
    names = [path.name for path in (small_disk / "updates" / ROUND).iterdir()]
    assert all("No space left on device" in text for text in told)
    assert not any("device-" in text for text in told)  # whose it was is no word of an error
    assert 2 < len(told) < 8
    assert len(names) == 9 - len(told)
    assert {spool.read(ROUND, name) for name in names} == {body}


def test_a_folder_that_another_process_made_is_durable_before_an_answer(
    spool, monkeypatch, tmp_path
):
    """It may have been made a moment ago, and its maker killed before it was on the disk."""
    (tmp_path / "updates" / ROUND).mkdir(parents=True)
    synced, real = [], update_spool.sync_directory
    monkeypatch.setattr(
        update_spool, "sync_directory", lambda path: (synced.append(path), real(path))
    )
    spool.store(ROUND, "a", b"one")
    assert {tmp_path, tmp_path / "updates", tmp_path / "updates" / ROUND} <= set(synced)


@pytest.mark.parametrize("name", ["../x", "", ".hidden", "a/b", "x" * 65])
def test_a_name_cannot_leave_the_folder(spool, name, tmp_path):
    with pytest.raises(InputError):
        spool.store(ROUND, name, b"one")
    for round_id in ("..", f"3-{DIGEST.upper()}", "3", f"03-{DIGEST}", name):
        with pytest.raises(InputError):
            spool.store(round_id, "a", b"one")
    assert not (tmp_path / "updates").exists()


def test_a_round_without_uploads_has_no_devices(spool):
    assert spool.devices(ROUND) == []
    with pytest.raises(NotFoundError):
        spool.read(ROUND, "a")


def test_removing_a_round_leaves_the_others(spool):
    other = f"4-{DIGEST}"
    spool.store(ROUND, "a", b"one")
    spool.store(other, "a", b"two")
    spool.remove(ROUND)
    spool.remove(ROUND)
    assert (spool.devices(ROUND), spool.rounds()) == ([], [other])


def test_the_marks_of_removed_rounds_do_not_pile_up(spool, tmp_path, monkeypatch):
    monkeypatch.setattr(update_spool, "_MARKS_KEPT", 3)
    for number in range(9):
        spool.store(f"{number}-{DIGEST}", "a", b"one")
        spool.remove(f"{number}-{DIGEST}")
    assert spool.rounds() == []
    left = sorted(path.name[0] for path in (tmp_path / "updates").iterdir())
    assert left == ["6", "7", "8"]


def test_a_closed_round_lists_what_was_acknowledged_and_takes_no_more(spool):
    spool.store(ROUND, "a", b"one")
    assert spool.close(ROUND) == ["a"]
    with pytest.raises(TooLateError):
        spool.store(ROUND, "b", b"two")
    assert spool.close(ROUND)[:1] == ["a"]


def test_an_upload_is_replaced_while_a_round_is_open_and_never_once_it_is_closed(spool):
    """Whoever reads what counts after closing reads the same bytes for ever."""
    told, read, bodies = [], [], [bytes([n]) * 5000 for n in range(40)]
    spool.store(ROUND, "a", bodies[0])

    def replace_all():
        for body in bodies[1:]:
            try:
                told.append((spool.store(ROUND, "a", body, may_replace=True), body))
            except ConflictError:
                return

    replacing = threading.Thread(target=replace_all)
    replacing.start()
    wait_for(lambda: len(told) > 3)
    assert spool.close(ROUND) == ["a"]
    read.append(spool.read(ROUND, "a"))
    replacing.join()
    read.append(spool.read(ROUND, "a"))
    assert read == [told[-1][1]] * 2
    assert {outcome for outcome, _ in told} == {"stored"}
    assert spool.devices(ROUND) == ["a"]
    with pytest.raises(ConflictError):
        spool.store(ROUND, "a", b"another", may_replace=True)
