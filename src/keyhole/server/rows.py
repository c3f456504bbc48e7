"""Gathers, adds and sums rows of a table by key, at the speed of memory and in a fixed order.

A table is a C-contiguous array (K, d), a key is a row number, M keys come with M rows. Keys are
checked once, up front; kernels then move whole rows. A gather that repeats keys of a large table
visits it in parts that fit the cache.

Compiled loops (`row_loops.py`) release the GIL and start no thread pool. Where `threads` is above
1, the work is split so that one row is written by one thread in order of occurrence: the sum is the
same, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from keyhole.arrays import LINE
from keyhole.compiled import loop
from keyhole.errors import InputError, KeySpaceError, ShapeError


@loop("keyhole.server.row_loops")
def copy_rows(
    table: np.ndarray, keys: np.ndarray, order: np.ndarray | None, out: np.ndarray, streams: bool
) -> None:
    """Copies occurrences `order`, or all if None; table (K, width) and out (M, width) are bytes.

    `streams` past the cache what it writes, where that is compiled.
    """
    if order is None:
        out[:] = table[keys]
    else:
        out[order] = table[keys[order]]


@loop("keyhole.server.row_loops")
def add_rows(
    table: np.ndarray, keys: np.ndarray, order: np.ndarray | None, rows: np.ndarray
) -> None:
    """Adds occurrences `order`, or all if None."""
    if order is None:
        np.add.at(table, keys, rows)
    else:
        np.add.at(table, keys[order], rows[order])


@loop("keyhole.server.row_loops")
def take_columns(table: np.ndarray, keys: np.ndarray, start: int, out: np.ndarray) -> None:
    """Spreads columns from `start` on of the rows of some keys over out (before, M, behind): how a
    parameter lies whose keys are not its first axis."""
    before, count, behind = out.shape
    rows = table[keys, start : start + before * behind]
    out[:] = rows.reshape(count, before, behind).transpose(1, 0, 2)


@loop("keyhole.server.row_loops")
def add_columns(table: np.ndarray, keys: np.ndarray, start: int, values: np.ndarray) -> None:
    """Adds values (before, M, behind) to columns from `start` on of the rows of some keys, in
    order of occurrence: from where `take_columns` took them."""
    before, count, behind = values.shape
    rows = values.transpose(1, 0, 2).reshape(count, before * behind)
    np.add.at(table[:, start : start + before * behind], keys, rows)


@loop("keyhole.server.row_loops")
def partition(keys: np.ndarray, block: int, parts: int, order: np.ndarray) -> np.ndarray:
    """Orders occurrences by part key // block % parts, stably; returns where each part starts."""
    of = keys // block % parts
    order[:] = np.argsort(of, kind="stable")
    return np.searchsorted(of[order], np.arange(parts + 1))


