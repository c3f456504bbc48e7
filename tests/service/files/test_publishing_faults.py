"""Faults while publishing: a full disk, a killed publisher, readers in other processes."""

import os
import resource
import subprocess
import sys
import threading

import numpy as np
import pytest

from keyhole.delivery.records import RecordField, Records
from keyhole.delivery.sources import FunctionSource
from keyhole.errors import StorageError
from keyhole.service import directory as retiring
from keyhole.service import publishing
from keyhole.service.publishing import Publisher
from keyhole.wire.signing import SigningKey
from tests.helpers import LONG, ROOT
from tests.service.files.disks import leave_room
from tests.service.small_rounds import check_current, flip, names_of, published, small_state, step

SMALL = {"segment_bytes": 100, "cohort": ["a"]}


def refusal_of(publisher, state, number, durable):
    """Publishes; returns what is said if that fails."""
    try:
        publisher.publish_state(state, number=number, durable=durable, **SMALL)
    except StorageError as error:
        return str(error)
    return None


def check_signed(directory, key):
    """`check_current`, and the signature of the trainer."""
    current = retiring.read_current(directory).round
    key.public.check(current, (directory / "rounds" / current / "manifest.sig").read_bytes())
    return check_current(directory)


@pytest.mark.parametrize("kind", ["dense", "lazy"])
@pytest.mark.parametrize("durable", [True, False])
def test_a_disk_that_is_full_at_any_page_leaves_the_round_before(small_disk, kind, durable):
    state, directory = small_state(kind=kind), small_disk / "rounds-directory"
    number, failures, key = 0, [], SigningKey.fresh()
    with Publisher(directory, key) as publisher:
        publisher.publish_state(state, number=0, **SMALL)
        for pages in range(40):
            step(state, [pages])
            before = check_signed(directory, key)
            leave_room(small_disk, pages)
            refusal = refusal_of(publisher, state, number + 1, durable)
            if refusal is None:
                number += 1
            else:
                failures.append(refusal)
                found = check_signed(directory, key)
                assert found[0] == before[0]
                assert [r.tobytes() for r in found[1]] == [r.tobytes() for r in before[1]]
                assert not [n for n in names_of(directory) if n.startswith((".new", ".old"))]
                assert not list(directory.glob("*.tmp"))
            (small_disk / "filler").unlink()
        assert all("No space left on device" in said and "\n" not in said for said in failures)
        assert 2 < len(failures) < 40
        publisher.publish_state(state, number=number + 1, **SMALL)
    rows = state.rows(1, np.arange(40))
    assert check_current(directory)[1][1].tobytes() == rows.tobytes()


@pytest.mark.parametrize("limit", [0, 20, 40, 99, 150, 900])
def test_files_that_may_not_grow_leave_the_round_before(tmp_path, limit):
    state = small_state()
    with Publisher(tmp_path) as publisher:
        publisher.publish_state(state, number=0, **SMALL)
        step(state)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        try:
            with pytest.raises(StorageError, match="File too large"):
                publisher.publish_state(state, number=1, **SMALL)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert check_current(tmp_path)[0] == 0
        assert len(names_of(tmp_path)) == 1
        publisher.publish_state(state, number=1, **SMALL)
    assert check_current(tmp_path)[0] == 1


