"""Updates of a cohort added up under their keys, as rows: deselect without a dense model.

The result holds one row for each key that somebody chose, so its cost and size depend on what was
selected. `keyhole.server.submodels` spreads it over a dense model; a server state takes it as it
is.

Clients are added up in blocks, from the first to the last, and blocks in pairs, pairs of pairs and
so on. Floating point numbers in another order give other bytes: with blocks and pairs that are
always the same, each may be summed wherever its clients were trained.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from keyhole import tree
from keyhole.errors import NotFiniteError
from keyhole.primitives.aggregate import divide
from keyhole.primitives.keyspace import Keys
from keyhole.primitives.layout import Layout
from keyhole.primitives.parts import Part
from keyhole.server.rows import scatter_add_rows, sum_rows
from keyhole.server.updates import RowUpdate, no_update
from keyhole.types import Array, Tree

__all__ = [
    "BLOCK",
    "PLAIN_SUM_SEEN_BY",
    "BlockSum",
    "Over",
    "choosers",
    "merge_blocks",
    "pair_up",
    "sum_block",
    "sum_updates",
]

BLOCK = 64
"""Clients of a block. Part of what a run's bytes depend on: never a matter of how it is run."""

PLAIN_SUM_SEEN_BY: Mapping[str, str] = {"server": "each update, its keys and whose they are"}
"""What is learned by whoever adds updates up in the clear."""

Over: TypeAlias = Literal["nothing", "cohort", "choosers"]
"""What a sum is divided by: nothing, N (Eq. 5), or the number of clients that chose the key."""


@dataclass(frozen=True)
class BlockSum:
    """The updates of consecutive clients, added up under their keys.

    Args:
        parts: for each part its distinct keys, ascending, and the sum of the rows of each.
        clients: how many were added.
        refused: places, from the first client on, of those whose update could not be added.
        span: how many blocks in a row were added up, a power of two.
    """

    parts: tuple[RowUpdate, ...]
    clients: int
    refused: tuple[int, ...] = ()
    span: int = 1


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
    blocks = (
        sum_block(layout, updates[at : at + BLOCK], keys[at : at + BLOCK])
        for at in range(0, len(updates), BLOCK)
    )
    return merge_blocks(layout, pair_up(blocks), keys, over)


def sum_block(
    layout: Layout,
    updates: Sequence[Tree],
    keys: Sequence[Mapping[str, Keys]],
    before: BlockSum | None = None,
) -> BlockSum:
    """Adds up the updates of one block, of at most `BLOCK` clients; see `sum_updates`.

    Args:
        layout: the model and its cuts.
        updates: u_n, each shaped as its client's sub-model.
        keys: z_n, each by the name of its key space.
        before: the sum of the first clients of the block, if these follow on them: additions are
            the same ones in the same order, so a block may be added up in pieces.
    """
    for update, chosen in zip(updates, keys, strict=True):
        layout.check(update, chosen)
    before = before or BlockSum(tuple(map(no_update, layout.parts)), 0)
    if not updates:
        return before
    leaves = [tree.flatten(update) for update in updates]
    pairs = zip(layout.parts, before.parts, strict=True)
    parts = tuple(_sum_part(part, leaves, keys, so_far) for part, so_far in pairs)
    return replace(before, parts=parts, clients=before.clients + len(updates))


def pair_up(blocks: Iterable[BlockSum]) -> list[BlockSum]:
    """Adds neighbours up: block 0 to block 1, 2 to 3; then pairs to pairs, fours to fours.

    This is a fixed tree: n blocks leave one sum for each bit of n that is set, the longest first.
    Whoever holds blocks k 2^r to (k + 1) 2^r may add them up apart and pass on their sum: the bytes
    are the same.

    Args:
        blocks: from the first to the last; a sum of several stands where they would stand.

    Raises:
        NotFiniteError: a sum overflows.

    >>> [summed.span for summed in pair_up([BlockSum((), 64)] * 13)]
    [8, 4, 1]
    """
    left: list[BlockSum] = []
    for summed in blocks:
        left.append(summed)
        while len(left) > 1 and left[-2].span == left[-1].span:
            left[-2:] = [_add_pair(*left[-2:])]
    return left


