"""The shape of a sketch: where a key's cells lie and what stands in them. Public, all of it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from keyhole.errors import InputError
from keyhole.private.prg import SEED_BYTES, FixedKeyAes, fixed_key
from keyhole.types import Array, KeyArray

__all__ = ["SketchShape"]

_MOST_HASHES = 6  # positions of 32 bits in two blocks of AES, beside the check
_MOST_KEYS = 1 << 40
_MOST_CELLS = 1 << 26  # positions scaled from 32 bits favour none by more than 1 in 100
_CHECK_BITS = 32


@dataclass(frozen=True)
class SketchShape:
    """How large a sketch is, and which cells belong to a key.

    There is one sub-table for each hash, so that the cells of a key are distinct. Where they lie,
    and the check of a key, come from AES under the public seed. Keys that were chosen before the
    seed was known crowd no more than random ones do, whoever chose them, if AES is a pseudo-random
    function; so each round draws its seed afresh, after the clients have their keys. Keys chosen
    with the seed at hand can be made to collide, and then the sum does not decode.

    There are `expansion` cells for each distinct key and `spare` more. The threshold of 4 hashes is
    1.295 cells a key; below it most keys are lost at once. Above it what remains is two keys that
    share all their cells, U^2 / 2 / (C / 4)^4 of all sums. How often 2,000 (U = 10,000) to 400,000
    tables with truly random cells failed in a simulation, to which tests hold this code:

        U              2       10     20     50     100    200    500    1000  10000
        1.4 U          1       0.4    0.6    0.2    0.2    5e-2   1e-3   5e-5  0
        1.4 U + 96     3e-6    1e-4   2e-4   4e-4   4e-4   2e-4   1e-4   0     0

    Args:
        num_keys: K.
        width: elements of a row.
        most_distinct: U, how many different keys all clients together may have: from public
            numbers alone, min(clients * keys_per_client, K) or what the last round had.
        seed: 16 bytes, public and fresh for this sum.
        bits: of an element of the ring.
        hashes: cells of a key, 3 to 6.
        expansion: cells for each distinct key.
        most_clients: how many clients may be added: the words of a key are so short that their
            sum does not wrap.
        spare: cells beyond that.

    Raises:
        InputError: a number is out of range.

    >>> shape = SketchShape(100_000, 500, 40_000, bytes(16), 32, most_clients=50)
    >>> shape.cells, shape.head_words, shape.length
    (56096, 3, 28216288)
    """

    num_keys: int
    width: int
    most_distinct: int
    seed: bytes
    bits: Literal[16, 32] = 32
    hashes: int = 4
    expansion: float = 1.4
    most_clients: int = 256
    spare: int = 96

    def __post_init__(self) -> None:
        if len(self.seed) != SEED_BYTES or self.bits not in (16, 32):
            raise _bad(f"a seed of {len(self.seed)} bytes, a ring of {self.bits} bits")
        if not 3 <= self.hashes <= _MOST_HASHES or not 1 <= self.expansion <= 100:
            raise _bad(f"{self.hashes} hashes, {self.expansion} cells a key")
        if not 1 <= self.most_distinct <= self.num_keys <= _MOST_KEYS:
            raise _bad(f"{self.most_distinct} distinct keys of {self.num_keys}")
        if self.width < 1 or not 1 <= self.most_clients < 2 ** (self.bits - 1) or self.spare < 0:
            raise _bad(f"{self.width} a row, {self.most_clients} clients, {self.spare} spare cells")
        if self.cells > _MOST_CELLS:
            raise _bad(f"{self.cells} cells")

    def __repr__(self) -> str:
        return f"SketchShape({self.num_keys}, {self.width}, {self.most_distinct}, ...)"

    @property
    def dtype(self) -> type[np.uint16] | type[np.uint32]:
        """Of elements of the ring."""
        return np.uint16 if self.bits == 16 else np.uint32

    @property
    def sub_cells(self) -> int:
        """Cells of one sub-table."""
        wanted = int(np.ceil(self.expansion * self.most_distinct)) + self.spare
        return -(-wanted // self.hashes)

    @property
    def cells(self) -> int:
        """C, cells of all sub-tables."""
        return self.sub_cells * self.hashes

    @property
    def word_bits(self) -> int:
        """Bits of a key in one word: the most for which the words of all clients do not wrap."""
        return (((1 << self.bits) - 1) // self.most_clients + 1).bit_length() - 1

    @property
    def key_words(self) -> int:
        """Words that hold a key."""
        return max(1, -(-(self.num_keys - 1).bit_length() // self.word_bits))

    @property
    def check_words(self) -> int:
        """Words that hold the 32 bits of a check."""
        return _CHECK_BITS // self.bits

    @property
    def head_words(self) -> int:
        """What stands in a cell before its row: count, key and check."""
        return 1 + self.key_words + self.check_words

    @property
    def length(self) -> int:
        """Elements of a sketch: the heads of all cells, then the rows of all cells."""
        return self.cells * (self.head_words + self.width)

    def cells_of(self, keys: KeyArray) -> NDArray[np.int64]:
        """The cells of each of keys (m,), one of every sub-table, (m, hashes)."""
        return self.place(keys)[0]

    def place(self, keys: KeyArray) -> tuple[NDArray[np.int64], Array]:
        """Returns the cells of keys (m,), and the heads that one client adds, (m, head_words)."""
        names = np.zeros((len(keys), 2), "<u8")
        names[:, 0] = keys
        words = self._cipher.expand(names.view(np.uint8), 2).view("<u4")
        # A word scaled to the size of a sub-table: cheaper than a division, and as even.
        scaled = words[:, : self.hashes].astype(np.uint64) * np.uint64(self.sub_cells)
        cells = (scaled >> np.uint64(32)).astype(np.int64)
        cells += np.arange(self.hashes) * self.sub_cells
        heads = np.empty((len(keys), self.head_words), self.dtype)
        heads[:, 0] = 1
        for word in range(self.key_words):
            heads[:, 1 + word] = (keys >> (word * self.word_bits)) & ((1 << self.word_bits) - 1)
        checks = np.ascontiguousarray(words[:, _MOST_HASHES : _MOST_HASHES + 1])
        heads[:, 1 + self.key_words :] = checks.view(f"<u{self.bits // 8}")
        return cells, heads

    def parts(self, sketch: Array) -> tuple[Array, Array]:
        """Views of a sketch (length,): heads (cells, head_words) and rows (cells, width)."""
        border = self.cells * self.head_words
        heads = sketch[:border].reshape(self.cells, self.head_words)
        return heads, sketch[border:].reshape(self.cells, self.width)

    @cached_property
    def _cipher(self) -> FixedKeyAes:
        return FixedKeyAes(fixed_key(self.seed, b"keyhole-sketch"))


def _bad(got: str) -> InputError:
    return InputError(
        "a sketch that cannot be",
        got=got,
        allowed=(
            f"a seed of {SEED_BYTES} bytes, 16 or 32 bits, 3..{_MOST_HASHES} hashes, a cell or more"
            " for each distinct key, no more of these than keys, fewer clients than half the ring"
        ),
        fix="size it from the cohort: min(clients * keys_per_client, num_keys)",
    )
