"""Encodes a table for retrieval from one server, and multiplies questions with it.

Slice values stand in the slots of polynomials modulo t: bucket j of group g is slot j. Position p
of all buckets and chunk c of what lies there make one polynomial, centred around zero and
transformed modulo both primes of q. `EncodedTable.encode` makes them once a round: a transform back
modulo t and two forward, 5 us in all. Eight positions make a part, and a part of which no row
changed is taken over from the table of the round before, as it stands: the same bytes as if made
anew.

A row's words are XORed with public random ones, a hash of their places, so that the size of
coefficients does not depend on what slices hold (`shape.py`, noise).

The inner loop adds up products of 27 and 27 bits in words of 64: 1,024 of them fit, and then sums
are reduced, once. Every product of every question is computed, in one order, whatever is asked.

Parts live in memory, or in a file that was deleted as soon as it was opened, of which a block of 32
chunks is read at a time. Every pass reads all of it, so that a cache of files which does not hold
the whole never holds what comes next: a table above half of the machine's memory is written and
read past it, which takes a sixth of the CPU time.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from fcntl import F_GETFL, F_SETFL, fcntl
from io import FileIO
from mmap import mmap
from pathlib import Path
from typing import Protocol, TypeVar
from weakref import finalize

import numpy as np
from numba import njit
from numpy.typing import NDArray

from keyhole.crypto.ntt import Residues, transform_of
from keyhole.delivery.pir.shape import LANES, POSITIONS_AT_ONCE, PRIMES, RingShape
from keyhole.delivery.pir.slots import slots_of
from keyhole.errors import StorageError
from keyhole.files import storage_errors

Rows = NDArray[np.uint64]
"""Rows of a table, (K, words)."""

MAX_PRODUCTS = 1024
"""Products of two residues that a word of 64 bits holds the sum of."""

_T = TypeVar("_T")
_R = TypeVar("_R")


class TablePart(Protocol):
    """Eight positions of an encoded table."""

    def block(self, number: int, room: mmap) -> Residues:
        """Returns 32 chunks, (primes, 8, groups, N, 32), which may lie in `room`, as many bytes."""
        ...


@dataclass(frozen=True)
class MemoryPart:
    """A part in memory: (blocks, primes, 8, groups, N, 32)."""

    values: Residues

    def block(self, number: int, room: mmap) -> Residues:
        """Implements `TablePart.block`."""
        values: Residues = self.values[number]
        return values


@dataclass(frozen=True, eq=False)
class FilePart:
    """A part in a file that it has for itself, and that is closed with it."""

    file: FileIO
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        finalize(self, self.file.close)

    def block(self, number: int, room: mmap) -> Residues:
        """Implements `TablePart.block`: threads may read at once."""
        at = number * len(room)
        if os.preadv(self.file.fileno(), [room], at) != len(room):
            raise StorageError(
                f"a table in files is damaged: got fewer than {len(room)} bytes at {at}; expected "
                "what was written; serve the round again, and check the disk"
            )
        return np.frombuffer(room, np.uint32).reshape(self.shape)


def cores() -> int:
    """Returns how many threads answer at once."""
    return os.cpu_count() or 1


def each_block(call: Callable[[_T], _R], items: Sequence[_T]) -> list[_R]:
    """Calls for every item, on all cores; compiled loops let go of the interpreter."""
    if len(items) < 2 or cores() == 1:
        return [call(item) for item in items]
    with ThreadPoolExecutor(cores()) as pool:
        return list(pool.map(call, items))


@dataclass(frozen=True, repr=False)
class EncodedTable:
    """A table in the form that questions are multiplied with. From `encode`.

    Args:
        rows: that it was made from, to see what changed.
        made: how many of the parts were made anew.
    """

    shape: RingShape
    rows: Rows
    parts: tuple[TablePart, ...]
    made: int

    def __repr__(self) -> str:
        return f"EncodedTable({len(self.rows)} rows, {len(self.parts)} parts)"

    @staticmethod
    def encode(
        rows: Rows,
        shape: RingShape,
        before: EncodedTable | None = None,
        folder: str | None = None,
    ) -> EncodedTable:
        """Returns the encoded table.

        Args:
            before: an earlier table, of which parts without a changed row are taken over.
            folder: where parts are kept in files; None keeps them in memory.
        """
        count = shape.parts
        kept: dict[int, TablePart] = {}
        if before is not None and before.shape == shape and before.rows.shape == rows.shape:
            changed = np.flatnonzero((before.rows != rows).any(axis=1))
            touched = set((_positions_of(shape, changed) // POSITIONS_AT_ONCE).tolist())
            kept = {n: part for n, part in enumerate(before.parts) if n not in touched}
        parts = [kept[n] if n in kept else _make_part(rows, shape, n, folder) for n in range(count)]
        return EncodedTable(shape, rows, tuple(parts), count - len(kept))

    def multiply(self, questions: Residues, block: int) -> Residues:
        """Returns the sums over all positions for 32 chunks: (questions, primes, groups, N, 32).

        Args:
            questions: (questions, parts, primes, groups, N, 8), values of the transform.
        """
        many, groups, degree = len(questions), self.shape.groups, self.shape.degree
        sums = np.zeros((many, len(PRIMES), groups * degree, LANES), np.uint64)
        room = mmap(-1, self.shape.block_bytes)  # of whole pages, as direct reading wants it
        for number, part in enumerate(self.parts):
            held = part.block(block, room).reshape(len(PRIMES), POSITIONS_AT_ONCE, -1, LANES)
            asked = questions[:, number].reshape(many, len(PRIMES), -1, POSITIONS_AT_ONCE)
            _add_products(held, asked, sums)
            if (number + 1) * POSITIONS_AT_ONCE % MAX_PRODUCTS == 0:
                reduce_sums(sums)
        reduce_sums(sums)
        return sums.astype(np.uint32).reshape(many, len(PRIMES), groups, degree, LANES)


def reduce_sums(sums: NDArray[np.uint64]) -> None:
    """Reduces sums, (..., primes, n, lanes), modulo their primes."""
    for at, prime in enumerate(PRIMES):
        _reduce(sums[..., at, :, :], np.uint64(prime))


def _positions_of(shape: RingShape, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Of all pieces of rows."""
    items = rows[:, None] * shape.pieces + np.arange(shape.pieces)
    return slots_of(shape).places_of(items.reshape(-1))[1]


