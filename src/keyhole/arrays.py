"""Names the kinds of arrays and functions that pass between the layers; keeps freed memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Hashable
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
