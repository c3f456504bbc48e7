"""Rounds through object stores: a real S3 server (moto), and directories as stores."""

import fcntl
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from keyhole.cli.mirror import mirror
from keyhole.errors import (
    DamageError,
    InputError,
    KeyholeError,
    NotFoundError,
    ServiceError,
    StorageError,
)
from keyhole.primitives.cuts import Cut
from keyhole.primitives.keyspace import KeySpace
from keyhole.primitives.layout import Layout
from keyhole.server.optimizers import SGD
from keyhole.server.state import ServerState
from keyhole.serving.mirror_files import MirrorSettings
from keyhole.serving.mirror_pull import fetch_round
from keyhole.serving.mirror_push import push_round
from keyhole.serving.object_store import StoreSettings, open_store
from keyhole.serving.publishing import Publisher
from keyhole.serving.reading import RoundsDirectory, verify_round
from keyhole.serving.round_files import number_of
from tests.serving.hand_made import content_of, write_round

pytest.importorskip("obstore", reason="object stores: pip install 'keyhole[s3]'")

DENIED = 1  # a port where nobody listens
SIGNED = {"access_key_id": "tester", "secret_access_key": "secret"}


@dataclass(frozen=True)
class Place:
    """A URL with the settings that reach it."""

    url: str
    settings: StoreSettings | None = None

    def push(self, directory, **settings):
        return push_round(
            directory, self.url, store=self.settings, settings=MirrorSettings(**settings)
        )

    def pull(self, directory, **settings):
        return fetch_round(
            self.url, directory, store=self.settings, settings=MirrorSettings(**settings)
        )

    @property
    def store(self):
        return open_store(self.url, self.settings)

    def read(self, name):
        return self.store.get(name, most=1 << 30)

    def names(self):
        return sorted(self.store.sizes("rounds"))


@contextmanager
def s3_server(log, **environment):
    """The port of an S3 server, as a process of its own."""
    if not all(find_spec(name) for name in ("moto", "flask", "flask_cors")):
        pytest.skip("an S3 server to test against is missing: pip install 'keyhole[dev]'")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env={**os.environ, **environment}
        )
    try:
        wait_until_open(process, port, log)
        yield port
    finally:
        process.kill()
        process.wait()


def wait_until_open(process, port, log):
    until = time.monotonic() + 30
    while time.monotonic() < until and process.poll() is None:
        with socket.socket() as trial:
            if trial.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.02)
    pytest.fail(f"the S3 server did not start: {log.read_text()}")


def ask_s3(port, method, target, body=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request(method, target, body)
    assert connection.getresponse().status < 300
    connection.close()


def make_bucket(port, name):
    ask_s3(port, "PUT", f"/{name}")


def s3_settings(port, **changed):
    settings = {"endpoint": f"http://127.0.0.1:{port}", "region": "us-east-1", "retries": 1}
    return StoreSettings(**{**settings, "options": SIGNED, **changed})


@pytest.fixture(scope="session")
def s3_port(tmp_path_factory):
    with s3_server(tmp_path_factory.mktemp("s3") / "log") as port:
        yield port


@pytest.fixture(autouse=True)
def no_settings_of_the_user(monkeypatch):
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    # A machine in a cloud would be given credentials; nobody is asked here.
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", f"http://127.0.0.1:{DENIED}")


@pytest.fixture
def s3(s3_port, request):
    bucket = f"bucket-{abs(hash(request.node.nodeid))}"
    make_bucket(s3_port, bucket)
    return Place(f"s3://{bucket}/federated/select", s3_settings(s3_port))


@pytest.fixture(params=["s3", "file"])
def place(request, tmp_path):
    if request.param == "s3":
        return request.getfixturevalue("s3")
    return Place((tmp_path / "store").as_uri())


@pytest.fixture
def origin(tmp_path):
    (tmp_path / "origin").mkdir()
    return tmp_path / "origin"


@pytest.fixture
def edge(tmp_path):
    return tmp_path / "edge"


def state_of(directory):
    """All files of a rounds directory but the lock and what an attempt left behind."""
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and "/.new-" not in path.as_posix() and path.name != "publisher.lock"
    }


def is_one_line(error):
    return "\n" not in str(error) and "<?xml" not in str(error) and len(str(error)) < 500


# --- there and back -------------------------------------------------------------------------


@pytest.mark.parametrize("strong", [False, True])
def test_a_round_comes_back_byte_for_byte(place, origin, edge, strong):
    name = write_round(origin, 3, strong=strong)
    sent, fetched = place.push(origin), place.pull(edge)
    assert content_of(edge, name) == content_of(origin, name)
    assert json.loads((edge / "current.json").read_text()) == {
        "round": name,
        "number": 3,
        "phase": "open",
    }
    files = content_of(origin, name)
    del files["manifest.json"]
    assert sent.bytes_moved == fetched.bytes_moved == sum(map(len, files.values()))
    assert (sent.round, sent.number, sent.bytes_known) == (name, 3, 0)


