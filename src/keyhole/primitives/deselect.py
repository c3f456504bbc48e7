"""Aggregates: one server value from the values of the clients that remain.

Each works leaf by leaf on trees of arrays, adds in cohort order (so the same cohort gives the same
bytes), takes dropouts as they are, and refuses NaN and infinity.

Deselect: adds up updates of different sub-models under the keys they came from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from math import ceil
from typing import Any

import numpy as np

from keyhole import tree
from keyhole.arrays import Array, DeselectFn, Tree
from keyhole.errors import InputError, NotFiniteError, ShapeError
from keyhole.primitives.placement import ClientValue, ServerValue, contributions, map_clients


def aggregate(
    values: ClientValue[Tree], combine: Callable[[Sequence[Array]], Any]
) -> ServerValue[Tree]:
    """Combines the clients' values leaf by leaf.

    Args:
        values: x_n, client-placed trees with equal paths and shapes.
        combine: takes the N arrays of one leaf, in cohort order, and returns one.

    Returns:
        The combined tree, at the server.

    Raises:
        CohortError: nobody is left.
        ShapeError: the clients' trees or shapes differ.
        NotFiniteError: a value holds NaN or infinity.

    >>> from keyhole.primitives.placement import at_clients
    >>> aggregate(at_clients([3, 9, 4]), combine=max).value
    np.int64(9)
    """
    held = contributions(values)
    return ServerValue(tree.map_leaves(lambda *leaves: combine(_checked(leaves)), *held))


def aggregate_sum(values: ClientValue[Tree]) -> ServerValue[Tree]:
    r"""Adds up the clients' values: $\sum_n x_n$, from the first client to the last."""
    return aggregate(values, _total)


def aggregate_mean(values: ClientValue[Tree]) -> ServerValue[Tree]:
    r"""Averages the clients' values.

    Eq. 1: $\text{Aggregate}_\text{mean}(\{x_1, \dots, x_N\}@C) = (\frac1N \sum_n x_n)@S$, where N
    counts the clients that remain.

    >>> from keyhole.primitives.placement import at_clients
    >>> aggregate_mean(at_clients({"w": 1.0, "e": 3.0, "s": 8.0}).drop("s")).value
    np.float64(2.0)
    """
    return aggregate(values, lambda leaves: divide(_total(leaves), len(leaves)))


def aggregate_weighted_mean(
    values: ClientValue[Tree], weights: ClientValue[float]
) -> ServerValue[Tree]:
    r"""Averages with a weight per client: $\sum_n w_n x_n / \sum_n w_n$.

    Args:
        values: x_n, client-placed trees.
        weights: w_n >= 0, client-placed scalars of the same cohort, not all zero.

    Raises:
        InputError: a weight is negative, or all are zero.

    >>> from keyhole.primitives.placement import at_clients
    >>> aggregate_weighted_mean(at_clients([1.0, 4.0]), at_clients([2, 1])).value
    np.float64(2.0)
    """
    total = aggregate_sum(map_clients(_weight, weights, values)).value
    if total == 0:
        raise InputError(
            f"weights add up to zero: got {total}; expected a positive sum; weight clients by "
            "their number of examples, or use aggregate_mean"
        )
    weighted = aggregate_sum(map_clients(_scale, weights, values)).value
    return ServerValue(tree.map_leaves(lambda leaf: divide(leaf, total), weighted))


def aggregate_median(values: ClientValue[Tree]) -> ServerValue[Tree]:
    """Takes the median of each coordinate: half of the clients may be arbitrary.

    >>> from keyhole.primitives.placement import at_clients
    >>> aggregate_median(at_clients([1.0, 2.0, 900.0])).value
    np.float64(2.0)
    """
    return aggregate(values, lambda leaves: np.median(np.stack(leaves), axis=0))


def aggregate_trimmed_mean(values: ClientValue[Tree], trim: float) -> ServerValue[Tree]:
    """Averages each coordinate without its `trimmed_count` smallest and as many largest values.

    Args:
        values: x_n, client-placed trees.
        trim: share to leave out at each end, in [0, 0.5).

    Raises:
        InputError: `trim` is outside [0, 0.5).

    >>> from keyhole.primitives.placement import at_clients
    >>> aggregate_trimmed_mean(at_clients([0.0, 1.0, 3.0, 900.0]), trim=0.25).value
    np.float64(2.0)
    """
    if not 0 <= trim < 0.5:
        raise InputError(
            f"trim leaves nothing to average: got {trim}; expected 0 <= trim < 0.5; trim less, or "
            "use aggregate_median"
        )

    def combine(leaves: Sequence[Array]) -> Any:
        cut = trimmed_count(trim, len(leaves))
        kept = np.sort(np.stack(leaves), axis=0)[cut : len(leaves) - cut]
        return divide(_total(list(kept)), len(kept))

    return aggregate(values, combine)


