"""Key bundles: the keys of many clients as a few arrays, which travel faster than many do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from keyhole.primitives.keyspace import Keys, KeySpace
from keyhole.primitives.layout import ClientKeys
from keyhole.types import KeyArray

__all__ = ["KeyBundle"]


@dataclass(frozen=True)
class KeyBundle:
    """Keys of clients, end to end.

    Args:
        shapes: for each client the key spaces that it named, and in what they were wrapped, as a
            place in `kinds`; clients of one task mostly have one kind.
        kinds: the type of a client's keys, and its key spaces in order.
        keys: of all clients and spaces, one after the other.
        ends: where those of each client and space end.

    >>> word = KeySpace("word", 10)
    >>> bundle = KeyBundle.of([word.keys([3, 1]), (word.keys([]),)])
    >>> [type(keys).__name__ for keys in bundle.unpack()]
    ['Keys', 'tuple']
    """

    shapes: KeyArray
    kinds: tuple[tuple[type, tuple[KeySpace, ...]], ...]
    keys: KeyArray
    ends: KeyArray

    @staticmethod
    def of(keys: Sequence[ClientKeys]) -> KeyBundle:
        """Bundles the keys of clients."""
        kinds: dict[tuple[type, tuple[KeySpace, ...]], int] = {}
        shapes, arrays = [], [np.empty(0, np.int64)]
        for own in keys:
            wrapped = (own,) if isinstance(own, Keys) else tuple(own)
            kind = type(own), tuple(z.space for z in wrapped)
            shapes.append(kinds.setdefault(kind, len(kinds)))
            arrays += [z.array for z in wrapped]
        ends = np.cumsum([len(array) for array in arrays])
        return KeyBundle(np.array(shapes, np.int64), tuple(kinds), np.concatenate(arrays), ends)

    def unpack(self) -> list[ClientKeys]:
        """The keys of each client, as they were."""
        spans = iter([self.keys[start:stop] for start, stop in pairwise(self.ends.tolist())])
        found: list[ClientKeys] = []
        for shape in self.shapes.tolist():
            wrapper, spaces = self.kinds[shape]
            own = [Keys(space, next(spans)) for space in spaces]
            found.append(own[0] if wrapper is Keys else wrapper(own))
        return found
