"""Attack: a stranger's files lie in the folder that `keyhole watch` and `keyhole status` look at.

One run of a folder, or one service that is watched, tries to hide all others from its operator, to
steer the operator's terminal, to have files outside of the folder read, or code of its own run. The
planted holes tell texts as they are, and follow every link.
"""

import json
import os
import shutil
import sys

import msgspec
import pytest

from keyhole.experiments.watch import folder as watched
from keyhole.experiments.watch.address import ServiceWatch
from keyhole.experiments.watch.folder import RunFolder
from keyhole.wire.http import HttpClient, Received
from tests.experiments.watch.watched import make_folder

TOP4, NOISE, ROUNDS = "emnist-top4", "emnist-top8-noise", "rounds"
ESCAPE = "\x1b]0;mine\x07"
HALF = "\ud800"  # half a letter: JSON holds it, and no encoding does


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("watched"))


@pytest.fixture
def home(made, tmp_path):
    return shutil.copytree(made, tmp_path / "runs")


def sent(folder):
    """What the page is sent of a folder: all that its API answers."""
    found = RunFolder(folder)
    told = msgspec.json.decode(msgspec.json.encode(found.overview()))
    runs = {run["name"]: msgspec.json.encode(found.run(run["name"])) for run in told["runs"]}
    return told, runs


def change(path, **fields):
    """Changes the first line of a JSON file."""
    first, _, rest = path.read_bytes().partition(b"\n")
    path.write_bytes(json.dumps(json.loads(first) | fields).encode() + b"\n" + rest)


NAMES = [f"run{ESCAPE}", "run\n\r\x00"[:-1], os.fsdecode(b"run\xff\xfe"), "run\u202e"]


@pytest.mark.parametrize("name", NAMES)
def test_the_name_of_a_run_hides_no_other_and_steers_nothing(home, name):
    shutil.copytree(home / TOP4, home / name)
    told, runs = sent(home)
    assert len(runs) == 3
    assert all(text.isprintable() for run in told["runs"] for text in (run["name"], run["short"]))


def test_where_texts_are_told_as_they_are_the_attack_succeeds(home, monkeypatch):
    monkeypatch.setattr(watched, "printable", lambda told: told)
    shutil.copytree(home / TOP4, home / NAMES[0])
    assert any(ESCAPE in run["short"] for run in sent(home)[0]["runs"])
    shutil.copytree(home / TOP4, home / NAMES[2])
    with pytest.raises(UnicodeEncodeError):
        sent(home)


DAMAGE = [
    ("records.jsonl", {"bytes_down": [10**400]}),
    ("records.jsonl", {"privacy": {"epsilon": 10**400}}),
    ("records.jsonl", {"incidents": [HALF, ESCAPE]}),
    ("records.jsonl", {"metrics": {HALF: 1.0}}),
    ("records.jsonl", {"seen_by": {ESCAPE: HALF}}),
    ("run.json", {"size": {"server": 10**400, "client": 1}}),
    ("run.json", {"titles": {"delivery": HALF}}),
    ("run.json", {"spec": {"task": HALF}}),
    ("result.json", {"metrics": {HALF: 1.0}}),
]


@pytest.mark.parametrize(("file", "fields"), DAMAGE)
def test_what_a_file_says_hides_no_other_run(home, file, fields):
    change(home / TOP4 / "trial-0" / file, **fields)
    told, runs = sent(home)
    assert NOISE in runs
    assert TOP4 in runs or any(trouble.startswith(TOP4) for trouble in told["troubles"])
    assert len(told["rounds"]) == 1


def test_what_a_run_names_is_not_imported(home, tmp_path, monkeypatch):
    (tmp_path / "planted_part.py").write_text("raise SystemExit('code of a stranger was run')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    path = home / TOP4 / "trial-0" / "run.json"
    spec = json.loads(path.read_bytes())["spec"]
    own = "planted_part:X"
    named = {"task": own, "delivery": own, "aggregation": spec["aggregation"] | {"name": own}}
    change(path, spec=spec | named)
    told, runs = sent(home)
    assert TOP4 in runs, told["troubles"]
    assert "planted_part" not in sys.modules


@pytest.fixture
def outside(tmp_path):
    """Nine files of somebody else."""
    folder = tmp_path / "outside"
    folder.mkdir()
    for number in range(9):
        (folder / f"secret-{number}").write_bytes(bytes(100))
    return folder


def lead_out(home, outside, what):
    """Puts a link where rounds have a folder."""
    rounds = home / ROUNDS
    name = json.loads((rounds / "current.json").read_bytes())["round"]
    place = {"updates": rounds / "updates" / name, "waiting": rounds / "waiting"}[what]
    place.parent.mkdir(exist_ok=True)
    place.symlink_to(outside)


@pytest.mark.parametrize("what", ["updates", "waiting"])
def test_files_outside_of_the_folder_are_not_counted(home, outside, what):
    lead_out(home, outside, what)
    told, runs = sent(home)
    assert told["rounds"] == []
    assert len(runs) == 2


def test_where_links_are_followed_the_attack_succeeds(home, outside, monkeypatch):
    lead_out(home, outside, "updates")
    monkeypatch.setattr(RunFolder, "_is_here", lambda self, path: True)
    (round_,) = sent(home)[0]["rounds"]
    assert (round_["updates"], round_["bytes"]) == (9, 900)


def test_a_pipe_is_not_waited_for(home):
    (home / TOP4 / "trial-0" / "result.json").unlink()
    os.mkfifo(home / TOP4 / "trial-0" / "result.json")
    (home / ROUNDS / "current.json").unlink()
    os.mkfifo(home / ROUNDS / "current.json")
    told, runs = sent(home)
    assert set(runs) == {TOP4, NOISE}  # of the other trials of the first
    assert told["rounds"] == []


ANSWERS = [
    ("/metrics", b"keyhole_round_number +Inf\n"),
    ("/metrics", b"keyhole_round_number NaN\n"),
    ("", b'{"round": "x", "number": 1e400, "phase": "open"}'),
    ("", b'{"round": "\\ud800\\u001b[2J", "number": 1, "phase": 3}'),
    ("", b"[" * 200_000),
    ("", b"[]"),
]


@pytest.mark.parametrize(("at", "body"), ANSWERS)
def test_a_service_that_lies_is_a_trouble_and_no_end(at, body, monkeypatch):
    answer = Received(200, body=memoryview(body))
    monkeypatch.setattr(HttpClient, "exchange", lambda *_, **__: answer)
    told = ServiceWatch(f"http://127.0.0.1:1{at}").overview()
    assert "no status at" in told["troubles"][0]
    assert told["rounds"] == []
