"""Select functions over many keys at once: one compiled call for a batch, not one for each key."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from keyhole import tree
from keyhole.errors import ShapeError
from keyhole.primitives.keyspace import KeySpace
from keyhole.primitives.transforms import plain_select_fn
from keyhole.types import Array, KeyArray, SelectFn, Tree

__all__ = ["BatchSelect", "batch_select"]

_Slices = Mapping[str, jax.ShapeDtypeStruct]
_Run = Callable[[Tree, KeyArray], dict[str, Array]]


@dataclass(frozen=True)
class BatchSelect:
    """A select function of many keys: `(x, keys) -> {path: (m, *shape)}`.

    Args:
        slices: path -> shape and dtype of one array of a slice, in path order.
        run: what computes them.
    """

    slices: _Slices
    run: _Run

    def __call__(self, server_value: Tree, keys: KeyArray) -> dict[str, Array]:
        """Returns the slices of `keys`, in NumPy arrays; order and repeats are kept."""
        return self.run(server_value, keys)


def batch_select(
    select_fn: SelectFn, server_value: Tree, space: KeySpace, batch: int = 256
) -> BatchSelect:
    """Makes a select function take many keys at once, to publish its slices or serve them.

    It is vectorised over keys and compiled once, for batches of one size; the last batch is filled
    up. A function that branches on the key is called key by key. Of a quantized or half-precision
    one the plain one underneath is taken: `FunctionSource.of` codes its slices.

    Args:
        select_fn: psi, written in JAX or NumPy; all slices have one shape.
        server_value: x, for its shapes; a batch is computed from the one that it is given, in
            JAX's arrays if it is large: those of NumPy may be copied for each batch.
        space: the key space.
        batch: keys of one call.

    Raises:
        ShapeError: slices differ in shape from key to key; noticed when such a key is used.

    >>> x = np.arange(6, dtype=np.float32).reshape(3, 2)
    >>> psi = batch_select(lambda x, k: 2 * x[k], x, KeySpace("row", 3))
    >>> psi(x, np.array([2, 0, 2]))["."]
    array([[ 8., 10.],
           [ 0.,  2.],
           [ 8., 10.]], dtype=float32)
    """
    psi, value = plain_select_fn(select_fn), jax.tree.map(jnp.asarray, server_value)
    is_traced = _traces(psi, value, space)
    first = jax.eval_shape(psi, value, 0) if is_traced else psi(value, 0)
    slices = {path: _shape_of(leaf) for path, leaf in tree.flatten(first).items()}
    return BatchSelect(slices, _by_vmap(psi, slices, batch) if is_traced else _by_loop(psi, slices))


def _by_vmap(psi: SelectFn, slices: _Slices, batch: int) -> _Run:
    """A batch is one call of one shape: fewer keys are followed by key 0, which is thrown away."""
    compiled = jax.jit(jax.vmap(psi, (None, 0)))

    def run(server_value: Tree, keys: KeyArray) -> dict[str, Array]:
        found = _empty(slices, len(keys))
        for start in range(0, len(keys), batch):
            some = keys[start : start + batch].astype(np.int32)
            made = compiled(server_value, np.pad(some, (0, batch - len(some))))
            for path, leaf in tree.flatten(made).items():
                found[path][start : start + batch] = np.asarray(leaf)[: len(some)]
        return found

    return run


def _by_loop(psi: SelectFn, slices: _Slices) -> _Run:
    shapes = {path: like.shape for path, like in slices.items()}

    def run(server_value: Tree, keys: KeyArray) -> dict[str, Array]:
        found = _empty(slices, len(keys))
        for place, key in enumerate(keys.tolist()):
            made = tree.flatten(psi(server_value, key))
            if {path: np.shape(leaf) for path, leaf in made.items()} != shapes:
                raise ShapeError(
                    "slices differ in shape from key to key",
                    got=", ".join(f"{np.shape(leaf)}" for leaf in made.values()),
                    allowed=", ".join(f"{shape}" for shape in shapes.values()),
                    fix="pad them in the select function: records of a table have one length",
                )
            for path, leaf in made.items():
                found[path][place] = leaf
        return found

    return run


def _traces(psi: SelectFn, value: Tree, space: KeySpace) -> bool:
    """Whether psi takes a traced value and key; JAX's errors about those derive from these two."""
    if space.num_keys > np.iinfo(np.int32).max:
        return False
    try:
        jax.eval_shape(psi, value, jax.ShapeDtypeStruct((), jnp.int32))
    except (TypeError, IndexError):
        return False
    return True


def _empty(slices: _Slices, count: int) -> dict[str, Array]:
    return {path: np.empty((count, *like.shape), like.dtype) for path, like in slices.items()}


def _shape_of(leaf: Any) -> jax.ShapeDtypeStruct:
    like = leaf if hasattr(leaf, "shape") else np.asarray(leaf)
    return jax.ShapeDtypeStruct(like.shape, like.dtype)
