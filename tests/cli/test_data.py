"""`keyhole data`: what it prints, and one line and exit code 2 for a bad file."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console
from rich.filesize import decimal

from keyhole.cli.bars import make_bars
from keyhole.cli.data import data
from keyhole.cli.main import main
from keyhole.cli.report import report
from tests.data import files
from tests.experiments.report.runs import write_sweep
from tests.helpers import LONG


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    """A folder of data with one file, and an empty cache."""
    (tmp_path / "data").mkdir()
    files.write_femnist(tmp_path / "data" / "femnist_mini.npz")
    monkeypatch.setenv("KEYHOLE_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("KEYHOLE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path


def run(*args):
    done = CliRunner().invoke(data, args, catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout


def fail(capsys, *args):
    with pytest.raises(SystemExit) as ended:
        main(["data", *args])
    return ended.value.code, capsys.readouterr().err


def test_list_shows_what_waits_and_what_is_imported():
    assert "not imported" in run("list")
    run("import", "femnist_mini")
    shown = run("list")
    assert "not imported" not in shown
    assert "public domain (NIST)" in shown
    found = json.loads(run("list", "--json"))
    assert found["files"][0]["imported"] is True
    assert found["imported"][0]["splits"]["train"] == {"clients": 2, "examples": 3}


def test_list_of_nothing_says_what_to_do(monkeypatch):
    monkeypatch.delenv("KEYHOLE_DATA")
    assert "keyhole data import PATH" in run("list")
    assert json.loads(run("list", "--json"))["imported"] == []


def test_import_says_what_came_in_and_the_second_time_that_it_was_there(folders):
    path = str(folders / "data" / "femnist_mini.npz")
    first = json.loads(run("import", path, "--json"))
    assert first["was_there"] is False
    assert first["kind"] == "writers"
    assert json.loads(run("import", path, "--json")) == first | {"was_there": True}
    assert "femnist_mini was imported" in run("import", path)


def test_info_shows_counts_licence_and_checksum():
    imported = json.loads(run("import", "femnist_mini", "--json"))
    shown = run("info", "femnist_mini")
    assert imported["sha256"] in shown
    assert "public domain" in shown
    assert "not computed again" in shown
    assert "all match" in run("info", "femnist_mini", "--verify")
    assert json.loads(run("info", "femnist_mini", "--json"))["files"].keys()


def test_info_of_a_path_is_info_of_what_came_from_it(folders):
    run("import", "femnist_mini")
    shown = json.loads(run("info", str(folders / "data" / "femnist_mini.npz"), "--json"))
    assert shown["name"] == "femnist_mini"


def test_import_after_a_touch_makes_info_of_the_path_work_again(folders, capsys):
    path = folders / "data" / "femnist_mini.npz"
    run("import", str(path))
    os.utime(path, ns=(1, 1))
    assert "is not imported" in fail(capsys, "info", str(path))[1]
    run("import", str(path))
    assert "public domain" in run("info", str(path))
    assert json.loads(run("import", str(path), "--json"))["was_there"] is True


def test_what_is_listed_can_be_imported_by_its_name(folders):
    path = files.write_movielens(folders / "my_movies.npz")
    run("import", str(path))
    path.unlink()
    assert "my_movies was imported" in run("import", "my_movies")


def test_import_shows_hashing_and_reading_with_their_units(folders):
    """The frames go to no terminal, so the last one is printed: both bars, each in its unit."""
    path = folders / "data" / "femnist_mini.npz"
    done = CliRunner().invoke(data, ["import", str(path)], catch_exceptions=False)
    hashing, reading = (line for line in done.stderr.splitlines() if line.strip())
    size = decimal(path.stat().st_size)
    assert hashing.startswith("hash femnist_mini")
    assert f"{size}/{size}" in hashing
    assert reading.startswith("import femnist_mini")
    assert "2/2 clients" in reading
    os.utime(path, ns=(1, 1))
    done = CliRunner().invoke(data, ["import", str(path)], catch_exceptions=False)
    assert "hash femnist_mini" in done.stderr
    assert "import femnist_mini" not in done.stderr  # the same bytes are not read again


def test_info_before_import_names_the_command(capsys):
    code, error = fail(capsys, "info", "femnist_mini")
    assert code == 2
    assert "run: keyhole data import femnist_mini" in error


def test_verify_names_the_damaged_file(capsys):
    directory = json.loads(run("import", "femnist_mini", "--json"))["directory"]
    array = Path(directory, "train.pixels.npy")
    array.write_bytes(array.read_bytes()[:-1] + b"\x99")
    code, error = fail(capsys, "info", "femnist_mini", "--verify")
    assert code == 2
    assert "train.pixels.npy" in error


@pytest.mark.parametrize("command", ["info", "import"])
def test_a_name_of_nothing_is_one_line_and_exit_code_2(command, capsys):
    code, error = fail(capsys, command, "no_such_thing")
    assert code == 2
    assert error.startswith("keyhole: no dataset 'no_such_thing'")
    assert error.count("\n") == 1


def test_a_bad_file_is_one_line_and_exit_code_2(folders, capsys):
    path = folders / "half.npz"
    path.write_bytes((folders / "data" / "femnist_mini.npz").read_bytes()[:300])
    code, error = fail(capsys, "import", str(path))
    assert code == 2
    assert error.splitlines()[-1].startswith(f"keyhole: cannot use {path}: got ")
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("fields", "count", "rate"),
    [
        ({}, "4000000/9000000", "1,000,000.0/s"),
        ({"unit": "clients"}, "4000000/9000000 clients", "1,000,000.0/s"),
        ({"unit": "bytes"}, "4.0 MB/9.0 MB", "1.0 MB/s"),
    ],
)
def test_a_bar_shows_count_and_rate_in_its_unit(fields, count, rate):
    bars, now = make_bars(), [0.0]
    bars.get_time = lambda: now[0]
    bar = bars.add_task("reading", total=9_000_000, note="a note", **fields)
    for _ in range(4):
        bars.advance(bar, 1_000_000)
    now[0] = 4.0
    console = Console(file=io.StringIO(), width=160)
    console.print(bars.get_renderable())
    for expected in ("reading", count, rate, "a note"):
        assert expected in console.file.getvalue()


def test_the_time_that_remains_grows_while_nothing_is_done_and_counts_no_round_of_before():
    bars, now = make_bars(), [0.0]
    bars.get_time = lambda: now[0]
    bar = bars.add_task("trial 0", total=100, note="")
    bars.reset(bar, completed=90, before=90, note="")
    bars.advance(bar, 2)
    shown = []
    for seconds in (16.0, 160.0):
        now[0] = seconds
        console = Console(file=io.StringIO(), width=160)
        console.print(bars.get_renderable())
        shown.append(console.file.getvalue())
    assert "0.1/s" in shown[0]
    assert "left 0:01:04" in shown[0]
    assert "left 0:10:40" in shown[1]


def test_a_bar_keeps_to_one_line_of_a_narrow_terminal():
    bars = make_bars()
    task = bars.add_task("import stackexchange_mini", total=520_600, note="", unit="bytes")
    bars.update(task, completed=520_600)
    console = Console(file=io.StringIO(), width=80)
    console.print(bars.get_renderable())
    (numbers,) = re.fullmatch(r".*? ━+ (.*)\n", console.file.getvalue()).groups()
    assert "520.6 kB/520.6 kB" in numbers
    assert "…" not in numbers  # where there is no room, words are cut


def test_the_bar_of_a_report_shows_a_rate(tmp_path):
    write_sweep(tmp_path / "runs", "emnist-cnn", [("", "a", 1, "cnn")], figures=[])
    done = CliRunner().invoke(report, [str(tmp_path / "runs")], catch_exceptions=False)
    assert re.search(r"drawing .*1/1 sweeps +[\d,.]+/s", done.stderr)


INTERRUPTED = """
import sys
from keyhole.cli.main import main
main(["data", "import", sys.argv[1]])
"""


def test_ctrl_c_leaves_nothing_half(folders):
    posts = (files.stack_record(user, f"word{user} and more " * 20) for user in range(20_000))
    path = files.write_stackexchange(folders / "many.jsonl.xz", posts)
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, path], stderr=subprocess.PIPE, text=True
    )
    work = folders / "cache" / ".work"
    while not list(work.glob("*/train.words.values.npy")):
        assert process.poll() is None
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    _, error = process.communicate(timeout=LONG)
    assert process.returncode == 130
    assert error.strip().splitlines()[-1] == "keyhole: interrupted"
    assert [path for path in work.iterdir() if path.is_dir()] == []


OWN_TASK = """
import keyhole as kh
import numpy as np
from keyhole.models.dense import masked_mean


