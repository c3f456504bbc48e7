"""The command line: help, results, and one line and an exit code for what goes wrong."""

import json
import os
import re
import signal
import subprocess
import sys

import click
import pytest

from keyhole.cli import main as cli
from keyhole.errors import CohortError, KeySpaceError
from tests.cli.conftest import COMMAND
from tests.helpers import LONG


@pytest.fixture(scope="module")
def demo(keyhole, tmp_path_factory):
    """A demo of two rounds, and where it wrote."""
    out = tmp_path_factory.mktemp("demo") / "out"
    return keyhole("demo", "--rounds", "2", "--json", "--out", out), out


def test_help_lists_the_commands(keyhole):
    done = keyhole("--help")
    assert done.returncode == 0
    assert all(name in done.stdout for name in ("data", "demo", "report", "sweep", "train"))


def test_the_version_is_the_packages(keyhole):
    assert keyhole("--version").stdout.startswith("keyhole 0.")


def test_help_does_not_start_jax():
    code = "import sys, keyhole.cli.main; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_device_that_fetches_in_the_clear_loads_nothing_of_runs():
    code = "import sys, keyhole.cli.device, keyhole.device.device; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    of_runs = (
        "jax",
        "numba",
        *(f"keyhole.{f}" for f in ("rounds", "experiments", "models", "data")),
    )
    loaded = {".".join(name.split(".")[:2]) for name in found.stdout.split()}
    assert "keyhole.wire" in loaded
    assert not loaded & set(of_runs)


def test_every_option_is_explained():
    self_evident = {"rounds", "trials", "client_lr", "server_lr"}
    for command in cli.keyhole.list_commands(None):
        for option in cli.keyhole.get_command(None, command).params:
            if isinstance(option, click.Option) and option.name not in self_evident:
                assert option.help, f"{command} --{option.name}"


def commands_of(command, context):
    """A command and all below it, each with its context."""
    yield command, context
    for name in command.list_commands(context) if isinstance(command, click.Group) else ():
        inner = command.get_command(context, name)
        yield from commands_of(inner, click.Context(inner, context, name))


def test_help_of_every_command_fits_80_columns_and_shows_every_default():
    top = click.Context(cli.keyhole, max_content_width=80, terminal_width=80, show_default=True)
    for command, context in commands_of(cli.keyhole, top):
        lines = command.get_help(context).splitlines()
        assert max(map(len, lines)) <= 80, command.name
        for param in command.params if context is not top else ():
            shown = param.get_help_record(context) if isinstance(param, click.Option) else None
            assert shown is None or re.search("required|default: .", shown[1]), shown


@pytest.mark.parametrize("name", ["serve", "device", "relay", "aggregator", "plan"])
def test_help_has_every_option_in_a_section_by_role(name):
    command = cli.keyhole.get_command(None, name)
    with click.Context(command, max_content_width=80, terminal_width=80) as context:
        text = command.get_help(context)
    assert max(map(len, text.splitlines())) <= 80
    _, sign, others = text.partition("\nOptions:\n")
    assert sign
    left = {line.split()[0] for line in others.splitlines() if line.startswith("  -")}
    assert left <= {"-h,", "--help", "--json"}


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
def test_a_wrong_value_is_one_message_and_exit_code_2(args, keyhole):
    done = keyhole(*args)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("keyhole: ")
    assert line.endswith(" --help")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["trian"], "No such command 'trian'; did you mean train? See keyhole --help"),
        (
            ["train", "so_tag", "--rouds", "3"],
            "No such option '--rouds'; did you mean --rounds? See keyhole train --help",
        ),
        (
            ["train", "so_tag", "--server-lr", "nan"],
            "Invalid value for '--server-lr': nan is not a number in the range x>0; see keyhole "
            "train --help",
        ),
        (
            ["train", "so_tag", "--delivery", "on-demnd"],
            "or module:NAME of your own; did you mean on-demand? See keyhole train --help",
        ),
    ],
)
def test_a_wrong_word_is_told_the_right_one(args, says, keyhole):
    assert keyhole(*args).stderr.strip().endswith(says)


def test_a_process_ends_as_the_function_does(program, keyhole):
    """So other tests may call the function."""
    for args in (["--help"], ["train", "no_such_task"]):
        ended, returned = program(*args), keyhole(*args)
        assert vars(returned).items() <= vars(ended).items()


