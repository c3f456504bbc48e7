"""Padding: sub-models of unequal size brought to one size, and back.

Compiled client code wants few shapes. A sub-model is padded with zeros behind its selected slices,
never with slices of a key that could be real; a mask says which slots hold a slice. Coming back,
whatever stands in the padding is cut off, so padding a client changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from keyhole import tree
from keyhole.primitives.layout import Layout
from keyhole.types import Array, Tree

__all__ = ["count_slots", "resize_submodel", "slot_masks"]


def count_slots(layout: Layout, submodel: Tree) -> dict[str, int]:
    """Returns how many slices of each key space a sub-model has room for, read from its shapes.

    >>> from keyhole.primitives.cuts import Cut
    >>> from keyhole.primitives.keyspace import KeySpace
    >>> layout = Layout.of({"w": np.zeros((5, 2))}, Cut(KeySpace("row", 5), {"w": 0}))
    >>> count_slots(layout, {"w": np.zeros((3, 2))})
    {'row': 3}
    """
    leaves = tree.flatten(submodel)
    counts: dict[str, int] = {}
    for part in layout.parts:
        for field in part.fields:
            shape = np.shape(leaves[field.path])
            for factor, axis in zip(part.product.factors, field.axes, strict=True):
                counts[factor.name] = shape[axis]
    return counts


def resize_submodel(layout: Layout, submodel: Tree, sizes: Mapping[str, int]) -> Tree:
    """Brings every cut axis to its size: zeros behind, or the end cut off.

    Args:
        layout: the model and its cuts.
        submodel: what a client selected, or its update.
        sizes: number of slots for each key space.

    >>> from keyhole.primitives.cuts import Cut
    >>> from keyhole.primitives.keyspace import KeySpace
    >>> layout = Layout.of(np.zeros(5), Cut(KeySpace("row", 5), {".": 0}))
    >>> padded = resize_submodel(layout, np.array([7.0, 8.0]), {"row": 4})
    >>> padded
    array([7., 8., 0., 0.])
    >>> resize_submodel(layout, padded, {"row": 2})
    array([7., 8.])
    """
    leaves = tree.flatten(submodel)
    resized = {}
    for part in layout.parts:
        counts = [sizes[factor.name] for factor in part.product.factors]
        for field in part.fields:
            leaf = np.asarray(leaves[field.path])
            resized[field.path] = _fit(leaf, field.client_shape(counts))
    return tree.unflatten(layout.structure, resized)


def slot_masks(counts: Mapping[str, int], sizes: Mapping[str, int]) -> dict[str, Array]:
    """Returns, for each key space, which of its slots hold a slice: bool of shape (size,)."""
    return {name: np.arange(size) < counts[name] for name, size in sizes.items()}


def _fit(array: Array, shape: tuple[int, ...]) -> Array:
    """The array within another shape; itself if that is its shape."""
    if array.shape == shape:
        return array
    fitted = np.zeros(shape, array.dtype)
    common = tuple(slice(min(a, b)) for a, b in zip(array.shape, shape, strict=True))
    fitted[common] = array[common]
    return fitted
