"""Names what lies in a rounds directory, holds rounds that are read, and removes old ones.

publisher.lock              one publisher at a time
current.json                the round that devices are told of; replaced at once, always last
rounds/<id>/manifest.sig    the trainer's signature of it, where it signs: 64 bytes
rounds/<id>/manifest.json   anyone who serves the round holds a shared lock on it
rounds/<id>/cohort.json     names of the devices that take part; missing if all do
rounds/<id>/table-T/        slice files

The newest two rounds are kept, one more is spare, the rest go.

A round may be taken away only if nobody holds it: anyone who serves it has a shared lock on its
manifest, and anyone who takes it away the exclusive one. A spare round has no name that a service
would look for, so the next round may be written over its files.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from keyhole.errors import InputError, StorageError
from keyhole.files import Buffer, replacing, storage_errors, write_all
from keyhole.wire.assignment import Phase
from keyhole.wire.manifest import Manifest, decode_manifest, name_round, number_of

MANIFEST, COHORT, CURRENT = "manifest.json", "cohort.json", "current.json"
SIGNATURE = "manifest.sig"
_START_ANEW = "remove it and publish again"  # a publisher would not know which number comes next


class CurrentRound(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What `current.json` holds; `Current` says what it means."""

    round: str
    number: int
    phase: Phase
    trailing: tuple[str, ...] = ()


def rounds_path(directory: Path) -> Path:
    """Returns where the rounds lie."""
    return directory / "rounds"


def round_path(directory: Path, round_id: str) -> Path:
    """Returns where one round lies; the identifier has been checked by `number_of`."""
    return rounds_path(directory) / round_id


def read_current(directory: Path) -> CurrentRound | None:
    """Returns the current round; None before the first."""
    path = directory / CURRENT
    if (data := _read_if_there(path)) is None:
        return None
    try:
        return decode_current(data)
    except InputError as error:
        raise _foreign(path, error.got, _START_ANEW) from error


def write_current(directory: Path, current: CurrentRound, durable: bool) -> None:
    """Replaces the current round at once."""
    write_file(directory / CURRENT, encode_current(current), durable)


def encode_current(current: CurrentRound) -> bytes:
    """Returns the content of `current.json`."""
    return msgspec.json.encode(current) + b"\n"


def decode_current(data: bytes) -> CurrentRound:
    """Returns the round that the content of a `current.json` names."""
    try:
        current = msgspec.json.decode(data, type=CurrentRound)
        if number_of(current.round) != current.number:
            raise ValueError("a round that does not have its number")
        if None in map(number_of, current.trailing):
            raise ValueError("a trailing round that is none")
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise InputError(
            f"not the name of a round: got {error!s}; expected the name, number and phase of a "
            "round; publish or push the round again"
        ) from error
    return current


def write_file(path: Path, data: Buffer, durable: bool) -> None:
    """Writes a small file that appears whole; if the disk refuses, what was there still is."""
    if durable:
        with replacing(path) as descriptor:
            write_all(descriptor, [data])
        return
    temporary = path.with_name(path.name + ".tmp")
    with storage_errors(path, "write"):
        try:
            temporary.write_bytes(data)
            temporary.rename(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise


def read_manifest(descriptor: int) -> tuple[str, Manifest, bytes]:
    """Returns the identifier that a manifest gives its round, what it says, and its bytes."""
    with storage_errors(Path(MANIFEST), "read"):
        data = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    try:
        manifest = decode_manifest(data)
    except InputError as error:
        raise _foreign(Path(MANIFEST), error.got) from error
    return name_round(data, manifest.number), manifest, data


@contextmanager
def locked_manifest(round_directory: Path, kind: int) -> Iterator[int | None]:
    """Opens and locks the manifest of a round, without waiting; gives its descriptor, None if the
    lock is not to be had, or the round has been removed meanwhile."""
    path = round_directory / MANIFEST
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        yield None
        return
    try:
        yield descriptor if _is_locked(descriptor, path, kind) else None
    finally:
        os.close(descriptor)


def _is_locked(descriptor: int, path: Path, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        found = path.stat()
    except (BlockingIOError, FileNotFoundError):
        return False
    # Between opening and locking, the round may have been taken away, or published again.
    return os.path.samestat(found, os.fstat(descriptor))


def encode_cohort(devices: Sequence[str]) -> bytes:
    """Returns the file of a cohort."""
    if len(set(devices)) != len(devices):
        raise InputError(
            f"a cohort names devices twice: got {len(devices) - len(set(devices))} repeats; "
            "expected each device once; leave out the repeats"
        )
    return msgspec.json.encode(list(devices)) + b"\n"


def read_cohort(round_directory: Path) -> dict[str, int] | None:
    """Returns device -> place; None if the round is for all devices."""
    path = round_directory / COHORT
    if (data := _read_if_there(path)) is None:
        return None
    try:
        devices = msgspec.json.decode(data, type=list[str])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _foreign(path, str(error)) from error
    return {device: place for place, device in enumerate(devices)}


def read_signature(round_directory: Path) -> bytes | None:
    """Returns the trainer's signature of a round; None where there is none. Devices check it."""
    return _read_if_there(round_directory / SIGNATURE)


def _read_if_there(path: Path) -> bytes | None:
    with storage_errors(path, "read"):
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return None


def _foreign(path: Path, how: str, fix: str = "publish the round again") -> StorageError:
    return StorageError(
        f"{path.name} is damaged: got {how}; expected the file as it was published; {fix}"
    )


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
        newest, name = (-1, "") if current is None else (current.number, current.round)
        for number, path in self._named():
            if number > newest or (number == newest and path.name != name):
                remove_round(path)

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
                    remove_round(path)

    def bases(self) -> Iterator[Base]:
        """Rounds to make a new one from, the best first: the spare one, then the current."""
        current = read_current(self._directory)
        directories = [self.spare]
        if current is not None:
            directories.append(round_path(self._directory, current.round))
        for directory in directories:
            with suppress(OSError, StorageError):
                with (directory / MANIFEST).open("rb") as file:
                    name, manifest, _ = read_manifest(file.fileno())
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


def remove_round(path: Path) -> None:
    """Takes the name away at once, so that no service can open it any more; then the files."""
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
