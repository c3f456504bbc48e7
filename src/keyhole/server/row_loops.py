"""Runs the loops of `rows.py`, `row_sums.py` and `inputs.py` over rows and keys, compiled.

What makes them fast: a row due a few steps later is fetched into the cache while the current one is
moved (the compiler has no word for this), and large outputs are streamed past the cache, which
spares reading the lines they overwrite.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from keyhole.arrays import LINE

# Kernels are typed by numba when they are first called.
# mypy: disable-error-code="no-untyped-def"


AHEAD = 8  # rows; 4 to 16 measured alike


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
    """Runs `copy_rows` of `rows.py`."""
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
    """Runs `add_rows` of `rows.py`."""
    number = len(keys) if order is None else len(order)
    start, source, width = table.ctypes.data, rows.ctypes.data, table.shape[1] * table.itemsize
    lead = min(32, max(2, _AHEAD // width))
    for x in range(number):
        y = min(x + lead, number - 1)
        i, j = (x, y) if order is None else (order[x], order[y])
        target, ahead = start + keys[i] * width, start + keys[j] * width
        _add_row(target, source + i * width, ahead, width, table)


_TILE = 16  # float32 in a line: as many lines of the other side stay in the first-level cache


@njit(cache=True, nogil=True)
def take_columns(table, keys, start, out):
    """Runs `take_columns` of `rows.py`; single numbers go in tiles, since one side has them far
    apart."""
    before, count, behind = out.shape
    if behind == 1:
        for tile in range(0, before, _TILE):
            lines = out[tile : min(tile + _TILE, before), :, 0]
            for i in range(count):
                row = table[keys[i], start + tile : start + tile + len(lines)]
                for p in range(len(row)):
                    lines[p, i] = row[p]
        return
    for i in range(count):
        for p in range(before):
            row, target = table[keys[i], start + p * behind :], out[p, i]
            for q in range(behind):
                target[q] = row[q]


@njit(cache=True, nogil=True)
def add_columns(table, keys, start, values):
    """Runs `add_columns` of `rows.py`, in tiles as `take_columns`."""
    before, count, behind = values.shape
    if behind == 1:
        for tile in range(0, before, _TILE):
            lines = values[tile : min(tile + _TILE, before), :, 0]
            for i in range(count):
                row = table[keys[i], start + tile : start + tile + len(lines)]
                for p in range(len(row)):
                    row[p] += lines[p, i]
        return
    for i in range(count):
        for p in range(before):
            row, added = table[keys[i], start + p * behind :], values[p, i]
            for q in range(behind):
                row[q] += added[q]


@njit(cache=True, nogil=True)
def partition(keys, block, parts, order):
    """Runs `partition` of `rows.py`."""
    starts = np.zeros(parts + 1, np.int64)
    for key in keys:
        starts[key // block % parts + 1] += 1
    _add_up(starts)
    nexts = starts.copy()
    for i, key in enumerate(keys):
        part = key // block % parts
        order[nexts[part]] = i
        nexts[part] += 1
    return starts


@njit(cache=True, nogil=True)
def _add_up(counts):
    """Turns counts into their running sums; np.cumsum takes a third of a second to compile."""
    for i in range(1, len(counts)):
        counts[i] += counts[i - 1]


@njit(cache=True, nogil=True)
def number_keys(source, work, slots):
    """Runs `number_keys` of `rows.py`."""
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
def join_keys(left, right, slots):
    """Runs `join_keys` of `rows.py`: one walk over both sides."""
    distinct = np.empty(len(left) + len(right), np.int64)
    i, j, count = 0, 0, 0
    while i < len(left) or j < len(right):
        is_left = j == len(right) or (i < len(left) and left[i] <= right[j])
        is_right = i == len(left) or (j < len(right) and right[j] <= left[i])
        distinct[count] = left[i] if is_left else right[j]
        if is_left:
            slots[i] = count
            i += 1
        if is_right:
            slots[len(left) + j] = count
            j += 1
        count += 1
    return distinct[:count].copy()


@njit(cache=True, nogil=True)
def _sort(source, work):
    """Keys ascending and their occurrences, in work (4, M), by a stable radix sort."""
    keys, order, to_keys, to_order = work[0], work[1], work[2], work[3]
    top, shift, mask = np.int64(0), 0, (1 << _DIGIT) - 1
    for i, key in enumerate(source):
        keys[i], order[i], top = key, i, max(top, key)
    nexts = np.empty(mask + 2, np.int64)
    while shift < 63 and top >> shift > 0:
        for digit in range(len(nexts)):
            nexts[digit] = 0
        for key in keys:
            nexts[(key >> shift & mask) + 1] += 1
        _add_up(nexts)
        for i, key in enumerate(keys):
            at = nexts[key >> shift & mask]
            nexts[key >> shift & mask] = at + 1
            to_keys[at], to_order[at] = key, order[i]
        keys, order, to_keys, to_order = to_keys, to_order, keys, order
        shift += _DIGIT
    return keys, order


@njit(cache=True, nogil=True)
def all_within(keys, last):
    """Runs `all_within` of `rows.py`: the sign bit collects both faults without a branch."""
    signs = np.int64(0)
    for key in keys:
        signs |= key | (last - key)
    return signs >= 0


@njit(cache=True, nogil=True)
def count_disorder(keys):
    """Runs `count_disorder` of `row_sums.py`."""
    count = 0
    for i in range(1, len(keys)):
        count += keys[i] <= keys[i - 1]
    return count


@njit(cache=True, nogil=True)
def all_below(numbers, limit):
    """Runs `all_below` of `inputs.py`, without a branch."""
    broken = np.int32(0)
    for i in range(len(numbers)):
        broken |= np.int32(not (abs(numbers[i]) <= limit))
    return broken == 0


@njit(cache=True, nogil=True)
def is_finite(bits):
    """Runs `is_finite` of `row_sums.py`."""
    exponent = np.int32(0x7F800000)
    broken = np.int32(0)
    for i in range(len(bits)):
        broken |= np.int32((bits[i] & exponent) == exponent)
    return broken == 0
