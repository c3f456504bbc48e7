"""Setting up .venv: what is installed when, what is shown of it, and that errors are not hidden."""

import os
import re
import subprocess
import sys
import venv

import pytest

import environment
from lock import LOCK, Locked, write_lock
from tests.helpers import ROOT
from tests.wheels import digest, write_index, write_wheel

PIP = [sys.executable, "-m", "pip", "install", "--no-index", "--no-compile"]


@pytest.fixture
def tree(tmp_path):
    """A tree with an environment of its own."""
    for name in environment.INPUTS:
        (tmp_path / name).write_text((ROOT / name).read_text())
    venv.create(tmp_path / ".venv", symlinks=True)
    return tmp_path


def test_an_environment_without_a_ready_file_is_made_anew(tree):
    assert environment.next_step(tree, "train") == "create"


@pytest.mark.parametrize(
    ("there", "asked", "step"),
    [
        ("train", "train", "nothing"),
        ("train", "full", "install"),
        ("full", "train", "nothing"),
        ("full", "full", "nothing"),
    ],
)
def test_a_level_is_added_to_and_never_taken_away(there, asked, step, tree):
    environment.mark_ready(tree, there)
    assert environment.next_step(tree, asked) == step


@pytest.mark.parametrize("name", environment.INPUTS)
def test_changed_dependencies_are_installed(name, tree):
    environment.mark_ready(tree, "full")
    (tree / name).write_text("changed")
    assert environment.next_step(tree, "train") == "install"


def test_an_environment_of_another_tree_is_made_anew(tree, tmp_path_factory):
    environment.mark_ready(tree, "full")
    moved = tree.rename(tmp_path_factory.mktemp("elsewhere") / "tree")
    assert environment.next_step(moved, "train") == "create"


def test_an_environment_whose_python_is_gone_is_made_anew(tree):
    environment.mark_ready(tree, "full")
    (tree / ".venv" / "bin" / "python").unlink()
    assert environment.next_step(tree, "train") == "create"


def test_an_install_that_fails_leaves_no_ready_file(tree, capfd):
    """There is no pip in this environment, which is one way to fail."""
    environment.mark_ready(tree, "train")
    assert environment.set_up(tree, "full", "install", environment.Screen()) != 0
    assert "No module named pip" in capfd.readouterr().err
    assert environment.next_step(tree, "train") == "create"


def test_every_package_is_shown_without_a_terminal(tmp_path, capfd):
    wheels = [str(write_wheel(tmp_path, name)) for name in ("hinges", "lock")]
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    site = tmp_path / "lib" / version / "site-packages"
    command = [*PIP, "--prefix", str(tmp_path), *wheels]
    assert environment.install(command, tmp_path, site, environment.Screen()) == 0
    shown, errors = capfd.readouterr()
    news = [line for line in shown.splitlines() if not line.endswith(" s ago)")]
    *begun, first, second, end = news
    assert begun == ["start pip", "fetch hinges 1.0", "fetch lock 1.0"]
    assert {first[:14], second[:14]} == {"installed 1/2 ", "installed 2/2 "}
    assert (end, errors) == ("2 packages installed", "")


def test_a_log_is_never_silent_for_long(monkeypatch, capfd):
    screen = environment.Screen()
    screen.show("fetch jaxlib 0.10.2")
    monkeypatch.setattr(environment, "SECONDS_OF_SILENCE", 0)
    screen.tick()
    first, second = capfd.readouterr().out.splitlines()
    assert first == "fetch jaxlib 0.10.2"
    assert re.fullmatch(r"fetch jaxlib 0\.10\.2 \(\d+ s ago\)", second)


def test_what_pip_reports_as_an_error_is_shown(tmp_path, capfd):
    command = [*PIP, "no-such-package-anywhere"]
    assert environment.install(command, tmp_path, tmp_path, environment.Screen()) == 1
    shown, errors = capfd.readouterr()
    assert shown.endswith("pip failed:\n")
    assert "ERROR: No matching distribution found for no-such-package-anywhere" in errors


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("Looking in indexes: https://user:word@host/simple", None),
        ("Collecting jax (from keyhole)", None),
        ("  Downloading https://host/six-1.1-py3-none-any.whl (11 kB)", "fetch six 1.1 (11 kB)"),
        ("  Using cached jax-0.10.2-py3-none-any.whl.metadata (13 kB)", "find jax 0.10.2"),
        ("Processing ./a/opt_einsum-3.4.0-py3-none-any.whl (from jax)", "fetch opt_einsum 3.4.0"),
        ("  Installing build dependencies: started", "build keyhole"),
    ],
)
def test_a_line_of_pip_becomes_progress_without_its_address(line, said):
    assert environment.describe(line) == said


def test_everything_is_installed_by_hash_and_keyhole_from_its_tree(tree):
    fetched, own = environment.commands(tree, "train")
    assert "--require-hashes" in fetched
    listed = (tree / ".venv" / "train.lock").read_text()
    assert fetched[-2:] == ["-r", str(tree / ".venv" / "train.lock")]
    assert "jax==" in listed
    assert "pytest==" not in listed
    assert own[-2:] == ["-e", "."]
    assert {"--no-index", "--no-deps", "--no-build-isolation"} <= set(own)


def test_a_newer_release_of_what_an_extra_names_changes_nothing(tree, monkeypatch):
    """pip that resolves would take screws 1.1 for "screws[long]", and stop: it is not pinned."""
    wheels = tree / "wheels"
    wheels.mkdir()
    pinned = [write_wheel(wheels, "hinges", needs=["screws[long]"]), write_wheel(wheels, "screws")]
    newer = write_wheel(wheels, "screws", version="1.1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", write_index(tree / "index", [*pinned, newer]))
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    levels = ("base", "build", "train")
    locked = [
        Locked(each.name.partition("-")[0], "1.0", "", (f"sha256:{digest(each)}",), levels, ("-",))
        for each in pinned
    ]
    (tree / LOCK).write_text(write_lock(locked))
    (tree / ".venv").mkdir(exist_ok=True)
    fetched, _ = environment.commands(tree, "train")
    installed = tree / "installed"
    pip = [sys.executable, *fetched[1:], "--target", installed]
    done = subprocess.run(pip, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (installed / "screws-1.0.dist-info").is_dir()


def test_targets_name_the_level_they_need():
    """The demo installs no tools, and everything else has them."""
    done = subprocess.run(
        ["make", "-n", "demo", "test", "check"],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if not name.startswith("MAKE")},
        capture_output=True,
        text=True,
        check=True,
    )
    lines = done.stdout.splitlines()
    asked = {
        line.split()[-1]: number for number, line in enumerate(lines) if "environment.py" in line
    }
    first = {
        word: next(n for n, line in enumerate(lines) if word in line) for word in ("demo", "pytest")
    }
    assert asked["train"] < first["demo"] < asked["full"] < first["pytest"]


@pytest.mark.parametrize(
    "name", ["Makefile", "requirements.lock", "pyproject.toml", "tools/environment.py"]
)
def test_no_package_index_is_named(name):
    text = (ROOT / name).read_text().replace("http://host", "")
    assert "://" not in text
    assert "index-url" not in text
    assert "find-links" not in text