def predict(params, batch):
    return params["mean"][batch["film"]]


def loss(params, batch, mask):
    return masked_mean((predict(params, batch) - batch["stars"]) ** 2, mask)


def init(seed):
    return {"mean": np.zeros(9, np.float32)}


def error(outputs, examples):
    return np.abs(outputs - examples["stars"]).mean()


model = kh.Model(init, loss, predict, (kh.Cut(kh.KeySpace("film", 9), {"mean": 0}),))
TASK = kh.Task(model, kh.data.open_dataset("stars"), metrics={"error": error}, name="films")
"""


def write_stars(path):
    rows = [f"u{i % 10},{i % 9},{i % 5}.5" for i in range(60)]
    path.write_text("\n".join(["user,film,stars", *rows]))
    return path


def test_a_table_of_your_own_is_imported_and_trained_on(folders, monkeypatch):
    path, words = write_stars(folders / "stars.csv"), ("--client", "user", "--input", "film=film")
    shown = run("import", str(path), *words, "--target", "stars", "--hold-out", "0.2")
    assert "stars is imported" in shown
    assert "client user; inputs film = film; target stars; 0.2 held out by client" in shown
    again = run("import", str(path), *words, "--target", "stars", "--hold-out", "0.2", "--json")
    assert json.loads(again)["was_there"] is True
    assert json.loads(again)["splits"]["test"] == {"clients": 2, "examples": 12}
    (folders / "mine.py").write_text(OWN_TASK)
    monkeypatch.chdir(folders)
    entry = "from keyhole.cli.main import main; main()"
    asked = "train mine:TASK --data stars --rounds 2 --cohort 3 --keys top --m 3"
    done = subprocess.run(
        [sys.executable, "-c", entry, *asked.split()],
        capture_output=True,
        text=True,
        check=False,
        timeout=LONG,
    )
    assert done.returncode == 0, done.stderr
    (result,) = folders.glob("keyhole-runs/*/trial-0/result.json")
    assert "error" in json.loads(result.read_text())["metrics"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--target", "stars"), "--target needs --client, which says whose row it is"),
        (("--by", "time"), "--by needs --client"),
        (("--client", "user", "--input", "film"), "--input names no key space: got 'film'"),
        (("--client", "usr"), "did you mean user?"),
        (("--client", "user", "--input", "stars=x", "--target", "x"), "target names a column"),
        (("--client", "user", "--hold-out", "1"), "--hold-out"),
        ((), "keyhole data import stars.csv --client COLUMN"),
    ],
)
def test_a_bad_import_of_your_own_is_one_line(folders, capsys, words, said):
    code, told = fail(capsys, "import", str(write_stars(folders / "stars.csv")), *words)
    assert code == 2
    assert said in " ".join(told.split())


def test_a_file_is_made_and_goes_by_its_name(folders, capsys, monkeypatch):
    leaf = files.write_leaf(folders / "leaf")
    assert "femnist.npz is made" in run("make", "femnist", str(leaf))
    assert "femnist is imported" in run("import", "femnist")
    code, said = fail(capsys, "make", "femnist", str(leaf))
    assert (code, "is there already" in said) == (2, True)
    monkeypatch.delenv("KEYHOLE_DATA")
    assert "give --out FOLDER" in fail(capsys, "make", "femnist", str(leaf))[1]
    assert "femnist.npz is made" in run("make", "femnist", str(leaf), "--out", str(folders))
