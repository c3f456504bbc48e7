"""The two inner loops of a server that adds up rows of point functions.

`convert` of `sparse_points.py` and its equation say what they mean; tests hold both together. All
positions are worked on alike, whatever their control bits.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from keyhole.private.secure_sum.fixed_point import RingArray

__all__ = ["add_rows", "pour"]


@njit(cache=True, nogil=True)
def add_rows(
    local: RingArray,
    mixed: RingArray,
    hidden: RingArray,
    control: NDArray[np.bool_],
    corrections: RingArray,
    bucket_size: int,
    client: int,
    start: int,
    count: int,
) -> None:
    """Adds one client's shares at `count` positions from `start` on, without their sign.

    Args:
        local: (count or more, row), added to.
        mixed: (count or more, row or more): what went into AES.
        hidden: of the same shape: what came out of it.
        control: (clients, positions).
        corrections: (clients, buckets, row).
        bucket_size: positions of a bucket.
        client: which of all.
        start: the first position.
        count: how many.
    """
    zero = local.dtype.type(0)
    for i in range(count):
        at = start + i
        mask = zero - local.dtype.type(control[client, at])  # all ones, or none
        correction = corrections[client, at // bucket_size]
        into, before, after = local[i], mixed[i], hidden[i]
        for j in range(into.shape[0]):
            into[j] += (before[j] ^ after[j]) + (correction[j] & mask)


@njit(cache=True, nogil=True)
def pour(
    local: RingArray, keys: NDArray[np.int32], start: int, count: int, total: RingArray
) -> None:
    """Adds local rows to those of their keys and clears them; positions without a key are lost.

    Args:
        local: (count or more, row).
        keys: (positions,) int32, -1 where there is none.
        start: the position of the first local row.
        count: how many.
        total: (num_keys, row), added to.
    """
    for i in range(count):
        key = keys[start + i]
        if key >= 0:
            for j in range(local.shape[1]):
                total[key, j] += local[i, j]
        local[i, :] = 0
