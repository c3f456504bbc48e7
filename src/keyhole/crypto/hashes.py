"""Hashes many texts of one length at once: keyed BLAKE3, 32 bytes each.

The `blake3` package is the definition, and hashes texts one after the other: a device has a few
thousand and needs nothing else. A server has millions. The compiled loop takes them side by side,
one to a lane of a vector, and gives the same bytes; tests hold both together. Keys are public: they
keep hashes of different kinds apart.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from keyhole.errors import ShapeError

HASH_BYTES = 32
KEY_BYTES = 32

HashArray = NDArray[np.uint8]
"""Hashes, shape (m, 32)."""

_COMPILE_FROM = 4 << 20  # bytes; below, one text at a time is done before compiled code is loaded


def hash_rows(rows: NDArray[np.uint8], key: bytes) -> HashArray:
    """Returns the keyed BLAKE3 of each row: (m, 32).

    Args:
        rows: (m, n) uint8.
        key: 32 public bytes.

    >>> hash_rows(np.zeros((2, 5), np.uint8), bytes(32))[1, :4].tobytes().hex()
    '4e9e4fc9'
    """
    if rows.ndim != 2 or rows.dtype != np.uint8 or len(key) != KEY_BYTES:
        raise ShapeError(
            f"texts that cannot be hashed: got {rows.dtype} of shape {rows.shape}, a key of "
            f"{len(key)} bytes; expected uint8 of shape (m, n), {KEY_BYTES} bytes; pass one text a "
            "row"
        )
    rows = np.ascontiguousarray(rows)
    if not compiled.cache_info().currsize and rows.nbytes < _COMPILE_FROM:
        return hash_one_by_one(rows, key)
    out = np.empty((len(rows), HASH_BYTES // 4), np.uint32)
    compiled().hash_lanes(rows, np.frombuffer(key, np.uint32), out)
    return out.view(np.uint8)


def hash_one_by_one(rows: NDArray[np.uint8], key: bytes) -> HashArray:
    """Returns what `hash_rows` does, by the library alone."""
    digests = b"".join([blake3(row, key=key).digest() for row in rows])
    return np.frombuffer(digests, np.uint8).reshape(len(rows), HASH_BYTES)


@cache
def compiled() -> ModuleType:
    """Loads the compiled loop, which takes a third of a second; all hashes run it from then on."""
    from keyhole.crypto import hash_lanes  # a device that fetches once never loads numba

    return hash_lanes
