"""Point functions whose value is a row: zero everywhere but at one secret position.

The tree is that of `dpf.py`, with a leaf for every position. At a position with seed s and control
bit t, party b's share of the row is

    (-1)^b (convert(s) + t * correction)

in the ring, where convert stretches a seed to a row and the correction makes both shares add up to
the secret row at the secret position (Boyle, Gilboa and Ishai, EUROCRYPT 2015 and CCS 2016, for
any group). Everywhere else both parties have the same seed and bit, and the shares cancel.

Hidden: position and row, from a party that holds one of both roots, for seeds of 127 bits and AES
under a fixed key as a circular correlation-robust hash. Not hidden: anything from whoever holds
both roots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keyhole.private.dpf import Bits, share_paths
from keyhole.private.prg import SEED_BYTES, FixedKeyAes, SeedArray, fixed_key
from keyhole.private.secure_sum.fixed_point import RingArray
from keyhole.types import KeyArray

__all__ = ["Corrections", "convert", "row_blocks", "rows_aes", "share_rows_at", "tree_aes"]

_TREE, _ROWS = b"keyhole-sum-tree", b"keyhole-sum-rows"


@dataclass(frozen=True, repr=False)
class Corrections:
    """What both parties receive alike, for n point functions.

    Args:
        nonce: 16 bytes that belong to this client's message alone.
        seeds: (n, depth, 16) uint8, control bits clear.
        bits: (n, depth, 2) bool, of the left and the right child.
        rows: (n, row) ring.
    """

    nonce: bytes
    seeds: NDArray[np.uint8]
    bits: Bits
    rows: RingArray

    def __repr__(self) -> str:
        return f"Corrections({len(self.rows)} points)"


def tree_aes(nonce: bytes) -> FixedKeyAes:
    """What grows the trees of one client."""
    return FixedKeyAes(fixed_key(nonce, _TREE))


def rows_aes(nonce: bytes) -> FixedKeyAes:
    """What stretches the seeds of one client's positions to rows."""
    return FixedKeyAes(fixed_key(nonce, _ROWS))


def row_blocks(row: int, dtype: np.dtype[Any]) -> int:
    """Blocks of AES that cover a row."""
    return -(-row * dtype.itemsize // SEED_BYTES)


def convert(seeds: SeedArray, row: int, dtype: np.dtype[Any], nonce: bytes) -> RingArray:
    """Returns the rows of seeds (..., 16): (..., row), little-endian elements."""
    whole = rows_aes(nonce).expand(seeds.reshape(-1, SEED_BYTES), row_blocks(row, dtype))
    cut = whole.view(dtype.newbyteorder("<"))[:, :row].astype(dtype, copy=False)
    return cut.reshape(*seeds.shape[:-1], row)


def share_rows_at(
    points: KeyArray, rows: RingArray, depth: int, nonce: bytes, roots: tuple[bytes, bytes]
) -> Corrections:
    """Shares rows at secret positions, one of each in every tree.

    Args:
        points: (n,) int64 of [0, 2^depth).
        rows: (n, row) ring.
        depth: of the trees.
        nonce: 16 bytes, used once; no secret.
        roots: 16 bytes of either party: fresh, secret, for one use.
    """
    seed_words, bit_words, ends, control = share_paths(tree_aes(nonce), points, depth, roots)
    one, other = convert(ends, rows.shape[1], rows.dtype, nonce)
    # At the point one control bit is set: the correction counts once, with that party's sign.
    missing = rows - one + other
    return Corrections(
        nonce, seed_words, bit_words, np.where(control[1][:, None], -missing, missing)
    )
