"""Computes sums of records: eight bytes that tell whether a record is still what it was.

Multilinear hashing: a record, with zero bytes behind it up to a multiple of four, is read as
little-endian 32-bit words w_1 .. w_n, and w_0 = 1. With 64-bit constants a_i and b_i,

    A = sum a_i w_i mod 2^64,   B = sum b_i w_i mod 2^64,   sum = upper half of A, upper half of B.

The constants are outputs 2i and 2i + 1 of splitmix64. Two records that differ have equal sums with
probability 2^-64 over the choice of constants. Since these are known, a sum finds damage and not
malice. (Lemire and Kaser, "Strongly universal string hashing is fast", 2014.)
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keyhole.errors import ShapeError
from keyhole.primitives.coding import GOLDEN, mix

_SEED = 0x6B657968_6F6C6531  # "keyhole1"
_WORD = 4  # bytes
_PAD_AT_ONCE = 1 << 20  # bytes of records that are padded in one go
_COMPILE_FROM = 4 << 20  # bytes; below, NumPy is done before compiled code is loaded


@cache
def compiled() -> Any:
    """Loads the compiled code, which takes a third of a second; all sums run it from then on."""
    from numba import njit  # a device that fetches once never loads it

    return njit(cache=True, nogil=True)(_sum_words)


def _sum_words(words, a, b, out):  # type: ignore[no-untyped-def]
    """Sums each row of `words` into `out`, with the constants a and b: the definition.

    The compiler turns the inner loop into vectors, 10 GB/s at 2 KB a record.
    """
    half = np.uint64(32)
    for record in range(len(words)):
        first, second = a[0], b[0]
        for i in range(words.shape[1]):
            word = np.uint64(words[record, i])
            first += a[i + 1] * word
            second += b[i + 1] * word
        out[record] = first >> half << half | second >> half


def sum_records(
    records: NDArray[np.uint8], out: NDArray[np.uint64] | None = None
) -> NDArray[np.uint64]:
    """Returns the sum of each record, at the speed of memory once `compiled` has been called.

    Args:
        records: (m, n) uint8, rows contiguous.
        out: (m,) uint64 to write into, contiguous.

    >>> hex(sum_records(np.zeros((1, 0), np.uint8))[0])  # the upper halves of a_0 and b_0
    '0xeb8181b21133b667'
    """
    _check_records(records)
    count = len(records)
    out = np.empty(count, np.uint64) if out is None else out
    if out.shape != (count,) or out.dtype != np.uint64 or not out.flags.carray:
        raise _misfit("sums do not fit here", out, f"contiguous uint64 of shape ({count},)")
    if not compiled.cache_info().currsize and records.nbytes < _COMPILE_FROM:
        out[:] = sum_records_by_definition(records)  # a device that starts for one round
    elif records.shape[1] % _WORD:
        _sum_padded(records, out)
    elif count:
        compiled()(_words(records), *_constants(records.shape[1] // _WORD), out)
    return out


def sum_records_by_definition(records: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """Returns the same sums without compiled code, for anyone who cannot have it."""
    _check_records(records)
    pad = -records.shape[1] % _WORD
    words = np.ascontiguousarray(np.pad(records, ((0, 0), (0, pad)))).view("<u4").astype(np.uint64)
    a, b = _constants(words.shape[1])
    halves = [(c[0] + (words * c[1:]).sum(1, np.uint64)) >> np.uint64(32) for c in (a, b)]
    sums: NDArray[np.uint64] = halves[0] << np.uint64(32) | halves[1]
    return sums


@lru_cache(maxsize=256)  # a pure function; a service meets as many lengths as tables
def _constants(words: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """a_0 .. a_n and b_0 .. b_n."""
    places = np.arange(1, 2 * words + 3, dtype=np.uint64)
    outputs = mix(np.uint64(_SEED) + places * GOLDEN)
    return np.ascontiguousarray(outputs[::2]), np.ascontiguousarray(outputs[1::2])


def _sum_padded(records: NDArray[np.uint8], out: NDArray[np.uint64]) -> None:
    """Copies records to where each is a whole number of words, a cache full at a time."""
    length = records.shape[1]
    words = -(-length // _WORD)
    at_once = max(1, _PAD_AT_ONCE // (words * _WORD))
    padded = np.zeros((min(at_once, len(records)), words * _WORD), np.uint8)
    for start in range(0, len(records), at_once):
        piece = records[start : start + at_once]
        padded[: len(piece), :length] = piece
        compiled()(_words(padded[: len(piece)]), *_constants(words), out[start : start + at_once])


def _words(records: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """Records of whole words as such, marked read-only whether they are or not.

    A kernel is compiled once for each kind of array, and mapped files cannot be written to.
    """
    if not records.flags.c_contiguous or records.ctypes.data % _WORD:
        records = records.copy()
    # Kernels run on little-endian machines alone, as all that numba supports are.
    words = records.reshape(-1).view(np.uint32).reshape(len(records), -1)
    words.flags.writeable = False
    return words


def _check_records(records: NDArray[np.uint8]) -> None:
    if records.ndim != 2 or records.dtype != np.uint8:
        raise _misfit("records are not a matrix of bytes", records, "uint8 of shape (m, n)")


def _misfit(wrong: str, got: NDArray[np.generic], allowed: str) -> ShapeError:
    fix = "pass one record a row, and room for one sum each"
    return ShapeError(f"{wrong}: got {got.dtype} of shape {got.shape}; expected {allowed}; {fix}")
