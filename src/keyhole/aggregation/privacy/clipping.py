"""Clips updates: no client moves the sum of a round by more than C in L2 norm.

What counts is the vector that is added up: the parts that everyone receives and the selected rows
together, as one long vector. Clipping them apart would allow each of them C. The bound holds for
sums, and for means over the planned cohort; it does not hold for means in which each row is divided
by the number of clients that asked for it, where one client more moves the rows of all others.
"""

from __future__ import annotations

from dataclasses import replace
from math import frexp, isfinite, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keyhole.aggregation.base import ClientResult, rows_of
from keyhole.arrays import Array, KeyArray, Tree
from keyhole.errors import InputError, NotFiniteError, ShapeError
from keyhole.primitives.layout import Layout
from keyhole.tree import flatten, map_leaves


def clip(update: Tree, limit: float) -> Tree:
    """Scales a whole update down to a Euclidean norm of at most C; a shorter one stays as it is.

        u min(1, C / |u|)

    The bound holds for the numbers that come out, in their own dtype, not for the real numbers
    before they are rounded.

    Args:
        update: all of it, as it will be added up: what was broadcast and what was selected. Rows
            of one key stand in it once (`merge_rows`).
        limit: C, above zero; infinity changes nothing.

    Returns:
        A tree like `update`.

    Raises:
        NotFiniteError: NaN or infinity in the update.
        InputError: C is not above zero.
        ShapeError: a leaf that does not hold real numbers.

    >>> clip({"bias": np.array([3.0]), "rows": np.array([[0.0, 4.0]])}, 10.0)["rows"]
    array([[0., 4.]])
    >>> norm(clip({"bias": np.array([3.0]), "rows": np.array([[0.0, 4.0]])}, 1.0)) <= 1.0
    True
    """
    if not limit > 0:  # NaN too
        raise InputError(
            "a clipping norm that nothing passes",
            got=limit,
            allowed="above 0, or infinity for no clipping",
            fix="take about the median norm of an update",
        )
    length, spare = norm(update), 0.0
    if length <= limit:
        return update
    clipped = update
    # Rounding to the dtype of a leaf may lengthen it again: a little shorter then, until it fits.
    while norm(clipped) > limit:
        factor = max(0.0, limit / length * (1 - spare))
        clipped = map_leaves(lambda leaf, by=factor: _scaled(leaf, by), update)
        spare = 2 * spare or 2.0**-50
    return clipped


def norm(update: Tree) -> float:
    """The Euclidean norm of all leaves together, summed in 64 bits without overflow.

    Raises:
        NotFiniteError: NaN or infinity in the update.
        ShapeError: a leaf that does not hold real numbers.

    >>> f"{norm({'a': np.array([3e200]), 'b': [np.array([4e200])]}):.6g}"
    '5e+200'
    """
    leaves = [_numbers(leaf) for leaf in flatten(update).values()]
    peaks = [float(np.abs(leaf).max()) for leaf in leaves if leaf.size]
    if not all(map(isfinite, peaks)):
        raise NotFiniteError(
            "an update with numbers that are none",
            got="NaN or infinity",
            allowed="finite numbers",
            fix="lower the learning rate, or leave this client out of the round",
        )
    largest = max(peaks, default=0.0)
    if largest == 0:
        return 0.0
    # A power of two: dividing by it loses nothing.
    unit = 2.0 ** min(1000, max(-1000, frexp(largest)[1]))
    return unit * sqrt(sum(float(np.sum(np.square(leaf / unit))) for leaf in leaves))


def merge_rows(keys: KeyArray, rows: Array) -> tuple[KeyArray, Array]:
    """Adds up the rows of keys that occur more than once: the deselect would do it after clipping,
    and k equal rows of norm C would make one of k C.

    Args:
        keys: (m,), repeated ones among them or not.
        rows: (m, ...).

    Returns:
        The distinct keys, ascending, and the sum of the rows of each.

    >>> merge_rows(np.array([7, 2, 7]), np.array([[1.0], [2.0], [3.0]]))
    (array([2, 7]), array([[2.],
           [4.]]))
    """
    if len(keys) != len(rows):
        raise ShapeError(
            "keys and rows that do not belong together",
            got=f"{len(keys)} keys and {len(rows)} rows",
            allowed="one row for each key",
            fix="pass the update of the slices that were selected",
        )
    distinct, places = np.unique(keys, return_inverse=True)
    merged = np.zeros((len(distinct), *rows.shape[1:]), rows.dtype)
    np.add.at(merged, places, rows)
    return distinct, merged


def norm_before_rounding(limit: float, step: float, entries: int) -> float:
    """The norm to clip to, so that an update is no longer than C after it became integers.

    Stochastic rounding moves every number that is not zero by less than one step, so that it can
    lengthen a vector by less than step sqrt(entries). That is nothing in a ring of 32 bits, and can
    be more than C itself in one of 16.

    Args:
        limit: C, to which the noise is scaled.
        step: 1 / scale, `FixedPoint.rounding`.
        entries: numbers of one update that may be other than zero: m times the width of a row, and
            all that is broadcast.

    Raises:
        InputError: nothing of C would be left.

    >>> norm_before_rounding(1.0, 2.0**-25, 500_000)
    0.99997...
    """
    left = limit - step * sqrt(entries)
    if not left > 0:
        raise InputError(
            "a ring too coarse for differential privacy",
            got=f"{entries} numbers, rounded by up to {step:.3g} each, against a norm of {limit:g}",
            allowed=f"steps below {limit / sqrt(max(1, entries)):.3g}",
            fix="take the ring of 32 bits, a larger clipping norm, or fewer keys",
        )
    return left


def _numbers(leaf: Any) -> NDArray[np.float64]:
    numbers = np.asarray(leaf)
    if numbers.dtype.kind in "iubcOSU":
        raise ShapeError(
            "an update that does not hold real numbers",
            got=numbers.dtype,
            allowed="floating point",
            fix="clip the update before it becomes integers",
        )
    return numbers.astype(np.float64)


def _scaled(leaf: Any, factor: float) -> Array:
    return (_numbers(leaf) * factor).astype(np.asarray(leaf).dtype)


def clip_update(layout: Layout, one: ClientResult, limit: float) -> ClientResult:
    """Returns the result, shortened to an L2 norm of `limit`, all parts together.

    Args:
        layout: the model and its cuts.
        one: with an update.
        limit: its Euclidean norm, of rows that are added up under equal keys.
    """

    def length(update: Tree) -> float:
        rows = rows_of(layout, replace(one, update=update))
        return norm({str(i): own for i, (_, own) in enumerate(rows)})

    update, found, factor = one.update, length(one.update), 1.0
    while found > limit:  # rounding may lengthen it again: a little shorter then
        factor *= limit / found * (1 - 2.0**-20)
        update = map_leaves(lambda leaf, by=factor: leaf * np.float32(by), one.update)
        found = length(update)
    return replace(one, update=update)
