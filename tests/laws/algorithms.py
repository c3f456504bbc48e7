"""Federated model training, without select (Algorithm 1) and with it (Algorithm 2).

Both are generators over rounds. A round's cohort arrives as its client-placed data; what a client
or the server computes, and how slices and updates travel, are arguments. An update is start minus
end, so a server step treats it as a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from keyhole.arrays import Tree
from keyhole.primitives.deselect import aggregate_mean
from keyhole.primitives.placement import ClientValue, ServerValue, map_clients
from keyhole.primitives.select import broadcast


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
