"""`keyhole train` and `keyhole sweep`: results, directories, wrong values, Ctrl-C."""

import fcntl
import json
import os
import pty
import re
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from contextlib import suppress
from dataclasses import replace

import pytest

from keyhole.cli.screen import WaitingNotice
from keyhole.cli.train import _table
from keyhole.experiments import all_tasks
from keyhole.experiments.report.kept import keep_sweeps, read_kept, write_kept
from keyhole.experiments.sweeps import SWEEPS
from keyhole.experiments.trial import Result
from keyhole.rounds.fields import spec_fields
from keyhole.rounds.record import read_records
from keyhole.rounds.spec import RunSpec
from keyhole.service.inbox import Waiting
from tests.cli.conftest import COMMAND
from tests.helpers import LONG, with_slow

TINY = ("--size", "neurons=16", "--size", "hidden=8", "--cohort", "3", "--rounds", "2")


def reached(trial):
    """Curve and test metrics of a trial, and the clients that it drew."""
    records = read_records(trial / "records.jsonl")
    metrics = json.loads((trial / "result.json").read_text())["metrics"]
    return [(r.clients, r.metrics) for r in records], metrics


@pytest.fixture(scope="module")
def trained(keyhole, few_writers, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs")
    options = ("--data", few_writers, "--m", 8, "--trials", 2, "--out", out, "--json")
    return keyhole("train", "emnist_2nn", *TINY, *options), out


def test_train_prints_what_each_trial_reached(trained):
    done, out = trained
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [row["rounds"] for row in rows] == [2, 2]
    assert rows[0]["client_size"] == 8 * 793 + 566
    assert (out / "emnist_2nn-neurons16-hidden8-independent8-neurons" / "trial-1").is_dir()


def test_the_same_command_does_not_train_again(trained, keyhole, few_writers):
    first, out = trained
    options = ("--data", few_writers, "--m", 8, "--trials", 2, "--out", out, "--json")
    again = keyhole("train", "emnist_2nn", *TINY, *options)
    assert again.stdout == first.stdout


def test_what_select_costs_is_told_once_for_trials_of_the_same_bytes(trained, keyhole, few_writers):
    options = ("--data", few_writers, "--m", 8, "--trials", 2, "--out", trained[1])
    told = keyhole("train", "emnist_2nn", *TINY, *options).stdout
    assert told.count("times broadcast here") == 1


def test_records_that_are_lost_are_told_on_screen_and_in_json(
    trained, keyhole, few_writers, tmp_path
):
    shutil.copytree(trained[1], tmp_path / "runs")
    for records in (tmp_path / "runs").glob("*/trial-0/records.jsonl"):
        records.write_bytes(b"")
    options = ("--data", few_writers, "--m", 8, "--out", tmp_path / "runs", "--json")
    done = keyhole("train", "emnist_2nn", *TINY, *options, "--rounds", 3)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)
    assert (row["rounds"], row["records"]) == (3, 2)
    assert "the records of 1 rounds are lost" in row["notes"][0]
    assert row["notes"][0] in done.stderr


def test_a_run_says_who_learned_what(keyhole, few_writers, tmp_path):
    """A third of the neurons, so that two servers are worth their bytes."""
    options = ("--data", few_writers, "--m", 5, "--out", tmp_path, "--delivery", "pir")
    done = keyhole("train", "emnist_2nn", *TINY, *options)
    assert done.returncode == 0, done.stderr
    assert "who learned what" in done.stdout
    assert "first server" in done.stdout
    assert "its keys and whose they are" in done.stdout
    again = json.loads(keyhole("train", "emnist_2nn", *TINY, *options, "--json").stdout)
    assert again[0]["seen_by"] == {
        "first server": "who takes part",
        "second server": "who takes part",
    }


def test_asynchronous_rounds_are_asked_for_by_how_many_are_at_work(keyhole, few_writers, tmp_path):
    options = ("--data", few_writers, "--m", 8, "--out", tmp_path, "--rounds", 4)
    done = keyhole("train", "emnist_2nn", *TINY[:-2], *options, "--concurrency", 6)
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("*-async6/trial-0/records.jsonl")
    records = read_records(path)
    assert [len(record.staleness) for record in records] == [3] * 4
    assert max(age for record in records for age in record.staleness) > 0


