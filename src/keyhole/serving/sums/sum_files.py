"""What an aggregator keeps on disk, so that nothing is lost when its process is killed.

    sums/<round>/opening    who opened it, terms and cohort
    sums/<round>/taken      whose updates count: from then on it is closed
    sums/<round>/list       the list as it was told to the other aggregator
    sums/<round>/agreed     whom this one will add
    sums/<round>/added      their names
    sums/<round>/share      what is given out, noise included: asked again, the same bytes
    sums/<round>/failed     why nothing is given out
    names/<name>            each name of a sum that was ever opened, and its round
    uploads/                shares of devices, see `UpdateSpool`

Each file appears at once and whole, and never changes. Everything is readable by its owner alone.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from keyhole.errors import ConflictError, NotFoundError, TooLateError
from keyhole.server.files import (
    Buffer,
    lock_file,
    replacing,
    storage_errors,
    sync_directory,
    write_all,
)
from keyhole.serving.files.round_files import number_of
from keyhole.serving.files.update_spool import UpdateSpool

__all__ = ["SumFiles"]

_OVER = "over"  # stands behind the round in the file of a name whose sum was forgotten


class SumFiles:
    """The files of one aggregator; one process has them: two would draw different noise for one
    sum, and give out both.

    Args:
        directory: made if it is missing.

    Raises:
        StorageError: another process has it, or the system refuses.
    """

    def __init__(self, directory: Path) -> None:
        self._sums, self._names = directory / "sums", directory / "names"
        for folder in (directory, self._sums, self._names):
            with storage_errors(folder, "make"):
                folder.mkdir(0o700, parents=True, exist_ok=True)
        self._lock: int | None = lock_file(directory / "lock", "another aggregator runs here")
        self.spool = UpdateSpool(directory / "uploads")

    def close(self) -> None:
        """Lets another process have them."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def rounds(self) -> list[str]:
        """The rounds whose sums are here."""
        found = [f.name for f in self._sums.iterdir() if (f / "opening").exists()]
        return sorted(name for name in found if number_of(name) is not None)

    def open(self, round_id: str, name: bytes, opening: bytes) -> bool:
        """Keeps a new sum; returns whether it is new.

        Raises:
            ConflictError: the round has other terms or another owner, or another round the name.
            TooLateError: the sum is over and forgotten.
        """
        folder, mark = self._folder(round_id), self._names / name.hex()
        if (folder / "opening").exists():
            if self.read(round_id, "opening") != opening:
                raise _taken("the round was opened with other terms, cohort or owner")
            return False
        marked = mark.read_text().split() if mark.exists() else []
        if marked and marked[0] != round_id:
            raise _taken("another round has a sum of this name")
        if marked[1:] == [_OVER]:
            raise TooLateError(
                "the sum is over",
                got="a round whose sum was forgotten",
                allowed="each sum once",
                fix="go on with the next round",
            )
        with storage_errors(folder, "make"):
            folder.mkdir(0o700, exist_ok=True)
            sync_directory(self._sums)
        with replacing(mark) as descriptor:
            write_all(descriptor, [round_id.encode("ascii")])
        self.write(round_id, "opening", [opening])
        return True  # a process that dies before has a mark and no sum: it is opened anew

    def write(self, round_id: str, name: str, content: Sequence[Buffer]) -> None:
        """Keeps a file; it is on the disk when this returns."""
        with replacing(self._folder(round_id) / name) as descriptor:
            write_all(descriptor, content)

    def has(self, round_id: str, name: str) -> bool:
        """Whether a file is there."""
        return (self._folder(round_id) / name).exists()

    def path(self, round_id: str, name: str) -> Path:
        """Where a file is."""
        return self._folder(round_id) / name

    def read(self, round_id: str, name: str) -> bytes:
        """Returns a file; raises NotFoundError where there is none."""
        try:
            return self.path(round_id, name).read_bytes()
        except FileNotFoundError as error:
            raise NotFoundError(
                "no such sum, or it is not so far",
                got="another round",
                allowed="a round that the trainer has opened here",
                fix="check the round; open it first",
            ) from error

    def forget(self, round_id: str, name: bytes) -> None:
        """Removes a sum, but not that there was one: its name is not used again."""
        with replacing(self._names / name.hex()) as descriptor:
            write_all(descriptor, [f"{round_id} {_OVER}".encode("ascii")])
        self.spool.close(round_id)  # so that devices that come late are told so
        self.spool.remove(round_id)
        folder = self._folder(round_id)
        with storage_errors(folder, "remove"):
            (folder / "opening").unlink(missing_ok=True)  # first: half of a sum is none
            shutil.rmtree(folder, ignore_errors=True)
            sync_directory(self._sums)

    def _folder(self, round_id: str) -> Path:
        # Names come from requests: what is not of this shape never reaches the file system.
        if number_of(round_id) is None:
            raise NotFoundError(
                "not the identifier of a round",
                got=f"{len(round_id)} characters",
                allowed="a number, '-' and 16 hex digits",
                fix="take it from the current round",
            )
        return self._sums / round_id


def _taken(wrong: str) -> ConflictError:
    return ConflictError(
        wrong,
        got="another opening",
        allowed="the same bytes again",
        fix="name each sum once: a run that starts anew takes a fresh salt",
    )
