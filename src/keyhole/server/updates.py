"""Row updates: what one step adds up to, one row for each distinct key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from keyhole import tree
from keyhole.errors import KeySpaceError, NotFiniteError, ShapeError
from keyhole.primitives.layout import Layout
from keyhole.primitives.parts import Part
from keyhole.types import KeyArray, Tree

__all__ = ["RowUpdate", "check_float32", "check_updates", "no_update", "usable"]

_LARGEST = np.finfo(np.float32).max / 2**20  # a million of them still add up


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
    """The update of a part that nobody touched."""
    return RowUpdate(np.empty(0, np.int64), np.empty((0, part.slice_size), np.float32))


def usable(update: Tree) -> Tree | None:
    """A client's update in float32, or None if it is not finite or too large to add up.

    >>> usable({"w": np.array([1.0, np.nan])}) is None
    True
    """
    leaves = {path: _cast(leaf) for path, leaf in tree.flatten(update).items()}
    return tree.unflatten(update, leaves) if all(map(_is_small, leaves.values())) else None


def _cast(leaf: Any) -> NDArray[np.float32]:
    if getattr(leaf, "dtype", None) == np.float32:
        return np.asarray(leaf)
    with np.errstate(over="ignore"):  # infinity is refused, as is what becomes it
        return np.asarray(leaf, np.float32)


def _is_small(leaf: NDArray[np.float32]) -> bool:
    """Two passes that write nothing; a NaN is both the least and the largest, and not small."""
    return leaf.size == 0 or bool(leaf.min() >= -_LARGEST and leaf.max() <= _LARGEST)


def check_float32(dtypes: Mapping[str, Any]) -> None:
    """Raises ShapeError unless every parameter is float32: optimizers keep float32 rows.

    Args:
        dtypes: parameter path -> dtype.
    """
    for path, dtype in dtypes.items():
        if dtype != np.float32:
            raise ShapeError(
                f"parameter {path!r} cannot be trained",
                got=dtype,
                allowed="float32",
                fix="convert the model, and make its layout from that",
            )


def check_updates(layout: Layout, updates: Sequence[RowUpdate]) -> None:
    """Raises unless `updates` can be applied as a whole, so that a refused step changes nothing.

    Raises:
        ShapeError: not one update for each part, or rows that are not (d, width) float32.
        KeySpaceError: keys that are not distinct, ascending and in range.
        NotFiniteError: NaN or infinity.
    """
    if len(updates) != len(layout.parts):
        raise ShapeError(
            "a step takes one update for each part",
            got=f"{len(updates)} updates",
            allowed=f"{len(layout.parts)}",
            fix="pass them in the order of layout.parts; no_update(part) where nothing changed",
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
            f"rows do not fit part {part.space.name!r}",
            got=f"{rows.dtype} of shape {rows.shape}, {order}",
            allowed=f"float32 of shape {expected}, C-contiguous",
            fix="sum the clients' rows of this part with sum_rows",
        )


def _check_keys(part: Part, keys: KeyArray) -> None:
    if keys.dtype != np.int64:
        raise KeySpaceError(
            f"keys of part {part.space.name!r} are not int64",
            got=keys.dtype,
            allowed="int64",
            fix="make them with KeySpace.keys",
        )
    disorder = _count_disorder(keys)
    if disorder:
        raise KeySpaceError(
            f"keys of part {part.space.name!r} are not distinct and ascending",
            got=f"{disorder} of {len(keys)} out of order",
            allowed="each key above the one before",
            fix="sum the clients' rows with sum_rows",
        )
    if len(keys) and not 0 <= keys[0] <= keys[-1] < part.space.num_keys:
        outside = int(np.sum((keys < 0) | (keys > part.space.num_keys - 1)))
        raise KeySpaceError(
            f"keys lie outside part {part.space.name!r}",
            got=f"{outside} such keys of {len(keys)}",
            allowed=f"0..{part.space.num_keys - 1}",
            fix="check that the update belongs to this layout",
        )


def _check_finite(part: Part, rows: NDArray[np.float32]) -> None:
    if not _is_finite(rows.reshape(-1).view(np.int32)):
        broken = int(np.sum(~np.all(np.isfinite(rows), axis=1)))
        raise NotFiniteError(
            f"the update of part {part.space.name!r} holds NaN or infinity",
            got=f"{broken} of {len(rows)} rows",
            allowed="finite numbers",
            fix="leave out the client that sent them, or clip updates",
        )


@njit(cache=True, nogil=True)
def _count_disorder(keys):  # type: ignore[no-untyped-def]
    count = 0
    for i in range(1, len(keys)):
        count += keys[i] <= keys[i - 1]
    return count


@njit(cache=True, nogil=True)
def _is_finite(bits):  # type: ignore[no-untyped-def]
    """Whether no float32, given as its bits, has the exponent of NaN and infinity."""
    exponent = np.int32(0x7F800000)
    broken = np.int32(0)
    for i in range(len(bits)):
        broken |= np.int32((bits[i] & exponent) == exponent)
    return broken == 0
