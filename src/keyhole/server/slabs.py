"""Slabs: the arrays that hold rows, their optimizer state, and the step each row is current at."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Slab"]


@dataclass
class Slab:
    """Rows side by side in anonymous memory; the last dimension is one row.

    Args:
        values: (capacity, width) float32.
        moments: as many arrays of that shape as the optimizer keeps, none to two.
        last: (capacity,) int32; the step a row is current at, 0 for one that was never touched.
    """

    values: NDArray[np.float32]
    moments: tuple[NDArray[np.float32], ...]
    last: NDArray[np.int32]

    @staticmethod
    def empty(capacity: int, width: int, moments: int) -> Slab:
        """Memory that is not filled: pages cost nothing until they are written."""
        shape = (capacity, width)
        states = tuple(np.empty(shape, np.float32) for _ in range(moments))
        return Slab(np.empty(shape, np.float32), states, np.empty(capacity, np.int32))

    @property
    def first(self) -> NDArray[np.float32]:
        """The first state array; the values stand in where there is none and are not read as
        such."""
        return self.moments[0] if self.moments else self.values

    @property
    def arrays(
        self,
    ) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32], NDArray[np.int32]]:
        """Values, first and second moments, last: what a kernel takes."""
        second = self.moments[1] if len(self.moments) > 1 else self.first
        return self.values, self.first, second, self.last

    @property
    def nbytes(self) -> int:
        """The size of all arrays; pages that were never written take no memory."""
        return self.values.nbytes + sum(m.nbytes for m in self.moments) + self.last.nbytes

    def grown(self, capacity: int, count: int) -> Slab:
        """A larger slab with the first `count` rows copied."""
        larger = Slab.empty(capacity, self.values.shape[1], len(self.moments))
        for old, new in zip(self.named().values(), larger.named().values(), strict=True):
            new[:count] = old[:count]
        return larger

    def named(self) -> dict[str, NDArray[np.float32] | NDArray[np.int32]]:
        """The arrays by name, in a fixed order: what a snapshot stores."""
        moments = {f"moment{i}": moment for i, moment in enumerate(self.moments)}
        return {"values": self.values, **moments, "last": self.last}