def killed(directory, kills, seed):
    command = [sys.executable, "-m", "tests.service.killed_publishers"]
    return subprocess.run(
        [*command, str(directory), str(kills), str(seed)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        cwd=ROOT,
    )


@pytest.mark.parametrize(("kills", "seed"), [(30, 0), pytest.param(600, 1, marks=pytest.mark.slow)])
def test_a_publisher_killed_at_any_moment_leaves_whole_rounds(tmp_path, kills, seed):
    done = killed(tmp_path, kills, seed)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= kills // 3 - 1  # rounds were published between the kills


READER = """
import sys, numpy as np
from keyhole.errors import TooLateError
from keyhole.service.reading import RoundsDirectory, verify_round
rounds, seen = RoundsDirectory(sys.argv[1], linger=0.01), set()
print("ready", flush=True)
while (current := rounds.current()).phase == "open":
    try:
        with rounds.hold(current.round) as opened:
            verify_round(opened)
            assert opened.manifest.number == current.number
            seen.add(current.number)
    except TooLateError:
        pass
print(len(seen), flush=True)
"""


def test_processes_read_whole_rounds_while_others_are_published(tmp_path):
    state = small_state()
    with Publisher(tmp_path) as publisher:
        publisher.publish_state(state, number=0, **SMALL)
        command = [sys.executable, "-W", "error", "-c", READER, str(tmp_path)]
        readers = [
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            for _ in range(2)
        ]
        for reader in readers:
            assert reader.stdout.readline() == "ready\n"
        for number in range(1, 40):
            step(state, [number % 40])
            publisher.publish_state(state, number=number, durable=False, **SMALL)
        publisher.close_round()
        for reader in readers:
            out, err = reader.communicate(timeout=LONG)
            assert (reader.returncode, err) == (0, "")
            assert int(out) >= 1


def test_a_round_that_cannot_be_made_durable_does_not_stay(tmp_path, monkeypatch):
    state, real = small_state(), publishing.sync_directory

    def failing(directory):
        if directory.name == "rounds":
            raise OSError(5, "Input/output error")
        real(directory)

    with Publisher(tmp_path) as publisher:
        for number in range(2):
            publisher.publish_state(state, number=number, **SMALL)
            step(state)
        before = names_of(tmp_path)
        monkeypatch.setattr(publishing, "sync_directory", failing)
        with pytest.raises(StorageError, match="Input/output error"):
            publisher.publish_state(state, number=2, **SMALL)
        assert names_of(tmp_path) == before
        assert check_current(tmp_path)[0] == 1


def test_a_round_that_was_not_waited_for_is_durable_when_published_again(tmp_path, monkeypatch):
    made, synced, real = published(tmp_path, durable=False), set(), os.fsync

    def fsync(descriptor):
        synced.add(os.fstat(descriptor).st_ino)
        real(descriptor)

    with Publisher(tmp_path) as publisher:
        monkeypatch.setattr(os, "fsync", fsync)
        publisher.publish_state(small_state(), number=0)
    assert {path.stat().st_ino for path in [made, *made.rglob("*")]} <= synced


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_round_is_there_while_it_is_repaired(tmp_path, monkeypatch, can_exchange):
    made, real = published(tmp_path, **SMALL), retiring.shutil.rmtree
    removed = []

    def removing(path, **options):
        removed.append((path.name, (made / "manifest.json").exists()))
        real(path, **options)

    if not can_exchange:
        monkeypatch.setattr(retiring, "_exchange", lambda *_: False)
    flip(made / "table-1" / "seg-3.bin")
    with Publisher(tmp_path) as publisher:
        monkeypatch.setattr(retiring.shutil, "rmtree", removing)
        publisher.publish_state(small_state(), number=0, **SMALL)
    assert removed
    assert all(is_there for _, is_there in removed)
    assert check_current(tmp_path)[0] == 0
    assert names_of(tmp_path) == [made.name]


@pytest.mark.parametrize("is_killed", [True, False])
def test_a_repair_that_ends_between_two_renames_is_healed(tmp_path, monkeypatch, is_killed):
    made = published(tmp_path, **SMALL)
    if is_killed:
        made.rename(made.with_name(f".was-{made.name}"))
        Publisher(tmp_path).close()
    else:
        monkeypatch.setattr(publishing, "_is_whole", lambda *_: False)
        monkeypatch.setattr(retiring, "_exchange", lambda *_: False)
        real = type(made).rename

        def rename(path, target):
            if path.name.startswith(".new-"):
                raise OSError(5, "Input/output error")
            return real(path, target)

        with Publisher(tmp_path) as publisher:
            monkeypatch.setattr(type(made), "rename", rename)
            with pytest.raises(StorageError, match="Input/output error"):
                publisher.publish_state(small_state(), number=0, **SMALL)
    assert check_current(tmp_path)[0] == 0
    assert names_of(tmp_path) == [made.name]


def test_a_second_publisher_that_starts_while_the_first_writes_disturbs_nothing(tmp_path):
    values, writing, go_on = np.ones((50, 4), np.float32), threading.Event(), threading.Event()

    def select_batch(x, keys):
        writing.set()
        assert go_on.wait(LONG)
        return {".": x[keys]}

    records = Records("row", 50, (RecordField(".", (4,), np.dtype(np.float32)),))
    source = FunctionSource(records, values, select_batch)
    with Publisher(tmp_path) as publisher:
        first = threading.Thread(
            target=publisher.publish,
            args=([source],),
            kwargs={"layout": None, "number": 0, "step": 0},
        )
        first.start()
        try:
            assert writing.wait(LONG)
            script = "import sys; from keyhole.service.publishing import Publisher;"
            second = subprocess.run(
                [sys.executable, "-c", f"{script} Publisher(sys.argv[1])", str(tmp_path)],
                capture_output=True,
                text=True,
                check=False,
                timeout=LONG,
                cwd=ROOT,
            )
            assert "has a publisher already" in second.stderr
        finally:
            go_on.set()
            first.join()
    assert check_current(tmp_path)[1][0].tobytes() == values.tobytes()
