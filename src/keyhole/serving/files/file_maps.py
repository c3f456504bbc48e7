"""Files mapped read-only behind one another, so that many segments are one array."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from keyhole.errors import StorageError
from keyhole.server.files import storage_errors

__all__ = ["Mapped", "map_files"]

Mapped = NDArray[np.uint8]
"""The bytes of a file, which cannot be written to."""

_FIXED = 0x10  # MAP_FIXED of Linux and the BSDs; Python's module has no name for it


def map_files(paths: Sequence[Path], sizes: Sequence[int]) -> tuple[tuple[Mapped, ...], bool]:
    """Maps files.

    Args:
        paths: of the files.
        sizes: how long each must be.

    Returns:
        The bytes of each, and whether they follow each other in memory: so that the whole is one
        array, every file but the last must end with a page.

    Raises:
        StorageError: a file is missing or of another size.
    """
    total = sum(sizes)
    is_one = len(sizes) > 1 and all(size % mmap.PAGESIZE == 0 for size in sizes[:-1])
    if not is_one or not total:
        return tuple(_map(p, s) for p, s in zip(paths, sizes, strict=True)), len(sizes) == 1
    # Addresses are set aside first; the files then take their places. Python gives all of them back
    # when nobody has an array in them any more.
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    region = np.frombuffer(mmap.mmap(-1, total, flags=private, prot=mmap.PROT_READ), np.uint8)
    found, at = [], 0
    for path, size in zip(paths, sizes, strict=True):
        found.append(region[at : at + size])
        if size:
            _map(path, size, found[-1].ctypes.data)
        at += size
    return tuple(found), True


def _map(path: Path, size: int, address: int | None = None) -> Mapped:
    """The bytes of a file, at an address that is this process's own, or anywhere."""
    with storage_errors(path, "read"):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            found = os.fstat(descriptor).st_size
            if found != size:
                raise StorageError(
                    f"{path.name} cannot be served",
                    got=f"{found} bytes",
                    allowed=f"{size} bytes, as published",
                    fix="publish the round again",
                )
            if not size:
                return np.empty(0, np.uint8)
            if address is None:
                return np.frombuffer(mmap.mmap(descriptor, size, prot=mmap.PROT_READ), np.uint8)
            _map_at(descriptor, size, address)
            return np.empty(0, np.uint8)
        finally:
            os.close(descriptor)


def _map_at(descriptor: int, size: int, address: int) -> None:
    """mmap(2) with an address, which Python's does not take."""
    call = ctypes.CDLL(None, use_errno=True).mmap
    call.restype = ctypes.c_void_p
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
    got = call(address, size, mmap.PROT_READ, mmap.MAP_SHARED | _FIXED, descriptor, 0)
    if got != address:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