def test_train_shows_a_table(keyhole, few_writers, tmp_path):
    done = keyhole(
        "train",
        "emnist_2nn",
        *TINY,
        "--m",
        8,
        "--data",
        few_writers,
        "--keys",
        "fixed",
        "--out",
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "accuracy" in done.stdout
    assert "-fixed" in done.stdout


def test_the_table_has_a_dash_for_what_devices_do_not_tell():
    known = Result(2, 1.5, {"recall": 0.5}, 40.0, 9000.0, 2000.0, 2, [], "")
    rows = [known, replace(known, client_size=None, bytes_down=None)]
    columns = [list(column.cells) for column in _table("run", {"server": 400}, rows).columns]
    assert [cells[0] for cells in columns] == ["0", "0.5000", "40", "10.00%", "9.0", "2.0", "1.5"]
    assert [cells[1] for cells in columns] == ["1", "0.5000", "-", "-", "-", "2.0", "1.5"]
    assert [cells[2] for cells in columns][:4] == ["mean", "0.5000", "-", "-"]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["train", "no_such_task"], "no such task: got 'no_such_task'"),
        (["train", "emnist_2nn", "--m", "201"], "expected 0..200"),
        (["train", "emnist_2nn", "--m", "many"], "--m: 'many' is not a whole number"),
        (["train", "emnist_2nn", "--m", "-5"], "--m: '-5' is not a whole number, 1 or more"),
        (["train", "emnist_2nn", "--m", "0"], "--m: '0' is not a whole number, 1 or more"),
        (
            ["train", "emnist_2nn", "--keys", "best"],
            "--keys: no 'best'; expected top, random, random-top, independent, all, rolling",
        ),
        (
            ["train", "emnist_2nn", "--keys", "word=top"],
            "--keys: task emnist_2nn has no key space 'word'",
        ),
        (["train", "emnist_2nn", "--size", "words=5"], "no such size: got words"),
        (["train", "emnist_2nn", "--size", "neurons"], "is not NAME=VALUE"),
        (["train", "emnist_2nn", "--rounds", "0"], "0 is not in the range"),
        (["train", "emnist_2nn", "--client-lr", "0"], "0.0 is not in the range"),
        (["train", "emnist_2nn", "--algorithm", "FedMax"], "no 'FedMax'; expected FedAvg"),
        (
            ["train", "so_word", "--keys", "top"],
            "--keys: task so_word has several key spaces: say word=top, neuron=top",
        ),
        (["train", "emnist_2nn", "--min-examples", "99"], "no client has this many examples"),
        (["train", "emnist_2nn", "--negatives", "0.1"], "no softmax that is cut"),
        (["train", "so_tag"], "a dataset of posts"),
        (["train", "emnist_2nn", "--m", "100", "--delivery", "pir"], "more than the whole model"),
        (["train", "emnist_2nn", "--sampling", "check-in"], "goes with --devices"),
        (["train", "emnist_2nn", "--rest", "2"], "without them"),
        (["train", "emnist_2nn", "--max-staleness", "2"], "goes with --concurrency"),
        (["train", "emnist_2nn", "--concurrency", "99999"], "more clients than there are"),
        (
            ["train", "emnist_2nn", "--concurrency", "2", "--sampling", "poisson"],
            "one after the other: got poisson sampling",
        ),
        (
            ["train", "emnist_2nn", "--concurrency", "2", "--aggregation", "secure-dense"],
            "in the clear, without noise",
        ),
        (["train", "emnist_2nn", "--data", "no/such/file.npz"], "no/such/file.npz"),
        (["sweep", "no-such-figure"], "no such sweep: got no-such-figure"),
        (["sweep", "emnist-2nn", "--scale", "huge"], "'huge' is not one of"),
        (["sweep", "emnist-2nn", "--trials", "0"], "0 is not in the range"),
    ],
)
def test_a_wrong_value_is_one_line_and_exit_code_2(args, said, keyhole, few_writers, tmp_path):
    data = [] if "--data" in args else ["--data", few_writers]
    done = keyhole(*args, *data, "--out", tmp_path / "runs")
    assert done.returncode == 2, done.stderr
    (line,) = [each for each in done.stderr.splitlines() if "━" not in each]  # bars aside
    assert line.startswith("keyhole: ")
    assert said in line
    assert not (tmp_path / "runs").exists(), "nothing was started"


