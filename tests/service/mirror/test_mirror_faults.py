"""What must never be seen while rounds are copied: half a round, damage, a step back."""

import fcntl
import json
import signal
import subprocess
import sys

import pytest

from keyhole.errors import DamageError, InputError, NotFoundError, StorageError
from keyhole.service.mirror import push_round
from tests.helpers import DIGEST
from tests.service.hand_made import content_of, write_round
from tests.service.mirror.places import Place, is_one_line, state_of

pytest.importorskip("obstore", reason="object stores: pip install 'keyhole[s3]'")

COPY = """
import sys
from pathlib import Path
from keyhole.service.{module} import {name}
from keyhole.service.mirror import MirrorSettings
from keyhole.service.object_store import StoreSettings
stop = int(sys.argv[3])
def tell(done, total):
    if done >= stop:
        print(done, flush=True)
        sys.stdin.read()  # until the parent kills this process
settings = StoreSettings(endpoint=sys.argv[4] or None, region="us-east-1",
                         options=dict(access_key_id="tester", secret_access_key="secret"))
ends = [end if "://" in end else Path(end) for end in sys.argv[1:3]]
{name}(*ends, store=settings, settings=MirrorSettings(workers=1), progress=tell)
"""


def kill_midway(script, first, second, place, after):
    """Runs a copy in a process and kills it once `after` bytes are done."""
    endpoint = place.settings.endpoint if place.settings else ""
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(first), str(second), str(after), endpoint],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with process:
        assert int(process.stdout.readline()) >= after
        process.send_signal(signal.SIGKILL)


