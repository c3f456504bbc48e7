"""Sub-models at memory speed: `Layout.select` and the deselects without a loop over slices.

`tests/laws/test_two_speeds.py` holds each function here to its plain definition. The cost depends
on what was selected: no row is read or written that no client chose.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import numpy as np

from keyhole import tree
from keyhole.primitives.keyspace import Keys
from keyhole.primitives.layout import ClientKeys, Layout
from keyhole.primitives.parts import Field, Part
from keyhole.primitives.placement import ClientValue, ServerValue, contributions, map_clients
from keyhole.server.aggregation import Over, sum_updates
from keyhole.server.rows import gather_rows
from keyhole.server.updates import RowUpdate
from keyhole.types import Array, Tree

__all__ = [
    "deselect_submodels_mean",
    "deselect_submodels_mean_per_key",
    "deselect_submodels_sum",
    "select_submodels",
]


def select_submodels(
    layout: Layout, server_value: ServerValue[Tree], keys: ClientValue[ClientKeys]
) -> ClientValue[Tree]:
    """Sends each client its sub-model: `Layout.select` for a cohort, as one gather per parameter.

    Args:
        layout: the model and its cuts.
        server_value: x, the model, at the server.
        keys: each client's keys, one `Keys` per key space.

    Returns:
        On each client the server's tree with shorter axes. What is not cut is shared between
        clients and read-only.

    Raises:
        ShapeError: the model does not have the shapes of the layout.
        KeySpaceError: a client's keys are missing, or of another key space.
    """
    layout.check(server_value.value)
    leaves = tree.flatten(server_value.value)

    def select(z: ClientKeys) -> Tree:
        chosen = layout.keys_by_space(z)
        return tree.unflatten(
            layout.structure,
            {
                field.path: _gather(field, part, leaves[field.path], chosen)
                for part in layout.parts
                for field in part.fields
            },
        )

    return map_clients(select, keys)


def deselect_submodels_sum(
    layout: Layout, updates: ClientValue[Tree], keys: ClientValue[ClientKeys]
) -> ServerValue[Tree]:
    """Adds the updates up under their keys: `deselect_sum` with `layout.deselect`.

    Additions happen in cohort order, so the bytes depend neither on threads nor on the order of
    keys.

    Args:
        layout: the model and its cuts.
        updates: u_n, shaped as the clients' sub-models.
        keys: z_n, the keys they were selected with.

    Returns:
        The sum, shaped as the server's model; rows that nobody chose are never written.

    Raises:
        CohortError: nobody is left.
        ShapeError: an update is not shaped as its sub-model.
        NotFiniteError: an update holds NaN or infinity.
    """
    return _deselect(layout, updates, keys, "nothing")


def deselect_submodels_mean(
    layout: Layout, updates: ClientValue[Tree], keys: ClientValue[ClientKeys]
) -> ServerValue[Tree]:
    """Averages over the cohort, Eq. 5: `deselect_mean` with `layout.deselect`."""
    return _deselect(layout, updates, keys, "cohort")


def deselect_submodels_mean_per_key(
    layout: Layout, updates: ClientValue[Tree], keys: ClientValue[ClientKeys]
) -> ServerValue[Tree]:
    """Averages each row over those who chose it: `deselect_mean_per_key` with `layout.deselect`."""
    return _deselect(layout, updates, keys, "choosers")


def _gather(field: Field, part: Part, value: Array, chosen: Mapping[str, Keys]) -> Array:
    """One parameter of one client."""
    zs = [chosen[factor.name].array for factor in part.product.factors]
    value = np.asarray(value)
    if not zs:
        shared = value.view()
        shared.setflags(write=False)
        return shared
    if field.axes == (0,):
        rows = gather_rows(value.reshape(len(value), prod(field.slice_shape)), zs[0])
        return rows.reshape(field.client_shape([len(zs[0])]))
    for axis, z in zip(field.axes, zs, strict=True):
        value = np.take(value, z, axis=axis)
    return value


def _deselect(
    layout: Layout, updates: ClientValue[Tree], keys: ClientValue[ClientKeys], over: Over
) -> ServerValue[Tree]:
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
