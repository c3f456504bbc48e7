"""Scans a table: the XOR of the rows that the bits of a query select, at the speed of memory.

Few queries: each reads the rows that its bits select, four at a time, while the next four are on
their way from memory. Many queries: all use a block of rows while it is in the cache, and instead
of rows they add entries of tables. A table holds all 16 XORs of four rows, so that four bits of a
query cost one addition ("method of four Russians": Arlazarov, Dinic, Kronrod and Faradzev, 1970).

Which rows are read, and in what order, follows from shapes; but for this: a server that answers few
queries skips the rows whose bit is 0. Those bits are its own share of a query, which looks random
to it whatever the keys are, so that what it skips tells it (and all who watch its memory) nothing
that it did not know. An observer of the two servers is not covered.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from keyhole.errors import ShapeError

# Kernels are typed by numba when they are first called.
# mypy: disable-error-code="no-untyped-def"


BLOCK = 32
"""Rows that many queries use together: as many bits of each query come in one word."""

_GROUP = 4  # rows of a table; 5 would need more entries than 32 queries can pay for
_ENTRIES = 1 << _GROUP
_LINE = 64  # bytes: the piece of a row that is tabulated at once; 128 and 256 were slower
_CHUNK = _LINE // 8  # words
_TABLE = _ENTRIES * _LINE  # bytes; the eight of a block take a quarter of a first-level cache
_WORD = ir.IntType(64)
_VECTOR = ir.VectorType(_WORD, 4)
_STEPS = range(0, _LINE, 32)


def _emit_load(builder: Any, address: Any, offset: int, align: int) -> Any:
    at = builder.inttoptr(builder.add(address, _WORD(offset)), _VECTOR.as_pointer())
    return builder.load(at, align=align)


def _emit_store(builder: Any, value: Any, address: Any, offset: int, align: int) -> None:
    at = builder.inttoptr(builder.add(address, _WORD(offset)), _VECTOR.as_pointer())
    builder.store(value, at, align=align)


def _emit_fetch(builder: Any, address: Any) -> None:
    """Emits a request for the line at an address; never faults."""
    pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
    fetch = builder.module.declare_intrinsic("llvm.prefetch", [pointer], kind)
    builder.call(fetch, [builder.inttoptr(address, pointer), number(0), number(3), number(1)])


def _type_fetch(_: Any, address: Any) -> Any:
    """Asks for the line at an address."""

    def emit(context: Any, builder: Any, __: Any, args: Any) -> Any:
        _emit_fetch(builder, args[0])
        return context.get_dummy_value()

    return types.void(address), emit


def _type_add_four(_: Any, total: Any, a: Any, b: Any, c: Any, d: Any, lead: Any) -> Any:
    """Adds a line of each of four rows; asks for the lines `lead` (a tuple) of the next four."""

    def emit(context: Any, builder: Any, __: Any, args: Any) -> Any:
        total, *rows, lead = args
        for i in range(_GROUP):
            _emit_fetch(builder, builder.extract_value(lead, i))
        for at in _STEPS:
            value = _emit_load(builder, total, at, 8)
            for row in rows:
                value = builder.xor(value, _emit_load(builder, row, at, 8))
            _emit_store(builder, value, total, at, 8)
        return context.get_dummy_value()

    return types.void(total, a, b, c, d, lead), emit


def _type_tabulate(_: Any, table: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """Writes all XORs of a line of each of four rows: entry i is that of the rows in i's bits."""

    def emit(context: Any, builder: Any, __: Any, args: Any) -> Any:
        for at in _STEPS:
            sums = [ir.Constant(_VECTOR, [0] * _VECTOR.count)]
            for row in args[1:]:
                value = _emit_load(builder, row, at, 8)
                sums += [value] + [builder.xor(value, each) for each in sums[1:]]
            for i, each in enumerate(sums):
                _emit_store(builder, each, args[0], i * _LINE + at, 32)
        return context.get_dummy_value()

    return types.void(table, a, b, c, d), emit


