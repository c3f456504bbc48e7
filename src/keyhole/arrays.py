"""Names the kinds of arrays and functions that pass between the layers; keeps freed memory, and
makes arrays that JAX reads where they are."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Hashable, Sequence
from math import prod
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]
"""Any numeric array."""

KeyArray: TypeAlias = NDArray[np.int64]
"""Keys of one client, shape (m,)."""

ClientId: TypeAlias = Hashable
"""What names a client within one cohort."""

Tree: TypeAlias = Any
"""Nested dicts, lists and tuples with arrays as leaves."""

SelectFn: TypeAlias = Callable[[Any, Any], Any]
"""psi: (server value, key) -> slice; the key is a Python int, or traced in JAX."""

DeselectFn: TypeAlias = Callable[[Any, Any], Any]
"""phi: (update of one client, its keys) -> value shaped like the server's."""

LINE = 64
"""Bytes in a cache line."""


def empty_on_line(shape: Sequence[int], dtype: Any) -> Array:
    """Returns an array of any numbers that begins at a cache line: JAX on a CPU reads such memory
    where it is, and copies every other array that it is given.

    >>> empty_on_line((3, 2), np.float32).ctypes.data % LINE
    0
    """
    size = prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(size + LINE, np.uint8)
    start = -memory.ctypes.data % LINE
    placed: Array = memory[start : start + size].view(dtype).reshape(shape)
    return placed


def on_line(array: Array) -> Array:
    """Returns the array itself if it is C-contiguous and begins at a cache line, else a copy that
    does; see `empty_on_line`."""
    if array.flags.c_contiguous and array.ctypes.data % LINE == 0:
        return array
    copy = empty_on_line(array.shape, array.dtype)
    copy[...] = array
    return copy


def read_only(array: Array) -> Array:
    """Returns a view that cannot be written to: compiled loops that only read an array take it in
    this form, in which what JAX returns comes, too; each other form is compiled once more."""
    seen = array.view()
    seen.setflags(write=False)
    return seen


# Parameters of mallopt(3).
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -2, -3, -8
_KEEP, _PAD = 2**31 - 1, 64 << 20


def keep_freed_memory() -> bool:
    """Tells the C library to keep what is freed, for the rest of the process.

    glibc hands freed blocks of megabytes back to the system, and every page of the next one costs a
    fault: at 1000 keys of 500 numbers that is half of a round. A program that owns its process may
    ask for them to be kept. A library may not, so nothing here happens by itself. Threads share
    what is kept: what one has freed is there for all.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt"):
        return False
    # Larger blocks are few, and what is kept of them would be missed.
    settings = {_MMAP_THRESHOLD: 128 << 20, _TRIM_THRESHOLD: _KEEP, _TOP_PAD: _PAD, _ARENA_MAX: 1}
    return all(library.mallopt(name, value) for name, value in settings.items())
