"""Sub-models at memory speed: what `Layout.select` and the deselects mean, without a loop over
slices.

`tests/laws/test_two_speeds.py` holds each function here to its plain definition. The cost depends
on what was selected: no row is read or written that no client chose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import TypeAlias

import numpy as np

from keyhole import tree
from keyhole.errors import NotFiniteError
from keyhole.primitives.keyspace import Keys
from keyhole.primitives.layout import Layout
from keyhole.primitives.parts import Field, Part
from keyhole.primitives.placement import ClientValue, ServerValue, contributions, map_clients
from keyhole.server.rows import gather_rows, sum_rows
from keyhole.types import Array, KeyArray, Tree

__all__ = [
    "deselect_submodels_mean",
    "deselect_submodels_mean_per_key",
    "deselect_submodels_sum",
    "select_submodels",
]

ClientKeys: TypeAlias = Keys | Iterable[Keys]

# (product keys of each client, distinct product keys) -> what each distinct key's sum is divided by
_Divisor: TypeAlias = Callable[[Sequence[KeyArray], KeyArray], Array] | None


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
    return _deselect(layout, updates, keys, divisor=None)


def deselect_submodels_mean(
    layout: Layout, updates: ClientValue[Tree], keys: ClientValue[ClientKeys]
) -> ServerValue[Tree]:
    """Averages over the cohort, Eq. 5: `deselect_mean` with `layout.deselect`. Arguments as
    above."""
    return _deselect(
        layout, updates, keys, lambda zs, distinct: np.full(len(distinct), float(len(zs)))
    )


def deselect_submodels_mean_per_key(
    layout: Layout, updates: ClientValue[Tree], keys: ClientValue[ClientKeys]
) -> ServerValue[Tree]:
    """Averages each row over those who chose it: `deselect_mean_per_key`. Arguments as above."""

    def choosers(zs: Sequence[KeyArray], _: KeyArray) -> Array:
        once = np.concatenate([np.unique(z) for z in zs])
        return sum_rows(once, np.ones((len(once), 1)))[1][:, 0]

    return _deselect(layout, updates, keys, choosers)


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
    layout: Layout,
    updates: ClientValue[Tree],
    keys: ClientValue[ClientKeys],
    divisor: _Divisor,
) -> ServerValue[Tree]:
    """Sums every part under its product keys and divides each row by `divisor`."""
    pairs = contributions(map_clients(lambda u, z: (u, layout.keys_by_space(z)), updates, keys))
    for update, chosen in pairs:
        layout.check(update, chosen)
    given = [tree.flatten(update) for update, _ in pairs]
    leaves: dict[str, Array] = {}
    for part in layout.parts:
        zs = [part.keys_of(chosen).array for _, chosen in pairs]
        for field in part.fields:
            stacks = [field.unstack(np.asarray(leaf[field.path])) for leaf in given]
            leaves[field.path] = _sum_field(part, field, zs, stacks, divisor)
    return ServerValue(tree.unflatten(layout.structure, leaves))


def _sum_field(
    part: Part,
    field: Field,
    zs: Sequence[KeyArray],
    stacks: Sequence[Array],
    divisor: _Divisor,
) -> Array:
    """The sum of one parameter over clients; `np.zeros` costs nothing for rows that stay zero."""
    rows = np.ascontiguousarray(np.concatenate(stacks), field.dtype)
    width = prod(field.slice_shape)
    distinct, sums = sum_rows(np.concatenate(zs), rows.reshape(len(rows), width))
    _check_finite(sums, stacks)
    if divisor is not None:
        is_float = np.issubdtype(sums.dtype, np.floating)
        sums = sums / divisor(zs, distinct).astype(sums.dtype if is_float else np.float64)[:, None]
    total = np.zeros(field.shape, sums.dtype)
    index = tuple(k.array for k in part.product.split(Keys(part.space, distinct)))
    by_slice = np.moveaxis(total, field.axes, range(len(field.axes)))
    by_slice[index] = sums.reshape(*([len(sums)] if index else []), *field.slice_shape)
    return total


def _check_finite(sums: Array, stacks: Sequence[Array]) -> None:
    if not np.all(np.isfinite(sums)):
        broken = sum(not np.all(np.isfinite(stack)) for stack in stacks)
        raise NotFiniteError(
            "updates hold NaN or infinity, or their sum overflows",
            got=f"{broken} of {len(stacks)} clients",
            allowed="finite numbers",
            fix="lower client_lr or clip gradients; drop those clients from the round",
        )
