"""The command line: help, results, and one line and an exit code for what goes wrong."""

import json
import os
import signal
import subprocess
import sys
import time

import click
import pytest

from keyhole.cli import main as cli
from keyhole.errors import CohortError, KeySpaceError


def keyhole(*args):
    command = [sys.executable, "-c", "from keyhole.cli.main import main; main()", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def short_demo():
    return keyhole("demo", "--rounds", "3", "--json")


def test_help_lists_the_commands():
    done = keyhole("--help")
    assert done.returncode == 0
    assert "demo" in done.stdout


def test_the_version_is_the_packages():
    assert keyhole("--version").stdout.startswith("keyhole 0.")


@pytest.mark.parametrize(
    "args",
    [
        ["demo", "--rounds", "0"],
        ["demo", "--rounds", "many"],
        ["demo", "--seed", "-1"],
        ["demo", "--no-such-flag"],
        ["no-such-command"],
    ],
)
def test_a_wrong_value_is_one_message_and_exit_code_2(args):
    done = keyhole(*args)
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].startswith("Error: ")
    assert "Traceback" not in done.stderr


def test_the_demo_prints_json(short_demo):
    assert short_demo.returncode == 0, short_demo.stderr
    rows = json.loads(short_demo.stdout)
    assert [row["keys"] for row in rows][:2] == ["no select", "all own words"]


def test_all_own_words_reach_the_accuracy_of_no_select(short_demo):
    """Eq. 2, on a trained model: the same accuracy from a fraction of the weights."""
    full, own, *_ = json.loads(short_demo.stdout)
    assert own["accuracy"] == pytest.approx(full["accuracy"], abs=0.002)
    assert own["client_size"] < 0.1 * full["client_size"]
    assert own["bytes_down"] == 4 * own["client_size"]


def test_the_same_seed_gives_the_same_bytes(short_demo):
    assert keyhole("demo", "--rounds", "3", "--json").stdout == short_demo.stdout


def test_the_demo_shows_a_table():
    done = keyhole("demo", "--rounds", "1")
    assert "all own words" in done.stdout
    assert "numbers held" in done.stdout


def test_ctrl_c_ends_with_one_line_and_130():
    command = [sys.executable, "-c", "from keyhole.cli.main import main; main()", "demo"]
    process = subprocess.Popen(
        [*command, "--rounds", "10000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    time.sleep(4)
    os.kill(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.strip().splitlines()[-1] == "keyhole: interrupted"
    assert "Traceback" not in err


@pytest.mark.parametrize("kind", [KeySpaceError, CohortError])
def test_an_error_of_the_library_is_one_line_and_its_exit_code(kind, monkeypatch, capsys):
    @click.command()
    def broken():
        raise kind("it broke", got=3, allowed="2", fix="mend it")

    monkeypatch.setitem(cli.keyhole.commands, "broken", broken)
    with pytest.raises(SystemExit) as ended:
        cli.main(["broken"])
    assert ended.value.code == kind.exit_code
    assert capsys.readouterr().err == "keyhole: it broke: got 3, allowed is 2; mend it\n"
