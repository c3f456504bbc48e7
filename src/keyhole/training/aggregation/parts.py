"""Updates part by part: what a client adds under which keys, and rows from sums."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from keyhole import tree
from keyhole.primitives.aggregate import divide
from keyhole.primitives.layout import Layout
from keyhole.server.aggregation import Over
from keyhole.server.rows import sum_rows
from keyhole.server.updates import RowUpdate
from keyhole.training.aggregation.contract import Contribution
from keyhole.types import KeyArray

__all__ = ["PartSum", "RowsOfClient", "rows_of"]

RowsOfClient = tuple[KeyArray, NDArray[np.float32]]
"""Different keys of one part, ascending, and what one client adds to the row of each."""


def rows_of(layout: Layout, one: Contribution) -> list[RowsOfClient]:
    """What a client adds to each part; rows of a repeated key are one."""
    layout.check(one.update, one.keys)
    leaves = tree.flatten(one.update)
    found = []
    for part in layout.parts:
        rows = np.ascontiguousarray(part.to_rows(leaves), np.float32)
        found.append(sum_rows(part.keys_of(one.keys).array, rows))
    return found


@dataclass(frozen=True, repr=False)
class PartSum:
    """What all clients added to one part.

    Args:
        keys: (d,) int64, ascending; those of which something is known.
        rows: (d, width), their sums.
        counts: (d,) how many clients chose each; None where that was not asked for.
    """

    keys: KeyArray
    rows: NDArray[np.float32]
    counts: NDArray[np.int64] | None = None

    def __repr__(self) -> str:
        return f"PartSum({len(self.keys)} keys)"

    @staticmethod
    def of_dense(sums: NDArray[np.float32], counts: NDArray[np.int64] | None) -> PartSum:
        """The rows of a dense sum that somebody touched: a step leaves zeros as they are."""
        is_touched = sums.any(axis=1) if counts is None else counts > 0
        keys = np.flatnonzero(is_touched)
        return PartSum(keys, sums[keys], None if counts is None else counts[keys])

    def divided(self, over: Over, clients: int) -> RowUpdate:
        """The update of the part, over what the plan divides by.

        Args:
            over: what to divide by; "choosers" needs counts.
            clients: how many were added.
        """
        if over == "cohort":
            return RowUpdate(self.keys, divide(self.rows, clients))
        if over == "choosers":
            return RowUpdate(self.keys, divide(self.rows, self.known_counts[:, None]))
        return RowUpdate(self.keys, self.rows)

    @property
    def known_counts(self) -> NDArray[np.int64]:
        """The counts, of a sum that was asked for them."""
        assert self.counts is not None
        return self.counts