def test_the_demo_prints_json(demo):
    done, _ = demo
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [row["keys"] for row in rows][:2] == ["no select", "all own words"]


def test_all_own_words_reach_the_recall_of_no_select(demo):
    """Eq. 2, on a trained model: the same recall from a fraction of the weights."""
    full, own, *_ = json.loads(demo[0].stdout)
    assert own["metrics"]["recall_at_5"] == pytest.approx(full["metrics"]["recall_at_5"], abs=0.002)
    assert own["client_size"] < 0.2 * full["client_size"]
    assert own["bytes_down"] == 4 * own["client_size"]


@pytest.mark.slow
def test_the_same_seed_gives_the_same_numbers(demo, keyhole, tmp_path):
    again = keyhole("demo", "--rounds", "2", "--json", "--out", tmp_path)
    first, second = (json.loads(done.stdout) for done in (demo[0], again))
    for row in (*first, *second):
        del row["seconds"]
    assert first == second
    assert (demo[1] / "demo.svg").read_bytes() == (tmp_path / "demo.svg").read_bytes()


def test_the_demo_writes_a_picture_and_a_table(demo):
    _, out = demo
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert "| all own words |" in (out / "demo.md").read_text()


@pytest.fixture(scope="module")
def shown(environment, tmp_path_factory):
    """A demo of one round on 80 columns, and where it ran."""
    where = tmp_path_factory.mktemp("shown")
    done = subprocess.run(
        [*COMMAND, "demo", "--rounds", "1", "--out", "here"],
        env={**environment, "COLUMNS": "80"},
        cwd=where,
        capture_output=True,
        text=True,
        check=True,
    )
    return done, where


def test_the_demo_shows_a_table_and_says_where_files_are(shown):
    done, where = shown
    assert "numbers held" in done.stdout
    assert "here/demo.png" in done.stdout
    assert (where / "here" / "demo.png").is_file()


def test_the_demo_fits_80_columns_and_tells_its_progress_without_a_terminal(shown):
    done, _ = shown
    assert max(map(len, (done.stdout + done.stderr).splitlines())) <= 80
    begins = ["no select", "all own words", "top 100 words", "top 30 words"]
    first, *lines = done.stderr.splitlines()
    assert first.startswith("starting JAX")
    for line, begin in zip(lines, begins, strict=True):
        assert re.fullmatch(rf"{begin} +1/1 rounds recall@5 \d+\.\d%", line)


def test_the_demo_ends_with_what_was_saved_and_a_command_that_exists(shown):
    *_, first, second, last = shown[0].stdout.splitlines()
    assert re.match(r"saved: .* 5\d\d KB per round, not 3,201 \(8\d%", first), first
    assert "no select: " in second
    name, verb, *args = last.removeprefix("try next: ").split()
    assert name == "keyhole"
    with cli.keyhole.get_command(None, verb).make_context(
        verb, args
    ) as context:  # reads every option
        assert context.params["rounds"] == 50


@pytest.mark.slow
def test_ctrl_c_ends_with_one_line_and_130(tmp_path):
    command = [sys.executable, "-c", "from keyhole.cli.main import main; main()", "demo"]
    process = subprocess.Popen(
        [*command, "--rounds", "10000", "--out", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "FORCE_COLOR": "1", "COLUMNS": "100"},  # as on a terminal: with bars
    )
    seen = ""
    while not re.search(r"[1-9]/10000", seen):  # until a round is done
        seen += (more := process.stderr.read(1))
        assert more, seen
    os.kill(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=LONG)
    assert process.returncode == 130
    assert err.strip().splitlines()[-1] == "keyhole: interrupted"
    assert "Traceback" not in err


@pytest.mark.parametrize("kind", [KeySpaceError, CohortError])
def test_an_error_of_the_library_is_one_line_and_its_exit_code(kind, monkeypatch, capsys):
    @click.command()
    def broken():
        raise kind("it broke: got 3; expected 2; mend it")

    monkeypatch.setitem(cli.keyhole.commands, "broken", broken)
    with pytest.raises(SystemExit) as ended:
        cli.main(["broken"])
    assert ended.value.code == kind.exit_code
    assert capsys.readouterr().err == "keyhole: it broke: got 3; expected 2; mend it\n"
