"""Adds up the updates of a cohort under their keys, as rows: deselect without a dense model.

The result holds one row for each key that somebody chose, so its cost and size depend on what was
selected. `keyhole.server.state` spreads it over a dense model; a server state takes it as it
is.

Clients are added up in blocks, from the first to the last, and blocks in pairs, pairs of pairs and
so on. Floating point numbers in another order give other bytes: with blocks and pairs that are
always the same, each may be summed wherever its clients were trained.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from keyhole import tree
from keyhole.arrays import Array, KeyArray, Tree
from keyhole.compiled import loop
from keyhole.errors import KeySpaceError, NotFiniteError, ShapeError
from keyhole.primitives.deselect import divide
from keyhole.primitives.keyspace import Keys, are_same_rising, distinct_keys
from keyhole.primitives.layout import Layout, Part
from keyhole.primitives.report import Report
from keyhole.server.rows import scatter_add_rows, sum_rows


@dataclass(frozen=True)
class RowUpdate:
    """The update of one part: u summed or averaged under each key, as `sum_rows` returns it.

    Args:
        keys: (d,) int64, distinct and ascending.
        rows: (d, width) float32; the fields of a slice side by side, in the part's order.
    """

    keys: KeyArray
    rows: NDArray[np.float32]

    def __repr__(self) -> str:
        """Keys may be private: printing shows how many there are."""
        return f"RowUpdate({len(self.keys)} rows)"


def no_update(part: Part) -> RowUpdate:
    """Returns the update of a part that nobody touched."""
    return RowUpdate(np.empty(0, np.int64), np.empty((0, part.slice_size), np.float32))


def check_float32(dtypes: Mapping[str, Any]) -> None:
    """Raises ShapeError unless every parameter is float32: optimizers keep float32 rows."""
    for path, dtype in dtypes.items():
        if dtype != np.float32:
            raise ShapeError(
                f"parameter {path!r} cannot be trained: got {dtype}; expected float32; convert the "
                "model, and make its layout from that"
            )


def check_updates(layout: Layout, updates: Sequence[RowUpdate]) -> None:
    """Raises unless `updates` can be applied as a whole, so that a refused step changes nothing."""
    if len(updates) != len(layout.parts):
        raise ShapeError(
            f"a step takes one update for each part: got {len(updates)} updates; expected "
            f"{len(layout.parts)}; pass them in the order of layout.parts; no_update(part) where "
            "nothing changed"
        )
    for part, update in zip(layout.parts, updates, strict=True):
        _check_rows(part, update)
        _check_keys(part, update.keys)
        _check_finite(part, update.rows)


def _check_rows(part: Part, update: RowUpdate) -> None:
    keys, rows = np.asarray(update.keys), np.asarray(update.rows)
    expected = (len(keys), part.slice_size) if keys.ndim == 1 else "(d, width) with d keys"
    if rows.shape != expected or rows.dtype != np.float32 or not rows.flags.c_contiguous:
        order = "C-contiguous" if rows.flags.c_contiguous else "not C-contiguous"
        raise ShapeError(
            f"rows do not fit part {part.space.name!r}: got {rows.dtype} of shape {rows.shape}, "
            f"{order}; expected float32 of shape {expected}, C-contiguous; sum the clients' rows "
            "of this part with sum_rows"
        )


def _check_keys(part: Part, keys: KeyArray) -> None:
    if keys.dtype != np.int64:
        raise KeySpaceError(
            f"keys of part {part.space.name!r} are not int64: got {keys.dtype}; expected int64; "
            "make them with KeySpace.keys"
        )
    disorder = count_disorder(keys)
    if disorder:
        raise KeySpaceError(
            f"keys of part {part.space.name!r} are not distinct and ascending: got {disorder} of "
            f"{len(keys)} out of order; expected each key above the one before; sum the clients' "
            "rows with sum_rows"
        )
    if len(keys) and not 0 <= keys[0] <= keys[-1] < part.space.num_keys:
        outside = int(np.sum((keys < 0) | (keys > part.space.num_keys - 1)))
        raise KeySpaceError(
            f"keys lie outside part {part.space.name!r}: got {outside} such keys of {len(keys)}; "
            f"expected 0..{part.space.num_keys - 1}; check that the update belongs to this layout"
        )


def _check_finite(part: Part, rows: NDArray[np.float32]) -> None:
    if not is_finite(rows.reshape(-1).view(np.int32)):
        broken = int(np.sum(~np.all(np.isfinite(rows), axis=1)))
        raise NotFiniteError(
            f"the update of part {part.space.name!r} holds NaN or infinity: got {broken} of "
            f"{len(rows)} rows; expected finite numbers; leave out the client that sent them, or "
            "clip updates"
        )


@loop("keyhole.server.row_loops")
def count_disorder(keys: KeyArray) -> int:
    """Returns how many keys are not above the one before."""
    return int(np.count_nonzero(keys[1:] <= keys[:-1]))


@loop("keyhole.server.row_loops")
def is_finite(bits: NDArray[np.int32]) -> bool:
    """Whether no float32, given as its bits, has the exponent of NaN and infinity."""
    exponent = np.int32(0x7F800000)
    return not bool(((bits & exponent) == exponent).any())


BLOCK = 64
"""Clients of a block. Part of what a run's bytes depend on: never a matter of how it is run."""

