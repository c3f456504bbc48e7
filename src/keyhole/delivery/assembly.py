"""Assembly: a sub-model from the records of its slices, whichever way they came."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np
from numpy.typing import NDArray

from keyhole import tree
from keyhole.delivery.records import RecordArray, Records
from keyhole.primitives.keyspace import Keys
from keyhole.primitives.layout import Layout
from keyhole.types import Array, Tree

__all__ = ["assemble", "keep_found", "most_keys_of"]

Mask = NDArray[np.bool_]


def assemble(
    layout: Layout,
    tables: Sequence[Records],
    found: Sequence[RecordArray],
    keys: Mapping[str, Keys],
) -> Tree:
    """Returns the sub-model that records stand for.

    Args:
        layout: the model and its cuts.
        tables: what the records of each part hold.
        found: the records of each part, in the order of `part.keys_of(keys)`.
        keys: of each key space, by name.
    """
    leaves: dict[str, Array] = {}
    for part, table, records in zip(layout.parts, tables, found, strict=True):
        counts = [len(keys[factor.name]) for factor in part.product.factors]
        leaves |= part.from_rows(table.decode_rows(records), counts)
    return tree.unflatten(layout.structure, leaves)


def keep_found(
    layout: Layout,
    found: Sequence[RecordArray],
    is_found: Sequence[Mask],
    keys: Mapping[str, Keys],
) -> tuple[list[RecordArray], dict[str, Keys]]:
    """Drops the keys whose slices are missing, so that what is left is a sub-model.

    A slice of a part that two key spaces cut is missing for a pair of keys: the first of them is
    dropped, from every part.

    Args:
        layout: the model and its cuts.
        found: the records of each part, in the order of `part.keys_of(keys)`.
        is_found: which of them are there.
        keys: what was asked for.

    Returns:
        The records of each part and the keys that are left, order and repeats kept.
    """
    kept = {name: np.ones(len(z), bool) for name, z in keys.items()}
    for part, there in zip(layout.parts, is_found, strict=True):
        if part.product.factors:
            first, *others = (factor.name for factor in part.product.factors)
            pairs = len(kept[first]), prod(len(keys[name]) for name in others)
            kept[first] &= there.reshape(pairs).all(axis=1)
    left = {name: Keys(z.space, z.array[kept[name]]) for name, z in keys.items()}
    records = []
    for part, rows in zip(layout.parts, found, strict=True):
        masks = [kept[factor.name] for factor in part.product.factors]
        grid = rows.reshape(*map(len, masks), rows.shape[1])
        chosen = grid[np.ix_(*masks)] if masks else rows
        records.append(chosen.reshape(prod(int(m.sum()) for m in masks), rows.shape[1]))
    return records, left


def most_keys_of(layout: Layout, keys_per_client: Mapping[str, int]) -> list[int]:
    """The most keys that a client asks of each part; every key where nothing is cut.

    Args:
        layout: the model and its cuts.
        keys_per_client: key space -> m, which is public.
    """
    return [
        min(
            prod(keys_per_client[factor.name] for factor in part.product.factors),
            part.space.num_keys,
        )
        for part in layout.parts
    ]
