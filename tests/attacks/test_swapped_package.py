"""Attack: a package index, or somebody before it, hands out a package of the same name and version
with other code. The index vouches for it: its page has the hash of the new file.

Planted hole: an install by version alone, as with `constraints.txt`.
"""

import subprocess
import sys

import pytest

import environment
from lock import LOCK, Locked, write_lock
from tests.wheels import digest, write_index, write_wheel

EVIL = "STOLEN = True\n"


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A tree whose lock was made from honest files, and an index that now has others."""
    honest, swapped = tmp_path / "honest", tmp_path / "swapped"
    for folder in (honest, swapped, tmp_path / ".venv"):
        folder.mkdir()
    hashes = (f"sha256:{digest(write_wheel(honest, 'hinges'))}",)
    locked = Locked("hinges", "1.0", "", hashes, ("base", "build", "train"), ("keyhole",))
    (tmp_path / LOCK).write_text(write_lock([locked]))
    index = write_index(tmp_path / "index", [write_wheel(swapped, "hinges", code=EVIL)])
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", index)
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    return tmp_path


def install(tree, command):
    """Runs pip's part of a command into a folder; returns its exit code and errors."""
    pip = [sys.executable, *command[1:], "--target", str(tree / "installed")]
    done = subprocess.run(pip, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


def test_a_swapped_package_is_not_installed(tree):
    fetched, _ = environment.commands(tree, "train")
    code, errors = install(tree, fetched)
    assert code != 0
    assert "DO NOT MATCH THE HASHES" in errors
    assert not (tree / "installed" / "hinges.py").exists()


def test_without_hashes_it_would_be(tree):
    fetched, _ = environment.commands(tree, "train")
    pins = tree / ".venv" / "train.lock"
    pins.write_text("hinges==1.0\n")
    code, errors = install(tree, [each for each in fetched if each != "--require-hashes"])
    assert code == 0, errors
    assert (tree / "installed" / "hinges.py").read_text() == EVIL