def test_a_second_push_and_a_second_pull_move_nothing(place, origin, edge):
    write_round(origin, 1)
    first = place.push(origin)
    place.pull(edge)
    assert place.push(origin).bytes_moved == place.pull(edge).bytes_moved == 0
    assert place.push(origin).bytes_known == first.bytes_moved


def test_two_rounds_remain_on_both_sides(place, origin, edge):
    names = [write_round(origin, number) for number in (8, 9, 10)]  # by number, not by letters
    for name in names:
        current = {"round": name, "number": number_of(name), "phase": "closed"}
        (origin / "current.json").write_text(json.dumps(current))
        pushed, pulled = place.push(origin), place.pull(edge)
    assert pushed.removed == pulled.removed == (names[0],)
    assert {name.split("/")[1] for name in place.names()} == set(names[1:])
    assert {path.name for path in (edge / "rounds").iterdir()} == set(names[1:])


def test_a_round_that_a_service_holds_stays_on_the_edge(place, origin, edge):
    names = []
    held = None
    for number in (1, 2, 3):
        names.append(write_round(origin, number))
        place.push(origin)
        place.pull(edge)
        if held is None:
            held = (edge / "rounds" / names[0] / "manifest.json").open("rb")
            fcntl.flock(held, fcntl.LOCK_SH)
    assert (edge / "rounds" / names[0]).exists()
    held.close()
    write_round(origin, 4)
    place.push(origin)
    assert set(place.pull(edge).removed) == {names[0], names[1]}


def test_objects_say_how_long_they_may_be_cached(s3, origin):
    from obstore import get

    name = write_round(origin, 1)
    s3.push(origin)
    objects = s3.store.objects
    for part in ("manifest.json", "table-0/seg-0.bin", "table-0/seg-0.sum"):
        assert "immutable" in get(objects, f"rounds/{name}/{part}").attributes["Cache-Control"]
    assert get(objects, "current.json").attributes["Cache-Control"] == "no-store"


def test_a_large_segment_goes_in_parts(s3, origin, edge):
    name = write_round(origin, 1, num_keys=6, width=1 << 20, per_segment=6)  # 24 MB
    seen = []
    push_round(origin, s3.url, store=s3.settings, progress=lambda *told: seen.append(told))
    s3.pull(edge)
    assert content_of(edge, name) == content_of(origin, name)
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1]
    assert len(seen) > 5  # the one large file alone is told in four steps


# --- what must never be seen ------------------------------------------------------------------

