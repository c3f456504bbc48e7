"""Runs the compiled loops of `merkle.py`: BLAKE3 of many texts side by side, the nodes of a proof.

BLAKE3 cuts a text into chunks of 1,024 bytes, hashes each in blocks of 64, and joins the chunks in
a binary tree. Texts of one length go through the same steps, so that one instruction serves a lane
of each (O'Connor, Aumasson, Neves and Wilcox-O'Hearn, "BLAKE3", 2020; its section 2 in order here).

What hashes chunks is compiled, and hashes their parents, too; the tree is plain Python. The state
of eight texts is sixteen vectors, which fill the registers of AVX2 and do not leave them within a
block; with AVX-512 it is that of sixteen texts. From loops over arrays the compiler makes half of
that speed, so the seven rounds are written out in its own language. Texts are read where they
stand, at any address; the end of one that fills no block is put into a room of its own. Other words
are copied one by one: where a slice of an array is assigned to another, numba compiles the message
of an error, which takes longer than all that is here. Numbers are little-endian.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from llvmlite.binding import get_host_cpu_features  # type: ignore[import-untyped]
from numba import njit, types
from numba.extending import intrinsic
from numpy.typing import NDArray

Words = NDArray[np.uint32]
Bytes = NDArray[np.uint8]
Numbers = NDArray[np.int64]

_LANES = 16 if get_host_cpu_features().get("avx512f") else 8
_BATCH = 1 << 14  # rows; what Python does for them takes no time beside hashing them
_BLOCK, _CHUNK = 64, 1024  # bytes
_START, _END, _PARENT, _ROOT, _KEYED = 1, 2, 4, 8, 16  # flags of a block
_IV = (0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A)
# Columns, then diagonals, of the state as a 4 x 4 matrix.
_STEPS = [
    [i, 4 + (i + k) % 4, 8 + (i + 2 * k) % 4, 12 + (i + 3 * k) % 4]
    for k in (0, 1)
    for i in range(4)
]
_PERMUTATION = (2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8)
_ROUNDS = 7

_WORD, _NUMBER = ir.IntType(32), ir.IntType(64)
_VECTOR = ir.VectorType(_WORD, _LANES)


def _splat(builder: Any, value: Any) -> Any:
    """A number of 64 bits, its low half in every lane."""
    first = builder.insert_element(
        ir.Constant(_VECTOR, ir.Undefined), builder.trunc(value, _WORD), _WORD(0)
    )
    return _shuffle(builder, first, first, [0] * _LANES)


def _shuffle(builder: Any, left: Any, right: Any, lanes: Sequence[int]) -> Any:
    return builder.shuffle_vector(left, right, ir.Constant(ir.VectorType(_WORD, _LANES), lanes))


def _load(builder: Any, address: Any, offset: int) -> Any:
    at = builder.inttoptr(builder.add(address, _NUMBER(offset)), _VECTOR.as_pointer())
    return builder.load(at, align=1)


def _rotate(builder: Any, value: Any, bits: int) -> Any:
    """To the right."""
    left, right = (ir.Constant(_VECTOR, [n] * _LANES) for n in (32 - bits, bits))
    return builder.or_(builder.lshr(value, right), builder.shl(value, left))


def _mix(builder: Any, v: list[Any], step: Sequence[int], x: Any, y: Any) -> None:
    """The quarter round."""
    a, b, c, d = (v[i] for i in step)
    for word, first, second in ((x, 16, 12), (y, 8, 7)):
        a = builder.add(builder.add(a, b), word)
        d = _rotate(builder, builder.xor(d, a), first)
        c = builder.add(c, d)
        b = _rotate(builder, builder.xor(b, c), second)
    for i, value in zip(step, (a, b, c, d), strict=True):
        v[i] = value


def _transpose(builder: Any, rows: list[Any]) -> list[Any]:
    """Turns as many words of each text as there are lanes into a vector for each word: first in
    blocks of four lanes, then blocks among each other. Processors have an instruction for each."""
    blocks = [range(at, at + 4) for at in range(0, 2 * _LANES, 4)]  # of two vectors side by side
    own, other = blocks[: _LANES // 4], blocks[_LANES // 4 :]
    pairs = list(zip(own, other, strict=True))
    stages = [
        [[lane for a, b in pairs for lane in (a[i], b[i], a[i + 1], b[i + 1])] for i in (0, 2)],
        [[lane for a, b in pairs for lane in (a[i], a[i + 1], b[i], b[i + 1])] for i in (0, 2)],
    ]
    among = [[lane for block in own[i::2] + other[i::2] for lane in block] for i in (0, 1)]
    stages += [among] * (_LANES.bit_length() - 3)
    held = [[(row, word) for word in range(_LANES)] for row in range(_LANES)]
    for height, (low, high) in enumerate(stages):
        for i in range(_LANES):
            if not i & (1 << height):
                j = i + (1 << height)
                left, right, both = rows[i], rows[j], held[i] + held[j]
                rows[i] = _shuffle(builder, left, right, low)
                rows[j] = _shuffle(builder, left, right, high)
                held[i], held[j] = ([both[lane] for lane in lanes] for lanes in (low, high))
    return [rows[i] for i in sorted(range(_LANES), key=lambda i: held[i][0][1])]


def _type_compress(
    _: Any, h: Any, block: Any, stride: Any, counter: Any, length: Any, flags: Any
) -> Any:
    """Takes a block of each text of a group, which lie `stride` bytes apart, into `h`, their
    chaining values; `h` and `block` are addresses."""

    def emit(context: Any, builder: Any, _: Any, args: Any) -> Any:
        h, block, stride, counter, length, flags = args
        m = _words(builder, block, stride)
        v = [_load(builder, h, 4 * _LANES * i) for i in range(8)]
        v += [ir.Constant(_VECTOR, [word] * _LANES) for word in _IV]
        high = builder.lshr(counter, _NUMBER(32))
        v += [_splat(builder, number) for number in (counter, high, length, flags)]
        words = list(range(16))
        for _turn in range(_ROUNDS):
            for i, step in enumerate(_STEPS):
                _mix(builder, v, step, m[words[2 * i]], m[words[2 * i + 1]])
            words = [words[i] for i in _PERMUTATION]
        for i in range(8):
            place = builder.add(h, _NUMBER(4 * _LANES * i))
            pointer = builder.inttoptr(place, _VECTOR.as_pointer())
            builder.store(builder.xor(v[i], v[i + 8]), pointer, align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), emit


_compress: Any = intrinsic(_type_compress)


def _words(builder: Any, block: Any, stride: Any) -> list[Any]:
    """The sixteen words of a block of each text."""
    at = [builder.add(block, builder.mul(stride, _NUMBER(i))) for i in range(_LANES)]
    _fetch_ahead(builder, at, stride)
    parts = [[_load(builder, row, offset) for row in at] for offset in range(0, _BLOCK, 4 * _LANES)]
    return [word for part in parts for word in _transpose(builder, part)]


def _fetch_ahead(builder: Any, at: list[Any], stride: Any) -> None:
    """Asks the memory for the same block of the next group. Beyond the last one, nobody waits."""
    byte = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte, _WORD, _WORD, _WORD])
    prefetch = builder.module.declare_intrinsic("llvm.prefetch", (byte,), kind)
    ahead = builder.mul(stride, _NUMBER(_LANES))
    for row in at:
        place = builder.inttoptr(builder.add(row, ahead), byte)
        builder.call(prefetch, [place, _WORD(0), _WORD(3), _WORD(1)])  # to read, soon, data


@njit(cache=True, nogil=True)
def _compress_rows(
    rows: Bytes, key: Words, first: int, last: int, h: Words, room: Bytes, out: Words
) -> None:
    """Writes the chaining value of each chunk of each row to `out`, (m, chunks, 8).

    Args:
        rows: (m, n); m is that of lanes or more.
        first: flags of the first block of a chunk.
        last: those of its last block.
        h: (8, lanes), room.
        room: (lanes, 64), for the ends of rows.
    """
    stride = rows.shape[1]
    rest = stride - stride % _BLOCK
    for group in range(0, len(rows), _LANES):
        row = min(group, len(rows) - _LANES)  # the last ones may be done twice
        for lane in range(_LANES):
            for i in range(stride - rest):  # zeros are behind it
                room[lane, i] = rows[row + lane, rest + i]
        for chunk in range(out.shape[1]):
            for i in range(8):
                for lane in range(_LANES):
                    h[i, lane] = key[i]
            start = chunk * _CHUNK
            stop = min(start + _CHUNK, stride)
            for at in range(start, max(stop, start + 1), _BLOCK):
                flags = _KEYED
                if at == start:
                    flags |= first
                if at + _BLOCK >= stop:
                    flags |= last
                if at < rest:
                    block = rows.ctypes.data + row * stride + at
                    _compress(h.ctypes.data, block, stride, chunk, _BLOCK, flags)
                else:
                    block = room.ctypes.data
                    _compress(h.ctypes.data, block, _BLOCK, chunk, stop - at, flags)
            for lane in range(_LANES):
                for i in range(8):
                    out[row + lane, chunk, i] = h[i, lane]


def hash_lanes(rows: NDArray[np.uint8], key: Words, out: Words) -> None:
    """Writes the hash of each row to `out`, (m, 8) words.

    Args:
        rows: (m, n), contiguous.
        key: eight words.
    """
    for first in range(0, len(rows), _BATCH):
        out[first : first + _BATCH] = _hash_batch(rows[first : first + _BATCH], _frozen(key))


def _hash_batch(rows: NDArray[np.uint8], key: Words) -> Words:
    """Joins chunks two by two, level by level; the last one of an odd number waits for its turn."""
    h, room = np.zeros((8, _LANES), np.uint32), np.zeros((_LANES, _BLOCK), np.uint8)
    count = len(rows)
    if count < _LANES:
        rows = np.concatenate([rows, np.zeros((_LANES - count, rows.shape[1]), np.uint8)])
    chunks = max(1, -(-rows.shape[1] // _CHUNK))
    values = np.empty((len(rows), chunks, 8), np.uint32)
    end = _END | (_ROOT if chunks == 1 else 0)
    _compress_rows(_frozen(rows), key, _START, end, h, room, values)
    while (chunks := values.shape[1]) > 1:
        pairs = np.ascontiguousarray(values[:, : chunks // 2 * 2]).reshape(-1, 16)
        parents = np.empty((len(pairs), 1, 8), np.uint32)
        root = _ROOT if chunks == 2 else 0
        _compress_rows(_frozen(pairs.view(np.uint8)), key, _PARENT, root, h, room, parents)
        alone = values[:, chunks // 2 * 2 :]
        values = np.concatenate([parents.reshape(len(rows), -1, 8), alone], axis=1)
    return values[:count, 0]


def _frozen(array: NDArray[Any]) -> NDArray[Any]:
    """Returns a read-only view: one kind of argument, compiled once."""
    view = array.view()
    view.flags.writeable = False
    return view


@njit(cache=True, nogil=True)
def find_siblings(keys: Numbers, sizes: Numbers, room: Numbers, out: Numbers) -> int:
    """Writes the places of a proof's nodes to `out`; returns how many there are.

    NumPy makes a dozen passes over the keys at every level of a tree; a service that proves 1,000
    rows to each of many devices makes one. Whether two keys are siblings cannot be foretold, so the
    loop counts instead of branching.

    Args:
        keys: ascending; may repeat.
        sizes: nodes of each level, from the leaves to the root.
        room: longer than `keys` by one.
        out: longer by one than the longest proof.
    """
    count, known = 0, 0
    for i in range(len(keys)):
        room[known] = keys[i]
        known += i + 1 == len(keys) or keys[i + 1] != keys[i]
    start = 0
    for level in range(len(sizes) - 1):
        at, above, size = 0, 0, sizes[level]
        room[known] = -1  # nobody's sibling
        while at < known:
            key = room[at]
            sibling = key ^ 1
            is_next = room[at + 1] == sibling
            out[count] = start + sibling
            count += (not is_next) & (sibling < size)
            room[above] = key >> 1
            above += 1
            at += 1 + is_next
        known = above
        start += size
    return count