def trimmed_count(trim: float, count: int) -> int:
    """Returns how many of `count` values are left out at each end: the share `trim` of them,
    rounded up so that it covers one liar among few, as long as a value is left. A share of a half
    leaves the median, or the two values around it.

    >>> [trimmed_count(0.2, n) for n in (1, 2, 3, 5, 6, 10)]
    [0, 0, 1, 1, 2, 2]
    """
    return min(ceil(trim * count - 1e-9), (count - 1) // 2)


def _total(leaves: Sequence[Array]) -> Any:
    """Adds from the first to the last: the order is part of the result."""
    return reduce(np.add, leaves)


def divide(total: Any, count: Any) -> Any:
    """Divides without leaving the float type of `total`; integers become float64."""
    return np.divide(total, np.asarray(count, _float(total)))


def _weight(weight: float, _: Tree) -> Array:
    if not weight >= 0:
        raise InputError(
            f"a client's weight is negative: got {weight}; expected 0 or more; weight by a count"
        )
    return np.asarray(weight, np.float64)


def _scale(weight: float, value: Tree) -> Tree:
    return tree.map_leaves(lambda leaf: np.multiply(leaf, np.asarray(weight, _float(leaf))), value)


def _float(leaf: Any) -> np.dtype[Any]:
    """The float type that a leaf is weighted or divided in: its own, or float64 for integers."""
    dtype = np.asarray(leaf).dtype
    return dtype if np.issubdtype(dtype, np.floating) else np.dtype(np.float64)


def _checked(leaves: Sequence[Any]) -> list[Any]:
    """The leaves as arrays of one shape, all finite."""
    arrays = [np.asarray(leaf)[()] for leaf in leaves]
    shapes = {np.shape(array) for array in arrays}
    if len(shapes) > 1:
        raise ShapeError(
            f"clients hold arrays of different shapes: got {', '.join(map(str, sorted(shapes)))}; "
            "expected one shape; deselect sub-models before adding them up"
        )
    broken = sum(not np.all(np.isfinite(array)) for array in arrays)
    if broken:
        raise NotFiniteError(
            f"values to aggregate hold NaN or infinity: got {broken} of {len(arrays)} clients; "
            "expected finite numbers; lower client_lr or clip gradients; drop those clients from "
            "the round"
        )
    return arrays


def deselect(
    updates: ClientValue[Any],
    keys: ClientValue[Any],
    deselect_fn: DeselectFn,
    aggregate: Callable[[ClientValue[Tree]], ServerValue[Tree]],
) -> ServerValue[Tree]:
    r"""Maps each update back to the server's shape, then aggregates: Eq. 5 with any aggregate.

    $\text{Aggregate}^\star(\{u_n\}@C, \{z_n\}@C, \phi) = \text{Aggregate}(\{\phi(u_n, z_n)\}@C)$.
    Coordinates that a client did not select count as zeros of that client.

    Args:
        updates: u_n, one update per client, shaped as its slices.
        keys: z_n, the keys those slices were selected with.
        deselect_fn: phi, `(update, keys) -> value shaped like the server's`.
        aggregate: any function from client-placed to server-placed, such as `aggregate_median`.

    Returns:
        The aggregate over the clients that are present in both, at the server.
    """
    return aggregate(map_clients(deselect_fn, updates, keys))


def deselect_sum(
    updates: ClientValue[Any], keys: ClientValue[Any], deselect_fn: DeselectFn
) -> ServerValue[Tree]:
    r"""Adds the updates up: $\sum_n \phi(u_n, z_n)$. Arguments as in `deselect`."""
    return deselect(updates, keys, deselect_fn, aggregate_sum)


def deselect_mean(
    updates: ClientValue[Any], keys: ClientValue[Any], deselect_fn: DeselectFn
) -> ServerValue[Tree]:
    r"""Averages the updates over the cohort.

    Eq. 5: $(\frac1N \sum_{n=1}^N \phi(u_n, z_n))@S$. N counts the clients that remain, whether or
    not they chose a key; `deselect_mean_per_key` divides by those who did. Arguments as in
    `deselect`.

    >>> from keyhole.primitives.keyspace import KeySpace
    >>> from keyhole.primitives.placement import at_clients
    >>> def phi(update, keys):
    ...     return np.bincount(keys, weights=update, minlength=4)
    >>> updates = at_clients([[6.0, 2.0], [4.0]])
    >>> deselect_mean(updates, KeySpace("row", 4).place([[3, 0], [3]]), phi).value
    array([1., 0., 0., 5.])
    """
    return deselect(updates, keys, deselect_fn, aggregate_mean)


def deselect_mean_per_key(
    updates: ClientValue[Any], keys: ClientValue[Any], deselect_fn: DeselectFn
) -> ServerValue[Tree]:
    r"""Averages each coordinate over the clients that selected it; zero where nobody did.

    $\sum_n \phi(u_n, z_n) / \max(1, \sum_n [\phi(\mathbf{1}, z_n) \ne 0])$: a client has selected
    the coordinates that an update of ones reaches. A phi whose weights cancel there (a difference
    of two rows, say) needs `deselect` with an aggregate of its own. Arguments as in `deselect`.

    >>> from keyhole.primitives.keyspace import KeySpace
    >>> from keyhole.primitives.placement import at_clients
    >>> def phi(update, keys):
    ...     return np.bincount(keys, weights=update, minlength=4)
    >>> updates = at_clients([[6.0, 2.0], [4.0]])
    >>> deselect_mean_per_key(updates, KeySpace("row", 4).place([[3, 0], [3]]), phi).value
    array([2., 0., 0., 5.])
    """

    def reached(update: Any, z: Any) -> Tree:
        ones = tree.map_leaves(np.ones_like, update)
        return tree.map_leaves(lambda leaf: np.not_equal(leaf, 0).astype(leaf.dtype), phi(ones, z))

    phi = deselect_fn
    total = deselect_sum(updates, keys, phi).value
    counts = deselect(updates, keys, reached, aggregate_sum).value
    return ServerValue(
        tree.map_leaves(lambda t, c: t / np.maximum(c, np.ones_like(c)), total, counts)
    )
