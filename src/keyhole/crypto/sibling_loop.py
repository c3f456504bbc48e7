"""Finds the nodes of a proof: the compiled loop behind `merkle.proof_places`.

NumPy makes a dozen passes over the keys at every level of a tree; a service that proves 1,000 rows
to each of many devices makes one. Whether two keys are siblings cannot be foretold, so the loop
counts instead of branching.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

Numbers = NDArray[np.int64]


@njit(cache=True, nogil=True)
def find_siblings(keys: Numbers, sizes: Numbers, room: Numbers, out: Numbers) -> int:
    """Writes the places of a proof's nodes to `out`; returns how many there are.

    Args:
        keys: ascending; may repeat.
        sizes: nodes of each level, from the leaves to the root.
        room: longer than `keys` by one.
        out: longer by one than the longest proof.
    """
    count, known = 0, 0
    for i in range(len(keys)):
        room[known] = keys[i]
        known += i + 1 == len(keys) or keys[i + 1] != keys[i]
    start = 0
    for level in range(len(sizes) - 1):
        at, above, size = 0, 0, sizes[level]
        room[known] = -1  # nobody's sibling
        while at < known:
            key = room[at]
            sibling = key ^ 1
            is_next = room[at + 1] == sibling
            out[count] = start + sibling
            count += (not is_next) & (sibling < size)
            room[above] = key >> 1
            above += 1
            at += 1 + is_next
        known = above
        start += size
    return count
