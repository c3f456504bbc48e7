"""Keeps the norm of each key's last update, for choices that read it, such as `importance`.

The norms are of sums, never of one client's update. They follow from the models before and after a
step, so they say no more than the model does: with secure sums the server knows the sum anyway,
with privacy the sum has its noise. Only keys that have moved are held.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from keyhole.arrays import Array, KeyArray
from keyhole.keys.choice import KeyTable
from keyhole.primitives.keyspace import Keys
from keyhole.primitives.layout import Layout
from keyhole.rounds.spec import RunParts
from keyhole.server.row_sums import RowUpdate

_ARCHIVE = b"PK\x03\x04"  # what dumped norms begin with


class KeptNorms:
    """Keeps the norms of the last updates from round to round, where a run has them kept."""

    def __init__(self) -> None:
        self._norms: dict[str, KeyTable] = {}

    def told(self, parts: RunParts) -> RunParts:
        """Returns the parts with what is known before a round."""
        return parts if parts.norms is None else replace(parts, norms=self._norms)

    def follow(self, parts: RunParts, layout: Layout, updates: Sequence[RowUpdate] | None) -> None:
        """Takes note of the step of a round; None where it made none."""
        if parts.norms is not None:
            self._norms = norms_after(self._norms, layout, updates or ())

    def dump(self) -> bytes:
        """Returns the norms, if there are any."""
        return dump_norms(self._norms) if self._norms else b""

    def load(self, data: bytes) -> None:
        """Goes on from what `dump` returned."""
        self._norms = load_norms(data)


def norms_after(
    norms: Mapping[str, KeyTable], layout: Layout, updates: Sequence[RowUpdate]
) -> dict[str, KeyTable]:
    """Returns the norms after a step: keys that it touched have new ones, others keep theirs.

    The norm of a key is the L2 norm of all numbers of the update that the key cuts, whatever other
    keys cut them too.

    Args:
        norms: key space -> what was known before.
        updates: of the step, one for each part of the layout; none where no step is made.
    """
    found = dict(norms)
    for space in layout.spaces if updates else ():
        touched, squares = _squares(layout, updates, space.name)
        before = found.get(space.name, KeyTable.empty())
        is_kept = ~np.isin(before.keys, touched)
        keys = np.concatenate([before.keys[is_kept], touched])
        # Rounded as they are published: devices choose as clients in process do.
        moved = np.sqrt(squares).astype(np.float32).astype(np.float64)
        values = np.concatenate([before.values[is_kept], moved])
        order = np.argsort(keys)
        order = order[values[order] > 0]
        found[space.name] = KeyTable(keys[order], values[order])
    return found


def _squares(layout: Layout, updates: Sequence[RowUpdate], space: str) -> tuple[KeyArray, Array]:
    """The touched keys of a key space, rising, and the sums of their squares."""
    keys, squares = [np.empty(0, np.int64)], [np.empty(0)]
    for part, update in zip(layout.parts, updates, strict=True):
        factors = [factor.name for factor in part.product.factors]
        if space in factors:
            split = part.product.split(Keys(part.space, update.keys))
            keys.append(split[factors.index(space)].array)
            squares.append(np.square(update.rows, dtype=np.float64).sum(axis=1))
    touched, place = np.unique(np.concatenate(keys), return_inverse=True)
    return touched, np.bincount(place, np.concatenate(squares), minlength=len(touched))


def dump_norms(norms: Mapping[str, KeyTable]) -> bytes:
    """Returns norms as bytes; equal norms give equal bytes."""
    arrays: dict[str, Any] = {}
    for name, table in sorted(norms.items()):
        arrays |= {f"keys {name}": table.keys, f"values {name}": table.values}
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def load_norms(data: bytes) -> dict[str, KeyTable]:
    """Returns the norms that `dump_norms` wrote; none of bytes that are something else."""
    if data[:4] != _ARCHIVE:
        return {}
    with np.load(io.BytesIO(data), allow_pickle=False) as file:
        names = [name.partition(" ")[2] for name in file if name.startswith("keys ")]
        return {name: KeyTable(file[f"keys {name}"], file[f"values {name}"]) for name in names}