def _type_add_entries(_: Any, total: Any, tables: Any, bits: Any) -> Any:
    """Adds what 32 bits select: one entry of each of eight tables."""

    def emit(context: Any, builder: Any, __: Any, args: Any) -> Any:
        total, tables, bits = args
        sums = [_emit_load(builder, total, at, 32) for at in _STEPS]
        for group in range(BLOCK // _GROUP):
            part = builder.and_(builder.lshr(bits, _WORD(group * _GROUP)), _WORD(_ENTRIES - 1))
            entry = builder.add(tables, builder.mul(part, _WORD(_LINE)))
            for i, at in enumerate(_STEPS):
                value = _emit_load(builder, entry, group * _TABLE + at, 32)
                sums[i] = builder.xor(sums[i], value)
        for value, at in zip(sums, _STEPS, strict=True):
            _emit_store(builder, value, total, at, 32)
        return context.get_dummy_value()

    return types.void(total, tables, bits), emit


_fetch: Any = intrinsic(_type_fetch)
_add_four: Any = intrinsic(_type_add_four)
_tabulate: Any = intrinsic(_type_tabulate)
_add_entries: Any = intrinsic(_type_add_entries)


@njit(cache=True, nogil=True)
def fold_few(rows, ids, size, bits, out, visits):
    """The answers to one query, as those of `fold_many`, for bits (B, bytes) uint8; `out`, (B,
    words), has zeros at first."""
    picked = np.empty(size + 1, np.int64)
    for bucket in range(len(bits)):
        count = np.int64(0)
        for i in range(size):
            key = np.int64(i) if ids.size == 0 else np.int64(ids[bucket, i])
            # Without a branch: half of them would be foreseen wrongly.
            picked[count] = key
            count += np.int64(bits[bucket, i >> 3] >> (i & 7) & 1) & np.int64(key >= 0)
        _add_rows(rows, picked[:count], out[bucket])
        if visits.size:
            for key in picked[:count]:
                visits[key] += 1


@njit(cache=True, nogil=True)
def _add_rows(rows, keys, total):
    """Adds the rows of keys to a total."""
    words, whole = rows.shape[1], len(keys) // _GROUP * _GROUP
    start, to, size = rows.ctypes.data, total.ctypes.data, rows.shape[1] * 8
    for j in range(0, whole, _GROUP):
        a, b, c, d = keys[j], keys[j + 1], keys[j + 2], keys[j + 3]
        n = min(j + _GROUP, whole - _GROUP)
        e, f, g, h = keys[n], keys[n + 1], keys[n + 2], keys[n + 3]
        for at in range(0, size - _LINE + 1, _LINE):
            here = start + at
            lead = (here + e * size, here + f * size, here + g * size, here + h * size)
            lines = (here + a * size, here + b * size, here + c * size, here + d * size)
            _add_four(to + at, lines[0], lines[1], lines[2], lines[3], lead)
        for w in range(words // _CHUNK * _CHUNK, words):
            total[w] ^= rows[a, w] ^ rows[b, w] ^ rows[c, w] ^ rows[d, w]
    for key in keys[whole:]:
        for w in range(words):
            total[w] ^= rows[key, w]


@njit(cache=True, nogil=True)
def fold_many(rows, ids, size, bits, out, visits):
    """The answers to many queries; every row of a bucket is read once for all of them.

    Args:
        rows: (K, words) uint64.
        ids: (B, size) int32 keys, -1 for none; empty if there is one bucket with all rows in order.
        bits: (B, blocks, q) uint32: bit j of word i of a query is position 32 i + j.
        out: (q, B, words) uint64.
        visits: (K,) int64, raised at every row that is read; or empty.
    """
    num_buckets, blocks, queries = bits.shape
    chunks = (rows.shape[1] + _CHUNK - 1) // _CHUNK
    sums = _lines(chunks * queries)
    tables, tails = _lines(BLOCK // _GROUP * _ENTRIES), _lines(BLOCK)
    keys, nexts = np.zeros(BLOCK, np.int64), np.zeros(BLOCK, np.int64)
    mask = _find(ids, size, 0, 0, nexts)
    for block in range(num_buckets * blocks):
        keys, nexts, present = nexts, keys, mask
        _count(keys, present, visits)
        if block + 1 < num_buckets * blocks:
            mask = _find(ids, size, (block + 1) // blocks, (block + 1) % blocks, nexts)
        chosen = bits[block // blocks, block % blocks]
        for chunk in range(chunks):
            _tabulate_block(rows, keys, chunk, tails, tables)
            for key in nexts:
                _fetch(rows.ctypes.data + key * rows.shape[1] * 8 + chunk * _LINE)
            to = sums.ctypes.data + chunk * queries * _LINE
            for q in range(queries):
                _add_entries(to + q * _LINE, tables.ctypes.data, np.int64(chosen[q]) & present)
        if block % blocks == blocks - 1:
            _hand_over(sums, out[:, block // blocks])


@njit(cache=True, nogil=True)
def _lines(count):
    """Zeros in whole cache lines, (count, 8) int64."""
    room = np.zeros((count + 1) * _CHUNK, np.int64)
    start = -room.ctypes.data % _LINE // 8
    return room[start : start + count * _CHUNK].reshape(count, _CHUNK)


@njit(cache=True, nogil=True)
def _find(ids, size, bucket, block, keys):
    """Fills in the keys of a block, 0 where there is none; returns the bits of those there are."""
    mask, first = np.int64(0), block * BLOCK
    for i in range(BLOCK):
        key = np.int64(-1)
        if first + i < size:
            key = np.int64(first + i) if ids.size == 0 else np.int64(ids[bucket, first + i])
        keys[i] = max(key, np.int64(0))
        mask |= np.int64(key >= 0) << i
    return mask


@njit(cache=True, nogil=True)
def _tabulate_block(rows, keys, chunk, tails, tables):
    """Makes the eight tables of one line of 32 rows."""
    start, size, begin = rows.ctypes.data + chunk * _LINE, rows.shape[1] * 8, chunk * _CHUNK
    left = rows.shape[1] - begin
    if left < _CHUNK:  # the end of a row: the line would reach into the next one
        for i in range(BLOCK):
            for w in range(left):
                tails[i, w] = np.int64(rows[keys[i], begin + w])
    for j in range(0, BLOCK, _GROUP):
        a, b, c, d = keys[j] * size, keys[j + 1] * size, keys[j + 2] * size, keys[j + 3] * size
        at = start
        if left < _CHUNK:
            at, a, b, c, d = tails.ctypes.data + j * _LINE, 0, _LINE, 2 * _LINE, 3 * _LINE
        _tabulate(tables.ctypes.data + j // _GROUP * _TABLE, at + a, at + b, at + c, at + d)


@njit(cache=True, nogil=True)
def _hand_over(sums, out):
    """Writes sums, line by line of all queries, as rows; clears them."""
    queries, words = out.shape
    for w in range(words):
        for q in range(queries):
            out[q, w] = np.uint64(sums[w // _CHUNK * queries + q, w % _CHUNK])
    sums[:] = 0


@njit(cache=True, nogil=True)
def _count(keys, mask, visits):
    """Notes that the rows of a block are read."""
    if visits.size:
        for i in range(BLOCK):
            if mask >> i & 1:
                visits[keys[i]] += 1


_MANY = 5  # queries from which tables pay: they cost what four queries cost without


def scan_rows(
    rows: NDArray[np.uint64], bits: NDArray[np.uint8], visits: NDArray[np.int64] | None = None
) -> NDArray[np.uint64]:
    """Answers queries over all rows, in one pass if there are five or more: (q, words).

    Args:
        rows: (K, words) uint64, contiguous.
        bits: (q, ceil(K / 8)) uint8: bit j of byte i is row 8 i + j; bits beyond K are ignored.
        visits: (K,) int64, raised by one whenever a row is read; for tests.

    >>> rows = np.array([[1], [2], [4]], np.uint64)
    >>> scan_rows(rows, np.array([[0b101], [0b110]], np.uint8))
    array([[5],
           [6]], dtype=uint64)
    """
    if bits.ndim != 2:
        raise _misfit(f"bits {bits.shape}")
    everything = np.empty((0, 0), np.int32)
    return _scan(rows, everything, len(rows), bits[:, None], visits)[:, 0]


def scan_buckets(
    rows: NDArray[np.uint64],
    members: NDArray[np.int32],
    bits: NDArray[np.uint8],
    visits: NDArray[np.int64] | None = None,
) -> NDArray[np.uint64]:
    """Answers queries over every bucket, as `scan_rows` over all rows: (q, B, words).

    Args:
        members: (B, size) int32: the keys of each bucket, -1 where there is none.
        bits: (q, B, ceil(size / 8)) uint8: bit j of byte i is position 8 i + j; others are ignored.
    """
    if members.ndim != 2 or members.dtype != np.int32 or not members.size:
        raise _misfit(f"members {members.dtype} {members.shape}")
    if members.max() >= len(rows):
        raise _misfit(f"a member beyond {len(rows)} rows")
    if bits.ndim != 3 or bits.shape[1] != len(members):
        raise _misfit(f"bits {bits.shape} for members {members.shape}")
    return _scan(rows, members, members.shape[1], bits, visits)


def plain_scan_rows(rows: NDArray[np.uint64], bits: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """Returns what `scan_rows` computes, as one reads it."""
    chosen = np.unpackbits(bits, axis=-1, count=len(rows), bitorder="little").astype(bool)
    sums = [np.bitwise_xor.reduce(rows[each], axis=0) for each in chosen]
    return np.array(sums, np.uint64).reshape(len(bits), rows.shape[1])


def plain_scan_buckets(
    rows: NDArray[np.uint64], members: NDArray[np.int32], bits: NDArray[np.uint8]
) -> NDArray[np.uint64]:
    """Returns what `scan_buckets` computes, as one reads it."""
    # An empty position is a row of zeros behind the last one.
    rows = np.vstack([rows, np.zeros_like(rows[:1])])
    sums = [plain_scan_rows(rows[keys], bits[:, b]) for b, keys in enumerate(members)]
    return np.stack(sums, axis=1)


def _scan(
    rows: NDArray[np.uint64],
    ids: NDArray[np.int32],
    size: int,
    bits: NDArray[np.uint8],
    visits: NDArray[np.int64] | None,
) -> NDArray[np.uint64]:
    """Both scans: bits (q, B, bytes) to (q, B, words)."""
    if rows.ndim != 2 or rows.dtype != np.uint64 or not rows.flags.c_contiguous or not rows.size:
        raise _misfit(f"rows {rows.dtype} {rows.shape}")
    if bits.dtype != np.uint8 or bits.shape[2] != -(-size // 8):
        raise _misfit(f"bits {bits.dtype} {bits.shape} for {size} positions")
    seen = np.empty(0, np.int64) if visits is None else visits
    if visits is not None and visits.shape != (len(rows),):
        raise _misfit(f"visits {visits.shape}")
    rows, ids, bits = (_read_only(each) for each in (rows, ids, bits))
    out = np.zeros((*bits.shape[:2], rows.shape[1]), np.uint64)
    if len(bits) >= _MANY:
        fold_many(rows, ids, size, _words(bits), out, seen)
        return out
    for query, answer in zip(bits, out, strict=True):
        fold_few(rows, ids, size, query, answer, seen)
    return out


def _read_only(array: NDArray[Any]) -> NDArray[Any]:
    """A view that is contiguous and read-only: kernels are compiled once, for such arrays."""
    view = np.ascontiguousarray(array).view()
    view.setflags(write=False)
    return view


def _words(bits: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """Bits (q, B, bytes) as words (B, blocks, q): what one block needs lies together."""
    queries, buckets, count = bits.shape
    blocks = -(-count * 8 // BLOCK)
    padded = np.zeros((queries, buckets, blocks * BLOCK // 8), np.uint8)
    padded[..., :count] = bits
    return np.ascontiguousarray(padded.view("<u4").transpose(1, 2, 0), np.uint32)


def _misfit(got: str) -> ShapeError:
    return ShapeError(
        f"arrays do not fit together in a scan: got {got}; expected rows uint64 (K, words), "
        "members int32 (B, size), bits uint8 of one bit a position; take rows from Database, "
        "members from Placement and bits from a query"
    )
