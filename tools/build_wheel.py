"""Builds the wheel in dist/: the same tree gives the same bytes, wherever and whenever it is built.

What would differ is taken away: the wheel is built from a copy of the tracked files, so that
nothing that lies about gets in, with modes of one kind and with the date of the last commit, or
SOURCE_DATE_EPOCH where that is set. Nothing is downloaded: setuptools is in the environment, by its
hash in requirements.lock. Prints the SHA-256, for others to compare.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

TREE = Path(__file__).resolve().parent.parent
NEEDED = ("pyproject.toml", "README.md", "LICENSE", "src")
# A zip file has no earlier date; trees without git and SOURCE_DATE_EPOCH get it.
EARLIEST = 315_532_800


def build_wheel(tree: Path, out: Path, epoch: int) -> Path:
    """Builds the wheel of a tree in `out`, dated `epoch` in unix seconds; returns its path."""
    with tempfile.TemporaryDirectory() as name:
        copy, made = Path(name) / "tree", Path(name) / "made"
        for file in _files(tree):
            target = copy / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(tree / file, target)
            target.chmod(0o644)  # the umask of a checkout is in the bytes of a wheel
        pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check"]
        offline = ["--no-index", "--no-deps", "--no-build-isolation"]
        subprocess.run(
            [*pip, *offline, "--wheel-dir", str(made), "."],
            cwd=copy,
            env=os.environ | {"SOURCE_DATE_EPOCH": str(epoch), "PYTHONHASHSEED": "0"},
            umask=0o022,
            check=True,
        )
        (wheel,) = made.iterdir()
        out.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy(wheel, out))


def _files(tree: Path) -> list[Path]:
    """What a wheel is made of, in a fixed order; of a checkout, the tracked files."""
    asked = ["git", "ls-files", "-z", "--", *NEEDED]
    listed = subprocess.run(asked, cwd=tree, capture_output=True, check=False)
    if listed.returncode == 0 and listed.stdout:
        return sorted(Path(os.fsdecode(name)) for name in listed.stdout.split(b"\0") if name)
    found = (path for name in NEEDED for path in (tree / name, *(tree / name).rglob("*")))
    kept = (path.relative_to(tree) for path in found if path.is_file())
    return sorted(path for path in kept if path.suffix in ("", ".md", ".py", ".toml", ".typed"))


def date_of(tree: Path) -> int:
    """Returns SOURCE_DATE_EPOCH, or when the last commit was made, in unix seconds."""
    if told := os.environ.get("SOURCE_DATE_EPOCH"):
        return int(told)
    asked = ["git", "log", "-1", "--format=%ct"]
    done = subprocess.run(asked, cwd=tree, capture_output=True, text=True, check=False)
    return int(done.stdout) if done.returncode == 0 else EARLIEST


if __name__ == "__main__":
    wheel = build_wheel(TREE, TREE / "dist", date_of(TREE))
    print(f"{hashlib.sha256(wheel.read_bytes()).hexdigest()}  {wheel.relative_to(TREE)}")
