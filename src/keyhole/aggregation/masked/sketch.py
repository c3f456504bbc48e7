"""Sketches rows under a few keys of many, as a vector that can be added without knowing the keys.

An invertible Bloom lookup table (Goodrich and Mitzenmacher, 2011) over a ring. A client adds each
of its rows to the h cells of its key, with a count of 1, the key and a check. Sketches add up to
the sketch of the sum, so that a secure sum of vectors adds them. The server peels the sum: a
cell with one key in it says which one, how many clients have it and what their rows add up to;
taken out of its other cells, it leaves others alone in theirs. The shape of a sketch, that is where
a key's cells lie and what stands in them, is public. Elements of the ring are uint16 or uint32; all
arithmetic on them wraps.

What it tells: a sum of sketches is a function of how many clients have each key and of what their
rows for it add up to, and of nothing else, whether it decodes or not. A party that has the sum
alone does not learn who has a key, nor which keys belong to one client. Single sketches hide
nothing: that nobody but their client sees one is up to the secure sum that adds them, and rests on
what that rests on. Not hidden: the counts, and the row of a key that one client alone has (without
its name). Nothing here is differentially private.

What a client puts in is not checked beyond its form. A sum that decodes is the sketch of what was
decoded, no matter who made it up; one client that sends nonsense makes the sum fail.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from keyhole.arrays import Array, KeyArray
from keyhole.compiled import loop
from keyhole.crypto.prg import SEED_BYTES, FixedKeyAes, fixed_key
from keyhole.errors import InputError, KeySpaceError, ShapeError, SketchError


@loop("keyhole.aggregation.loops")
def add_rows(table: Array, cells: NDArray[np.int64], rows: Array) -> None:
    """Adds each of rows (n, w) to all of its cells (n, h) of a table (C, w), in place."""
    for column in cells.T:
        np.add.at(table, column, rows)


@loop("keyhole.aggregation.loops")
def take_rows(table: Array, cells: NDArray[np.int64], rows: Array) -> None:
    """Takes each of rows (n, w) out of all of its cells (n, h) of a table (C, w), in place."""
    for column in cells.T:
        np.subtract.at(table, column, rows)


@loop("keyhole.aggregation.loops")
def read_keys(
    heads: Array,
    cells: NDArray[np.int64],
    key_words: int,
    word_bits: int,
    num_keys: int,
    max_clients: int,
) -> NDArray[np.int64]:
    """Returns the key that each of cells would hold if it held one alone; -1 where no key fits.

    A cell of one key holds the key times its count, word by word. No division takes place where the
    count is not between 1 and the number of clients.
    """
    count = heads[cells, 0].astype(np.int64)
    fits = (count >= 1) & (count <= max_clients)
    divisor, keys = np.where(fits, count, 1), np.zeros(len(cells), np.int64)
    for word in range(key_words):
        digit, rest = np.divmod(heads[cells, 1 + word].astype(np.int64), divisor)
        fits &= (rest == 0) & (digit >> word_bits == 0)
        keys |= digit << (word * word_bits)
    return np.where(fits & (keys >= 0) & (keys < num_keys), keys, -1)


_MAX_HASHES = 6  # positions of 32 bits in two blocks of AES, beside the check
_MAX_KEYS = 1 << 40
_MAX_CELLS = 1 << 26  # positions scaled from 32 bits favour none by more than 1 in 100
_CHECK_BITS = 32


@dataclass(frozen=True)
class SketchShape:
    """How large a sketch is, and which cells belong to a key.

    There is one sub-table for each hash, so that the cells of a key are distinct. Where they lie,
    and the check of a key, come from AES under the public seed. Keys that were chosen before the
    seed was known crowd no more than random ones do if AES is a pseudo-random
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
        max_distinct: U, how many different keys all clients together may have: from public
            numbers alone, min(clients * keys_per_client, K) or what the last round had.
        seed: 16 bytes, public and fresh for this sum.
        hashes: cells of a key, 3 to 6.
        expansion: cells for each distinct key.
        max_clients: how many clients may be added: the words of a key are so short that their
            sum does not wrap.
        spare: cells beyond that.

    >>> shape = SketchShape(100_000, 500, 40_000, bytes(16), 32, max_clients=50)
    >>> shape.cells, shape.head_words, shape.length
    (56096, 3, 28216288)
    """

    num_keys: int
    width: int
    max_distinct: int
    seed: bytes
    bits: Literal[16, 32] = 32
    hashes: int = 4
    expansion: float = 1.4
    max_clients: int = 256
    spare: int = 96

    def __post_init__(self) -> None:
        if len(self.seed) != SEED_BYTES or self.bits not in (16, 32):
            raise _bad(f"a seed of {len(self.seed)} bytes, a ring of {self.bits} bits")
        if not 3 <= self.hashes <= _MAX_HASHES or not 1 <= self.expansion <= 100:
            raise _bad(f"{self.hashes} hashes, {self.expansion} cells a key")
        if not 1 <= self.max_distinct <= self.num_keys <= _MAX_KEYS:
            raise _bad(f"{self.max_distinct} distinct keys of {self.num_keys}")
        if self.width < 1 or not 1 <= self.max_clients < 2 ** (self.bits - 1) or self.spare < 0:
            raise _bad(f"{self.width} a row, {self.max_clients} clients, {self.spare} spare cells")
        if self.cells > _MAX_CELLS:
            raise _bad(f"{self.cells} cells")

    def __repr__(self) -> str:
        return f"SketchShape({self.num_keys}, {self.width}, {self.max_distinct}, ...)"

    @property
    def dtype(self) -> type[np.uint16] | type[np.uint32]:
        """The dtype of elements of the ring."""
        return np.uint16 if self.bits == 16 else np.uint32

    @property
    def sub_cells(self) -> int:
        """Cells of one sub-table."""
        wanted = int(np.ceil(self.expansion * self.max_distinct)) + self.spare
        return -(-wanted // self.hashes)

    @property
    def cells(self) -> int:
        """C, cells of all sub-tables."""
        return self.sub_cells * self.hashes

    @property
    def word_bits(self) -> int:
        """Bits of a key in one word: the most for which the words of all clients do not wrap."""
        return (((1 << self.bits) - 1) // self.max_clients + 1).bit_length() - 1

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
        checks = np.ascontiguousarray(words[:, _MAX_HASHES : _MAX_HASHES + 1])
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
        f"the shape of a sketch is invalid: got {got}; expected a seed of {SEED_BYTES} bytes, 16 "
        f"or 32 bits, 3..{_MAX_HASHES} hashes, a cell or more for each distinct key, no more of "
        "these than keys, fewer clients than half the ring; size it from the cohort: min(clients * "
        "keys_per_client, num_keys)"
    )


@dataclass(frozen=True)
class Decoded:
    """What a sum of sketches holds, or what one pass takes out of it, in the order of its keys.

    Args:
        keys: (u,) int64, distinct and ascending.
        counts: (u,) int64: how many clients have each key, 1 or more.
        rows: (u, width) of the ring: what their rows add up to.
    """

    keys: KeyArray
    counts: NDArray[np.int64]
    rows: Array

    def __repr__(self) -> str:
        return f"Decoded({len(self.keys)} keys)"


def encode(shape: SketchShape, keys: KeyArray, rows: Array) -> Array:
    """Returns the sketch of one client, (length,) of the ring, for distinct keys (m,) and rows (m,
    width) of the ring; all clients of a sum have the same shape.

    >>> shape = SketchShape(1000, 2, 3, bytes(16), 32)
    >>> one = encode(shape, np.array([7, 900]), np.array([[1, 2], [3, 4]], np.uint32))
    >>> other = encode(shape, np.array([900]), np.array([[10, 20]], np.uint32))
    >>> decoded = decode(shape, one + other, max_clients=2)
    >>> decoded.keys, decoded.counts, decoded.rows
    (array([  7, 900]), array([1, 2]), array([[ 1,  2], [13, 24]], dtype=uint32))
    """
    keys = _checked(shape, keys)
    if rows.shape != (len(keys), shape.width) or rows.dtype != shape.dtype:
        raise ShapeError(
            f"rows that do not fit the sketch: got {rows.dtype} {rows.shape}; expected "
            f"uint{shape.bits} {(len(keys), shape.width)}; encode the rows with the ring and the "
            "width of the shape"
        )
    sketch = np.zeros(shape.length, shape.dtype)
    heads, values = shape.parts(sketch)
    cells, own = shape.place(keys)
    add_rows(heads, cells, own)
    add_rows(values, cells, rows)
    return sketch


def decode(shape: SketchShape, total: Array, max_clients: int) -> Decoded:
    """Peels a sum of sketches.

    What it returns encodes to exactly this sum: every cell is empty at the end.

    Args:
        total: (length,) of the ring; it stays as it is.
        max_clients: how many sketches were added, or more.

    Raises:
        SketchError: it does not decode: too many distinct keys, keys that share all their cells
            (a new seed helps), or a sketch that no client makes: a key that is not below num_keys,
            a count above the number of clients, a key that comes twice, rows without a key.
    """
    if not 1 <= max_clients <= shape.max_clients:
        raise InputError(
            f"another number of clients than the sketch was made for: got {max_clients}; expected "
            f"1..{shape.max_clients}; make the shape with max_clients of the cohort"
        )
    if total.shape != (shape.length,) or total.dtype != shape.dtype:
        raise ShapeError(
            f"a sum that does not fit the sketch: got {total.dtype} {total.shape}; expected "
            f"uint{shape.bits} {(shape.length,)}; add up sketches of one shape"
        )
    return _Peeling(shape, total, max_clients).result()


class _Peeling:
    """A sum of sketches that is taken apart, all single keys of a pass at a time.

    Hashes are computed for all keys of a pass at once. A pass looks only at cells that the last one
    touched, so that all passes together cost no more than the keys have cells.
    """

    def __init__(self, shape: SketchShape, total: Array, max_clients: int) -> None:
        self._shape = shape
        self._max_clients = max_clients
        self._heads, self._values = (part.copy() for part in shape.parts(total))
        self._found: list[Decoded] = []

    def _take_out(self) -> None:
        """Takes out keys until no cell holds one alone."""
        touched, taken = np.arange(self._shape.cells), 0
        while len(touched):
            keys, sources, cells, own = self._singles(touched)
            # Each key empties a cell for good; whatever goes on for longer was made to.
            taken += len(keys)
            if taken > self._shape.cells:
                raise self._failure("a key that comes twice in a sum of sketches")
            counts, rows = self._heads[sources, 0], self._values[sources]
            take_rows(self._heads, cells, counts[:, None] * own)
            take_rows(self._values, cells, rows)
            self._found.append(Decoded(keys, counts.astype(np.int64), rows))
            touched = np.unique(cells)

    def _check(self, keys: KeyArray) -> None:
        """Raises SketchError unless all is taken out, and each key once."""
        if len(np.unique(keys)) < len(keys):
            raise self._failure("a key that comes twice in a sum of sketches")
        left = np.flatnonzero(self._heads.any(axis=1))
        if len(left) and len(self._singles(left, is_lenient=True)[0]):
            raise self._failure("a key or a count that no sum of sketches has")
        if len(left):
            raise self._failure("a sum of sketches that does not peel")
        if self._values.max():
            raise self._failure("rows without a key in a sum of sketches")

    def result(self) -> Decoded:
        """Returns all that was found, in the order of keys."""
        self._take_out()
        keys = np.concatenate([found.keys for found in self._found])
        self._check(keys)
        counts = np.concatenate([found.counts for found in self._found])
        order = np.argsort(keys)
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        rows, start = np.empty((len(keys), self._shape.width), self._shape.dtype), 0
        for found in self._found:
            rows[place[start : start + len(found.keys)]] = found.rows
            start += len(found.keys)
        return Decoded(keys[order], counts[order], rows)

    def _singles(
        self, touched: NDArray[np.int64], is_lenient: bool = False
    ) -> tuple[KeyArray, NDArray[np.int64], NDArray[np.int64], Array]:
        """Keys that are alone in one of these cells, once each: keys (n,), the cells (n,) they are
        alone in, all their cells (n, h) and their heads (n, head_words)."""
        shape = self._shape
        max_keys = 1 << 62 if is_lenient else shape.num_keys
        max_clients = 2**shape.bits if is_lenient else self._max_clients
        keys = read_keys(
            self._heads, touched, shape.key_words, shape.word_bits, max_keys, max_clients
        )
        sources, keys = touched[keys >= 0], keys[keys >= 0]
        cells, own = shape.place(keys)
        heads = self._heads[sources]
        is_here = (cells == sources[:, None]).any(axis=1)
        is_single = is_here & (heads == heads[:, :1] * own).all(axis=1)
        keys, first = np.unique(keys[is_single], return_index=True)
        which = np.flatnonzero(is_single)[first]
        return keys, sources[which], cells[which], own[which]

    def _failure(self, wrong: str) -> SketchError:
        left = int(np.count_nonzero(self._heads.any(axis=1)))
        return SketchError(
            f"{wrong}: got {left} of {self._shape.cells} cells left; expected none; apply nothing; "
            "take a new seed and more distinct keys for the next round"
        )


def _checked(shape: SketchShape, keys: KeyArray) -> KeyArray:
    """Keys that can be encoded."""
    keys = np.asarray(keys)
    if keys.ndim != 1 or keys.dtype.kind not in "iu":
        raise KeySpaceError(
            f"keys of another form: got {keys.dtype} {keys.shape}; expected whole numbers (m,); "
            "pass one array of keys"
        )
    keys = keys.astype(np.int64)
    is_outside = (keys < 0) | (keys >= shape.num_keys)
    if is_outside.any() or len(keys) > shape.max_distinct or len(np.unique(keys)) < len(keys):
        raise KeySpaceError(
            f"keys that a sketch cannot hold: got {len(keys)} keys, {len(np.unique(keys))} "
            f"distinct, {is_outside.sum()} outside; expected distinct keys below {shape.num_keys}, "
            f"{shape.max_distinct} at most; add up the rows of equal keys, and size the sketch for "
            "all keys of the cohort"
        )
    return keys
