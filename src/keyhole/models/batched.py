"""Select functions over many keys at once: one compiled call for a batch, not one for each key."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from keyhole import tree
from keyhole.errors import ShapeError
from keyhole.primitives.keyspace import KeySpace
from keyhole.primitives.transforms import plain_select_fn
from keyhole.types import Array, KeyArray, SelectFn, Tree

__all__ = ["BatchSelect", "batch_select"]

_Slices = Mapping[str, jax.ShapeDtypeStruct]
_Run = Callable[[Tree, KeyArray], dict[str, Array]]

_COMPARED = 16  # keys whose slices a compiled function is compared at: the first, the last, between


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
    up. Numbers and keys have 64 bits where psi has them so. Slices are then those of psi: the same
    bytes where it only picks, up to the rounding of sums and products where it computes. That is
    compared at 16 keys, the first and the last among them.

    A function is called key by key where it cannot be compiled (it branches on the key, or calls
    NumPy) or would return something else: another dtype, as `jnp.zeros(3)` does that leaves it to
    JAX, or other numbers. Of a quantized or half-precision one the plain one underneath is taken:
    `FunctionSource.of` codes its slices.

    Args:
        select_fn: psi, written in JAX or NumPy; all slices have one shape and dtype.
        server_value: x, for its shapes; a batch is computed from the one that it is given, in
            JAX's arrays if it is large: those of NumPy may be copied for each batch.
        space: the key space.
        batch: keys of one call.

    Raises:
        ShapeError: slices differ in shape or dtype from key to key, or from those of this
            `server_value`; noticed when they are made.

    >>> x = np.arange(6, dtype=np.float32).reshape(3, 2)
    >>> psi = batch_select(lambda x, k: 2 * x[k], x, KeySpace("row", 3))
    >>> psi(x, np.array([2, 0, 2]))["."]
    array([[ 8., 10.],
           [ 0.,  2.],
           [ 8., 10.]], dtype=float32)
    """
    psi = plain_select_fn(select_fn)
    slices = _shapes_of(psi(server_value, 0))
    compiled, plain = _by_vmap(psi, slices, batch), _by_loop(psi, slices)
    last = space.num_keys - 1
    keys = np.unique([last * place // (_COMPARED - 1) for place in range(_COMPARED)])
    is_same = _traces(psi, server_value, slices) and _agree(
        compiled(server_value, keys), plain(server_value, keys)
    )
    return BatchSelect(slices, compiled if is_same else plain)


def _by_vmap(psi: SelectFn, slices: _Slices, batch: int) -> _Run:
    """A batch is one call of one shape: fewer keys are followed by key 0, which is thrown away."""
    compiled = jax.jit(jax.vmap(psi, (None, 0)))

    def run(server_value: Tree, keys: KeyArray) -> dict[str, Array]:
        found = _empty(slices, len(keys))
        for start in range(0, len(keys), batch):
            some = keys[start : start + batch].astype(np.int64)
            with jax.enable_x64(True):
                made = compiled(server_value, np.pad(some, (0, batch - len(some))))
            _check_shapes(_shapes_of(made, 1), slices)
            for path, leaf in tree.flatten(made).items():
                found[path][start : start + batch] = np.asarray(leaf)[: len(some)]
        return found

    return run


def _by_loop(psi: SelectFn, slices: _Slices) -> _Run:
    """The definition, key by key."""

    def run(server_value: Tree, keys: KeyArray) -> dict[str, Array]:
        found = _empty(slices, len(keys))
        for place, key in enumerate(keys.tolist()):
            made = psi(server_value, key)
            _check_shapes(_shapes_of(made), slices)
            for path, leaf in tree.flatten(made).items():
                found[path][place] = leaf
        return found

    return run


def _traces(psi: SelectFn, value: Tree, slices: _Slices) -> bool:
    """Whether psi takes a traced value and key, and gives what it gives for plain ones."""
    try:
        with jax.enable_x64(True):
            keys = jax.ShapeDtypeStruct((2,), np.int64)
            made = jax.eval_shape(jax.vmap(psi, (None, 0)), value, keys)
            return _shapes_of(made, 1) == slices
    except Exception:  # noqa: BLE001 - psi has just worked: whatever it is, tracing brought it
        return False


def _agree(compiled: Mapping[str, Array], plain: Mapping[str, Array]) -> bool:
    """Whether two ways to compute slices differ by rounding only, which whole numbers have none."""
    return all(_is_close(compiled[path], expected) for path, expected in plain.items())


def _is_close(found: Array, expected: Array) -> bool:
    if not np.issubdtype(expected.dtype, np.inexact):
        return np.array_equal(found, expected)
    tolerance = float(np.sqrt(np.finfo(expected.dtype).eps))
    largest = float(np.max(np.abs(expected), initial=0, where=np.isfinite(expected)))
    return np.allclose(found, expected, tolerance, tolerance * largest, equal_nan=True)


def _empty(slices: _Slices, count: int) -> dict[str, Array]:
    return {path: np.empty((count, *like.shape), like.dtype) for path, like in slices.items()}


def _shapes_of(made: Tree, axes: int = 0) -> _Slices:
    """Path -> shape and dtype of the arrays of a slice; the first `axes` axes are not its own."""
    found = {}
    for path, leaf in tree.flatten(made).items():
        like: Any = leaf if hasattr(leaf, "shape") else np.asarray(leaf)
        found[path] = jax.ShapeDtypeStruct(like.shape[axes:], like.dtype)
    return found


def _check_shapes(found: _Slices, slices: _Slices) -> None:
    if found != slices:
        raise ShapeError(
            "slices differ in shape or dtype",
            got=_written(found),
            allowed=_written(slices),
            fix="pad and cast them in the select function: all records of a table are alike",
        )


def _written(slices: _Slices) -> str:
    return ", ".join(f"{like.dtype}{list(like.shape)}" for like in slices.values())
