"""Numbers that look random and are a pure function of (seed, key, position).

Counter-based: any number can be made without those before it, so a slice rounded on demand has the
bytes of the slice that was rounded beforehand. Not for secrets.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from keyhole.types import KeyArray

__all__ = ["GOLDEN", "mix", "uniform"]

# The increment and the two multipliers of SplitMix64 (Steele, Lea and Flood, 2014).
GOLDEN, _MIX_1, _MIX_2 = (
    np.uint64(0x9E3779B97F4A7C15),
    np.uint64(0xBF58476D1CE4E5B9),
    np.uint64(0x94D049BB133111EB),
)


def uniform(seed: int, keys: KeyArray, count: int, start: int = 0) -> NDArray[np.float32]:
    """Returns `count` uniform numbers in [0, 1) for each key.

    Args:
        seed: any whole number from 0 to 2^64 - 1.
        keys: shape (m,).
        count: numbers per key.
        start: how many numbers of each key's stream to pass over.

    Returns:
        float32 of shape (m, count); row i depends on seed and keys[i] only.

    >>> uniform(1, np.array([5, 9]), 3)[1] == uniform(1, np.array([9]), 3)[0]
    array([ True,  True,  True])
    """
    stream = mix(mix(np.array([seed], np.uint64)) ^ mix(keys.astype(np.uint64) + GOLDEN))
    steps = np.arange(start + 1, start + count + 1, dtype=np.uint64) * GOLDEN
    bits = mix(stream[:, None] + steps) >> np.uint64(40)
    return bits.astype(np.float32) * np.float32(2**-24)


def mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finalizer: every input bit changes every output bit half of the time."""
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))
