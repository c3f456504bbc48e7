"""Updates of a cohort added up under their keys, as rows: deselect without a dense model.

The result holds one row for each key that somebody chose, so its cost and size depend on what was
selected. `keyhole.server.submodels` spreads it over a dense model; a server state takes it as it
is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

import numpy as np

from keyhole import tree
from keyhole.errors import NotFiniteError
from keyhole.primitives.aggregate import divide
from keyhole.primitives.keyspace import Keys
from keyhole.primitives.layout import Layout
from keyhole.primitives.parts import Part
from keyhole.server.rows import sum_rows
from keyhole.server.updates import RowUpdate
from keyhole.types import Array, KeyArray, Tree

__all__ = ["PLAIN_SUM_SEEN_BY", "Over", "sum_updates"]

PLAIN_SUM_SEEN_BY: Mapping[str, str] = {"server": "each update, its keys and whose they are"}
"""What is learned by whoever adds updates up in the clear."""

Over: TypeAlias = Literal["nothing", "cohort", "choosers"]
"""What a sum is divided by: nothing, N (Eq. 5), or the number of clients that chose the key."""


def sum_updates(
    layout: Layout,
    updates: Sequence[Tree],
    keys: Sequence[Mapping[str, Keys]],
    over: Over,
) -> tuple[RowUpdate, ...]:
    """Adds updates up under their keys, from the first client to the last.

    Args:
        layout: the model and its cuts.
        updates: u_n, each shaped as its client's sub-model.
        keys: z_n, each by the name of its key space.
        over: what to divide by.

    Returns:
        For each part its distinct keys, ascending, and a row for each.

    Raises:
        ShapeError: an update is not shaped as its sub-model.
        NotFiniteError: an update holds NaN or infinity, or a sum overflows.
    """
    for update, chosen in zip(updates, keys, strict=True):
        layout.check(update, chosen)
    leaves = [tree.flatten(update) for update in updates]
    return tuple(_sum_part(part, leaves, keys, over) for part in layout.parts)


def _sum_part(
    part: Part,
    leaves: Sequence[Mapping[str, Array]],
    keys: Sequence[Mapping[str, Keys]],
    over: Over,
) -> RowUpdate:
    zs = [part.keys_of(chosen).array for chosen in keys]
    blocks = [part.to_rows(leaf) for leaf in leaves]
    dtype = np.result_type(*(f.dtype for f in part.fields), *(b.dtype for b in blocks))
    distinct, sums = sum_rows(
        np.concatenate(zs), np.ascontiguousarray(np.concatenate(blocks), dtype)
    )
    _check_finite(sums, blocks)
    if over == "cohort":
        sums = divide(sums, len(zs))
    if over == "choosers":
        sums = divide(sums, _choosers(zs)[:, None])
    return RowUpdate(distinct, sums)


def _choosers(zs: Sequence[KeyArray]) -> Array:
    """How many clients chose each distinct key, ascending by key."""
    once = np.concatenate([np.unique(z) for z in zs])
    return np.unique(once, return_counts=True)[1]


def _check_finite(sums: Array, blocks: Sequence[Array]) -> None:
    if not np.all(np.isfinite(sums)):
        broken = sum(not np.all(np.isfinite(block)) for block in blocks)
        raise NotFiniteError(
            "updates hold NaN or infinity, or their sum overflows",
            got=f"{broken} of {len(blocks)} clients",
            allowed="finite numbers",
            fix="lower client_lr or clip gradients; drop those clients from the round",
        )
