"""The two inner loops of a party that expands trees of seeds.

`extend` and `apply_corrections` of `dpf.py` say what they mean; tests hold both together.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

__all__ = ["grow", "write_leaves"]

_ONE = np.uint64(1)


@njit(cache=True, nogil=True)
def grow(
    children: NDArray[np.uint64],
    bits: NDArray[np.bool_],
    control: NDArray[np.bool_],
    seed_words: NDArray[np.uint64],
    bit_words: NDArray[np.bool_],
) -> None:
    """Takes control bits out of children and corrects both, in place.

    Args:
        children: (n, w, 2, 2) of tree, node, side and half of a seed.
        bits: (n, w, 2), written.
        control: (n, w) of the nodes.
        seed_words: (n, 2).
        bit_words: (n, 2).
    """
    for i in range(children.shape[0]):
        for j in range(children.shape[1]):
            mask = np.uint64(0) - np.uint64(control[i, j])
            for side in range(2):
                low = children[i, j, side, 0]
                bits[i, j, side] = (low & _ONE != 0) ^ (control[i, j] & bit_words[i, side])
                children[i, j, side, 0] = (low & ~_ONE) ^ (seed_words[i, 0] & mask)
                children[i, j, side, 1] ^= seed_words[i, 1] & mask


@njit(cache=True, nogil=True)
def write_leaves(
    leaves: NDArray[np.uint8],
    control: NDArray[np.bool_],
    corrections: NDArray[np.uint8],
    out: NDArray[np.uint8],
) -> None:
    """Corrects leaves and writes them one behind the other, as far as there is room.

    Args:
        leaves: (n, w, leaf_bytes or more).
        control: (n, w or more).
        corrections: (n, leaf_bytes).
        out: (n, share_bytes), written.
    """
    width = corrections.shape[1]
    for i in range(leaves.shape[0]):
        for j in range(leaves.shape[1]):
            mask = np.uint8(0) - np.uint8(control[i, j])
            for k in range(min(width, out.shape[1] - j * width)):
                out[i, j * width + k] = leaves[i, j, k] ^ (corrections[i, k] & mask)