def _make_part(rows: Rows, shape: RingShape, number: int, folder: str | None) -> TablePart:
    """Encodes eight positions, some of which may be empty."""
    first = number * POSITIONS_AT_ONCE
    members = slots_of(shape).members(first, min(POSITIONS_AT_ONCE, shape.positions - first))
    form = (len(PRIMES), POSITIONS_AT_ONCE, shape.groups, shape.degree, LANES)
    if folder is None:
        values = np.empty((shape.lane_blocks, *form), np.uint32)
        each_block(lambda at: _encode_block(rows, shape, members, at, values[at]), _blocks(shape))
        return MemoryPart(values)
    room = mmap(-1, shape.block_bytes)
    scratch = np.frombuffer(room, np.uint32).reshape(form)
    with storage_errors(Path(folder), "write a table to"), ExitStack() as stack:
        file = stack.enter_context(tempfile.TemporaryFile(dir=folder, buffering=0))
        if shape.encoded_bytes > memory_bytes() // 2:
            _pass_by_cache(file)
        for at in _blocks(shape):
            _encode_block(rows, shape, members, at, scratch)
            left = memoryview(room)
            while left:
                left = left[file.write(left) :]
        stack.pop_all()  # the part closes it
    return FilePart(file, form)


def memory_bytes() -> int:
    """Returns how much memory the machine has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _pass_by_cache(file: FileIO) -> None:
    """Has a file written and read directly, where its system can."""
    with suppress(OSError):
        fcntl(file, F_SETFL, fcntl(file, F_GETFL) | os.O_DIRECT)


def _blocks(shape: RingShape) -> range:
    return range(shape.lane_blocks)


def _encode_block(
    rows: Rows, shape: RingShape, members: NDArray[np.int64], block: int, out: Residues
) -> None:
    """Encodes 32 chunks of some positions: (primes, 8, groups, N, 32)."""
    plain = transform_of(shape.degree, shape.modulus)
    rings = [transform_of(shape.degree, prime) for prime in PRIMES]
    values = np.empty((shape.groups, shape.degree, LANES), np.uint32)
    bits = np.int64(shape.chunk_bits)
    for at in range(POSITIONS_AT_ONCE):
        if at >= len(members):
            out[:, at] = 0
            continue
        slots = values.reshape(-1, LANES)
        _gather(rows, members[at], shape.pieces, shape.piece_words, block, bits, slots)
        plain.inverse(values)
        for place, ring in enumerate(rings):
            _lift(values, np.uint32(shape.modulus), np.uint32(ring.modulus), out[place, at])
            ring.forward(out[place, at])


@njit(cache=True, nogil=True)
def _gather(rows, items, pieces, piece_words, block, bits, out):  # type: ignore[no-untyped-def]
    """Writes 32 chunks of each item: (slots, 32)."""
    lanes = out.shape[1]
    row_words = rows.shape[1]
    first_bit = block * lanes * bits
    first, skip = first_bit >> 6, first_bit & 63
    needed = ((skip + lanes * bits + 63) >> 6) + 1
    words = np.zeros(needed, np.uint64)
    limit = (np.uint64(1) << np.uint64(bits)) - np.uint64(1)
    for slot in range(len(items)):
        item = items[slot]
        if item < 0:
            for r in range(lanes):
                out[slot, r] = 0
            continue
        row, start = item // pieces, (item % pieces) * piece_words
        for k in range(needed):
            at = first + k
            words[k] = 0
            if at < piece_words and start + at < row_words:
                at += start
                x = np.uint64(row) * np.uint64(row_words) + np.uint64(at)
                words[k] = rows[row, at] ^ _mix(x)
        for r in range(lanes):
            bit = skip + r * bits
            low, shift = bit >> 6, np.uint64(bit & 63)
            # In two steps: a shift by 64 is none.
            above = (words[low + 1] << np.uint64(1)) << (np.uint64(63) - shift)
            out[slot, r] = np.uint32(((words[low] >> shift) | above) & limit)


@njit(cache=True, nogil=True, inline="always")
def _mix(x):  # type: ignore[no-untyped-def]
    """What `primitives.coding.mix` computes."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@njit(cache=True, nogil=True)
