"""Computes keyed BLAKE3 of many texts side by side: the compiled loop behind `hashes.hash_rows`.

BLAKE3 cuts a text into chunks of 1,024 bytes, hashes each in blocks of 64, and joins the chunks in
a binary tree. Texts of one length go through the same steps, so that one instruction serves a lane
of each (O'Connor, Aumasson, Neves and Wilcox-O'Hearn, "BLAKE3", 2020; its section 2 in order here).

What hashes chunks is compiled, and hashes their parents, too; the tree is plain Python. Words are
copied one by one: where a slice of an array is assigned to another, numba compiles the message of
an error, which takes longer than all that is here.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

Words = NDArray[np.uint32]

_LANES = 128  # their words and state stay in the first cache
_BATCH = 1 << 14  # rows; what Python does for them takes no time beside hashing them
_BLOCK, _CHUNK = 64, 1024  # bytes
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
def _compress(h: Words, m: Words, v: Words, second: Words) -> None:
    """Takes a block `m` (16, lanes) into the chaining values `h` (8, lanes); `v` is room, and its
    second half starts with `second` in all lanes."""
    for i in range(8):
        for lane in range(_LANES):
            v[i, lane] = h[i, lane]
            v[8 + i, lane] = second[i]
    for turn in range(7):
        for step in range(8):
            a, b, c, d = _STEPS[step]
            x, y = _SCHEDULE[turn, 2 * step], _SCHEDULE[turn, 2 * step + 1]
            _mix(v[a], v[b], v[c], v[d], m[x], m[y])
    for i in range(8):
        for lane in range(_LANES):
            h[i, lane] = v[i, lane] ^ v[i + 8, lane]


@njit(cache=True, nogil=True)
def _compress_rows(
    words: Words, length: int, key: Words, first: int, last: int, room: Words, out: Words
) -> None:
    """Writes the chaining value of each chunk of each row to `out`, (m, chunks, 8).

    Args:
        words: (m, n), whole blocks.
        length: bytes of a row; zeros are behind them.
        first: flags of the first block of a chunk.
        last: those of its last block.
        room: (41, lanes).
    """
    h, m, v, second = room[:8], room[8:24], room[24:40], room[40]
    for i in range(4):
        second[i] = _IV[i]
    for row in range(0, len(words), _LANES):
        lanes = min(_LANES, len(words) - row)
        for chunk in range(out.shape[1]):
            for i in range(8):
                for lane in range(_LANES):
                    h[i, lane] = key[i]
            start = chunk * _CHUNK
            stop = min(start + _CHUNK, length)
            second[4], second[5] = chunk, chunk >> 32
            for at in range(start, max(stop, start + 1), _BLOCK):
                for lane in range(lanes):
                    for i in range(16):
                        m[i, lane] = words[row + lane, at // 4 + i]
                second[6], second[7] = min(_BLOCK, stop - at), _KEYED
                if at == start:
                    second[7] |= first
                if at + _BLOCK >= stop:
                    second[7] |= last
                _compress(h, m, v, second)
            for lane in range(lanes):
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
    room = np.zeros((41, _LANES), np.uint32)
    chunks = max(1, -(-rows.shape[1] // _CHUNK))
    values = np.empty((len(rows), chunks, 8), np.uint32)
    end = _END | (_ROOT if chunks == 1 else 0)
    _compress_rows(_words_of(rows), rows.shape[1], key, _START, end, room, values)
    while (chunks := values.shape[1]) > 1:
        pairs = np.ascontiguousarray(values[:, : chunks // 2 * 2]).reshape(-1, 16)
        parents = np.empty((len(pairs), 1, 8), np.uint32)
        root = _ROOT if chunks == 2 else 0
        _compress_rows(_frozen(pairs), _BLOCK, key, _PARENT, root, room, parents)
        alone = values[:, chunks // 2 * 2 :]
        values = np.concatenate([parents.reshape(len(rows), -1, 8), alone], axis=1)
    return values[:, 0]


def _words_of(rows: NDArray[np.uint8]) -> Words:
    """Gives the words of the rows, a copy with zeros behind their end where no block ends there."""
    count, length = rows.shape
    width = max(_BLOCK, -(-length // _BLOCK) * _BLOCK)
    if width != length or rows.ctypes.data % 4:
        padded = np.empty((count, width), np.uint8)
        padded[:, :length], padded[:, length:] = rows, 0
        rows = padded
    return _frozen(rows.view(np.uint32))


def _frozen(words: Words) -> Words:
    """Gives a view that cannot be written: one kind of argument, compiled once."""
    view = words.view()
    view.flags.writeable = False
    return view