Over: TypeAlias = Literal["nothing", "cohort", "choosers"]
"""What a sum is divided by: nothing, N (Eq. 5), or the number of clients that chose the key."""


@dataclass(frozen=True)
class BlockSum:
    """The updates of consecutive clients, added up under their keys.

    Args:
        parts: for each part its distinct keys, ascending, and the sum of the rows of each.
        refused: places, from the first client on, of those whose update could not be added.
        empty: places of those that had nothing to add.
        above: places of those whose update was longer than the round allows.
        norms: of the updates that were added, in order, where they were asked for.
        told: place and report, without its update, of those that said more than an update.
        span: how many blocks in a row were added up, a power of two.
    """

    parts: tuple[RowUpdate, ...]
    clients: int
    refused: tuple[int, ...] = ()
    span: int = 1
    empty: tuple[int, ...] = ()
    above: tuple[int, ...] = ()
    norms: tuple[float, ...] = ()
    told: tuple[tuple[int, Report], ...] = ()


def sum_updates(
    layout: Layout,
    updates: Sequence[Tree],
    keys: Sequence[Mapping[str, Keys]],
    over: Over,
) -> tuple[RowUpdate, ...]:
    """Adds updates up under their keys, from the first client to the last.

    Args:
        updates: u_n, each shaped as its client's sub-model.
        keys: z_n, each by the name of its key space.
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
    A holder of blocks k 2^r to (k + 1) 2^r may add them up apart and pass on their sum: the bytes
    are the same.

    Args:
        blocks: from the first to the last; a sum of several stands where they would stand.

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
        keys: z_n of all clients that were added.
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
    """Returns how many clients chose each distinct key of a part, ascending by key."""
    once = np.concatenate([np.unique(part.keys_of(chosen).array) for chosen in keys])
    return np.unique(once, return_counts=True)[1].astype(np.int64)


def _sum_part(
    part: Part,
    leaves: Sequence[Mapping[str, Array]],
    keys: Sequence[Mapping[str, Keys]],
    before: RowUpdate,
) -> RowUpdate:
    own = [part.keys_of(chosen).array for chosen in keys]
    dtypes = {np.asarray(leaf[field.path]).dtype for leaf in leaves for field in part.fields}
    dtype = np.result_type(before.rows, *(f.dtype for f in part.fields), *dtypes)
    if are_same_rising([before.keys, *own] if len(before.keys) else own):
        return _sum_alike(part, leaves, own[0], before, dtype)
    zs = [before.keys, *own]
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


def _sum_alike(
    part: Part,
    leaves: Sequence[Mapping[str, Array]],
    keys: KeyArray,
    before: RowUpdate,
    dtype: np.dtype[Any],
) -> RowUpdate:
    """`_sum_part` of clients with the same keys, each once and in order: the same additions, with
    neither a sort nor all rows side by side."""
    sums = np.zeros((len(keys), part.slice_size), dtype)
    if len(before.keys):
        sums += before.rows
    for leaf in leaves:
        sums += part.to_rows(leaf)
    if not np.all(np.isfinite(sums)):
        broken = sum(not np.all(np.isfinite(part.to_rows(leaf))) for leaf in leaves)
        raise _not_finite(f"{broken} of {len(leaves)} clients")
    return RowUpdate(keys.copy(), sums)


def _add_pair(left: BlockSum, right: BlockSum) -> BlockSum:
    """Two sums of as many blocks; clients of the right one follow on those of the left one."""
    filled = [summed.parts for summed in (left, right) if summed.clients] or [left.parts]
    parts = tuple(_merge_part(same) for same in zip(*filled, strict=True))

    def both(name: Literal["refused", "empty", "above"]) -> tuple[int, ...]:
        behind = tuple(left.span * BLOCK + place for place in getattr(right, name))
        return tuple(getattr(left, name)) + behind

    clients, span = left.clients + right.clients, left.span + right.span
    told = tuple((left.span * BLOCK + place, report) for place, report in right.told)
    return BlockSum(
        parts,
        clients,
        both("refused"),
        span,
        both("empty"),
        both("above"),
        left.norms + right.norms,
        left.told + told,
    )


def _merge_part(same: Sequence[RowUpdate]) -> RowUpdate:
    """One part of several blocks, added up in their order; nothing but the sum is allocated."""
    if len(same) == 1:
        return same[0]
    distinct = distinct_keys([part.keys for part in same])
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
        f"updates hold NaN or infinity, or their sum overflows: got {got}; expected finite "
        "numbers; lower client_lr or clip gradients; drop those clients from the round"
    )