def _lift(values, t, p, out):  # type: ignore[no-untyped-def]
    """Numbers modulo t as those of the same size around zero modulo p."""
    flat, to, half, more = values.reshape(-1), out.reshape(-1), t // np.uint32(2), np.uint32(p - t)
    for n in range(len(flat)):
        x = flat[n]
        to[n] = np.uint32(x + (more if x > half else np.uint32(0)))


@njit(cache=True, nogil=True)
def _add_products(table, asked, sums):  # type: ignore[no-untyped-def]
    """sums (q, primes, n, lanes) += table (primes, 8, n, lanes) times asked (q, primes, n, 8)."""
    for prime in range(table.shape[0]):
        d0, d1, d2, d3 = table[prime, 0], table[prime, 1], table[prime, 2], table[prime, 3]
        d4, d5, d6, d7 = table[prime, 4], table[prime, 5], table[prime, 6], table[prime, 7]
        for n in range(table.shape[2]):
            for q in range(len(asked)):
                b, out = asked[q, prime, n], sums[q, prime, n]
                b0, b1, b2, b3 = np.uint64(b[0]), np.uint64(b[1]), np.uint64(b[2]), np.uint64(b[3])
                b4, b5, b6, b7 = np.uint64(b[4]), np.uint64(b[5]), np.uint64(b[6]), np.uint64(b[7])
                for r in range(len(out)):
                    one = np.uint64(d0[n, r]) * b0 + np.uint64(d1[n, r]) * b1
                    two = np.uint64(d2[n, r]) * b2 + np.uint64(d3[n, r]) * b3
                    three = np.uint64(d4[n, r]) * b4 + np.uint64(d5[n, r]) * b5
                    four = np.uint64(d6[n, r]) * b6 + np.uint64(d7[n, r]) * b7
                    out[r] += (one + two) + (three + four)


@njit(cache=True, nogil=True)
def _reduce(sums, p):  # type: ignore[no-untyped-def]
    for q in range(sums.shape[0]):
        for n in range(sums.shape[1]):
            for r in range(sums.shape[2]):
                sums[q, n, r] %= p
