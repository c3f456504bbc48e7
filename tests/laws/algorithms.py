"""Federated model training, without select (Algorithm 1) and with it (Algorithm 2).

Both are generators over rounds. A round's cohort arrives as its client-placed data; what a client
or the server computes, and how slices and updates travel, are arguments. An update is start minus
end, so a server step treats it as a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from math import prod
from typing import Any

import numpy as np

from keyhole import tree
from keyhole.arrays import Array, Tree
from keyhole.primitives.deselect import aggregate_mean
from keyhole.primitives.keyspace import Keys
from keyhole.primitives.layout import ClientKeys, Layout, Part
from keyhole.primitives.placement import ClientValue, ServerValue, contributions, map_clients
from keyhole.primitives.select import broadcast
from keyhole.server.row_sums import Over, RowUpdate, sum_updates


def train(
    server_value: ServerValue[Tree],
    cohorts: Iterable[ClientValue[Any]],
    client_update: Callable[[Tree, Any], Tree],
    server_update: Callable[[Tree, Tree], Tree],
) -> Iterator[ServerValue[Tree]]:
    """Algorithm 1: every client trains the whole model.

    Args:
        server_value: x^0.
        cohorts: for each round t, the data of the clients in S^t.
        client_update: `(model, data) -> update`.
        server_update: `(model, update) -> model`.

    Yields:
        x^{t+1} after each round.
    """
    x = server_value
    for data in cohorts:
        received = broadcast(x, to=data)
        updates = map_clients(client_update, received, data)
        u = aggregate_mean(updates)
        x = ServerValue(server_update(x.value, u.value))
        yield x


def train_with_select(
    server_value: ServerValue[Tree],
    cohorts: Iterable[ClientValue[Any]],
    choose: Callable[[Any], Any],
    deliver: Callable[[ServerValue[Tree], ClientValue[Any]], ClientValue[Any]],
    client_update: Callable[[Any, Any, Any], Any],
    aggregate: Callable[[ClientValue[Any], ClientValue[Any]], ServerValue[Tree]],
    server_update: Callable[[Tree, Tree], Tree],
) -> Iterator[ServerValue[Tree]]:
    """Algorithm 2: every client trains the slices it names.

    Args:
        server_value: x^0.
        cohorts: for each round t, the data of the clients in S^t.
        choose: `data -> keys`, run on the client.
        deliver: psi over a cohort, `(x, keys) -> slices`.
        client_update: `(slices, data, keys) -> update`, shaped as the slices.
        aggregate: phi over a cohort, `(updates, keys) -> update shaped as x`.
        server_update: `(model, update) -> model`.

    Yields:
        x^{t+1} after each round.
    """
    x = server_value
    for data in cohorts:
        keys = map_clients(choose, data)
        slices = deliver(x, keys)
        updates = map_clients(client_update, slices, data, keys)
        u = aggregate(updates, keys)
        x = ServerValue(server_update(x.value, u.value))
        yield x


def deselect_submodels(
    layout: Layout,
    updates: ClientValue[Tree],
    keys: ClientValue[ClientKeys],
    over: Over = "cohort",
) -> ServerValue[Tree]:
    """The sums that rounds make (`sum_updates`), as a deselect: `deselect_mean`
    of Eq. 5 with `layout.deselect`; over "nothing" `deselect_sum`, over "choosers"
    `deselect_mean_per_key`.

    Additions happen in cohort order, so the bytes depend neither on threads nor on the order of
    keys.
    """
    pairs = contributions(map_clients(lambda u, z: (u, layout.keys_by_space(z)), updates, keys))
    sums = sum_updates(layout, [u for u, _ in pairs], [z for _, z in pairs], over)
    leaves: dict[str, Array] = {}
    for part, update in zip(layout.parts, sums, strict=True):
        leaves |= _spread(part, update)
    return ServerValue(tree.unflatten(layout.structure, leaves))


def _spread(part: Part, update: RowUpdate) -> dict[str, Array]:
    """The rows written into zeros; `np.zeros` costs nothing for rows that stay zero."""
    index = tuple(k.array for k in part.product.split(Keys(part.space, update.keys)))
    leaves, start = {}, 0
    for field in part.fields:
        stop = start + prod(field.slice_shape)
        rows = update.rows[:, start:stop]
        total = np.zeros(field.shape, rows.dtype)
        by_slice = np.moveaxis(total, field.axes, range(len(field.axes)))
        by_slice[index] = rows.reshape(*([len(rows)] if index else []), *field.slice_shape)
        leaves[field.path] = total
        start = stop
    return leaves