def test_a_killed_push_leaves_the_old_round_current_and_goes_on_later(place, origin, edge):
    old = write_round(origin, 1)
    total = place.push(origin).bytes_moved
    new = write_round(origin, 2)
    script = COPY.format(module="mirror", name="push_round")
    kill_midway(script, origin, place.url, place, total // 2)
    assert json.loads(place.read("current.json"))["round"] == old
    assert f"rounds/{new}/manifest.json" not in place.names()
    assert place.pull(edge).round == old
    again = place.push(origin)
    assert again.bytes_known >= total // 2
    assert again.bytes_known + again.bytes_moved == total
    assert place.pull(edge).round == new
    assert content_of(edge, new) == content_of(origin, new)


def test_a_killed_pull_leaves_the_old_round_current_and_goes_on_later(place, origin, edge):
    write_round(origin, 1)
    place.push(origin)
    place.pull(edge)
    before = state_of(edge)
    new = write_round(origin, 2)
    total = place.push(origin).bytes_moved
    script = COPY.format(module="mirror", name="fetch_round")
    kill_midway(script, place.url, edge, place, total * 2 // 3)
    assert state_of(edge) == before
    again = place.pull(edge)
    assert 0 < again.bytes_known < total
    assert again.bytes_known + again.bytes_moved == total
    assert content_of(edge, new) == content_of(origin, new)
    assert not list((edge / "rounds").glob(".*"))


def test_an_interrupt_ends_all_copies_and_nothing_appears(place, origin, edge):
    write_round(origin, 1, num_keys=200, per_segment=5)  # 41 segments
    told = []

    def interrupt(done, total):
        told.append(done)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        push_round(origin, place.url, store=place.settings, progress=interrupt)
    assert len(told) <= 4  # once in each thread
    with pytest.raises(NotFoundError):
        place.pull(edge)
    assert place.push(origin).number == 1


def damage(place, name, how):
    data = bytearray(place.read(name))
    if how == "flipped":
        data[len(data) // 2] ^= 0x10
    elif how == "truncated":
        del data[-1:]
    elif how == "longer":
        data.append(0)
    place.store.put(name, bytes(data))


@pytest.mark.parametrize("part", ["table-0/seg-1.bin", "table-0/tree.bin", "manifest.json"])
@pytest.mark.parametrize(
    ("place", "how"),
    [("file", "flipped"), ("file", "truncated"), ("file", "longer"), ("s3", "flipped")],
    indirect=["place"],
)
def test_damage_in_the_store_is_found_and_nothing_appears(place, origin, edge, how, part):
    write_round(origin, 1)
    place.push(origin)
    place.pull(edge)
    before = state_of(edge)
    name = write_round(origin, 2)
    place.push(origin)
    damage(place, f"rounds/{name}/{part}", how)
    with pytest.raises(DamageError) as caught:
        place.pull(edge)
    assert is_one_line(caught.value)
    assert state_of(edge) == before
    place.push(origin, is_anew=True)
    assert place.pull(edge).round == name
    assert content_of(edge, name) == content_of(origin, name)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b'{"round": "../../evil", "number": 1, "phase": "open"}',
        b'{"round": "1-%s", "number": 2, "phase": "open"}' % DIGEST.encode(),
        b'{"round": "1-%s", "number": 1, "phase": "ajar"}' % DIGEST.encode(),
        b'{"round": "01-%s", "number": 1, "phase": "open"}' % DIGEST.encode(),
        b'{"round": "1-%s", "number": 1, "phase": "open", "trailing": ["../x"]}' % DIGEST.encode(),
        b"x" * 100_000,
    ],
)
def test_a_strange_current_json_is_refused(tmp_path, edge, content):
    place = Place((tmp_path / "store").as_uri())
    place.store.put("current.json", content)
    with pytest.raises(DamageError) as caught:
        place.pull(edge)
    assert is_one_line(caught.value)
    assert not edge.exists()


def test_a_segment_that_is_gone_is_named(place, origin, edge):
    name = write_round(origin, 1)
    place.push(origin)
    place.store.delete([f"rounds/{name}/table-0/seg-1.bin"])
    with pytest.raises(NotFoundError, match=r"seg-1\.bin") as caught:
        place.pull(edge)
    assert is_one_line(caught.value)
    assert not (edge / "current.json").exists()


@pytest.mark.parametrize("part", ["table-0/seg-1.bin", "table-0/tree.bin"])
def test_a_damaged_file_is_not_pushed(place, origin, part):
    name = write_round(origin, 1)
    path = origin / "rounds" / name / part
    path.write_bytes(path.read_bytes()[:-1] + b"\xff\x00"[:1])
    with pytest.raises(DamageError):
        place.push(origin)
    assert f"rounds/{name}/{part}" not in place.names()
    with pytest.raises(NotFoundError):
        place.read("current.json")


def test_a_manifest_that_does_not_give_the_round_its_name_is_not_pushed(place, origin):
    name = write_round(origin, 1)
    path = origin / "rounds" / name / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b'"step": 1', b'"step": 2'))
    with pytest.raises(StorageError, match=r"manifest\.json of round 1 is damaged") as caught:
        place.push(origin)
    assert is_one_line(caught.value)
    assert place.names() == []


def test_a_manifest_that_is_none_is_told_in_four_facts(place, origin):
    name = write_round(origin, 1)
    (origin / "rounds" / name / "manifest.json").write_bytes(b"{}")
    with pytest.raises(StorageError) as caught:
        place.push(origin)
    assert str(caught.value).count("expected") == 1


def test_an_older_round_does_not_replace_a_newer_one_unless_told_to(place, origin, edge):
    old, new = write_round(origin, 1), write_round(origin, 2)
    place.push(origin)
    place.pull(edge)
    current = {"round": old, "number": 1, "phase": "open"}
    (origin / "current.json").write_text(json.dumps(current))
    with pytest.raises(InputError, match="newer round"):
        place.push(origin)
    place.push(origin, may_go_back=True)
    with pytest.raises(InputError, match="newer round"):
        place.pull(edge)
    assert place.pull(edge, may_go_back=True).round == old
    assert (edge / "rounds" / new).exists()  # so that one can go forward again


def test_two_writers_of_one_directory_are_refused(place, origin, edge):
    write_round(origin, 1)
    place.push(origin)
    edge.mkdir()
    with (edge / "publisher.lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(StorageError, match="publisher already"):
            place.pull(edge)
    assert place.pull(edge).number == 1


def test_a_disk_that_refuses_is_one_error(place, origin, edge):
    write_round(origin, 1)
    place.push(origin)
    edge.write_text("not a directory")
    with pytest.raises(StorageError) as caught:
        place.pull(edge)
    assert is_one_line(caught.value)
