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
from functools import reduce
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from keyhole import tree
from keyhole.arrays import Array, KeyArray, Tree, read_only
from keyhole.compiled import loop
from keyhole.errors import KeySpaceError, NotFiniteError, ShapeError
from keyhole.primitives.deselect import divide
from keyhole.primitives.keyspace import Keys, are_same_rising
from keyhole.primitives.layout import Layout, Part
from keyhole.primitives.report import Report
from keyhole.server.rows import add_columns, add_rows, join_keys, number_keys, scatter_add_rows


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
    if not _all_finite(rows):
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


def _all_finite(array: Array) -> bool:
    """Whether no number is NaN or infinity; without a second array where loops know the type."""
    if array.dtype == np.float32 and array.flags.carray:
        return is_finite(array.reshape(-1).view(np.int32))
    return bool(np.all(np.isfinite(array)))


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
    dtypes = {np.asarray(leaf).dtype for u in updates for leaf in tree.flatten(u).values()}
    adder = BlockAdder(layout, keys, before, dtypes)
    for at, update in enumerate(updates):
        adder.add(at, update)
    if adder.is_finite():
        return adder.total()
    broken = sum(not _all_finite(leaf) for u in updates for leaf in _each_once(u))
    raise _not_finite(f"{broken} of {len(updates)} clients")


def _each_once(update: Tree) -> list[Array]:
    """All numbers of an update side by side, so that a client counts once."""
    return [np.concatenate([np.ravel(leaf) for leaf in tree.flatten(update).values()])]


class BlockAdder:
    """Adds up the updates of one block as they come: no more than their sum and the one that is
    added is held, and every number of an update is read once.

    Args:
        keys: of each client of the block, in order, whether or not its update will be added.
        before: as in `sum_block`.
        dtypes: of the updates, where they may differ from those of the parameters.
    """

    def __init__(
        self,
        layout: Layout,
        keys: Sequence[Mapping[str, Keys]],
        before: BlockSum | None = None,
        dtypes: Iterable[np.dtype[Any]] = (),
    ) -> None:
        self._layout, self._keys = layout, keys
        self._before = before or BlockSum(tuple(map(no_update, layout.parts)), 0)
        self._added = np.zeros(len(keys), bool)
        pairs = zip(layout.parts, self._before.parts, strict=True)
        self._parts = [_PartSum(part, keys, so_far, dtypes) for part, so_far in pairs]

    def add(self, at: int, update: Tree) -> None:
        """Adds the update of client `at`; clients come in order, and some may not come."""
        leaves = tree.flatten(update)
        self._layout.check_leaves(leaves, self._keys[at])
        self._added[at] = True
        for part in self._parts:
            part.add(at, leaves)

    def is_finite(self) -> bool:
        """Returns whether the sum has neither NaN nor infinity."""
        return all(_all_finite(part.sums) for part in self._parts)

    def total(self) -> BlockSum:
        """Returns the sum; keys that no added client has are not in it."""
        count = int(self._added.sum())
        if not count:
            return self._before
        parts = tuple(part.total(self._added) for part in self._parts)
        return replace(self._before, parts=parts, clients=self._before.clients + count)


class _PartSum:
    """The sum of one part: a row for each distinct key, and for each client where its rows go."""

    def __init__(
        self,
        part: Part,
        keys: Sequence[Mapping[str, Keys]],
        before: RowUpdate,
        dtypes: Iterable[np.dtype[Any]],
    ) -> None:
        held = [before.keys, *(part.keys_of(chosen).array for chosen in keys)]
        dtype = np.result_type(before.rows, *(f.dtype for f in part.fields), *dtypes)
        self._part, self._has_before = part, len(before.keys) > 0
        some = held if self._has_before else held[1:]
        self._is_alike = not some or are_same_rising(some)  # neither sorted nor looked up
        if self._is_alike:
            self.keys = some[0].copy() if some else before.keys
            self._slots = [np.arange(len(self.keys))] * len(held)
        else:
            ends = np.cumsum([len(z) for z in held])
            work, slots = np.empty((4, ends[-1]), np.int64), np.empty(ends[-1], np.int64)
            self.keys = number_keys(np.concatenate(held), work, slots).copy()
            self._slots = np.split(slots, ends[:-1])
        self.sums = np.zeros((len(self.keys), part.slice_size), dtype)
        if self._has_before:
            self._add_rows(0, before.rows)

    def add(self, at: int, leaves: Mapping[str, Array]) -> None:
        """Adds the rows of client `at`: from where they lie in its leaves, where that is known."""
        blocks = self._part.blocks
        if blocks is None or not all(self._can_add(leaves[path]) for path, *_ in blocks):
            self._add_rows(at + 1, self._part.to_rows(leaves))
            return
        slots = self._slots[at + 1]
        for path, start, before, behind in blocks:
            values = leaves[path].reshape(before, len(slots), behind)
            add_columns(self.sums, slots, start, read_only(values))

    def _can_add(self, leaf: Any) -> bool:
        is_array = isinstance(leaf, np.ndarray) and leaf.flags.c_contiguous and leaf.flags.aligned
        return is_array and leaf.dtype == self.sums.dtype

    def total(self, added: NDArray[np.bool_]) -> RowUpdate:
        """The rows of keys that some added client has."""
        if self._is_alike or added.all():
            return RowUpdate(self.keys, self.sums)
        is_held = np.zeros(len(self.keys), bool)
        for slots, is_added in zip(self._slots, [self._has_before, *added], strict=True):
            is_held[slots] |= is_added
        return RowUpdate(self.keys[is_held], self.sums[is_held])

    def _add_rows(self, at: int, rows: Array) -> None:
        if self._is_alike:
            self.sums += rows
        elif rows.size:
            add_rows(self.sums, self._slots[at], None, np.ascontiguousarray(rows, self.sums.dtype))


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
    merged = [reduce(_merge_part, same) for same in zip(*filled, strict=True)]
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


def _add_pair(left: BlockSum, right: BlockSum) -> BlockSum:
    """Two sums of as many blocks; clients of the right one follow on those of the left one."""
    filled = [summed.parts for summed in (left, right) if summed.clients] or [left.parts]
    parts = tuple(reduce(_merge_part, same) for same in zip(*filled, strict=True))

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


def _merge_part(left: RowUpdate, right: RowUpdate) -> RowUpdate:
    """One part of two sums, the left one first; nothing but their sum is allocated."""
    count, slots = len(left.keys), np.empty(len(left.keys) + len(right.keys), np.int64)
    distinct = join_keys(left.keys, right.keys, slots)
    dtype = np.result_type(left.rows.dtype, right.rows.dtype)
    sums = np.zeros((len(distinct), left.rows.shape[1]), dtype)
    for rows, places in ((left.rows, slots[:count]), (right.rows, slots[count:])):
        scatter_add_rows(sums, places, np.ascontiguousarray(rows, dtype))
    if not _all_finite(sums):
        raise sum_overflow(sums.dtype)
    return RowUpdate(distinct, sums)


def sum_overflow(dtype: np.dtype[Any]) -> NotFiniteError:
    """Returns the error of updates that are finite, each by itself, and whose sum is not."""
    return _not_finite(f"a sum beyond {dtype}")


def _not_finite(got: str) -> NotFiniteError:
    return NotFiniteError(
        f"updates hold NaN or infinity, or their sum overflows: got {got}; expected finite "
        "numbers; lower client_lr or clip gradients; drop those clients from the round"
    )
