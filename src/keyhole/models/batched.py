"""Select functions over many keys at once: one compiled call for a batch, not one for each key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from keyhole import tree
from keyhole.delivery.records import PLAIN, Coding, RecordField, Records
from keyhole.delivery.sources import FunctionSource
from keyhole.errors import InputError, ShapeError
from keyhole.primitives.keyspace import KeySpace
from keyhole.primitives.transforms import HalfPrecision, Quantized, plain_select_fn
from keyhole.types import Array, KeyArray, SelectFn, Tree

__all__ = ["batch_select", "source_of"]

_SelectBatch = Callable[[Any, KeyArray], dict[str, Array]]


def source_of(
    select_fn: SelectFn, server_value: Tree, space: KeySpace, coding: Coding = PLAIN
) -> FunctionSource:
    """Returns a source of the slices of any select function, to publish or to serve on demand.

    Args:
        select_fn: psi, written in JAX or NumPy; all slices have one shape. A quantized or
            half-precision one brings its coding along.
        server_value: x.
        space: the key space.
        coding: how numbers are stored.

    Raises:
        ShapeError: slices differ in shape from key to key.
        InputError: two codings.

    >>> row = KeySpace("row", 3)
    >>> source = source_of(lambda x, k: 2 * x[k], np.arange(6, dtype=np.float32).reshape(3, 2), row)
    >>> source.records.decode(source.read(np.array([2, 0, 2])))["."]
    array([[ 8., 10.],
           [ 0.,  2.],
           [ 8., 10.]], dtype=float32)
    """
    records, select_batch = batch_select(select_fn, server_value, space, coding)
    return FunctionSource(records, jax.tree.map(jnp.asarray, server_value), select_batch)


def batch_select(
    select_fn: SelectFn,
    server_value: Tree,
    space: KeySpace,
    coding: Coding = PLAIN,
    batch: int = 256,
) -> tuple[Records, _SelectBatch]:
    """Returns what the slices of a select function hold, and what computes many of them.

    The function is vectorised over keys and compiled once, for batches of one size; the last batch
    is filled up. One that branches on the key is called key by key.

    Args:
        select_fn: psi.
        server_value: x, for its shapes; a batch is computed from the one that it is given.
        space: the key space.
        coding: how numbers are stored.
        batch: keys of one call.

    Returns:
        The records, and `(x, keys) -> {path: (m, *shape)}`.

    Raises:
        ShapeError, InputError: as `source_of` says.
    """
    psi, coding = plain_select_fn(select_fn), _coding_of(select_fn, coding)
    value = jax.tree.map(jnp.asarray, server_value)
    is_traced = _traces(psi, value, space)
    first = jax.eval_shape(psi, value, 0) if is_traced else psi(value, 0)
    fields = tuple(
        RecordField(path, tuple(leaf.shape), np.dtype(leaf.dtype))
        for path, leaf in tree.flatten(jax.tree.map(_with_shape, first)).items()
    )
    records = Records(space.name, space.num_keys, fields, coding)
    return records, _by_vmap(psi, fields, batch) if is_traced else _by_loop(psi, fields)


def _by_vmap(psi: SelectFn, fields: tuple[RecordField, ...], batch: int) -> _SelectBatch:
    """A batch is one call of one shape: fewer keys are followed by key 0, which is thrown away."""
    compiled = jax.jit(jax.vmap(psi, (None, 0)))

    def select_batch(server_value: Tree, keys: KeyArray) -> dict[str, Array]:
        found = {f.path: np.empty((len(keys), *f.shape), f.dtype) for f in fields}
        for start in range(0, len(keys), batch):
            some = keys[start : start + batch].astype(np.int32)
            slices = compiled(server_value, np.pad(some, (0, batch - len(some))))
            for path, leaf in tree.flatten(slices).items():
                found[path][start : start + batch] = np.asarray(leaf)[: len(some)]
        return found

    return select_batch


def _by_loop(psi: SelectFn, fields: tuple[RecordField, ...]) -> _SelectBatch:
    def select_batch(server_value: Tree, keys: KeyArray) -> dict[str, Array]:
        found = {f.path: np.empty((len(keys), *f.shape), f.dtype) for f in fields}
        for place, key in enumerate(keys.tolist()):
            slices = tree.flatten(psi(server_value, key))
            if {path: np.shape(leaf) for path, leaf in slices.items()} != {
                f.path: f.shape for f in fields
            }:
                raise ShapeError(
                    "slices differ in shape from key to key",
                    got=", ".join(f"{np.shape(leaf)}" for leaf in slices.values()),
                    allowed=", ".join(f"{f.shape}" for f in fields),
                    fix="pad them in the select function: records of a table have one length",
                )
            for path, leaf in slices.items():
                found[path][place] = leaf
        return found

    return select_batch


def _traces(psi: SelectFn, value: Tree, space: KeySpace) -> bool:
    """Whether psi takes a traced value and key; JAX's errors about those derive from these two."""
    if space.num_keys > np.iinfo(np.int32).max:
        return False
    try:
        jax.eval_shape(psi, value, jax.ShapeDtypeStruct((), jnp.int32))
    except (TypeError, IndexError):
        return False
    return True


def _coding_of(select_fn: SelectFn, coding: Coding) -> Coding:
    """The coding that a transformed select function stands for, or the one that is given."""
    if not isinstance(select_fn, (Quantized, HalfPrecision)):
        return coding
    if coding != PLAIN:
        raise InputError(
            "slices are coded twice",
            got=f"{type(select_fn).__name__} and {coding.kind}",
            allowed="one coding",
            fix="pass the plain select function",
        )
    if isinstance(select_fn, HalfPrecision):
        return Coding("half")
    return Coding("uint8" if select_fn.bits == 8 else "uint4", select_fn.seed)


def _with_shape(leaf: Any) -> Any:
    """The leaf, as an array if it is a bare number."""
    return leaf if hasattr(leaf, "shape") else np.asarray(leaf)
