"""Stores one upload for each device and round, there as a whole or not at all."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, TypeAlias

from keyhole.errors import (
    ConflictError,
    InputError,
    NotFoundError,
    StorageError,
    TooLateError,
)
from keyhole.files import make_directory, passing_file, storage_errors, sweep, sync_directory
from keyhole.service.access import DEVICE_NAME, check_device_name
from keyhole.wire.manifest import number_of

REFUSED = ".refused"
"""The folder of a round's uploads in which devices are named whose update was refused."""

_CLOSED, _COUNTED, _REMOVED = ".closed", ".counted", ".removed"
_MARKS_KEPT = 256  # rounds; an upload that began in one has long ended when its marks go


Refusal: TypeAlias = Literal["norm", "numbers"]
"""Why an update was refused: it was above the max norm, or held NaN or infinity."""


class UpdateSpool:
    """Uploads as files `<round>/<device>`, readable by their owner alone.

    Any number of processes may store at once: the first to link its file to the name wins. What was
    stored is on the disk before anyone is told so. What a process was storing when it was killed is
    removed when another one starts, and when its round is closed or removed.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        for folder in self._folders():
            _sweep(folder)

    def store(
        self, round_id: str, device: str, body: bytes, *, may_replace: bool = False
    ) -> Literal["stored", "known"]:
        """Keeps an upload: "stored", or "known" if the same bytes are here, or counted before they
        were removed. What is acknowledged is among what `close` returns, and nothing else is.

        Args:
            may_replace: whether it takes the place of other bytes, as long as the round is open.

        Raises ConflictError if other bytes are here, TooLateError if the round closed without it.
        """
        path = self._path(round_id, device)
        if (path.parent / REFUSED / device).exists():
            raise ConflictError(
                "an update of this device was refused in this round: got another; expected one "
                "update for each device and round; wait for the next round"
            )
        if not self.is_closed(round_id):
            self._make(path.parent)
            with (
                storage_errors(path.parent, "store an update of"),  # errors name no device
                passing_file(path.parent, body) as temporary,
            ):
                try:
                    path.hardlink_to(temporary)
                    outcome: Literal["stored", "known"] = "stored"
                except FileExistsError:
                    outcome = "known"
                # Anyone who linked the name may have died before it was on the disk.
                sync_directory(path.parent)
        else:
            outcome = "known"
        # The list of `close` may have been made before the upload had its name, or not yet.
        if self.is_closed(round_id) and device not in self._count(round_id):
            raise TooLateError(
                "the round takes no more updates: got an update after it was closed; expected "
                "updates while it is open; check in for the next one"
            )
        if outcome == "known" and self._stored(round_id, device) not in (None, body):
            if may_replace and self._replace(path, body):
                return "stored"
            raise ConflictError(
                f"this device has sent another update in this round: got {len(body)} other bytes; "
                "expected one update for each device and round; send the same bytes again, or wait "
                "for the next round"
            )
        return outcome

    def has(self, round_id: str, device: str) -> bool:
        """Returns whether a device's update is here, or was when the round closed."""
        path = self._path(round_id, device)
        if path.exists():
            return True
        return (path.parent / _REMOVED).exists() and device in self._counted(round_id)

    def refuse(self, round_id: str, device: str, why: Refusal) -> None:
        """Takes note that the update of a device was refused: none of it counts in this round."""
        path = self._path(round_id, device)
        folder = path.parent / REFUSED
        if path.exists():  # what was acknowledged counts, whatever is sent behind it
            return
        self._make(folder.parent)
        with storage_errors(folder, "store"):
            folder.mkdir(0o700, exist_ok=True)
            with passing_file(folder, why.encode()) as made, suppress(FileExistsError):
                (folder / device).hardlink_to(made)
            sync_directory(folder)
            sync_directory(folder.parent)

    def refused(self, round_id: str) -> list[str]:
        """Returns the devices whose update was refused, sorted."""
        return refused_in(self._folder(round_id))

    def refusal(self, round_id: str, device: str) -> Refusal | None:
        """Returns why the update of a device was refused; None if it was not."""
        try:
            why = (self._path(round_id, device).parent / REFUSED / device).read_bytes()
        except FileNotFoundError:
            return None
        return "norm" if why == b"norm" else "numbers"

    def devices(self, round_id: str) -> list[str]:
        """Returns the devices whose uploads are here, sorted."""
        return sorted(_shown(self._folder(round_id)))

    def close(self, round_id: str) -> list[str]:
        """Takes no more uploads of a round; returns the devices whose uploads count.

        First a mark, then the list: `store` looks for the mark after the upload has its name, so
        an upload that found none is in the list. One that finds the mark and no list makes it: the
        first list is the one that holds. A round that was closed before gives the same list again.
        """
        folder = self._folder(round_id)
        self._make(folder)
        with storage_errors(folder, "close"), _locked(folder):
            (folder / _CLOSED).touch()
            sync_directory(folder)
        _sweep(folder)
        return self._count(round_id)

    def is_closed(self, round_id: str) -> bool:
        """Returns whether `close` was called."""
        return (self._folder(round_id) / _CLOSED).exists()

    def rounds(self) -> list[str]:
        """Returns the rounds of which something is here, and that were not removed."""
        return sorted(f.name for f in self._folders() if not (f / _REMOVED).exists())

    def read(self, round_id: str, device: str) -> bytes:
        """Returns an upload."""
        body = self._stored(round_id, device)
        if body is None:
            raise NotFoundError(
                "no such update: got none; expected one of `devices`; look there first"
            )
        return body

    def remove(self, round_id: str) -> None:
        """Forgets the uploads of a round, but not that it is closed, nor which of them counted.

        An upload may have begun before: when it ends, it must not be taken for one of an open
        round. The marks of the last few hundred rounds stay.
        """
        folder = self._folder(round_id)
        if not folder.is_dir():
            return
        if not self.is_closed(round_id):
            self._list(folder, [])  # nothing that comes from here on counts
        with storage_errors(folder, "remove"):
            with _locked(folder):
                (folder / _CLOSED).touch()
            (folder / _REMOVED).touch()
            sync_directory(folder)
            _sweep(folder)
            for device in self.devices(round_id):
                (folder / device).unlink(missing_ok=True)
            shutil.rmtree(folder / REFUSED, ignore_errors=True)
            removed = [f for f in self._folders() if (f / _REMOVED).exists()]
            removed.sort(key=lambda f: number_of(f.name) or 0)
            for old in removed[:-_MARKS_KEPT]:
                shutil.rmtree(old, ignore_errors=True)

    def begin(self, round_id: str) -> None:
        """Takes uploads of a round that was removed before: a run that starts over meets it."""
        folder = self._folder(round_id)
        if (folder / _REMOVED).exists():
            shutil.rmtree(folder, ignore_errors=True)

    def _replace(self, path: Path, body: bytes) -> bool:
        """Puts an upload in the place of another; returns whether the round was open. What is here
        when a round is closed stays as it is."""
        folder = path.parent
        with storage_errors(folder, "store an update of"), _locked(folder):
            if (folder / _CLOSED).exists():
                return False
            with passing_file(folder, body) as temporary:
                temporary.rename(path)
                sync_directory(folder)
        return True

    def _folders(self) -> list[Path]:
        try:
            return [f for f in self._directory.iterdir() if number_of(f.name) is not None]
        except FileNotFoundError:
            return []

    def _stored(self, round_id: str, device: str) -> bytes | None:
        try:
            return self._path(round_id, device).read_bytes()
        except FileNotFoundError:
            return None

    def _count(self, round_id: str) -> list[str]:
        """The devices whose uploads count in a closed round."""
        folder = self._folder(round_id)
        if not (folder / _COUNTED).exists():
            self._list(folder, self.devices(round_id))
        return self._counted(round_id)

    def _list(self, folder: Path, devices: Sequence[str]) -> None:
        """Writes whose uploads count, unless somebody has."""
        content = "\n".join(devices).encode()
        with storage_errors(folder, "close"), passing_file(folder, content) as made:
            with suppress(FileExistsError):
                (folder / _COUNTED).hardlink_to(made)
            sync_directory(folder)

    def _counted(self, round_id: str) -> list[str]:
        """The list of a closed round; empty before it is made."""
        path = self._folder(round_id) / _COUNTED
        with storage_errors(path, "read"):
            if not path.exists():
                return []
            names = path.read_bytes().decode("ascii", "replace").split()
        if not all(map(DEVICE_NAME.fullmatch, names)):
            raise StorageError(
                f"{path.name} is damaged: got {len(names)} names, not all of devices; expected the "
                "list that was written when the round was closed; restore it from a copy, or go on "
                "with the next round"
            )
        return names

    def _folder(self, round_id: str) -> Path:
        # Names come from requests: what is not of this shape never reaches the file system.
        if number_of(round_id) is None:
            raise InputError(
                f"not the identifier of a round: got {len(round_id)} characters; expected a "
                "number, '-' and 64 hex digits; take it from the current round"
            )
        return self._directory / round_id

    def _path(self, round_id: str, device: str) -> Path:
        return self._folder(round_id) / check_device_name(device)

    def _make(self, folder: Path) -> None:
        make_directory(self._directory)
        with storage_errors(folder, "make"):
            folder.mkdir(0o700, exist_ok=True)
            # Even if it was there: another process may have made it just now.
            sync_directory(self._directory)
            sync_directory(self._directory.parent)


def sizes_in(folder: Path) -> dict[str, int]:
    """Returns the devices whose uploads are in the folder of a round, each with its bytes."""
    found = {}
    for name in _shown(folder):
        with suppress(FileNotFoundError):  # the round may have been removed meanwhile
            found[name] = (folder / name).lstat().st_size
    return found


def refused_in(folder: Path) -> list[str]:
    """Returns the devices whose update was refused in the round of this folder, sorted."""
    return sorted(_shown(folder / REFUSED))


def _shown(folder: Path) -> list[str]:
    """The files of a folder that are no marks; none where there is no folder."""
    try:
        return [e.name for e in folder.iterdir() if not e.name.startswith(".")]
    except FileNotFoundError:
        return []


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Closing a round and replacing an upload of it come one after the other."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _sweep(folder: Path) -> None:
    """Removes what dead processes were storing in the folder of a round."""
    sweep(folder)
    sweep(folder / REFUSED)