@pytest.mark.parametrize("command", [["train", "emnist_2nn", "--m", "8", *TINY], ["demo"]])
def test_a_place_that_cannot_be_written_is_one_line_and_exit_code_4(
    command, keyhole, few_writers, tmp_path
):
    (tmp_path / "file").write_text("no directory")
    data = ["--data", few_writers] if command[0] == "train" else []
    done = keyhole(*command, *data, "--out", tmp_path / "file" / "runs")
    assert done.returncode == 4, done.stderr
    assert done.stderr.strip().splitlines()[-1].startswith("keyhole: cannot make ")


def test_a_sweep_shares_arms_and_leaves_no_models(keyhole, few_writers, tmp_path):
    options = ("--data", few_writers, "--out", tmp_path, "--rounds", "1", "--trials", "1")
    options += ("--cohort", "2", "--json")
    first = keyhole("sweep", "emnist-2nn", *options)
    assert first.returncode == 0, first.stderr
    assert len(json.loads(first.stdout)) == 4
    second = keyhole("sweep", "divisor", *options)
    assert second.returncode == 0, second.stderr
    assert len(list(tmp_path.glob("*/trial-0/result.json"))) == 4 + 3  # three arms are new
    assert not list(tmp_path.glob("*/trial-0/state"))
    described = json.loads((tmp_path / "divisor.json").read_text())
    assert {line["arm"] for line in described["lines"]} <= {p.name for p in tmp_path.iterdir()}


def test_a_grid_of_your_own_is_run_resumed_and_drawn(keyhole, few_writers, tmp_path):
    grid = tmp_path / "mine.toml"
    grid.write_text(
        'task = "emnist_2nn"\nrounds = 1\nevaluate_every = 1\ncohort.size = 2\n'
        "trials = 1\nkeys.neuron.count = [10, 50]\n"
    )
    out = tmp_path / "runs"
    options = ("sweep", grid, "--data", few_writers, "--out", out)
    first = keyhole(*options, "--json")
    assert first.returncode == 0, first.stderr
    rows = json.loads(first.stdout)
    arms = [f"emnist_2nn-keys.neuron.count={m}" for m in (10, 50)]
    assert [row["run"] for row in rows] == [str(out / arm / "trial-0") for arm in arms]
    told = json.loads((out / arms[0] / "trial-0" / "run.json").read_text())
    assert told["spec"]["data"] == str(few_writers)
    assert json.loads(keyhole(*options, "--json").stdout) == rows
    drawn = keyhole("report", out, "--json")
    (table,) = json.loads(drawn.stdout)
    assert [row["label"] for row in table["rows"]] == [f"keys.neuron.count = {m}" for m in (10, 50)]
    refused = keyhole(*options, "--scale", "small")
    assert refused.returncode == 2
    assert "--scale goes with a figure of the paper" in refused.stderr


@pytest.mark.parametrize("more", [(), ("--processes", 2)])
def test_a_sweep_of_more_rounds_says_where_it_goes_on(keyhole, few_writers, tmp_path, more):
    grid = tmp_path / "mine.toml"
    grid.write_text(
        'task = "emnist_2nn"\nrounds = 1\ncohort.size = 2\ntrials = 1\nkeys.neuron.count = [10]\n'
    )
    options = ("sweep", grid, "--data", few_writers, "--out", tmp_path / "out", "--keep-state")
    first = keyhole(*options)
    assert (first.returncode, "resumed" in first.stderr) == (0, False), first.stderr
    done = keyhole(*options, "--rounds", 2, *more)
    assert done.returncode == 0, done.stderr
    assert "=10/trial-0: resumed after 1 of 2 rounds" in done.stderr
    assert "resumed" not in keyhole(*options, "--rounds", 2, *more).stderr


