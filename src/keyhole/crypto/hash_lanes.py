"""Computes keyed BLAKE3 of many texts side by side: the compiled loop behind `hashes.hash_rows`.

BLAKE3 cuts a text into chunks of 1,024 bytes, hashes each in blocks of 64, and joins the chunks in
a binary tree. Texts of one length go through the same steps, so that one instruction serves a lane
of each (O'Connor, Aumasson, Neves and Wilcox-O'Hearn, "BLAKE3", 2020; its section 2 in order here).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

Words = NDArray[np.uint32]

_LANES = 128  # their words and state stay in the first cache
_BLOCK, _CHUNK = 64, 1024  # bytes
_DEPTH = 54  # of the tree over the chunks of the longest text there can be
_START, _END, _PARENT, _ROOT, _KEYED = 1, 2, 4, 8, 16  # flags of a block
_IV = np.array([0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A], np.uint32)
# Columns, then diagonals, of the state as a 4 x 4 matrix. One call in a loop compiles faster than
# eight calls.
_STEPS = np.array(
    [
        [i, 4 + (i + k) % 4, 8 + (i + 2 * k) % 4, 12 + (i + 3 * k) % 4]
        for k in (0, 1)
        for i in range(4)
    ]
)
_PERMUTATION = (2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8)


def _schedule() -> NDArray[np.int64]:
    """Which word of a block each step of each of the seven rounds takes."""
    rounds = [list(range(16))]
    for _ in range(6):
        rounds.append([rounds[-1][i] for i in _PERMUTATION])
    return np.array(rounds)


_SCHEDULE = _schedule()


@njit(cache=True, nogil=True)
def _mix(a: Words, b: Words, c: Words, d: Words, x: Words, y: Words) -> None:
    """The quarter round, in every lane. Casts keep numbers at 32 bits."""
    u = np.uint32
    for i in range(_LANES):
        first = u(a[i] + b[i] + x[i])
        fourth = u(d[i] ^ first)
        fourth = u(fourth >> u(16)) | u(fourth << u(16))
        third = u(c[i] + fourth)
        second = u(b[i] ^ third)
        second = u(second >> u(12)) | u(second << u(20))
        first = u(first + second + y[i])
        fourth = u(fourth ^ first)
        fourth = u(fourth >> u(8)) | u(fourth << u(24))
        third = u(third + fourth)
        second = u(second ^ third)
        a[i], c[i], d[i] = first, third, fourth
        b[i] = u(second >> u(7)) | u(second << u(25))


@njit(cache=True, nogil=True)
def _compress(h: Words, m: Words, v: Words, counter: int, length: int, flags: int) -> None:
    """Takes a block `m` (16, lanes) into the chaining values `h` (8, lanes); `v` is room."""
    v[:8] = h
    for i in range(4):
        v[8 + i] = _IV[i]
    v[12], v[13] = np.uint32(counter), np.uint32(counter >> 32)
    v[14], v[15] = np.uint32(length), np.uint32(flags | _KEYED)
    for turn in range(7):
        for step in range(8):
            a, b, c, d = _STEPS[step]
            x, y = _SCHEDULE[turn, 2 * step], _SCHEDULE[turn, 2 * step + 1]
            _mix(v[a], v[b], v[c], v[d], m[x], m[y])
    for i in range(8):
        for lane in range(_LANES):
            h[i, lane] = v[i, lane] ^ v[i + 8, lane]


@njit(cache=True, nogil=True)
def _load(rows: NDArray[np.uint8], first: int, at: int, length: int, m: Words) -> None:
    """Puts a block of up to 128 texts into lanes, zeros behind its end."""
    lanes = min(_LANES, len(rows) - first)
    if length == _BLOCK and rows.shape[1] % 4 == 0:
        words = rows.view(np.uint32)
        for lane in range(lanes):
            for word in range(16):
                m[word, lane] = words[first + lane, at // 4 + word]
        return
    m[:] = 0
    for lane in range(lanes):
        for i in range(length):
            byte = np.uint32(rows[first + lane, at + i]) << np.uint32(8 * (i % 4))
            m[i // 4, lane] |= np.uint32(byte)


@njit(cache=True, nogil=True)
def _hash_chunk(
    rows: NDArray[np.uint8], first: int, chunk: int, root: int, h: Words, m: Words, v: Words
) -> None:
    """Writes the chaining value of one chunk of up to 128 texts to `h`, which holds the key."""
    start, stop = chunk * _CHUNK, min((chunk + 1) * _CHUNK, rows.shape[1])
    blocks = max(1, -(-(stop - start) // _BLOCK))
    for block in range(blocks):
        at = start + block * _BLOCK
        length = min(_BLOCK, stop - at)
        flags = _START if block == 0 else 0
        if block == blocks - 1:
            flags |= _END | root
        _load(rows, first, at, length, m)
        _compress(h, m, v, chunk, length, flags)


@njit(cache=True, nogil=True)
def hash_lanes(rows: NDArray[np.uint8], key: Words, out: Any) -> None:
    """Writes the hash of each row to `out`, (m, 8) words.

    A chunk's value waits on the stack until its sibling of the same height is there, as a binary
    counter carries.
    """
    chunks = max(1, -(-rows.shape[1] // _CHUNK))
    m, v = np.empty((16, _LANES), np.uint32), np.empty((16, _LANES), np.uint32)
    stack = np.empty((_DEPTH, 8, _LANES), np.uint32)
    for first in range(0, len(rows), _LANES):
        height = 0
        for chunk in range(chunks):
            is_last = chunk == chunks - 1
            for i in range(8):
                stack[height, i] = key[i]
            _hash_chunk(rows, first, chunk, _ROOT if chunks == 1 else 0, stack[height], m, v)
            height += 1
            joined = chunk + 1
            while height > 1 and (is_last or joined % 2 == 0):
                m[:8], m[8:] = stack[height - 2], stack[height - 1]
                height -= 1
                for i in range(8):
                    stack[height - 1, i] = key[i]
                is_root = is_last and height == 1
                _compress(stack[height - 1], m, v, 0, _BLOCK, _PARENT | (_ROOT if is_root else 0))
                joined //= 2
        for lane in range(min(_LANES, len(rows) - first)):
            for i in range(8):
                out[first + lane, i] = stack[0, i, lane]