def merge_blocks(
    layout: Layout, blocks: Iterable[BlockSum], keys: Sequence[Mapping[str, Keys]], over: Over
) -> tuple[RowUpdate, ...]:
    """Adds up, from the first to the last, what `pair_up` left, and divides.

    Args:
        layout: the model and its cuts.
        blocks: at least one with a client.
        keys: z_n of all clients that were added.
        over: what to divide by.

    Raises:
        NotFiniteError: a sum overflows.
    """
    filled = [block.parts for block in blocks if block.clients]
    merged = [_merge_part(same) for same in zip(*filled, strict=True)]
    if over == "cohort":
        return tuple(RowUpdate(u.keys, divide(u.rows, len(keys))) for u in merged)
    if over == "choosers":
        counts = (choosers(part, keys) for part in layout.parts)
        pairs = zip(merged, counts, strict=True)
        return tuple(RowUpdate(u.keys, divide(u.rows, n[:, None])) for u, n in pairs)
    return tuple(merged)


def choosers(part: Part, keys: Sequence[Mapping[str, Keys]]) -> NDArray[np.int64]:
    """How many clients chose each distinct key of a part, ascending by key."""
    once = np.concatenate([np.unique(part.keys_of(chosen).array) for chosen in keys])
    return np.unique(once, return_counts=True)[1].astype(np.int64)


def _sum_part(
    part: Part,
    leaves: Sequence[Mapping[str, Array]],
    keys: Sequence[Mapping[str, Keys]],
    before: RowUpdate,
) -> RowUpdate:
    zs = [before.keys, *(part.keys_of(chosen).array for chosen in keys)]
    dtypes = {np.asarray(leaf[field.path]).dtype for leaf in leaves for field in part.fields}
    dtype = np.result_type(before.rows, *(f.dtype for f in part.fields), *dtypes)
    ends = np.cumsum([len(z) for z in zs]).tolist()
    rows = np.empty((ends[-1], part.slice_size), dtype)
    rows[: ends[0]] = before.rows
    for leaf, (start, stop) in zip(leaves, pairwise(ends), strict=True):
        part.to_rows(leaf, out=rows[start:stop])
    distinct, sums = sum_rows(np.concatenate(zs), rows)
    if not np.all(np.isfinite(sums)):
        spans = [rows[start:stop] for start, stop in pairwise(ends)]
        broken = sum(not np.all(np.isfinite(span)) for span in spans)
        raise _not_finite(f"{broken} of {len(leaves)} clients")
    return RowUpdate(distinct, sums)


def _add_pair(left: BlockSum, right: BlockSum) -> BlockSum:
    """Two sums of as many blocks; clients of the right one follow on those of the left one."""
    filled = [summed.parts for summed in (left, right) if summed.clients] or [left.parts]
    parts = tuple(_merge_part(same) for same in zip(*filled, strict=True))
    behind = tuple(left.span * BLOCK + place for place in right.refused)
    clients, span = left.clients + right.clients, left.span + right.span
    return BlockSum(parts, clients, left.refused + behind, span)


def _merge_part(same: Sequence[RowUpdate]) -> RowUpdate:
    """One part of several blocks, added up in their order; nothing but the sum is allocated."""
    if len(same) == 1:
        return same[0]
    distinct = np.unique(np.concatenate([part.keys for part in same]))
    dtype = np.result_type(*(part.rows.dtype for part in same))
    sums = np.zeros((len(distinct), same[0].rows.shape[1]), dtype)
    for part in same:
        places = np.searchsorted(distinct, part.keys)
        scatter_add_rows(sums, places, np.ascontiguousarray(part.rows, dtype))
    if not np.all(np.isfinite(sums)):
        raise _not_finite(f"a sum beyond {sums.dtype}")
    return RowUpdate(distinct, sums)


def _not_finite(got: str) -> NotFiniteError:
    return NotFiniteError(
        "updates hold NaN or infinity, or their sum overflows",
        got=got,
        allowed="finite numbers",
        fix="lower client_lr or clip gradients; drop those clients from the round",
    )