def test_a_sweep_runs_what_is_not_kept_as_all_of_it_would(keyhole, few_writers, tmp_path):
    grid = tmp_path / "mine.toml"
    grid.write_text(
        'task = "emnist_2nn"\nrounds = 2\nevaluate_every = 1\ncohort.size = 2\n'
        "trials = 2\nkeys.neuron.count = [10, 50]\n"
    )
    whole, missing = tmp_path / "whole", tmp_path / "missing"
    options = ("sweep", grid, "--data", few_writers)
    assert keyhole(*options, "--trials", 1, "--out", whole).returncode == 0
    (sweep,) = keep_sweeps(whole, "c0ffee", {})
    kept = write_kept(sweep, tmp_path)
    assert keyhole(*options, "--out", whole).returncode == 0
    done = keyhole(*options, "--kept", kept, "--out", missing, "--json")
    assert done.returncode == 0, done.stderr
    assert {path.name for path in missing.glob("emnist*/*")} == {"trial-1"}
    assert len(json.loads(done.stdout)) == 2
    for found in missing.glob("emnist*/*"):
        assert reached(found) == reached(whole / found.relative_to(missing))
    (rest,) = keep_sweeps(missing, "c0ffee", {})
    merged = read_kept(write_kept(rest, tmp_path))
    assert [(run.arm, run.trial) for run in merged.runs] == [
        (line.arm, trial) for line in merged.lines for trial in (0, 1)
    ]
    assert not json.loads(keyhole(*options, "--kept", kept, "--out", missing, "--json").stdout)
    longer = keyhole(*options, "--rounds", 3, "--kept", kept, "--out", tmp_path / "3", "--json")
    assert len(json.loads(longer.stdout)) == 4, "runs of another record are not kept"


@pytest.mark.parametrize("times", with_slow([1, 2], fast=[2]))
def test_ctrl_c_keeps_what_was_done(times, environment, few_writers, tmp_path):
    args = ["train", "emnist_2nn", *TINY[:-1], "100000", "--m", "8"]
    args += ["--data", few_writers, "--out", tmp_path]
    process = subprocess.Popen(
        [*COMMAND, *map(str, args)], stderr=subprocess.PIPE, text=True, env=environment
    )
    deadline = time.monotonic() + LONG
    try:
        while time.monotonic() < deadline and process.poll() is None:
            found = list(tmp_path.glob("*/trial-0/records.jsonl"))
            if found and len(found[0].read_bytes().splitlines()) >= 3:
                break
            time.sleep(0.05)
        for _ in range(times):  # the second one gives up the round under way
            process.send_signal(signal.SIGINT)
            time.sleep(0.02)
        _, err = process.communicate(timeout=LONG)
    finally:
        process.kill()
    assert process.returncode == 130, err
    (found,) = tmp_path.glob("*/trial-0/records.jsonl")
    made = len(read_records(found))
    assert made >= 3
    *before, kept, last = err.splitlines()
    assert kept == f"{found.parent} keeps {made} finished rounds; the same command resumes it"
    assert last == "keyhole: interrupted"
    assert not any("trial" in line for line in before), "bars that stand still are wiped off"


def test_a_file_says_what_to_train_and_options_come_before_it(
    trained, keyhole, few_writers, tmp_path
):
    first, out = trained
    told = tmp_path / "run.toml"
    told.write_text(
        f"""
version = 6
task = "emnist_2nn"
data = "{few_writers}"
rounds = 7
cohort.size = 3
keys.neuron.count = 8
[sizes]
neurons = 16
hidden = 8
"""
    )
    for file in (told, next(out.glob("*/trial-0/run.json"))):
        again = keyhole(
            *("train", "--spec", file, "--rounds", 2, "--trials", 2, "--out", out, "--json")
        )
        assert again.stdout == first.stdout, again.stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("version = 1", "is of another version: got version 1"),
        ("client.steps = 2", "run.toml has a field that no run has: got client.steps"),
        ("task = 'so_tag'", "--spec is of task so_tag"),
        ("[", "cannot be read"),
    ],
)
def test_a_file_that_is_no_run_is_one_line(keyhole, tmp_path, text, said):
    (tmp_path / "run.toml").write_text(text)
    done = keyhole("train", "emnist_2nn", "--spec", tmp_path / "run.toml", "--out", tmp_path / "r")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert said in line


WITHOUT_JAX = """
import sys
from keyhole.cli.main import main

for args, code in (("--m -5", 2), ("--keys best", 2), ("--help", 0)):
    try:
        main(["train", "so_tag", *args.split()])
    except SystemExit as ended:
        assert (ended.code or 0) == code, args
    assert "jax" not in sys.modules, args
"""


