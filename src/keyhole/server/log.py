"""Appends every step's updates to one file, durable before they are applied: the delta log.

    file   header (64 bytes), then entries
    header magic, version, digest of the layout, step before the first entry, zeros, CRC-32
    entry  head: mark, step, sizes, CRC-32 of the body, CRC-32 of the head
           body: for each part how many keys, keys, rows, zeros up to a multiple of 8 bytes;
           then the caller's metadata

All numbers are little-endian. A crash may leave an unfinished entry at the end: it was never
acknowledged, and opening the log cuts it off and says so. A damaged entry with a good one behind it
is no crash: reading stops with an error.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from keyhole.errors import StorageError
from keyhole.files import checksum, replacing, storage_errors, write_all
from keyhole.primitives.layout import Layout, layout_digest
from keyhole.server.row_sums import RowUpdate

_VERSION = 1
_HEADER = struct.Struct("<8sI32sQI4xI")  # 64 bytes; the last number is the CRC of those before
_HEAD = struct.Struct("<4sIQQQI")  # mark, parts, step, metadata bytes, body bytes, CRC of the body
_CRC = struct.Struct("<I")
_COUNT = struct.Struct("<Q")
_MAGIC, _MARK = b"khdelta\n", b"khe\n"
_HEAD_SIZE = _HEAD.size + _CRC.size
_RESTORE = "restore the file it was"


@dataclass(frozen=True)
class Entry:
    """One step: its number (the first is 1), its updates, and bytes that the caller put with it."""

    step: int
    updates: tuple[RowUpdate, ...]
    metadata: bytes = b""


@dataclass(frozen=True)
class LogEnd:
    """Where a log ends: bytes that are good, the last step, and what was cut off, if anything."""

    size: int
    last_step: int
    torn: str = ""


class DeltaLog:
    """A log open for appending. Made by `DeltaLog.open`, after `read_log` has found its end."""

    def __init__(self, path: Path, descriptor: int, end: LogEnd) -> None:
        self.path = path
        self._descriptor = descriptor
        self._size = end.size
        self._step = end.last_step
        self._is_broken = False

    @staticmethod
    def open(path: Path, end: LogEnd) -> DeltaLog:
        """Opens a log at its end; an unfinished entry is cut off."""
        with storage_errors(path, "open"):
            descriptor = os.open(path, os.O_WRONLY)
            if os.fstat(descriptor).st_size != end.size:
                os.ftruncate(descriptor, end.size)
                os.fsync(descriptor)
            os.lseek(descriptor, end.size, os.SEEK_SET)
        return DeltaLog(path, descriptor, end)

    def append(self, entry: Entry, *, durable: bool = True) -> None:
        """Writes one entry and waits until it is on the disk.

        Without `durable` a power failure may take the entry back. Raises StorageError where the
        disk is full or failed, and the log is as before: append again later. Or the entry is not
        the next step.
        """
        if self._is_broken:
            got, allowed = "a failed write that could not be taken back", "a working disk"
            raise refusal(self.path, "cannot go on", got, allowed, "recover the run")
        _check_next(self.path, "takes steps in order", entry.step, self._step, "recover the run")
        buffers = _pack(entry)
        with storage_errors(self.path, "append to"):
            try:
                write_all(self._descriptor, buffers)
                if durable:
                    os.fsync(self._descriptor)
            except BaseException:
                self._take_back()
                raise
        written = sum(memoryview(buffer).nbytes for buffer in buffers)
        if durable and hasattr(os, "posix_fadvise"):
            # Nobody reads an entry before a recovery: without this, each takes memory of its own in
            # the system's cache of files, and getting that costs more than writing.
            os.posix_fadvise(self._descriptor, self._size, written, os.POSIX_FADV_DONTNEED)
        self._size += written
        self._step = entry.step

    def close(self) -> None:
        """Closes the file; what was appended is durable already."""
        os.close(self._descriptor)

    def _take_back(self) -> None:
        """Cuts off an entry that could not be written whole; truncating needs no room."""
        self._is_broken = True
        os.ftruncate(self._descriptor, self._size)
        os.lseek(self._descriptor, self._size, os.SEEK_SET)
        os.fsync(self._descriptor)
        self._is_broken = False


def create_log(path: Path, layout: Layout, start: int) -> LogEnd:
    """Writes an empty log whose first entry will be step start + 1; it appears at once or not."""
    with replacing(path) as descriptor:
        write_all(descriptor, [pack_header(_MAGIC, layout, start)])
    return LogEnd(_HEADER.size, start)


def is_empty_log(path: Path) -> bool:
    """Returns whether nothing follows the header of a log, not even a part of an entry."""
    return path.stat().st_size <= _HEADER.size


def read_log(
    path: Path, layout: Layout, visit: Callable[[Entry], None], until: int | None = None
) -> LogEnd:
    """Reads a log from the start and passes each entry on, whole and checked.

    What follows step `until` is reported as cut off, unread.
    """
    with storage_errors(path, "read"), path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        start, _ = read_header(file, path, _MAGIC, layout, "a delta log", _RESTORE)
        step, at = start, _HEADER.size
        while at < size:
            if step == until:
                return LogEnd(at, step, f"{path.name}: {size - at} bytes after step {step}")
            head = _head_at(file.read(_HEAD_SIZE))
            if head is not None and head.body > size - at - _HEAD_SIZE:
                head = None
            entry = None if head is None else _read_body(file, head, layout)
            if head is None or entry is None:
                _refuse_damage(file, path, at, head, start, step)
                torn = f"{path.name}: {size - at} bytes of an unfinished entry after step {step}"
                return LogEnd(at, step, torn)
            _check_next(path, "skips steps", entry.step, step, _RESTORE)
            visit(entry)
            at, step = at + _HEAD_SIZE + head.body, entry.step
        return LogEnd(at, step)


class _Head(NamedTuple):
    parts: int
    step: int
    metadata: int
    body: int
    crc: int


def _pack(entry: Entry) -> list[bytes | memoryview]:
    """Head and body of an entry; arrays are not copied."""
    body: list[bytes | memoryview] = []
    for update in entry.updates:
        keys = np.ascontiguousarray(update.keys, "<i8")
        rows = np.ascontiguousarray(update.rows, "<f4")
        body += [_COUNT.pack(len(keys)), keys.data.cast("B") if len(keys) else b""]
        body += [rows.data.cast("B") if rows.size else b"", bytes(-rows.nbytes % 8)]
    body.append(entry.metadata)
    size = sum(memoryview(piece).nbytes for piece in body)
    numbers = (len(entry.updates), entry.step, len(entry.metadata), size, checksum(*body))
    head = _HEAD.pack(_MARK, *numbers)
    return [head, _CRC.pack(checksum(head)), *body]


def pack_header(magic: bytes, layout: Layout, number: int, crc: int = 0) -> bytes:
    """Returns the first 64 bytes of a log or a snapshot; what the two numbers say is its own."""
    fields = (magic, _VERSION, layout_digest(layout), number, crc)
    return _HEADER.pack(*fields, checksum(_HEADER.pack(*fields, 0)[: -_CRC.size]))


def read_header(
    file: BinaryIO, path: Path, magic: bytes, layout: Layout, what: str, fix: str
) -> tuple[int, int]:
    """Returns the two numbers of a header; raises StorageError unless it is whole and of this
    layout."""
    data = file.read(_HEADER.size)
    if len(data) < _HEADER.size or data[: len(magic)] != magic:
        raise refusal(path, f"is not {what}", f"{len(data)} first bytes", "its header", fix)
    _, version, digest, number, own, crc = _HEADER.unpack(data)
    if crc != checksum(data[: -_CRC.size]):
        raise refusal(path, "has a damaged header", f"CRC {crc:08x}", "the header's own", fix)
    if version != _VERSION:
        raise refusal(path, "is of another version", version, _VERSION, fix)
    if digest != layout_digest(layout):
        got, allowed = digest.hex()[:12], layout_digest(layout).hex()[:12]
        raise refusal(path, "was written for another layout", got, allowed, fix)
    return number, own


def _head_at(data: bytes, at: int = 0) -> _Head | None:
    """The head of the entry that starts at `at`, if it is whole."""
    head = data[at : at + _HEAD_SIZE]
    if len(head) < _HEAD_SIZE or head[: len(_MARK)] != _MARK:
        return None
    if _CRC.unpack_from(head, _HEAD.size)[0] != checksum(head[: _HEAD.size]):
        return None
    return _Head(*_HEAD.unpack_from(head)[1:])


def _read_body(file: BinaryIO, head: _Head, layout: Layout) -> Entry | None:
    """The entry that follows its head, if the checksum holds."""
    body = bytearray(head.body)
    file.readinto(body)  # type: ignore[attr-defined]
    if checksum(body) != head.crc:
        return None
    updates, at = [], 0
    for part in layout.parts[: head.parts]:
        (count,) = _COUNT.unpack_from(body, at)
        keys = np.frombuffer(body, "<i8", count, at + _COUNT.size)
        at += _COUNT.size + keys.nbytes
        rows = np.frombuffer(body, "<f4", count * part.slice_size, at)
        at += rows.nbytes + -rows.nbytes % 8
        updates.append(RowUpdate(keys, rows.reshape(count, part.slice_size)))
    return Entry(head.step, tuple(updates), bytes(body[at:]))


def _refuse_damage(
    file: BinaryIO, path: Path, at: int, head: _Head | None, start: int, step: int
) -> None:
    """Raises if a whole entry follows the bad one at `at`: then it is damage, not a torn end."""
    file.seek(at + _HEAD_SIZE + head.body if head else at + 1)
    rest = file.read()
    found = rest.find(_MARK)
    while found >= 0:
        if _is_entry(rest, found, step):
            wrong, got = f"is damaged in entry {step - start + 1}", f"last good step {step}"
            fix = f"restore the file; recover(..., until={step}) drops what follows"
            raise refusal(path, wrong, got, "whole entries", fix)
        found = rest.find(_MARK, found + 1)


def _is_entry(data: bytes, at: int, after: int) -> bool:
    """Whether a whole entry of a later step starts at `at`."""
    head = _head_at(data, at)
    if head is None:
        return False
    body = memoryview(data)[at + _HEAD_SIZE : at + _HEAD_SIZE + head.body]
    return len(body) == head.body and checksum(body) == head.crc and head.step > after


def _check_next(path: Path, wrong: str, found: int, step: int, fix: str) -> None:
    if found != step + 1:
        raise refusal(path, wrong, f"step {found} after {step}", f"step {step + 1}", fix)


def refusal(path: Path, wrong: str, got: object, allowed: object, fix: str) -> StorageError:
    """Returns the error of a file that is not used."""
    return StorageError(f"{path.name} {wrong}: got {got}; expected {allowed}; {fix}")
