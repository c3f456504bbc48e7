"""Writes requirements.lock, and picks from it what some extras need.

`lock.py write` resolves what pyproject.toml asks for, all extras at once so that any of them
install together, and keeps the versions that the lock has unless `--upgrade` is given. `lock.py
pick base ray` prints what these need, for `pip install --no-deps --require-hashes -r`. Each package
has the hashes of all its files, whatever the platform; below them stands which extras it is for,
and what asks for it. No package index is named: pip takes the files from where the machine's
settings say, and refuses those with other bytes.

Picking uses the standard library alone: it runs before anything is installed.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

TREE = Path(__file__).resolve().parent.parent
LOCK = "requirements.lock"
BASE = "base"  # what keyhole needs without any extra, as a device does
BUILD = "build"  # what it is built with
# Which build of PyTorch fits depends on the machine: those of a CPU come from another index than
# those of a GPU, under one version. It is installed as an extra, by its version.
UNLOCKED = ("torch",)
PYTHON = "3.11"  # the oldest that is supported

HEAD = f"""\
# All that keyhole and its extras need, but {", ".join(UNLOCKED)}: versions, and hashes of files.
# `make lock` writes this file; `python tools/lock.py pick base ray` prints what these need.
"""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_FOR, _VIA = "    # for ", "    # via "


@dataclass(frozen=True)
class Locked:
    """One package of the lock."""

    name: str
    version: str
    marker: str  # where it is needed; empty if everywhere
    hashes: tuple[str, ...]  # "sha256:..." of its files
    extras: tuple[str, ...]  # that need it
    via: tuple[str, ...]  # packages that ask for it, or keyhole itself

    def requirement(self) -> str:
        """As pip reads it."""
        pin = f"{self.name}=={self.version}" + (f" ; {self.marker}" if self.marker else "")
        return " \\\n    --hash=".join((pin, *self.hashes)) + "\n"


def write_lock(packages: Iterable[Locked]) -> str:
    """Returns the text of a lock."""
    entries = (
        each.requirement() + f"{_FOR}{', '.join(each.extras)}\n{_VIA}{', '.join(each.via)}\n"
        for each in packages
    )
    return HEAD + "".join(entries)


def read_lock(text: str) -> list[Locked]:
    """Returns the packages of a lock."""
    return [_read(entry) for entry in re.split(r"(?m)^(?=[a-z0-9])", text)[1:]]


def _read(entry: str) -> Locked:
    extras, via = (
        tuple(line.removeprefix(note).split(", "))
        for note in (_FOR, _VIA)
        for line in entry.splitlines()
        if line.startswith(note)
    )
    return Locked(*_pin(entry), _hashes(entry), extras, via)


def _pin(entry: str) -> tuple[str, str, str]:
    """Name, version and marker of the first line."""
    pin, _, marker = entry.partition("\n")[0].removesuffix("\\").partition(";")
    name, _, version = pin.strip().partition("==")
    return name, version, marker.strip()


def _hashes(entry: str) -> tuple[str, ...]:
    return tuple(re.findall(r"--hash=(sha256:[0-9a-f]{64})", entry))


def pick(tree: Path, extras: Sequence[str]) -> list[Locked]:
    """Returns the packages that some extras need, `base` among them.

    Raises ValueError for an extra that is not in the lock.
    """
    found = read_lock((tree / LOCK).read_text())
    known = {extra for each in found for extra in each.extras}
    if unknown := set(extras) - known:
        raise ValueError(
            f"no such extra in {LOCK}: got {', '.join(sorted(unknown))}; expected some of "
            f"{', '.join(sorted(known))}; choose among them, and install torch by its version"
        )
    return [each for each in found if set(extras) & set(each.extras)]


def asked_for(tree: Path) -> dict[str, list[str]]:
    """Returns what pyproject.toml asks for: the requirements of `base`, of `build`, and of every
    extra that is locked."""
    told = tomllib.loads((tree / "pyproject.toml").read_text())
    project = told["project"]
    groups = {BASE: project["dependencies"], BUILD: told["build-system"]["requires"]}
    extras = project.get("optional-dependencies", {})
    return groups | {name: extras[name] for name in extras if name not in UNLOCKED}


def name_of(requirement: str) -> str:
    """Returns the normal name of what a requirement asks for.

    >>> name_of("tensorboardX>=2.6.5"), name_of("moto[s3]>=5.2")
    ('tensorboardx', 'moto')
    """
    found = _NAME.match(requirement)
    assert found is not None, requirement
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def resolve(tree: Path, *, upgrade: bool) -> list[Locked]:
    """Asks the machine's package index for what pyproject.toml needs."""
    groups, old, index = asked_for(tree), tree / LOCK, _index()
    with tempfile.TemporaryDirectory() as name:
        pins = Path(name) / "all.txt"
        if old.is_file() and not upgrade:  # these versions are kept where they still fit
            pins.write_text(old.read_text())
        left = Path(name) / "left.txt"  # what others ask for and is not locked is needed nowhere
        left.write_text("".join(f"{one}\n" for one in UNLOCKED))
        without = "--excludes", str(left)
        everything = [one for asked in groups.values() for one in asked]
        hashed = "--output-file", str(pins), "--generate-hashes", "--annotation-style=line"
        _compile(everything, index, *hashed, *without)
        text = pins.read_text()
        limits = "-c", str(pins), *without
        found = {name: _compile(groups[name], index, *limits) for name in groups}
    needed = {name: set(re.findall(r"(?m)^([a-z0-9._-]+)==", found[name])) for name in groups}
    direct = {name_of(one) for one in everything}
    return [_locked(entry, needed, direct) for entry in re.split(r"(?m)^(?=[a-z0-9])", text)[1:]]


