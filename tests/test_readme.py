"""README.md: every block of commands runs as printed, in an empty folder, or says here why not."""

import re
import shutil
import subprocess
import sys

import pytest

import keyhole as kh
import lock
from tests.helpers import ROOT
from tests.shell import run_as_typed, without_test_settings

README = (ROOT / "README.md").read_text()
FENCED = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.S | re.M)
BLOCKS = [text for language, text in FENCED if not language]
BEGINNINGS = {
    "make": "make demo ",
    "install": "python3 -m venv .venv",
    "wheel": "make wheel ",
    "experiments": "keyhole sweep emnist-2nn ",
    "project": "keyhole new ",
    "script": "python examples/serve_and_train.py",
    "by hand": "mkdir rounds ",
    "private select": "keyhole plan ",
    "private round": "keyhole train so_tag ",
    "machines": "keyhole train emnist_2nn ",
    "map": "src/keyhole/\n",  # a picture of the tree, and no commands
}
SEEN = """python -c "
import time, urllib.request
for _ in range(600):
    try:
        print(urllib.request.urlopen('http://127.0.0.1:8150').status)
        break
    except OSError:
        time.sleep(0.2)
else:
    raise SystemExit('no page')
"
"""


def block(name):
    """The block of README with this beginning."""
    (found,) = [each for each in BLOCKS if each.startswith(BEGINNINGS[name])]
    return found


def run_block(name, directory, edit=lambda text: text):
    """Runs a block in a folder that has nothing but the scripts of the checkout; every command of
    it must succeed. Returns what was printed."""
    for folder in ("runs", "examples"):
        (directory / folder).symlink_to(ROOT / folder)
    code, printed = run_as_typed("set -e\n" + edit(block(name)), directory)
    assert code == 0, printed
    return printed


def records_in(folder):
    """The rounds of the only run below a folder."""
    (run,) = folder.iterdir()
    return kh.open_run(run).records()


def test_every_block_is_known_here():
    for text in BLOCKS:
        assert sum(text.startswith(begins) for begins in BEGINNINGS.values()) == 1, text


@pytest.mark.slow
def test_the_experiments_end_with_figures_and_a_page(tmp_path):
    printed = run_block(
        "experiments", tmp_path, lambda text: text.replace("kill %1", SEEN + "kill %1")
    )
    assert printed.rstrip().endswith("200"), printed
    assert list((tmp_path / "keyhole-runs").rglob("*.html")), printed


@pytest.mark.slow
def test_a_project_trains_here_and_with_devices(tmp_path):
    run_block("project", tmp_path)
    runs = list((tmp_path / "films" / "runs").iterdir())
    assert len(runs) == 2
    for folder in runs:
        assert [bool(each.clients) for each in kh.open_run(folder).records()] == [True] * 5


@pytest.mark.slow
def test_a_service_and_devices_started_by_hand_train_a_model(tmp_path):
    printed = run_block("by hand", tmp_path)
    records = records_in(tmp_path / "keyhole-runs")
    assert [len(record.staleness) for record in records] == [2] * 5, printed


@pytest.mark.slow
@pytest.mark.parametrize("name", ["script", "private select", "private round", "machines"])
def test_commands_that_end_by_themselves_succeed(name, tmp_path):
    run_block(name, tmp_path)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A fresh checkout; skips where pip finds no packages."""
    folder = tmp_path_factory.mktemp("checkout") / "keyhole"
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    first = folder.parent / "first.txt"
    first.write_text(lock.pick(ROOT, ["base"])[0].requirement())
    fetch = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", folder.parent]
    if subprocess.run([*fetch, "--require-hashes", "-r", first], check=False).returncode:
        pytest.skip("README's blocks of make, pip and the wheel need packages: pip finds none here")
    return folder


def run_in(folder, text, seconds=1800):
    """Runs commands in a checkout, with the Python that made this environment as `python3`."""
    programs = folder.parent / "programs"
    programs.mkdir(exist_ok=True)
    for name in ("python3", "python3.11"):
        link = programs / name
        link.unlink(missing_ok=True)
        link.symlink_to(sys._base_executable)
    known = without_test_settings(folder.parent / "cache")
    known = {name: value for name, value in known.items() if name != "VIRTUAL_ENV"}
    done = subprocess.run(
        ["bash", "-e", "-c", text],
        cwd=folder,
        env={**known, "PATH": f"{programs}:{known['PATH']}"},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
def test_make_needs_nothing_but_python(checkout):
    """`make test` is left out: it would run this test again. All else of the block and of the wheel
    runs as printed, the wheel in a folder that has nothing else."""
    lines = block("make").splitlines()
    assert [line.split()[1] for line in lines] == ["demo", "test", "docs"]
    assert "94.9%" in run_in(checkout, lines[0])
    assert "built build/site" in run_in(checkout, lines[2])
    here, _, there = block("wheel").partition("python3 -m venv env")
    run_in(checkout, here)
    other = checkout.parent / "other"
    other.mkdir()
    (wheel,) = (checkout / "dist").glob("*.whl")
    for made in (wheel, checkout / "device.txt"):
        shutil.copy(made, other)
    printed = run_in(other, f"python3 -m venv env{there}\nenv/bin/keyhole device --help")
    assert "Usage: keyhole device" in printed


@pytest.mark.slow
def test_the_installation_by_hand_gives_the_command(checkout):
    assert "Usage: keyhole" in run_in(checkout, block("install"))
