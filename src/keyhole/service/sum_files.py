"""Keeps what one aggregator has in files: its key, its sums, and each name that a sum ever had.

    sums/<round>/opening    who opened it, params and cohort
    sums/<round>/list       the list as it was told to the other aggregator
    sums/<round>/receipt    what this one adds
    sums/<round>/counts     its share of how many sent each key, where rows are dropped
    sums/<round>/share      what is given out, noise included: asked again, the same bytes
    sums/<round>/failed     why nothing is given out
    names/<name>            each name of a sum that was ever opened, and its round
    seal.key                this aggregator's private key, in hex, to which devices seal shares
    seal.pub                the public key, for its operator to give out
    ledger                  what sums have spent of each device's privacy, run after run
    uploads/                shares of devices, see `UpdateSpool`

Each file appears at once and whole, and never changes. Everything is readable by its owner alone.
What is damaged is an error that names the file, and nothing of it is mended.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from keyhole.crypto.hpke import PrivateKey
from keyhole.errors import (
    ConflictError,
    InputError,
    MalformedError,
    NotFoundError,
    StorageError,
    TooLateError,
)
from keyhole.files import (
    Buffer,
    lock_file,
    passing_file,
    replacing,
    storage_errors,
    sweep,
    sync_directory,
    write_all,
)
from keyhole.service.spool import UpdateSpool
from keyhole.wire.manifest import digest_of, number_of
from keyhole.wire.messages import read_message

T = TypeVar("T")

_OVER = b"over"  # stands behind the round in the file of a name whose sum was forgotten


def sealing_key(directory: Path) -> PrivateKey:
    """The key of an aggregator, to which devices seal what they send; made if there is none.

    Raises:
        StorageError: it cannot be written, read, or holds something else.
    """
    path = directory / "seal.key"
    with storage_errors(path, "make"):
        directory.mkdir(0o700, parents=True, exist_ok=True)
        sweep(directory)
        if not path.exists():  # there whole or not at all: a key cannot be made a second time
            made = PrivateKey.fresh().secret.hex().encode()
            with passing_file(directory, made) as passing, suppress(FileExistsError):
                path.hardlink_to(passing)
            sync_directory(directory)
        text = path.read_bytes()
    try:
        key = PrivateKey(bytes.fromhex(text.decode("ascii")))
    except (ValueError, InputError) as error:
        raise StorageError(
            f"the key of the aggregator cannot be read: got {len(text)} bytes in {path}; "
            "expected 64 hex digits; put back a copy, or remove it: a new key is made, which "
            "devices must be told"
        ) from error
    shown, public = directory / "seal.pub", f"{key.public.hex()}\n".encode()
    with storage_errors(shown, "read"):
        is_shown = shown.exists() and shown.read_bytes() == public
    if not is_shown:
        with replacing(shown) as descriptor:
            write_all(descriptor, [public])
    return key


class SumFiles:
    """The files of one aggregator; one process has them: two would draw different noise for one
    sum, and give out both.
    """

    def __init__(self, directory: Path) -> None:
        self._sums, self._names = directory / "sums", directory / "names"
        self.ledger = directory / "ledger"
        for folder in (directory, self._sums, self._names):
            with storage_errors(folder, "make"):
                folder.mkdir(0o700, parents=True, exist_ok=True)
        self._lock: int | None = lock_file(directory / "lock", "another aggregator runs here")
        self.key = sealing_key(directory)
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
        """Keeps a new sum; returns whether it is new."""
        folder, mark = self._folder(round_id), self._names / name.hex()
        if (folder / "opening").exists():
            if self.read(round_id, "opening") != opening:
                raise _taken("the round was opened with other terms, cohort or owner")
            return False
        marked, own = _marked(mark), round_id.encode("ascii")
        if marked and marked[0] != own:
            raise _taken("another round has a sum of this name")
        if marked[1:]:
            raise TooLateError(
                "the sum is over: got a round whose sum was forgotten; expected each sum once; go "
                "on with the next round"
            )
        with storage_errors(folder, "make"):
            folder.mkdir(0o700, exist_ok=True)
            sync_directory(self._sums)
        with replacing(mark, secret=True) as descriptor:
            write_all(descriptor, [own])
        self.write(round_id, "opening", [opening])
        return True  # a process that dies before has a mark and no sum: it is opened again

    def write(self, round_id: str, name: str, content: Sequence[Buffer]) -> None:
        """Keeps a file; it is on the disk when this returns."""
        with replacing(self.path(round_id, name), secret=True) as descriptor:
            write_all(descriptor, content)

    def has(self, round_id: str, name: str) -> bool:
        """Whether a file is there."""
        return self.path(round_id, name).exists()

    def path(self, round_id: str, name: str) -> Path:
        """Where a file is."""
        return self._folder(round_id) / name

    def opened_at(self, round_id: str) -> float:
        """When a sum was opened, in unix seconds; raises NotFoundError where there is none."""
        try:
            return self.path(round_id, "opening").stat().st_mtime
        except FileNotFoundError as error:
            raise _no_sum() from error

    def read(self, round_id: str, name: str) -> bytes:
        """Returns a file; raises NotFoundError where there is none."""
        path = self.path(round_id, name)
        with storage_errors(path, "read"):
            try:
                return path.read_bytes()
            except FileNotFoundError as error:
                raise _no_sum() from error

    def kept(self, round_id: str, name: str, kind: type[T]) -> T:
        """Returns a file as a message; raises StorageError where it is damaged."""
        content = self.read(round_id, name)
        try:
            return read_message(content, kind)
        except MalformedError as error:
            raise damaged(name, f"{len(content)} bytes of something else") from error

    def forget(self, round_id: str, name: bytes) -> None:
        """Removes a sum, but not that there was one: its name is not used again."""
        with replacing(self._names / name.hex(), secret=True) as descriptor:
            write_all(descriptor, [round_id.encode("ascii") + b" " + _OVER])
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
            raise _no_round(round_id)
        return self._sums / round_id


def damaged(name: str, got: str) -> StorageError:
    """Returns the error of a file that does not hold what this aggregator wrote."""
    return StorageError(
        f"{name} of a sum is damaged: got {got}; expected what this aggregator wrote there; "
        "restore the file from a copy, or let the trainer go on with the next round"
    )


def _marked(mark: Path) -> list[bytes]:
    """The round that a name is of, and whether its sum is over; nothing for a new name."""
    with storage_errors(mark, "read"):
        if not mark.exists():
            return []
        found = mark.read_bytes().split(b" ")
    is_round = number_of(found[0].decode("ascii", "replace")) is not None
    if not is_round or found[1:] not in ([], [_OVER]):
        raise damaged("the name", f"{len(found)} words")
    return found


def _no_sum() -> NotFoundError:
    return NotFoundError(
        "no such sum, or it is not so far: got another round; expected a round that the trainer "
        "has opened here; check the round; open it first"
    )


def _taken(wrong: str) -> ConflictError:
    return ConflictError(
        f"{wrong}: got another opening; expected the same bytes again; name each sum once: a run "
        "that starts over takes a fresh salt"
    )


def model_of(round_id: str) -> bytes:
    """The digest of the manifest of a round, which its name holds."""
    if number_of(round_id) is None:
        raise _no_round(round_id)
    return digest_of(round_id)


def _no_round(round_id: str) -> NotFoundError:
    return NotFoundError(
        f"not the identifier of a round: got {len(round_id)} characters; expected a number, '-' "
        "and 64 hex digits; take it from the current round"
    )
