"""What becomes of old rounds: the newest two are kept, one more is spare, the rest go.

A round may be taken away only if nobody holds it: whoever serves it has a shared lock on its
manifest, and whoever takes it away the exclusive one. A spare round has no name that a service
would look for, so the next round may be written over its files.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from keyhole.errors import StorageError
from keyhole.serving.files.round_files import (
    CURRENT,
    MANIFEST,
    locked_manifest,
    number_of,
    read_current,
    read_manifest,
    round_path,
    rounds_path,
)
from keyhole.serving.manifest import Manifest

__all__ = ["Base", "Shelf"]

_REPLACED = ".was-"  # a round while another takes its name
_HERE, _BOTH = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of Linux


@dataclass(frozen=True)
class Base:
    """An earlier round that a new one may be made from."""

    id: str
    directory: Path
    manifest: Manifest
    is_spare: bool


class Shelf:
    """The rounds of a directory, as their publisher sees them."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._rounds = rounds_path(directory)

    @property
    def spare(self) -> Path:
        """Where the spare round lies, if there is one."""
        return self._rounds / ".spare"

    def clean(self) -> None:
        """Removes what a publisher that was killed left behind; no device was told of it."""
        (self._directory / (CURRENT + ".tmp")).unlink(missing_ok=True)
        for path in self._rounds.glob(_REPLACED + "*"):
            named = path.with_name(path.name.removeprefix(_REPLACED))
            if not named.exists():  # killed between the two renames of `put`
                path.rename(named)
        for path in self._rounds.iterdir():
            if path.name.startswith((".new-", ".old-", _REPLACED)):
                shutil.rmtree(path, ignore_errors=True)
        current = read_current(self._directory)
        newest = -1 if current is None else current.number
        for number, path in self._named():
            if number > newest:
                self._remove(path)

    def retire(self) -> None:
        """Takes away the rounds that are neither current nor the one before, and not held.

        What the system refuses stays where it is until the next time.
        """
        current = read_current(self._directory)
        if current is None:
            return
        old = [
            path
            for number, path in self._named()
            if number <= current.number and path.name != current.round
        ]
        for path in old[:-1]:
            with suppress(OSError), locked_manifest(path, fcntl.LOCK_EX) as lock:
                if lock is not None:
                    self.drop_spare()
                    path.rename(self.spare)
                elif not (path / MANIFEST).exists():
                    self._remove(path)

    def bases(self) -> Iterator[Base]:
        """Rounds to make a new one from, the best first: the spare one, then the current."""
        current = read_current(self._directory)
        directories = [self.spare]
        if current is not None:
            directories.append(round_path(self._directory, current.round))
        for directory in directories:
            with suppress(OSError, StorageError):
                descriptor = os.open(directory / MANIFEST, os.O_RDONLY)
                try:
                    name, manifest, _ = read_manifest(descriptor)
                finally:
                    os.close(descriptor)
                yield Base(name, directory, manifest, directory == self.spare)

    def drop_spare(self) -> None:
        """Removes the spare round."""
        shutil.rmtree(self.spare, ignore_errors=True)

    def put(self, made: Path, named: Path) -> None:
        """Gives a directory its name; what bore that name goes, though services may still read.

        There is a round of that name at every moment, where the system can exchange two names; else
        there is none between two renames.
        """
        if not named.exists():
            made.rename(named)
            return
        old = made
        if not _exchange(made, named):
            old = named.with_name(_REPLACED + named.name)
            named.rename(old)
            made.rename(named)
        shutil.rmtree(old, ignore_errors=True)

    def _named(self) -> list[tuple[int, Path]]:
        """Rounds by number, ascending."""
        found = [(number_of(path.name), path) for path in self._rounds.iterdir()]
        return sorted((number, path) for number, path in found if number is not None)

    def _remove(self, path: Path) -> None:
        """Takes the name away at once, the files after that."""
        gone = path.with_name(f".old-{path.name}")
        path.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Gives each the other's name at once; says whether this system and its disk can."""
    call = getattr(ctypes.CDLL(None), "renameat2", None)
    if call is None:
        return False
    names = os.fsencode(one.absolute()), os.fsencode(other.absolute())
    return bool(call(_HERE, names[0], _HERE, names[1], _BOTH) == 0)
