"""Packs numbers of a few bits each, one after the other from the lowest bit on."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from keyhole.compiled import loop
from keyhole.errors import MalformedError

_WORD_BYTES = 8

MAX_BITS = 56
"""Of a number: with up to 7 bits that are left over, they fit into a word."""


def packed_bytes(count: int, bits: int) -> int:
    """Returns the number of bytes of packed numbers.

    >>> packed_bytes(4, 54)
    27
    """
    return -(-count * bits // 8)


def pack_bits(numbers: NDArray[np.uint64], bits: int) -> bytes:
    """Returns numbers of a one-dimensional array below 2^bits, `bits` of each; zeros fill the last
    byte.

    >>> pack_bits(np.array([1, 2, 3], np.uint64), 4).hex()
    '2103'
    """
    assert 1 <= bits <= MAX_BITS
    out = np.empty(packed_bytes(len(numbers), bits), np.uint8)
    pack_into(numbers, bits, out)
    return out.tobytes()


def unpack_bits(data: memoryview, count: int, bits: int) -> NDArray[np.uint64]:
    """Returns the numbers that were packed.

    Raises:
        MalformedError: another length, or bits behind the last number.
    """
    raw = np.frombuffer(data, np.uint8)
    spare = 8 * len(raw) - count * bits
    if len(raw) != packed_bytes(count, bits) or (spare and raw[-1] >> (8 - spare)):
        raise MalformedError(
            f"packed numbers do not fit: got {len(raw)} bytes; expected {count} numbers of {bits} "
            "bits, and zeros behind them; send them again"
        )
    out = np.empty(count, np.uint64)
    unpack_into(raw, bits, out)
    return out


@loop("keyhole.crypto.ntt_loops")
def pack_into(numbers: NDArray[np.uint64], bits: int, out: NDArray[np.uint8]) -> None:
    """Writes `bits` bits of each number."""
    raw = numbers.astype("<u8").view(np.uint8).reshape(-1, 8)
    each = np.unpackbits(raw, axis=1, bitorder="little")[:, :bits]
    out[:] = np.packbits(each, bitorder="little")


@loop("keyhole.crypto.ntt_loops")
def unpack_into(data: NDArray[np.uint8], bits: int, out: NDArray[np.uint64]) -> None:
    """Reads numbers of `bits` bits: eight of them begin at the same bits of bytes as the next
    eight do."""
    padded = np.concatenate([data, np.zeros(2 * _WORD_BYTES, np.uint8)])
    mask = np.uint64((1 << bits) - 1)
    for first in range(min(8, len(out))):
        found = out[first::8]
        start, shift = divmod(first * bits, 8)
        words = np.ndarray(len(found), "<u8", padded.data, start, (bits,))  # where no word begins
        np.right_shift(words, np.uint64(shift), out=found)
        found &= mask