def test_a_wrong_value_and_help_do_not_wait_for_jax(environment):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_JAX],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_help_fits_80_columns_and_shows_every_default(keyhole, environment, monkeypatch):
    monkeypatch.setitem(environment, "COLUMNS", "80")
    text = keyhole("train", "--help").stdout
    assert max(map(len, text.splitlines())) <= 80
    roles = ["Model and data", "Clients", "Keys", "Delivery", "Aggregation", "Privacy"]
    found = [text.index(f"\n{role}:\n") for role in [*roles, "Where it runs"]]
    assert found == sorted(found)
    for field in spec_fields(RunSpec):
        if field.flag and f"\n  {field.flag}" in text:
            told = text.split(f"\n  {field.flag}", 1)[1].split("\n  --", 1)[0]
            assert "[default:" in told, field.flag


OWN_PARTS = """
from keyhole.aggregation.plain import PLAIN as SUM
from keyhole.delivery.clear import OnDemand

DELIVERY = OnDemand()
FIRST = {first}


def choose(context):
    return list(range(FIRST, FIRST + context.max_keys))
"""


@pytest.mark.slow
def test_parts_of_one_s_own_are_named_by_module(program, few_writers, tmp_path):
    own = ("--keys", "own_parts:choose", "--aggregation", "own_parts:SUM")
    args = (*TINY, "--m", 8, *own, "--delivery", "own_parts:DELIVERY", "--data", few_writers)
    for first, code in ((0, 0), (8, 2)):
        (tmp_path / "own_parts.py").write_text(OWN_PARTS.format(first=first))
        done = program("train", "emnist_2nn", *args, cwd=tmp_path)
        assert done.returncode == code, done.stderr
        shutil.rmtree(tmp_path / "__pycache__")  # Python tells files of one second by their size
    assert "the code or fields of own_parts:choose are not those that the run in" in done.stderr


def words_of(text):
    return set(re.findall(r"[\w-]+", text))


def test_help_names_every_task_and_every_sweep(keyhole):
    assert words_of(keyhole("train", "--help").stdout) >= all_tasks().keys()
    assert words_of(keyhole("sweep", "--help").stdout) >= SWEEPS.keys()


def test_a_finished_run_of_other_settings_is_refused(trained, keyhole, few_writers):
    _, out = trained
    options = ("--data", few_writers, "--m", 8, "--out", out, "--client-lr", "9")
    done = keyhole("train", "emnist_2nn", *TINY, *options)
    assert done.returncode == 2
    assert "holds a run with another client.lr: got 9.0; expected 0.1" in done.stderr


def waiting(here, missing):
    return Waiting(3, here, 30, [f"device-{number}" for number in missing])


def test_a_terminal_is_told_of_a_round_that_stands_still(capsys):
    now = [100.0]
    tell = WaitingNotice(clock=lambda: now[0])
    for seconds, here in [(0, 0), (4, 0), (3, 1), (4.9, 1)]:
        now[0] += seconds
        tell(waiting(here, [7]))
    assert capsys.readouterr().err.count("round 3: 0 of 30") == 0
    now[0] += 0.2
    tell(waiting(1, [7]))
    tell(waiting(1, [7]))
    assert capsys.readouterr().err == "round 3: 1 of 30 updates are here; waiting for device-7\n"
    tell(waiting(2, range(30)))
    now[0] += 6
    tell(waiting(2, range(30)))
    named = ", ".join(f"device-{number}" for number in range(20))
    told = f"round 3: 2 of 30 updates are here; waiting for {named} and 10 more\n"
    assert capsys.readouterr().err == told


BARS = """
import click
from keyhole.cli.bars import progress_bars
from keyhole.logs import say
say("ready")
try:
    with progress_bars() as bars:
        bar = bars.add_task("task.TASK-top50-products-check-in, trial 0", total=3, note="")
        bars.advance(bar)
        bars.refresh()
        say("round 11: 3 of 4 devices wait to be drawn")
        bars.refresh()
        say("runs/task.TASK-top50-products-check-in/trial-0 " + TEXT)
        raise click.Abort
except click.Abort:
    say("keyhole: interrupted")
"""
TEXT = "keeps 1325 finished rounds; the same command resumes it"


