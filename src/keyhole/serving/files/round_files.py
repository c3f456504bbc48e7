"""A rounds directory: names, the current round, who holds a round.

publisher.lock              one publisher at a time
current.json                the round that devices are told of; replaced at once, always last
rounds/<id>/manifest.json   whoever serves the round holds a shared lock on it
rounds/<id>/cohort.json     names of the devices that take part; missing if all do
rounds/<id>/table-T/        slice files
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from keyhole.errors import InputError, StorageError
from keyhole.server.files import Buffer, replacing, storage_errors, write_all
from keyhole.serving.manifest import Manifest, decode_manifest, name_round
from keyhole.serving.tables import Phase

__all__ = [
    "CurrentRound",
    "decode_current",
    "encode_cohort",
    "encode_current",
    "locked_manifest",
    "number_of",
    "read_cohort",
    "read_current",
    "read_manifest",
    "round_path",
    "rounds_path",
    "write_current",
    "write_file",
]

MANIFEST, COHORT, CURRENT = "manifest.json", "cohort.json", "current.json"
_START_ANEW = "remove it and publish again"  # a publisher would not know which number comes next
_ROUND_ID = re.compile(r"(0|[1-9][0-9]{0,17})-[0-9a-f]{16}")


class CurrentRound(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What `current.json` holds; `Current` says what it means."""

    round: str
    number: int
    phase: Phase
    trailing: tuple[str, ...] = ()


def rounds_path(directory: Path) -> Path:
    """Where the rounds lie."""
    return directory / "rounds"


def round_path(directory: Path, round_id: str) -> Path:
    """Where one round lies; the identifier has been checked by `number_of`."""
    return rounds_path(directory) / round_id


def number_of(round_id: str) -> int | None:
    """The number in a round's identifier; None if it is no identifier, as `name_round` makes them.

    >>> [number_of(f"{number}-44136fa355b3678a") for number in ("12", "012", "../12")]
    [12, None, None]
    """
    found = _ROUND_ID.fullmatch(round_id)
    return None if found is None else int(found[1])


def read_current(directory: Path) -> CurrentRound | None:
    """Returns the current round; None before the first.

    Raises:
        StorageError: the file cannot be read, or is not what a publisher wrote.
    """
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
    """Returns the round that the content of a `current.json` names.

    Raises:
        InputError: it names none.
    """
    try:
        current = msgspec.json.decode(data, type=CurrentRound)
        if number_of(current.round) != current.number:
            raise ValueError("a round that does not have its number")
        if None in map(number_of, current.trailing):
            raise ValueError("a trailing round that is none")
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise InputError(
            "not the name of a round",
            got=str(error),
            allowed="the name, number and phase of a round",
            fix="publish or push the round again",
        ) from error
    return current


def write_file(path: Path, data: Buffer, durable: bool) -> None:
    """Writes a small file that appears whole.

    Raises:
        StorageError: the disk refuses; what was there before is still there.
    """
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
    """Returns the identifier that a manifest gives its round, what it says, and its bytes.

    Raises:
        StorageError: it is damaged.
    """
    with storage_errors(Path(MANIFEST), "read"):
        data = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    try:
        manifest = decode_manifest(data)
    except InputError as error:
        raise _foreign(Path(MANIFEST), error.got) from error
    return name_round(data, manifest.number), manifest, data


@contextmanager
def locked_manifest(round_directory: Path, kind: int) -> Iterator[int | None]:
    """Opens and locks the manifest of a round, without waiting.

    Args:
        round_directory: of the round.
        kind: `fcntl.LOCK_SH` or `fcntl.LOCK_EX`.

    Yields:
        The descriptor, closed at the end; None if the lock is not to be had, or the round has been
        removed meanwhile.
    """
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
    # Between opening and locking, the round may have been taken away, or published anew.
    return os.path.samestat(found, os.fstat(descriptor))


def encode_cohort(devices: Sequence[str]) -> bytes:
    """Returns the file of a cohort.

    Raises:
        InputError: a device is named twice.
    """
    if len(set(devices)) != len(devices):
        raise InputError(
            "a cohort names devices twice",
            got=f"{len(devices) - len(set(devices))} repeats",
            allowed="each device once",
            fix="leave out the repeats",
        )
    return msgspec.json.encode(list(devices)) + b"\n"


def read_cohort(round_directory: Path) -> dict[str, int] | None:
    """Returns device -> place; None if the round is for all devices.

    Raises:
        StorageError: the file is damaged.
    """
    path = round_directory / COHORT
    if (data := _read_if_there(path)) is None:
        return None
    try:
        devices = msgspec.json.decode(data, type=list[str])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _foreign(path, str(error)) from error
    return {device: place for place, device in enumerate(devices)}


def _read_if_there(path: Path) -> bytes | None:
    with storage_errors(path, "read"):
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return None


def _foreign(path: Path, how: str, fix: str = "publish the round again") -> StorageError:
    return StorageError(
        f"{path.name} is damaged", got=how, allowed="the file as it was published", fix=fix
    )
