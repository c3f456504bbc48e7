"""Excerpts: the rows of some keys, small enough to travel, from which sub-models are selected.

What clients of one block chose has many keys in common, so an excerpt is smaller than their
sub-models together; and whoever holds it selects them as the server would, byte for byte.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from keyhole.errors import KeySpaceError
from keyhole.primitives.layout import ClientKeys, Layout, RowSource
from keyhole.types import Array, KeyArray

__all__ = ["Excerpt"]


@dataclass(frozen=True)
class Excerpt:
    """Rows of some parts of a model: a `RowSource` for the keys that are there.

    Args:
        layout: the model and its cuts.
        parts: place of a part -> its keys, ascending, and the row of each.
    """

    layout: Layout
    parts: Mapping[int, tuple[KeyArray, Array]]

    @staticmethod
    def of_everyone(source: RowSource) -> Excerpt:
        """What every client receives: the part that is not cut."""
        parts = enumerate(source.layout.parts)
        uncut = [place for place, part in parts if not part.product.factors]
        only = np.zeros(1, np.int64)
        return Excerpt(source.layout, {place: (only, source.rows(place, only)) for place in uncut})

    @staticmethod
    def of_keys(source: RowSource, keys: Sequence[ClientKeys]) -> Excerpt:
        """What clients with these keys receive beyond that, each row once."""
        chosen = [source.layout.keys_by_space(z) for z in keys]
        parts = {}
        for place, part in enumerate(source.layout.parts):
            if part.product.factors:
                distinct = np.unique(np.concatenate([part.keys_of(z).array for z in chosen]))
                parts[place] = distinct, source.rows(place, distinct)
        return Excerpt(source.layout, parts)

    def __or__(self, other: Excerpt) -> Excerpt:
        """Parts of both."""
        return Excerpt(self.layout, {**self.parts, **other.parts})

    def rows(self, part: int, keys: KeyArray) -> Array:
        """Implements `RowSource.rows`.

        Raises:
            KeySpaceError: a key is not in the excerpt.
        """
        held, rows = self.parts[part]
        at = np.searchsorted(held, keys)
        if not np.array_equal(held.take(at, mode="clip"), keys):
            raise KeySpaceError(
                "keys are not in the excerpt",
                got=f"{len(np.setdiff1d(keys, held))} others",
                allowed=f"the {len(held)} keys that it was made for",
                fix="name them where it is made",
            )
        return rows.take(at, axis=0)
