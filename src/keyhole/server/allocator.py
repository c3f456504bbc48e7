"""Keeps memory that a round frees for the next one.

glibc hands freed blocks of megabytes back to the system, and every page of the next one costs a
fault: at 1000 keys of 500 numbers that is half of a round. A program that owns its process may ask
for them to be kept. A library may not, so nothing here happens by itself.
"""

from __future__ import annotations

import ctypes

# Parameters of mallopt(3).
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_KEEP, _PAD = 2**31 - 1, 64 << 20


def keep_freed_memory() -> bool:
    """Tells the C library to keep what is freed, for the rest of the process."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt"):
        return False
    settings = {_MMAP_THRESHOLD: 1 << 30, _TRIM_THRESHOLD: _KEEP, _TOP_PAD: _PAD}
    return all(library.mallopt(name, value) for name, value in settings.items())
