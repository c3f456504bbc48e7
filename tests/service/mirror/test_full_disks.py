"""Pulling onto a disk: room is taken only for what comes, and given back if it does not."""

import os
import subprocess
import sys
from contextlib import contextmanager

import pytest

from keyhole.errors import DamageError, NotFoundError, StorageError
from keyhole.service.mirror import fetch_round
from tests.helpers import LONG
from tests.service.hand_made import content_of, write_round
from tests.service.mirror.places import Place, is_one_line, state_of

pytest.importorskip("obstore", reason="object stores: pip install 'keyhole[s3]'")

LARGE = {"num_keys": 3_000, "width": 64, "per_segment": 1_000}  # three segments of 256 KB

LIMITED = """
import resource, sys
from pathlib import Path
from keyhole.errors import StorageError
from keyhole.service.mirror import fetch_round
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 17, resource.RLIM_INFINITY))
try:
    fetch_round(sys.argv[1], Path(sys.argv[2]))
except StorageError as error:
    print(error)
"""


@pytest.fixture
def file_store(tmp_path):
    return Place((tmp_path / "store").as_uri())


def room_of(directory):
    """Bytes that the files below a directory take on the disk."""
    return sum(path.stat().st_blocks * 512 for path in directory.rglob("*") if path.is_file())


@pytest.mark.parametrize("how", ["missing", "shorter", "longer"])
def test_no_room_is_taken_for_what_the_store_does_not_have(file_store, origin, edge, how):
    name = write_round(origin, 1, **LARGE)
    file_store.push(origin)
    for part in range(3):
        segment = f"rounds/{name}/table-0/seg-{part}.bin"
        whole = file_store.read(segment)
        file_store.store.delete([segment])
        if how != "missing":
            file_store.store.put(segment, whole[:1000] if how == "shorter" else whole + b"\0")
    with pytest.raises(NotFoundError if how == "missing" else DamageError):
        file_store.pull(edge)
    assert not list(edge.rglob("table-0/seg-*.bin"))
    trees = sum(path.stat().st_size for path in edge.rglob("tree.bin"))  # which it has
    assert room_of(edge) < trees + (1 << 16)


def test_half_a_file_gives_its_room_back(place, origin, edge):
    name = write_round(origin, 1, num_keys=3, width=1 << 20, per_segment=3)  # 12 MB in one file
    place.push(origin)

    def interrupt(done, total):
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch_round(place.url, edge, store=place.settings, progress=interrupt)
    assert not list(edge.rglob("table-0/seg-*.bin"))
    assert room_of(edge) < 1 << 16
    assert place.pull(edge).round == name


@contextmanager
def small_disk(path, size):
    """A file system of its own with that much room."""
    path.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={size}", "tmpfs", path]
    try:
        mounted = subprocess.run(["mount", *options], capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("mount is not installed: apt install mount")
    if mounted.returncode:
        pytest.skip(f"may not mount a small disk: {mounted.stderr.decode().strip()}; run as root")
    try:
        yield path
    finally:
        subprocess.run(["umount", path], check=True)


def test_a_full_disk_keeps_the_old_round_and_goes_on_with_more_room(file_store, origin, tmp_path):
    old = write_round(origin, 1)
    file_store.push(origin)
    with small_disk(tmp_path / "disk", "640k") as disk:
        file_store.pull(disk)
        before = state_of(disk)
        new = write_round(origin, 2, **LARGE)
        total = file_store.push(origin).bytes_moved
        with pytest.raises(StorageError, match="No space left") as caught:
            file_store.pull(disk, workers=1)
        assert is_one_line(caught.value)
        assert state_of(disk) == before
        segments = list(disk.rglob(".part-*/table-0/*.bin"))
        assert len(segments) == 2  # whole ones; of the third nothing is left
        assert os.statvfs(disk).f_bavail > 0
        subprocess.run(["mount", "-o", "remount,size=2m", disk], check=True)
        again = file_store.pull(disk)
        assert 0 < again.bytes_moved < total
        assert content_of(disk, new) == content_of(origin, new)
        assert content_of(disk, old) == content_of(origin, old)


def test_a_limit_on_files_is_one_error_and_leaves_nothing(file_store, origin, edge):
    name = write_round(origin, 1, **LARGE)
    file_store.push(origin)
    command = [sys.executable, "-c", LIMITED, file_store.url, str(edge)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONG, check=True)
    assert "File too large" in done.stdout
    assert done.stdout.count("\n") == 1
    assert not list(edge.rglob("table-0/seg-*.bin"))
    assert file_store.pull(edge).round == name


@pytest.mark.parametrize("part", ["table-0/seg-1.bin", "table-0/tree.bin", "manifest.json"])
def test_pulling_again_repairs_what_a_disk_has_damaged(place, origin, edge, part):
    name = write_round(origin, 1)
    place.push(origin)
    total = place.pull(edge).bytes_moved
    path = edge / "rounds" / name / part
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)
    assert place.pull(edge).bytes_moved == 0  # what seems to be there is not read
    assert place.pull(edge, is_anew=True).bytes_moved == total
    assert content_of(edge, name) == content_of(origin, name)
    assert not list((edge / "rounds").glob(".*"))
