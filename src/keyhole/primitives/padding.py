"""Padding: sub-models of unequal size brought to one size, and back.

Compiled client code wants few shapes. A sub-model is padded with zeros behind its selected slices,
never with slices of a key that could be real; a mask says which slots hold a slice. Coming back,
whatever stands in the padding is cut off, so padding a client changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from keyhole import tree
from keyhole.errors import ShapeError
from keyhole.primitives.keyspace import Keys
from keyhole.primitives.layout import Layout
from keyhole.types import Array, Tree

__all__ = ["key_masks", "pad_submodel", "unpad_submodel"]


def pad_submodel(layout: Layout, submodel: Tree, keys: Keys | Iterable[Keys], **sizes: int) -> Tree:
    """Returns the sub-model with each cut axis extended with zeros to its padded size.

    Args:
        layout: the model and its cuts.
        submodel: what `keys` selected.
        keys: the client's keys.
        sizes: padded number of slots for each key space, at least the number of keys.

    Raises:
        ShapeError: the sub-model does not fit the keys, or does not fit into `sizes`.

    >>> from keyhole.primitives.cuts import Cut
    >>> from keyhole.primitives.keyspace import KeySpace
    >>> row = KeySpace("row", 5)
    >>> layout = Layout.of(np.zeros(5), Cut(row, {".": 0}))
    >>> pad_submodel(layout, np.array([7.0, 8.0]), row.keys([4, 1]), row=4)
    array([7., 8., 0., 0.])
    """
    chosen = layout.keys_by_space(keys)
    layout.check(submodel, chosen)
    slots = {name: (len(z), sizes.get(name, len(z))) for name, z in chosen.items()}
    for name, (used, size) in slots.items():
        if size < used:
            raise ShapeError(
                f"padded size of {name!r} is smaller than the number of keys",
                got=size,
                allowed=f"{used} or more",
                fix="choose a larger bucket of shapes",
            )

    def pad(leaf: Array, axes: dict[int, str]) -> Array:
        extra = {axis: slots[name][1] - slots[name][0] for axis, name in axes.items()}
        return np.pad(leaf, [(0, extra.get(axis, 0)) for axis in range(np.ndim(leaf))])

    return _map_fields(layout, submodel, pad)


def unpad_submodel(layout: Layout, padded: Tree, keys: Keys | Iterable[Keys]) -> Tree:
    """Returns the part of a padded sub-model, or of its update, that belongs to `keys`.

    >>> from keyhole.primitives.cuts import Cut
    >>> from keyhole.primitives.keyspace import KeySpace
    >>> row = KeySpace("row", 5)
    >>> layout = Layout.of(np.zeros(5), Cut(row, {".": 0}))
    >>> unpad_submodel(layout, np.array([7.0, 8.0, np.nan, 3.0]), row.keys([4, 1]))
    array([7., 8.])
    """
    chosen = layout.keys_by_space(keys)

    def cut_off(leaf: Array, axes: dict[int, str]) -> Array:
        ends = {axis: len(chosen[name]) for axis, name in axes.items()}
        return leaf[tuple(slice(ends.get(axis)) for axis in range(np.ndim(leaf)))]

    submodel = _map_fields(layout, padded, cut_off)
    layout.check(submodel, chosen)
    return submodel


def key_masks(layout: Layout, keys: Keys | Iterable[Keys], **sizes: int) -> dict[str, Array]:
    """Returns, for each key space, which of its padded slots hold a slice: bool of shape
    (size,)."""
    chosen = layout.keys_by_space(keys)
    return {name: np.arange(sizes.get(name, len(z))) < len(z) for name, z in chosen.items()}


def _map_fields(layout: Layout, value: Tree, fn: Callable[[Array, dict[int, str]], Array]) -> Tree:
    """Applies fn(leaf, {axis: name of the key space that cuts it}) to every parameter."""
    leaves = tree.flatten(value)
    mapped = {}
    for part in layout.parts:
        names = [factor.name for factor in part.product.factors]
        for field in part.fields:
            axes = dict(zip(field.axes, names, strict=True))
            mapped[field.path] = fn(np.asarray(leaves[field.path]), axes)
    return tree.unflatten(layout.structure, mapped)