COPY = """
import sys
from pathlib import Path
from keyhole.serving.{module} import {name}
from keyhole.primitives.cuts import Cut
from keyhole.primitives.keyspace import KeySpace
from keyhole.primitives.layout import Layout
from keyhole.server.optimizers import SGD
from keyhole.server.state import ServerState
from keyhole.serving.mirror_files import MirrorSettings
from keyhole.serving.object_store import StoreSettings
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
    script = COPY.format(module="mirror_push", name="push_round")
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
    script = COPY.format(module="mirror_pull", name="fetch_round")
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


def test_what_is_pulled_can_be_served(place, origin, edge):
    """From a real publisher to what the service reads; the names of the cohort stay at home."""
    layout = Layout.of(
        {"w": np.zeros((40, 8), np.float32), "b": np.zeros(3, np.float32)},
        Cut(KeySpace("word", 40), {"w": 0}),
    )
    value = {
        "w": np.arange(320, dtype=np.float32).reshape(40, 8),
        "b": np.arange(3, dtype=np.float32),
    }
    state = ServerState.dense(layout, value, SGD(lr=1.0))
    with Publisher(origin) as publisher:
        made = publisher.publish_state(state, number=1, cohort=["phone-1"], segment_bytes=256)
    place.push(origin)
    assert not [name for name in place.names() if "cohort" in name]
    place.pull(edge)
    rounds = RoundsDirectory(edge)
    assert rounds.current().round == made.id
    with rounds.hold(made.id) as held:
        verify_round(held)
        word = next(table for table in held.tables if table.info.name == "word")
        records = word.gather(np.array([39, 0, 39])).records
        assert records.tobytes() == value["w"][[39, 0, 39]].tobytes()
    rounds.close()


def damage(place, name, how):
    data = bytearray(place.read(name))
    if how == "flipped":
        data[len(data) // 2] ^= 0x10
    elif how == "truncated":
        del data[-1:]
    elif how == "longer":
        data.append(0)
    place.store.put(name, bytes(data))


@pytest.mark.parametrize("part", ["table-0/seg-1.bin", "table-0/seg-1.sum", "manifest.json"])
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
        b'{"round": "1-0123456789abcdef", "number": 2, "phase": "open"}',
        b'{"round": "1-0123456789abcdef", "number": 1, "phase": "ajar"}',
        b'{"round": "01-0123456789abcdef", "number": 1, "phase": "open"}',
        b"x" * 100_000,
    ],
)
def test_a_strange_current_json_is_refused(place, edge, content):
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


@pytest.mark.parametrize("part", ["table-0/seg-1.bin", "table-0/seg-1.sum"])
def test_a_damaged_file_is_not_pushed(place, origin, part):
    name = write_round(origin, 1)
    path = origin / "rounds" / name / part
    path.write_bytes(path.read_bytes()[:-1] + b"\xff\x00"[:1])
    with pytest.raises(DamageError):
        place.push(origin)
    assert f"rounds/{name}/{part}" not in place.names()
    with pytest.raises(NotFoundError):
        place.read("current.json")


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


# --- what users get wrong ---------------------------------------------------------------------


def test_an_empty_store_and_an_empty_directory_say_so(place, origin, edge):
    with pytest.raises(NotFoundError, match=r"current\.json"):
        place.pull(edge)
    with pytest.raises(NotFoundError, match="no round has been published"):
        place.push(origin)


@pytest.mark.parametrize("do", ["push", "pull"])
def test_a_bucket_that_does_not_exist_is_named(s3_port, origin, edge, do):
    write_round(origin, 1)
    place = Place("s3://no-such-bucket/x", s3_settings(s3_port))
    with pytest.raises(InputError, match="no such bucket") as caught:
        getattr(place, do)(origin if do == "push" else edge)
    assert is_one_line(caught.value)


def test_no_credentials_are_asked_for_by_name(s3_port, origin):
    write_round(origin, 1)
    make_bucket(s3_port, "needs-a-name")
    place = Place("s3://needs-a-name/x", s3_settings(s3_port, options={}, retries=0))
    with pytest.raises(InputError, match="AWS_ACCESS_KEY_ID") as caught:
        place.push(origin)
    assert is_one_line(caught.value)


def test_wrong_credentials_are_refused_in_one_line(tmp_path, origin):
    write_round(origin, 1)
    with s3_server(tmp_path / "log", INITIAL_NO_AUTH_ACTION_COUNT="1") as port:
        make_bucket(port, "guarded")
        with pytest.raises(InputError, match="does not accept them") as caught:
            Place("s3://guarded/x", s3_settings(port)).push(origin)
    assert is_one_line(caught.value)
    assert "secret" not in caught.value.got


def test_without_a_signature_only_an_open_bucket_can_be_pulled(s3, s3_port, origin, edge):
    write_round(origin, 1)
    s3.push(origin)
    anonymous = StoreSettings(s3.settings.endpoint, "us-east-1", is_anonymous=True)
    with pytest.raises(InputError, match="does not accept them") as caught:
        Place(s3.url, anonymous).pull(edge)
    assert is_one_line(caught.value)
    bucket = s3.url.split("/")[2]
    allowed = {"Effect": "Allow", "Principal": "*", "Action": "s3:GetObject"}
    allowed["Resource"] = f"arn:aws:s3:::{bucket}/*"
    ask_s3(s3_port, "PUT", f"/{bucket}?policy", json.dumps({"Statement": [allowed]}))
    assert Place(s3.url, anonymous).pull(edge).number == 1


def test_a_store_that_does_not_answer_is_one_line(origin):
    write_round(origin, 1)
    with pytest.raises(ServiceError) as caught:
        Place("s3://some-bucket/x", s3_settings(DENIED)).push(origin)
    assert is_one_line(caught.value)


@pytest.mark.parametrize("url", ["bucket/prefix", "ftp-but-not://x/y", ""])
def test_what_is_not_a_url_of_a_store_is_refused(url):
    with pytest.raises(InputError, match="cannot open this object store") as caught:
        open_store(url)
    assert is_one_line(caught.value)


def test_a_missing_library_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(InputError, match=r"keyhole\[s3\]"):
        open_store("s3://bucket/prefix")


@pytest.mark.parametrize("settings", [{"keep": 0}, {"workers": 0}])
def test_settings_below_one_are_refused(settings):
    with pytest.raises(InputError):
        MirrorSettings(**settings)


# --- the command ------------------------------------------------------------------------------


def run(*args):
    return CliRunner().invoke(mirror, [str(arg) for arg in args])


def test_the_command_pushes_and_pulls_with_settings_of_the_environment(
    s3, origin, edge, monkeypatch
):
    name = write_round(origin, 7)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "tester")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    at = ["--endpoint", s3.settings.endpoint]
    pushed = run("push", origin, s3.url, "--json", *at)
    assert json.loads(pushed.stdout)["round"] == name, pushed.output
    assert "push to" in pushed.stderr
    pulled = run("pull", s3.url, edge, *at)
    assert pulled.stdout.startswith(f"{name} is current: ")
    assert content_of(edge, name) == content_of(origin, name)


def test_the_endpoint_may_come_from_the_environment_too(s3, origin, monkeypatch):
    write_round(origin, 7)
    for name, value in {
        "AWS_ACCESS_KEY_ID": "tester",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": s3.settings.endpoint,
    }.items():
        monkeypatch.setenv(name, value)
    refused = run("push", origin, s3.url)
    assert isinstance(refused.exception, InputError)
    assert "AWS_ALLOW_HTTP" in str(refused.exception)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    assert run("push", origin, s3.url).exit_code == 0


def test_the_command_ends_on_an_error_of_ours(edge, tmp_path):
    done = run("pull", (tmp_path / "nowhere").as_uri(), edge)
    assert isinstance(done.exception, KeyholeError)
    assert Path(edge).exists() is False
