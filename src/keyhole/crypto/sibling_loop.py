"""Finds and copies the nodes of a proof: the compiled loop behind `merkle.prove`.

NumPy makes a dozen passes over the keys at every level of a tree; a service that proves 1,000 rows
to each of many devices makes one.
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
        room: as long as `keys`.
    """
    count, known = 0, 0
    for i in range(len(keys)):
        if i == 0 or keys[i] != keys[i - 1]:
            room[known] = keys[i]
            known += 1
    start = 0
    for level in range(len(sizes) - 1):
        at, above = 0, 0
        while at < known:
            key = room[at]
            sibling = key ^ 1
            at += 1
            if at < known and room[at] == sibling:
                at += 1
            elif sibling < sizes[level]:
                out[count] = start + sibling
                count += 1
            room[above] = key >> 1
            above += 1
        known = above
        start += sizes[level]
    return count


@njit(cache=True, nogil=True)
def copy_nodes(nodes: NDArray[np.uint64], places: Numbers, out: NDArray[np.uint64]) -> None:
    """Copies nodes, four words each."""
    for i in range(len(places)):
        for word in range(4):
            out[i, word] = nodes[places[i], word]