def _locked(entry: str, needed: Mapping[str, set[str]], direct: set[str]) -> Locked:
    """A package as uv writes it, with which extras it is for."""
    name, version, marker = _pin(entry)
    said = "".join(re.findall(r"(?m)^    # via (.*)$", entry))  # nothing where only we ask
    via = {one for one in said.split(", ") if _NAME.fullmatch(one)}
    via |= {"keyhole"} if name in direct else set()
    extras = tuple(extra for extra, names in needed.items() if name in names)
    hashes = tuple(sorted(_hashes(entry)))
    return Locked(name, version, marker, hashes, extras, tuple(sorted(via)))


def _compile(asked: Sequence[str], index: Mapping[str, str], *options: str) -> str:
    """Runs uv's resolver; returns what it prints."""
    uv = [sys.executable, "-m", "uv", "pip", "compile", "-", "--quiet", "--no-header"]
    done = subprocess.run(
        [*uv, "--universal", "--python-version", PYTHON, *options],
        input="\n".join(asked),
        env=os.environ | index,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout


def _index() -> dict[str, str]:
    """The package index of pip's settings, for uv, which does not read them."""
    said = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    found = re.findall(r"(?m)^\S+\.index-url='(.*)'$", said)
    return {"UV_DEFAULT_INDEX": found[-1]} if found else {}


def main(args: Sequence[str]) -> int:
    """Writes the lock, or prints a part of it; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    writing = verbs.add_parser("write", help=f"write {LOCK}")
    writing.add_argument("--upgrade", action="store_true", help="take the newest versions")
    verbs.add_parser("pick", help="print what extras need").add_argument("extras", nargs="+")
    asked = parser.parse_args(args)
    if asked.verb == "write":
        packages = resolve(TREE, upgrade=asked.upgrade)
        (TREE / LOCK).write_text(write_lock(packages))
        print(f"{len(packages)} packages in {LOCK}")
        return 0
    try:
        print("".join(each.requirement() for each in pick(TREE, asked.extras)), end="")
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
