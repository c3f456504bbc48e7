"""Gathers, adds and sums rows of a table by key, at the speed of memory and in a fixed order.

A table is a C-contiguous array (K, d), a key is a row number, M keys come with M rows. Keys are
checked once, up front; kernels then move whole rows. A gather that repeats keys of a large table
visits it in parts that fit the cache.

Kernels release the GIL and start no thread pool. Where `threads` is above 1, the work is split so
that one row is written by one thread in order of occurrence: the sum is the same, bit for bit.

What makes kernels fast: a row due a few steps later is fetched into the cache while the current one
is moved (the compiler has no word for this), and large outputs are streamed past the cache, which
spares reading the lines they overwrite.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from keyhole.errors import InputError, KeySpaceError, ShapeError

# Kernels are typed by numba when they are first called.
# mypy: disable-error-code="no-untyped-def"


AHEAD = 8  # rows; 4 to 16 measured alike
LINE = 64  # bytes in a cache line


def emit_fetch(builder: Any, address: Any, *, for_writing: bool) -> None:
    """Emits a request for the line at an address, into all caches; never faults."""
    pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
    fetch = builder.module.declare_intrinsic("llvm.prefetch", [pointer], kind)
    at = builder.inttoptr(address, pointer)
    builder.call(fetch, [at, number(int(for_writing)), number(3), number(1)])


def _type_fetch(_: Any, address: Any) -> Any:
    """Asks for the line at an address."""

    def emit(_: Any, builder: Any, __: Any, args: Any) -> Any:
        emit_fetch(builder, args[0], for_writing=True)
        return ir.Constant(ir.IntType(8).as_pointer(), None)

    return types.void(types.int64), emit


_fetch: Any = intrinsic(_type_fetch)


@njit(cache=True, nogil=True, inline="always")
def fetch_row(rows, slot):
    """Fetches row `slot` of an array, for writing; a slot outside it is harmless."""
    size = rows.strides[0]
    first = rows.ctypes.data + slot * size
    for at in range(0, size, LINE):
        _fetch(first + at)
    _fetch(first + size - 1)  # a row rarely begins where a line does


_BLOCK = 256  # bytes moved without a branch
_AHEAD = 4096  # bytes fetched before they are due; an eighth of a first-level cache
_DIGIT = 11  # bits per radix pass: 2048 counters stay in the first-level cache
_WORD, _FLAG = ir.IntType(64), ir.IntType(32)


def _move(tail: tuple[int, ...], *, adds: bool = False, streams: bool = False) -> Any:
    """Makes an intrinsic that copies or adds a row: blocks of bytes, then ever smaller units.

    The compiler neither fetches ahead nor streams, and knows too little about aliasing to keep
    whole vectors in flight. Blocks without a branch are worth a third of the time at d = 64.
    """

    @intrinsic
    def move(_: Any, target: Any, source: Any, ahead: Any, size: Any, kind: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            item = context.get_value_type(signature.args[4].dtype)
            width = context.get_abi_sizeof(item)
            done = _emit_units(builder, item, width, args, _WORD(0), _BLOCK, adds, streams)
            with builder.if_then(builder.icmp_signed("<", done, args[3])):
                for unit in tail:
                    size = unit or width
                    done = _emit_units(builder, item, width, args, done, size, adds, streams)
            # A row that starts inside a line ends in one more.
            _emit_fetches(builder, builder.add(args[2], builder.sub(args[3], _WORD(1))), LINE)
            return context.get_dummy_value()

        return types.void(target, source, ahead, size, kind), emit

    return move


def _emit_units(
    builder: Any, item: Any, width: int, args: Any, done: Any, unit: int, adds: bool, streams: bool
) -> Any:
    """Moves as many whole units as remain after the bytes that are done; returns what is done."""
    # Streaming needs alignment, and rows of a multiple of 16 bytes have no more than that.
    chunk, align = (min(unit, 16), 16) if streams else (min(unit, 32), 1)
    pointer = ir.VectorType(item, chunk // width).as_pointer()
    add = builder.add if isinstance(item, ir.IntType) else builder.fadd
    count = builder.sdiv(builder.sub(args[3], done), _WORD(unit))
    with cgutils.for_range(builder, count) as loop:
        offset = builder.add(done, builder.mul(loop.index, _WORD(unit)))
        _emit_fetches(builder, builder.add(args[2], offset), unit)
        for at in range(0, unit, chunk):
            here = builder.add(offset, _WORD(at))
            target, source = (builder.inttoptr(builder.add(p, here), pointer) for p in args[:2])
            value = builder.load(source, align=1)
            if adds:
                value = add(builder.load(target, align=1), value)
            store = builder.store(value, target, align=align)
            if streams:
                store.set_metadata("nontemporal", builder.module.add_metadata([_FLAG(1)]))
    return builder.add(done, builder.mul(count, _WORD(unit)))


def _emit_fetches(builder: Any, address: Any, size: int) -> None:
    """Asks for the whole lines from an address on."""
    for line in range(0, size - LINE + 1, LINE):
        emit_fetch(builder, builder.add(address, _WORD(line)), for_writing=False)


def _make_fence() -> Any:
    """Makes an intrinsic that lets other threads see what was streamed."""

    @intrinsic
    def fence(_: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            builder.fence("seq_cst")
            return context.get_dummy_value()

        return types.void(), emit

    return fence


_copy_row = _move((LINE, 32, 4, 1))
_stream_row = _move((LINE, 16), streams=True)
_add_row = _move((LINE, 0), adds=True)
_fence = _make_fence()


@njit(cache=True, nogil=True)
def copy_rows(table, keys, order, out, streams):
    """Copies occurrences `order`, or all if None; table (K, width) and out (M, width) are bytes."""
    number = len(keys) if order is None else len(order)
    start, to, width = table.ctypes.data, out.ctypes.data, table.shape[1]
    lead = min(32, max(2, _AHEAD // width))
    streams = streams and (to | width) & 15 == 0
    for x in range(number):
        y = min(x + lead, number - 1)
        i, j = (x, y) if order is None else (order[x], order[y])
        source, ahead = start + keys[i] * width, start + keys[j] * width
        if streams:
            _stream_row(to + i * width, source, ahead, width, table)
        else:
            _copy_row(to + i * width, source, ahead, width, table)
    if streams:
        _fence()


@njit(cache=True, nogil=True)
def add_rows(table, keys, order, rows):
    """Adds occurrences `order`, or all if None."""
    number = len(keys) if order is None else len(order)
    start, source, width = table.ctypes.data, rows.ctypes.data, table.shape[1] * table.itemsize
    lead = min(32, max(2, _AHEAD // width))
    for x in range(number):
        y = min(x + lead, number - 1)
        i, j = (x, y) if order is None else (order[x], order[y])
        target, ahead = start + keys[i] * width, start + keys[j] * width
        _add_row(target, source + i * width, ahead, width, table)


@njit(cache=True, nogil=True)
def partition(keys, block, parts, order):
    """Orders occurrences by part key // block % parts, stably; returns where each part starts."""
    starts = np.zeros(parts + 1, np.int64)
    for key in keys:
        starts[key // block % parts + 1] += 1
    starts = np.cumsum(starts)
    nexts = starts.copy()
    for i, key in enumerate(keys):
        part = key // block % parts
        order[nexts[part]] = i
        nexts[part] += 1
    return starts


@njit(cache=True, nogil=True)
def number_keys(source, work, slots):
    """Fills slots[i] with the rank of key i among the distinct keys; returns those, ascending."""
    keys, order = _sort(source, work)
    count = 0
    for x in range(len(keys)):
        # Distinct keys are packed into the front of the sorted ones: count never passes x.
        if x == 0 or keys[x] != keys[count - 1]:
            keys[count] = keys[x]
            count += 1
        slots[order[x]] = count - 1
    return keys[:count]


@njit(cache=True, nogil=True)
def _sort(source, work):
    """Keys ascending and their occurrences, in work (4, M), by a stable radix sort."""
    keys, order, to_keys, to_order = work[0], work[1], work[2], work[3]
    top, shift, mask = np.int64(0), 0, (1 << _DIGIT) - 1
    for i, key in enumerate(source):
        keys[i], order[i], top = key, i, max(top, key)
    while shift < 63 and top >> shift > 0:
        nexts = np.zeros(mask + 2, np.int64)
        for key in keys:
            nexts[(key >> shift & mask) + 1] += 1
        nexts = np.cumsum(nexts)
        for i, key in enumerate(keys):
            at = nexts[key >> shift & mask]
            nexts[key >> shift & mask] = at + 1
            to_keys[at], to_order[at] = key, order[i]
        keys, order, to_keys, to_order = to_keys, to_order, keys, order
        shift += _DIGIT
    return keys, order


@njit(cache=True, nogil=True)
def all_within(keys, last):
    """Whether all keys are in 0..last; the sign bit collects both faults without a branch."""
    signs = np.int64(0)
    for key in keys:
        signs |= key | (last - key)
    return signs >= 0


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