@loop("keyhole.server.row_loops")
def number_keys(source: np.ndarray, work: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """Fills slots[i] with the rank of key i among the distinct keys; returns those, ascending.

    `work`, (4, M), is memory for the compiled form.
    """
    distinct, slots[:] = np.unique(source, return_inverse=True)
    return distinct


@loop("keyhole.server.row_loops")
def join_keys(left: np.ndarray, right: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """Fills slots with the ranks of the keys of both, one after the other, among the distinct keys;
    returns those, ascending. Each side is distinct and ascending."""
    distinct = np.union1d(left, right)
    slots[:] = np.searchsorted(distinct, np.concatenate([left, right]))
    return distinct


@loop("keyhole.server.row_loops")
def all_within(keys: np.ndarray, last: int) -> bool:
    """Whether all keys are in 0..last."""
    return not len(keys) or bool(keys.min() >= 0 and keys.max() <= last)


_STREAM_FROM = 8 << 20  # bytes of output; below, the reader may still find it in the cache
_PART = 16 << 20  # bytes of table that stay in a shared cache while a part is visited
_THREAD_FROM = 8 << 20  # bytes for each thread, which costs about 0.1 ms to start
_ADDABLE = tuple(np.dtype(name) for name in ("float32", "float64", "int32", "int64"))


def gather_rows(
    table: np.ndarray, keys: np.ndarray, out: np.ndarray | None = None, *, threads: int = 1
) -> np.ndarray:
    """Copies the row of each key; order and repeats are kept.

    out[i, :] = table[keys[i], :]

    Args:
        table: (K, d), C-contiguous, boolean or numeric.
        keys: (M,), integers in [0, K).
        out: (M, d) of the table's dtype to write into; spares the page faults of fresh memory.
        threads: how many threads may share a large job.

    >>> gather_rows(np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([1, 0, 1]))
    array([[3., 4.],
           [1., 2.],
           [3., 4.]])
    """
    _check_rows("table", table)
    keys = checked_keys(keys, len(table))
    shape = (len(keys), table.shape[1])
    out = np.empty(shape, table.dtype) if out is None else _checked_target("out", out, table)
    if out.shape != shape:
        raise _misfit("out has the wrong shape", out.shape, shape, "allocate one row for each key")
    if out.nbytes:
        _gather(table, keys, out, _share(threads, out.nbytes))
    return out


def scatter_add_rows(
    table: np.ndarray, keys: np.ndarray, rows: np.ndarray, *, threads: int = 1
) -> None:
    """Adds each row to the table's row of its key, in place and in order of occurrence.

    table[keys[i], :] += rows[i, :]  for i = 0, 1, ..., M - 1

    Args:
        table: (K, d), C-contiguous, writeable, float32, float64, int32 or int64.
        keys: (M,), integers in [0, K); a repeated key adds repeatedly.
        rows: (M, d), C-contiguous, of the table's dtype, not overlapping the table.
        threads: how many threads may share a large job; the result does not depend on it.

    >>> table = np.zeros((3, 2), np.float32)
    >>> scatter_add_rows(table, np.array([2, 0, 2]), np.ones((3, 2), np.float32))
    >>> table[:, 0]
    array([1., 0., 2.], dtype=float32)
    """
    _check_rows("rows", rows, addable=True)
    _checked_target("table", table, rows)
    keys = checked_keys(keys, len(table))
    expected = (len(keys), table.shape[1])
    if rows.shape != expected:
        raise _misfit("rows do not fit", rows.shape, expected, "pass one row of d for each key")
    if rows.nbytes:
        _scatter_add(table, keys, rows, _share(threads, rows.nbytes))


def sum_rows(
    keys: np.ndarray, rows: np.ndarray, *, threads: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """Sums the rows of each distinct key; time and memory depend on M and d, never on K.

    sums[g, :] = 0 + rows[i1, :] + rows[i2, :] + ...  over i1 < i2 < ... with keys[i] = distinct[g]

    Args:
        keys: (M,), integers in [0, 2**63).
        rows: (M, d), C-contiguous, float32, float64, int32 or int64.
        threads: how many threads may share a large job; the result does not depend on it.

    >>> sum_rows(np.array([7, 2**62, 7]), np.array([[1.0], [2.0], [3.0]]))
    (array([                  7, 4611686018427387904]), array([[4.],
           [2.]]))
    """
    _check_rows("rows", rows, addable=True)
    keys = checked_keys(keys, 2**63)
    # NumPy backs large arrays with large pages: the sort takes a third of the time in this memory.
    work, slots = np.empty((4, len(keys)), np.int64), np.empty(len(keys), np.int64)
    distinct = number_keys(keys, work, slots).copy()
    sums = np.zeros((len(distinct), rows.shape[1]), rows.dtype)
    scatter_add_rows(sums, slots, rows, threads=threads)
    return distinct, sums


def _misfit(wrong: str, got: object, allowed: object, fix: str) -> ShapeError:
    return ShapeError(f"{wrong}: got {got}; expected {allowed}; {fix}")


def _check_rows(name: str, rows: np.ndarray, *, addable: bool = False) -> None:
    """Demands a C-contiguous matrix of numbers; `addable`: of a dtype the kernels can add."""
    if not isinstance(rows, np.ndarray) or rows.ndim != 2:
        got = rows.shape if isinstance(rows, np.ndarray) else type(rows).__name__
        raise _misfit(f"{name} is not a matrix", got, "an array (rows, d)", "reshape it")
    if not rows.flags.c_contiguous:
        fix = "copy it with numpy.ascontiguousarray"
        raise _misfit(f"{name} is not C-contiguous", f"strides {rows.strides}", "whole rows", fix)
    if addable and rows.dtype not in _ADDABLE:
        allowed = ", ".join(str(dtype) for dtype in _ADDABLE)
        raise _misfit(f"{name} cannot be added up", rows.dtype, allowed, "convert it with astype")
    if rows.dtype.kind not in "biufc":
        raise _misfit(f"{name} holds no numbers", rows.dtype, "a numeric dtype", "convert it")


def _checked_target(name: str, target: np.ndarray, source: np.ndarray) -> np.ndarray:
    """A matrix that may be written to while the source is read."""
    _check_rows(name, target)
    if target.dtype != source.dtype:
        raise _misfit(f"{name} has the wrong dtype", target.dtype, source.dtype, "use one dtype")
    if not target.flags.writeable:
        raise _misfit(f"{name} is read-only", "writeable=False", "a writeable array", "copy it")
    if np.may_share_memory(target, source):
        raise _misfit(f"{name} overlaps what is read", "shared memory", "its own", "copy it")
    return target


def checked_keys(keys: np.ndarray, num_keys: int) -> np.ndarray:
    """Returns the keys as contiguous writeable int64, all in [0, num_keys)."""
    if not isinstance(keys, np.ndarray) or keys.ndim != 1:
        got = f"rank {keys.ndim}" if isinstance(keys, np.ndarray) else type(keys).__name__
        fix = "pass one integer for each row"
        raise KeySpaceError(f"keys are not a vector: got {got}; expected an array (M,); {fix}")
    if keys.dtype.kind not in "iu" or keys.dtype == np.uint64:
        fix = "convert them with astype"
        raise KeySpaceError(f"keys are not integers: got {keys.dtype}; expected int64; {fix}")
    # Read-only keys are copied: 8 bytes each, against a second compilation of every kernel.
    if keys.dtype != np.int64 or not keys.flags.carray:
        keys = np.array(keys, np.int64)
    if not all_within(keys, num_keys - 1):
        count = np.count_nonzero((keys < 0) | (keys > num_keys - 1))
        got, fix = f"{count} such keys of {keys.size}", "rebuild the key space or enlarge the table"
        allowed = f"0..{num_keys - 1}" if num_keys else "none, the table has no rows"
        raise KeySpaceError(f"keys lie outside the table: got {got}; expected {allowed}; {fix}")
    return keys


def _share(threads: int, nbytes: int) -> int:
    """How many threads a job of this size is worth."""
    if threads < 1:
        fix = "pass the number of cores to use"
        raise InputError(f"too few threads: got {threads}; expected 1 or more; {fix}")
    return min(threads, max(1, nbytes // _THREAD_FROM))


def _gather(table: np.ndarray, keys: np.ndarray, out: np.ndarray, threads: int) -> None:
    """Gives each thread its own rows of the output."""
    table, out, streams = table.view(np.uint8), out.view(np.uint8), out.nbytes >= _STREAM_FROM
    order = np.arange(len(keys)) if threads > 1 else None
    if table.nbytes > 2 * _PART and out.nbytes > 2 * table.nbytes:
        order, block = np.empty_like(keys), max(1, _PART // table.shape[1])
        partition(keys, block, -(-len(table) // block), order)
    orders = [None] if order is None else np.array_split(order, threads)
    _run(lambda order: copy_rows(table, keys, order, out, streams), orders)


def _scatter_add(table: np.ndarray, keys: np.ndarray, rows: np.ndarray, threads: int) -> None:
    """Gives each thread its own rows of the table: by turns, in blocks of about a line."""
    orders: list[Any] = [None]
    if threads > 1:
        order, block = np.empty_like(keys), max(1, LINE * len(rows) // rows.nbytes)
        orders = np.split(order, partition(keys, block, threads, order)[1:-1])
    _run(lambda order: add_rows(table, keys, order, rows), orders)


def _run(work: Callable[[Any], None], orders: list[Any]) -> None:
    """Does the work of each order in a thread of its own; a single one here."""
    if len(orders) == 1:
        work(orders[0])
    else:
        with ThreadPoolExecutor(len(orders)) as pool:
            list(pool.map(work, orders))