def on_a_terminal(program, columns=80):
    """What is left on the screen: lines, with what was wiped off or written over gone."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {name: os.environ[name] for name in os.environ if name != "COLUMNS"}
    process = subprocess.Popen(
        [sys.executable, "-c", program], stderr=theirs, env=environment | {"TERM": "xterm"}
    )
    os.close(theirs)
    sent = b""
    with suppress(OSError):  # the end of what it wrote
        while some := os.read(ours, 1 << 16):
            sent += some
    os.close(ours)
    assert process.wait(LONG) == 0
    lines, row, column = [""], 0, 0
    for code, letter in re.findall(r"\x1b\[([?\d;]*[A-Za-z])|(.)", sent.decode(), re.DOTALL):
        if letter == "\n" or (letter not in ("", "\r") and column == columns):
            row, column = row + 1, 0 if letter != "\n" else column
            lines += [""] * (row + 1 - len(lines))
        if letter == "\r":
            column = 0
        elif letter not in ("", "\n"):
            lines[row] = lines[row][:column].ljust(column) + letter + lines[row][column + 1 :]
            column += 1
        elif code == "2K":
            lines[row] = ""
        elif code.endswith("A"):
            row -= int(code[:-1])
    return lines


def test_a_terminal_of_80_columns_keeps_what_is_said_beside_bars():
    lines = on_a_terminal(BARS.replace("TEXT", repr(TEXT)))
    assert lines[0] == "ready"
    assert lines[1].rstrip() == "round 11: 3 of 4 devices wait to be drawn"
    said = " ".join(" ".join(lines[2:-2]).split())
    assert said == f"runs/task.TASK-top50-products-check-in/trial-0 {TEXT}"
    assert lines[-2:] == ["keyhole: interrupted", ""]


def test_every_line_of_a_log_of_json_is_an_object(keyhole, few_writers, tmp_path):
    rounds, spec = tmp_path / "rounds", ("train", "emnist_2nn", *TINY, "--m", 8, "--log", "json")
    devices = ("--devices", rounds, "--round-seconds", 0.05, "--data", few_writers)
    done = keyhole(*spec, *devices, "--out", tmp_path / "one")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert any(line["text"].startswith("metrics at http://") for line in lines)
    assert any(line["event"] == "round opened" for line in lines)
    refused = keyhole(*spec, *devices, "--out", tmp_path / "one", "--aggregators", "x", "y")
    assert refused.returncode == 2
    (last,) = [json.loads(line) for line in refused.stderr.splitlines()]
    assert last["level"] == "error"


def test_a_second_run_into_a_folder_of_rounds_counts_on(keyhole, few_writers, tmp_path):
    rounds, spec = tmp_path / "rounds", ("train", "emnist_2nn", *TINY, "--m", 8)
    devices = ("--devices", rounds, "--round-seconds", 0.05, "--data", few_writers)
    done = keyhole(*spec, *devices, "--out", tmp_path / "one")
    assert done.returncode == 0, done.stderr
    assert "trial-0: 2 of 2 rounds closed without an update" in done.stdout
    assert "round 1 is open: waits for 3 updates of 3 devices" in done.stderr
    assert "round 1 closed empty (time): 0 of 3 updates count, 3 did not come" in done.stderr
    assert "device-" not in done.stderr
    done = keyhole(*spec, *devices, "--out", tmp_path / "two", "--seed", 5)
    assert done.returncode == 0, done.stderr
    assert "round 1 closed empty (time): 0 of 3 updates count, 3 did not come" in done.stderr
    assert json.loads((rounds / "current.json").read_text())["number"] == 3


def test_popular_keys_come_from_a_file_or_are_refused(keyhole, tmp_path):
    listed = tmp_path / "popular.txt"
    listed.write_text("0-9\n12\nnone\n")
    for words, error in {
        f"word=@{listed}": "got '0-9+12+none'; expected a number of keys",
        f"word=@{tmp_path / 'gone'}": "cannot be read",
        "word": "is not NAME=KEYS",
    }.items():
        done = keyhole(
            "train", "so_tag", "--delivery", "pir", "--popular", words, "--out", tmp_path
        )
        assert done.returncode == 2
        assert error in " ".join(done.stderr.split())
    done = keyhole("train", "so_tag", "--popular-share", "0.5", "--out", tmp_path)
    assert (done.returncode, "--popular-share goes with --popular" in done.stderr) == (2, True)
    assert [each.name for each in tmp_path.iterdir()] == ["popular.txt"]
