"""Deselect: adds up updates of different sub-models under the keys they came from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from keyhole import tree
from keyhole.primitives.aggregate import aggregate_mean, aggregate_sum
from keyhole.primitives.placement import ClientValue, ServerValue, map_clients
from keyhole.types import DeselectFn, Tree

__all__ = ["deselect", "deselect_mean", "deselect_mean_per_key", "deselect_sum"]


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
