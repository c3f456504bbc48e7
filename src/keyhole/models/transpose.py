"""Deselect functions derived from select functions: phi is the transpose of psi.

For a select function that is linear in the server value, `x -> [psi(x, k) for k in keys]` is a
linear map, and phi is its transpose: the adjoint that JAX knows from reverse-mode differentiation.

Select functions over many keys at once: one compiled call for a batch, not one for each key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from keyhole import tree
from keyhole.arrays import Array, DeselectFn, KeyArray, SelectFn, Tree
from keyhole.errors import NotLinearError, ShapeError
from keyhole.primitives.coding import plain_select_fn
from keyhole.primitives.keyspace import Keys, KeySpace, check_space

_Transpose = Callable[[list[Tree], Keys], Tree]


def derive_deselect(select_fn: SelectFn, server_like: Tree, space: KeySpace) -> DeselectFn:
    r"""Returns the deselect function of a select function written in JAX.

    $\phi(u, z) = \sum_i \psi(\cdot, z_i)^\top u_i$, by `jax.linear_transpose`. Slices may be trees,
    may overlap between keys, and may differ in shape from key to key. Of a quantized or
    half-precision select function, the plain one underneath is taken.

    Args:
        select_fn: psi, `(server value, key) -> slice`, linear in the server value.
        server_like: the server value, or shapes and dtypes in its structure.

    Linearity is checked at up to eight keys when phi is made, and at every key that is used where
    psi branches on the key.

    >>> row = KeySpace("row", 3)
    >>> phi = derive_deselect(lambda x, k: 2 * x[k], np.zeros(3, np.float32), row)
    >>> phi([np.float32(1), np.float32(5), np.float32(1)], row.keys([2, 0, 2]))
    array([10.,  0.,  4.], dtype=float32)
    """
    psi = plain_select_fn(select_fn)
    like = jax.tree.map(_shape_of, server_like)
    last = space.num_keys - 1
    for key in {last * i // 7 for i in range(8)}:
        _check_linear(psi, like, key)
    transpose = _by_vmap(psi, like) if _traces(psi, like, space) else _by_loop(psi, like)

    def deselect_fn(update: list[Tree], keys: Keys) -> Tree:
        check_space(keys, space)
        if len(update) != len(keys):
            raise ShapeError(
                f"an update has one slice for each key: got {len(update)} slices; expected "
                f"{len(keys)}, the number of keys; pass the update of the slices that these keys "
                "selected"
            )
        if not len(keys):
            return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), like)
        return jax.tree.map(np.asarray, transpose(update, keys))

    return deselect_fn


def _traces(psi: SelectFn, like: Tree, space: KeySpace) -> bool:
    """Whether psi takes a traced key; if not (it branches on it), keys are unrolled one by one."""
    if space.num_keys > np.iinfo(np.int32).max:
        return False
    try:
        jax.eval_shape(psi, like, jax.ShapeDtypeStruct((), jnp.int32))
    except (TypeError, IndexError):  # JAX's errors about traced values derive from these
        return False
    return True


def _by_vmap(psi: SelectFn, like: Tree) -> _Transpose:
    """All keys at once: one scatter-add, compiled once for each number of keys."""

    @jax.jit
    def run(stacked: Tree, keys: jax.Array) -> Tree:
        def slices(x: Tree) -> Tree:
            return jax.vmap(lambda key: psi(x, key))(keys)

        return _transposed(slices, like)(stacked)

    def transpose(update: list[Tree], keys: Keys) -> Tree:
        stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *update)
        return run(stacked, keys.array.astype(np.int32))

    return transpose


def _by_loop(psi: SelectFn, like: Tree) -> _Transpose:
    """Key by key, for select functions that branch on the key; each is checked when first used."""
    checked: set[int] = set()

    def transpose(update: list[Tree], keys: Keys) -> Tree:
        for key in set(keys) - checked:
            _check_linear(psi, like, key)
            checked.add(key)
        return _transposed(lambda x: [psi(x, key) for key in keys], like)(update)

    return transpose


def _transposed(slices: Callable[[Tree], Tree], like: Tree) -> Callable[[Tree], Tree]:
    """The transpose of `slices`; updates are cast to the dtypes of the slices."""
    expected = jax.eval_shape(slices, like)
    transpose = jax.linear_transpose(slices, like)

    def run(update: Tree) -> Tree:
        cast = jax.tree.map(lambda leaf, e: jnp.asarray(leaf, e.dtype), update, expected)
        (total,) = transpose(cast)
        return total

    return run


def _shape_of(leaf: Tree) -> jax.ShapeDtypeStruct:
    """Shape and dtype of a leaf as JAX holds it (float64 becomes float32 unless x64 is on)."""
    dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ShapeError(
            f"a server value that is not floating point has no derivative: got {dtype}; expected "
            "floating point; convert it, or pass your own deselect_fn"
        )
    return jax.ShapeDtypeStruct(leaf.shape, dtype)


def _check_linear(psi: SelectFn, like: Tree, key: int) -> None:
    """Raises NotLinearError unless psi has a transpose and is additive at `key`."""

    def at_key(x: Tree) -> Tree:
        return psi(x, key)

    try:
        zeros = jax.tree.map(lambda e: jnp.zeros(e.shape, e.dtype), jax.eval_shape(at_key, like))
        _transposed(at_key, like)(zeros)
    except (NotImplementedError, RuntimeError, TypeError, AssertionError) as error:
        reason = str(error).splitlines()[0] if not isinstance(error, AssertionError) else ""
        raise _not_linear(psi, reason or "it multiplies or branches on it") from error
    if not _is_additive(at_key, like):
        raise _not_linear(psi, "psi(x + y, k) differs from psi(x, k) + psi(y, k)")


def _is_additive(at_key: Callable[[Tree], Tree], like: Tree) -> bool:
    """Compares on two random server values: JAX transposes `x + 1` as if the 1 were not there."""
    rng = np.random.Generator(np.random.Philox(0))
    x, y = (
        jax.tree.map(lambda a: jnp.asarray(rng.standard_normal(a.shape), a.dtype), like)
        for _ in range(2)
    )
    whole = jax.tree.leaves(at_key(jax.tree.map(jnp.add, x, y)))
    parts = zip(jax.tree.leaves(at_key(x)), jax.tree.leaves(at_key(y)), strict=True)
    return all(
        np.allclose(w, a + b, rtol=0, atol=np.sqrt(jnp.finfo(w.dtype).eps) * (1 + np.abs(w).max()))
        for w, (a, b) in zip(whole, parts, strict=True)
        if w.size
    )


def _not_linear(psi: SelectFn, reason: str) -> NotLinearError:
    name, code = str(getattr(psi, "__qualname__", repr(psi))), getattr(psi, "__code__", None)
    name += f" in {Path(code.co_filename).name}:{code.co_firstlineno}" if code else ""
    return NotLinearError(
        f"select function {name!r} is not linear in the server value: got {reason}; expected "
        "select functions that pick, scale and add; pass your own deselect_fn"
    )


_Slices = Mapping[str, jax.ShapeDtypeStruct]
_Run = Callable[[Tree, KeyArray], dict[str, Array]]

_COMPARED = 16  # keys whose slices a compiled function is compared at: the first, the last, between


@dataclass(frozen=True)
class BatchedSelect:
    """A select function of many keys: `(x, keys) -> {path: (m, *shape)}`.

    Args:
        slices: path -> shape and dtype of one array of a slice, in path order.
    """

    slices: _Slices
    run: _Run

    def __call__(self, server_value: Tree, keys: KeyArray) -> dict[str, Array]:
        """Returns the slices of `keys`, in NumPy arrays; order and repeats are kept."""
        return self.run(server_value, keys)


def batch_select(
    select_fn: SelectFn, server_value: Tree, space: KeySpace, batch: int = 256
) -> BatchedSelect:
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
    compiled, plain = _batch_by_vmap(psi, slices, batch), _batch_by_loop(psi, slices)
    last = space.num_keys - 1
    keys = np.unique([last * place // (_COMPARED - 1) for place in range(_COMPARED)])
    if not _traces_in_batches(psi, server_value, slices):
        return BatchedSelect(slices, plain)
    found, expected = compiled(server_value, keys), plain(server_value, keys)
    is_same = all(_is_close(found[path], array) for path, array in expected.items())
    return BatchedSelect(slices, compiled if is_same else plain)


def _batch_by_vmap(psi: SelectFn, slices: _Slices, batch: int) -> _Run:
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


def _batch_by_loop(psi: SelectFn, slices: _Slices) -> _Run:
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


def _traces_in_batches(psi: SelectFn, value: Tree, slices: _Slices) -> bool:
    """Whether psi takes a traced value and key, and gives what it gives for plain ones."""
    try:
        with jax.enable_x64(True):
            keys = jax.ShapeDtypeStruct((2,), np.int64)
            made = jax.eval_shape(jax.vmap(psi, (None, 0)), value, keys)
            return _shapes_of(made, 1) == slices
    except Exception:  # noqa: BLE001 - psi has just worked: whatever it is, tracing brought it
        return False


def _is_close(found: Array, expected: Array) -> bool:
    """Whether arrays differ by rounding only, of which whole numbers have none."""
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
            f"slices differ in shape or dtype: got {_written(found)}; expected {_written(slices)}; "
            "pad and cast them in the select function: all records of a table are alike"
        )


def _written(slices: _Slices) -> str:
    return ", ".join(f"{like.dtype}{list(like.shape)}" for like in slices.values())
