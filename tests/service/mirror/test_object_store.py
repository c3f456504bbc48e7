"""Rounds through object stores: a real S3 server (moto), and directories as stores."""

import fcntl
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from keyhole.cli.mirror import mirror
from keyhole.errors import InputError, KeyholeError, NotFoundError, ServiceError
from keyhole.primitives.keyspace import KeySpace
from keyhole.primitives.layout import Cut, Layout
from keyhole.server.optimizers import SGD
from keyhole.server.state import ServerState
from keyhole.service.mirror import MirrorSettings, push_round
from keyhole.service.object_store import StoreSettings, open_store
from keyhole.service.publishing import Publisher
from keyhole.service.reading import RoundsDirectory, verify_round
from keyhole.wire.manifest import number_of
from tests.service.hand_made import content_of, write_round
from tests.service.mirror.places import (
    DENIED,
    Place,
    ask_s3,
    is_one_line,
    make_bucket,
    s3_server,
    s3_settings,
)

pytest.importorskip("obstore", reason="object stores: pip install 'keyhole[s3]'")


def test_a_round_comes_back_byte_for_byte(place, origin, edge):
    name = write_round(origin, 3)
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


def test_a_signature_travels_with_its_round(place, origin, edge):
    name = write_round(origin, 3)
    (origin / "rounds" / name / "manifest.sig").write_bytes(bytes(range(64)))
    place.push(origin)
    place.pull(edge)
    assert content_of(edge, name) == content_of(origin, name)


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
    for part in ("manifest.json", "table-0/seg-0.bin", "table-0/tree.bin"):
        assert "immutable" in get(objects, f"rounds/{name}/{part}").attributes["Cache-Control"]
    assert get(objects, "current.json").attributes["Cache-Control"] == "no-store"


@pytest.mark.slow
def test_a_large_segment_goes_in_parts(s3, origin, edge):
    name = write_round(origin, 1, num_keys=6, width=1 << 20, per_segment=6)  # 24 MB
    seen = []
    push_round(origin, s3.url, store=s3.settings, progress=lambda *told: seen.append(told))
    s3.pull(edge)
    assert content_of(edge, name) == content_of(origin, name)
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1]
    assert len(seen) == 4  # two trees, two segments


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


def test_an_empty_store_and_an_empty_directory_say_so(place, origin, edge):
    with pytest.raises(NotFoundError, match=r"current\.json"):
        place.pull(edge)
    with pytest.raises(NotFoundError, match="no round has been published"):
        place.push(origin)


def test_a_push_of_nothing_leaves_no_folder_behind(tmp_path):
    with pytest.raises(NotFoundError, match="no round has been published"):
        push_round(tmp_path / "empty", (tmp_path / "store").as_uri())
    assert not list(tmp_path.iterdir())


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


@pytest.mark.parametrize("verb", ["push", "pull"])
def test_who_watches_ends_at_once_without_the_library(monkeypatch, tmp_path, verb):
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    order = [str(tmp_path), f"file://{tmp_path}"]
    done = run(verb, *(order if verb == "push" else reversed(order)), "--watch")
    assert isinstance(done.exception, InputError)
    assert "keyhole[s3]" in str(done.exception)


@pytest.mark.parametrize("settings", [{"keep": 0}, {"workers": 0}])
def test_settings_below_one_are_refused(settings):
    with pytest.raises(InputError):
        MirrorSettings(**settings)


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
