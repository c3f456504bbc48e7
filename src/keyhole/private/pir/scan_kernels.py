"""Kernels that XOR rows together. They trust their arguments: `xor_scan` checks them."""

# Kernels are typed by numba when they are first called.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.extending import intrinsic

__all__ = ["BLOCK", "fold_few", "fold_many"]

import os

VECS=int(os.environ.get("VECS","4"))
GROUPS=int(os.environ.get("GROUPS","8"))
BLOCK = 4*GROUPS  # rows that share one set of tables
_GROUP = 4  # rows of one table
_TABLE = 1 << _GROUP
_CHUNK = 4*VECS  # words of a row handled at a time
_WIDTH = 8 * _CHUNK  # bytes
_VECTOR = 4
_I64 = ir.IntType(64)
_POINTER = ir.VectorType(_I64, _VECTOR).as_pointer()


def _at(builder: Any, address: Any, offset: int) -> Any:
    return builder.inttoptr(builder.add(address, _I64(offset)), _POINTER)


@intrinsic
def _build(_: Any, table: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """All 16 XORs of four rows, one chunk wide."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        for at in range(0, _WIDTH, 8 * _VECTOR):
            sums = [ir.Constant(ir.VectorType(_I64, _VECTOR), [0] * _VECTOR)]
            for address in args[1:]:
                row = builder.load(_at(builder, address, at), align=1)
                sums += [row] + [builder.xor(row, each) for each in sums[1:]]
            for i, value in enumerate(sums):
                builder.store(value, _at(builder, args[0], i * _WIDTH + at), align=32)
        return context.get_dummy_value()

    return types.void(table, a, b, c, d), emit


@intrinsic
def _fold(_: Any, total: Any, table: Any, bits: Any) -> Any:
    """Adds to one chunk what 32 bits select: an entry of each of eight tables."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        total, table, bits = args
        steps = range(0, _WIDTH, 8 * _VECTOR)
        sums = [builder.load(_at(builder, total, at), align=32) for at in steps]
        for group in range(BLOCK // _GROUP):
            part = builder.and_(builder.lshr(bits, _I64(group * _GROUP)), _I64(_TABLE - 1))
            entry = builder.add(table, builder.mul(part, _I64(_WIDTH)))
            for i, at in enumerate(steps):
                value = builder.load(
                    _at(builder, entry, group * _TABLE * _WIDTH + at), align=32
                )
                sums[i] = builder.xor(sums[i], value)
        for value, at in zip(sums, steps, strict=True):
            builder.store(value, _at(builder, total, at), align=32)
        return context.get_dummy_value()

    return types.void(total, table, bits), emit


@intrinsic
def _fetch(_: Any, address: Any) -> Any:
    """Asks for the line at an address; never faults."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
        fetch = builder.module.declare_intrinsic("llvm.prefetch", [pointer], kind)
        builder.call(fetch, [builder.inttoptr(args[0], pointer), number(0), number(3), number(1)])
        return context.get_dummy_value()

    return types.void(address), emit


@njit(cache=True, nogil=True)
def _find(rows, ids, block, size, blocks, nothing, at):
    """Fills `at` with the addresses of the rows of a block."""
    bucket, first = block // blocks, block % blocks * BLOCK
    for i in range(BLOCK):
        key = np.int64(-1)
        if first + i < size:
            key = np.int64(first + i) if ids.size == 0 else np.int64(ids[bucket, first + i])
        at[i] = rows.ctypes.data + key * rows.shape[1] * 8 if key >= 0 else nothing


@njit(cache=True, nogil=True)
def fold_many(rows, ids, size, bits, out):
    """bits (B, blocks, q) int64; out (q, B, words)."""
    num_buckets, blocks, q = bits.shape
    words = rows.shape[1]
    chunks = (words + _CHUNK - 1) // _CHUNK
    space = np.zeros(chunks * q * _CHUNK + 8 * _TABLE * _CHUNK + 33 * _CHUNK + 8, np.int64)
    base = (space.ctypes.data + 63) // 64 * 64
    table = base + chunks * q * _WIDTH
    tails = table + 8 * _TABLE * _WIDTH
    tail_at = (tails - space.ctypes.data) // 8
    nothing = tails + 32 * _WIDTH
    acc_at = (base - space.ctypes.data) // 8
    now, then = np.empty(BLOCK, np.int64), np.empty(BLOCK, np.int64)
    _find(rows, ids, 0, size, blocks, nothing, then)
    flat = rows.reshape(-1).view(np.int64)
    start = rows.ctypes.data
    for block in range(num_buckets * blocks):
        now[:] = then
        if block + 1 < num_buckets * blocks:
            _find(rows, ids, block + 1, size, blocks, nothing, then)
        bucket = block // blocks
        chosen = bits[bucket, block % blocks]
        for chunk in range(chunks):
            begin = chunk * _WIDTH
            if (chunk + 1) * _CHUNK <= words:
                for g in range(0, BLOCK, _GROUP):
                    _build(table + g // _GROUP * _TABLE * _WIDTH, now[g] + begin * (now[g] != nothing), now[g + 1] + begin* (now[g+1] != nothing), now[g + 2] + begin* (now[g+2] != nothing), now[g + 3] + begin* (now[g+3] != nothing))
            else:
                for i in range(BLOCK):
                    for w in range(words - chunk * _CHUNK):
                        space[tail_at + i * _CHUNK + w] = 0 if now[i] == nothing else flat[(now[i] - start) // 8 + chunk * _CHUNK + w]
                for g in range(0, BLOCK, _GROUP):
                    t = tails + g * _WIDTH
                    _build(table + g // _GROUP * _TABLE * _WIDTH, t, t + _WIDTH, t + 2 * _WIDTH, t + 3 * _WIDTH)
            for i in range(BLOCK):
                for line in range(0, _WIDTH, 64):
                    _fetch(then[i] + begin + line)
            to = base + chunk * q * _WIDTH
            for i in range(q):
                _fold(to + i * _WIDTH, table, chosen[i])
        if block % blocks == blocks - 1:
            for chunk in range(chunks):
                for i in range(q):
                    a = acc_at + (chunk * q + i) * _CHUNK
                    for w in range(min(_CHUNK, words - chunk * _CHUNK)):
                        out[i, bucket, chunk * _CHUNK + w] = np.uint64(space[a + w])
                    space[a : a + _CHUNK] = 0


PF=int(os.environ.get("PF","0"))
@intrinsic
def _four(_: Any, total: Any, a: Any, b: Any, c: Any, d: Any, e,f,g,h) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
        fetch = builder.module.declare_intrinsic("llvm.prefetch", [pointer], kind)
        for x in args[5:]:
            builder.call(fetch, [builder.inttoptr(x, pointer), number(0), number(3), number(1)])
        for at in (0, 32):
            value = builder.load(_at(builder, args[0], at), align=1)
            for x in args[1:5]:
                value = builder.xor(value, builder.load(_at(builder, x, at), align=1))
            builder.store(value, _at(builder, args[0], at), align=1)
        return context.get_dummy_value()
    return types.void(total, a,b,c,d,e,f,g,h), emit


@njit(cache=False, nogil=True)
def fold_few(rows, ids, size, bits, out):
    """bits (B, bytes) of one query; out (B, words)."""
    words = rows.shape[1]
    count = 0
    start, row_bytes = rows.ctypes.data, words * 8
    picked = np.empty(size + 8, np.int64)
    for bucket in range(len(bits)):
        count = 0
        for i in range(size):
            key = np.int64(i) if ids.size == 0 else np.int64(ids[bucket, i])
            picked[count] = key
            count += np.int64(bits[bucket, i >> 3] >> (i & 7) & 1) & np.int64(key >= 0)
        total = out[bucket]
        whole = count // 4 * 4
        for j in range(0, whole, 4):
            if PF == 1 and j + 8 <= count:
                for k in range(j + 4, j + 8):
                    for line in range(0, row_bytes, 64):
                        _fetch(start + picked[k] * row_bytes + line)
            if PF == 2:
                ad = start + picked[j] * row_bytes
                bd = start + picked[j+1] * row_bytes
                cd = start + picked[j+2] * row_bytes
                dd = start + picked[j+3] * row_bytes
                k = min(j + 4, whole - 4)
                ae = start + picked[k] * row_bytes
                be = start + picked[k+1] * row_bytes
                ce = start + picked[k+2] * row_bytes
                de = start + picked[k+3] * row_bytes
                td = total.ctypes.data
                for o in range(0, row_bytes - 63, 64):
                    _four(td + o, ad + o, bd + o, cd + o, dd + o, ae + o, be + o, ce + o, de + o)
                for w in range(words // 8 * 8, words):
                    total[w] ^= rows[picked[j],w] ^ rows[picked[j+1],w] ^ rows[picked[j+2],w] ^ rows[picked[j+3],w]
                continue
            a, b, c, d = rows[picked[j]], rows[picked[j + 1]], rows[picked[j + 2]], rows[picked[j + 3]]
            for w in range(words):
                total[w] ^= a[w] ^ b[w] ^ c[w] ^ d[w]
        for j in range(whole, count):
            for w in range(words):
                total[w] ^= rows[picked[j], w]
