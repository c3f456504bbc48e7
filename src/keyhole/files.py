"""Files that survive: checksums, names that appear at once, and what is said when a disk fails.

Nothing here trusts a file: anyone who reads one checks it before using a byte of it.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeAlias
from zlib import crc32

from keyhole.errors import StorageError

Buffer: TypeAlias = bytes | bytearray | memoryview
"""Bytes to be written or checked; arrays come as `array.data`."""

SECRET = 0o600
"""Mode of a file that its owner alone may read: keys, tokens, salts, updates, slices."""

_PASSING = ".passing-"  # begins the name of a file that is being written
_MAX_AT_ONCE = 64  # buffers in one call; the least that POSIX lets a system take is 16


def checksum(*buffers: Buffer, start: int = 0) -> int:
    """Returns the CRC-32 of the buffers one after the other, behind those whose CRC `start` is."""
    value = start
    for buffer in buffers:
        value = crc32(buffer, value)
    return value


def write_all(descriptor: int, buffers: Sequence[Buffer]) -> None:
    """Writes all buffers without joining them; the system may take any part of them at a time."""
    left = [view for view in (memoryview(b).cast("B") for b in buffers) if view.nbytes]
    while left:
        written = os.writev(descriptor, left[:_MAX_AT_ONCE])
        while left and written >= left[0].nbytes:
            written -= left.pop(0).nbytes
        if written:
            left[0] = left[0][written:]


def sync_directory(directory: Path) -> None:
    """Makes names durable: a new or renamed file may vanish in a crash until this is done."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_file(path: Path) -> None:
    """Makes what was written to a file outlast a power cut."""
    with storage_errors(path, "write"), path.open("rb") as file:
        os.fsync(file.fileno())


@contextmanager
def replacing(path: Path, *, secret: bool = False) -> Iterator[int]:
    """Gives a descriptor to write to; the file has its name once everything is on the disk.

    A crash leaves either no file of that name or the whole one, and perhaps one ending in `.tmp`.
    One that is secret can be read by its owner alone from its first byte on, wherever it lies and
    whatever the umask says.
    """
    temporary = path.with_name(path.name + ".tmp")
    with storage_errors(path, "write"):
        mode = SECRET if secret else 0o644
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        try:
            try:
                if secret:  # one that a crash left may have had another mode
                    os.fchmod(descriptor, SECRET)
                yield descriptor
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            temporary.rename(path)
            sync_directory(path.parent)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def write_together(folder: Path, contents: Mapping[str, Buffer]) -> None:
    """Writes secret files of one folder, each whole or not at all; all are on the disk in the end.

    A disk is waited for once everything was handed to it: about half the time of one file after the
    other.
    """
    opened: dict[Path, int] = {}
    with storage_errors(folder, "write to"):
        try:
            for name, content in contents.items():
                path = folder / f"{name}.tmp"
                opened[path] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, SECRET)
                write_all(opened[path], [content])
            for descriptor in opened.values():
                os.fsync(descriptor)
        finally:
            for descriptor in opened.values():
                os.close(descriptor)
        for path in opened:
            path.rename(path.with_suffix(""))
        sync_directory(folder)


@contextmanager
def passing_file(folder: Path, content: Buffer) -> Iterator[Path]:
    """Gives a secret file that holds `content` durably under a passing name, which begins with a
    dot: link it to the name that lasts. It is locked as long as it is here, so that `sweep` knows
    what a crash has left."""
    while True:
        path = folder / f"{_PASSING}{secrets.token_hex(8)}"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, SECRET)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if not os.fstat(descriptor).st_nlink:
                continue  # swept before it was locked
            write_all(descriptor, [content])
            os.fsync(descriptor)
            yield path
            return
        finally:
            path.unlink(missing_ok=True)
            os.close(descriptor)


def sweep(folder: Path) -> None:
    """Removes passing files whose process has ended without doing so, and no others."""
    for path in folder.glob(f"{_PASSING}*"):
        with suppress(OSError):  # gone, or locked by a process that lives
            descriptor = os.open(path, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(descriptor)


def kept_secret(path: Path, size: int) -> bytes:
    """Returns the secret in a file that its owner alone can read; where there is none, one of the
    system's generator is put there. Of processes that come at once, all get the same."""
    if not path.exists():
        make_directory(path.parent)
        with storage_errors(path, "write"):
            made = secrets.token_bytes(size)
            with passing_file(path.parent, made) as passing, suppress(FileExistsError):
                os.link(passing, path)  # unless another process was first
            sync_directory(path.parent)
    with storage_errors(path, "read"):
        found = path.read_bytes()
    if len(found) != size:
        raise StorageError(
            f"{path.name} holds no secret: got {len(found)} bytes; expected {size}; restore the "
            "file, or start a new run"
        )
    return found


def lock_file(path: Path, what: str, flags: int = os.O_RDWR | os.O_CREAT) -> int:
    """Takes a file or directory for this process; the lock ends with it, however it ends."""
    with storage_errors(path, "open"):
        lock = os.open(path, flags, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        raise StorageError(
            f"{what}: got a lock of another process; expected one at a time; wait for it to end"
        ) from error
    return lock


def make_directory(path: Path) -> None:
    """Makes a directory and those above it, where they are missing."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(
            f"cannot make directory {path}: got {error.strerror or repr(error)}; expected a path "
            "below a directory that may be written; choose another path, or ask for the right to "
            "write there"
        ) from error


@contextmanager
def directory_for_work(path: Path) -> Iterator[None]:
    """Makes a directory; where what follows fails before it writes, none is left behind."""
    missing = [each for each in (path, *path.parents) if not each.exists()]
    make_directory(path)
    try:
        yield
    except BaseException:
        with suppress(OSError):  # one that is not empty stays, and so do those above it
            for each in missing:
                each.rmdir()
        raise


@contextmanager
def storage_errors(path: Path, verb: str) -> Iterator[None]:
    """Turns what the system says about a file into a StorageError."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"cannot {verb} {path.name}: got {error.strerror or repr(error)}; expected a disk with "
            "room, and a directory that may be written; what was stored before is safe: make room "
            "and try again"
        ) from error
