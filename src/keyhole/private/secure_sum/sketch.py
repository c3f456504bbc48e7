"""Sketches: rows under a few keys of many, as a vector that can be added without knowing the keys.

An invertible Bloom lookup table (Goodrich and Mitzenmacher, 2011) over a ring. A client adds each
of its rows to the h cells of its key, with a count of 1, the key and a check. Sketches add up to
the sketch of the sum, so that a secure sum of vectors adds them. Whoever has the sum peels it: a
cell with one key in it says which one, how many clients have it and what their rows add up to;
taken out of its other cells, it leaves others alone in theirs.

What it tells: a sum of sketches is a function of how many clients have each key and of what their
rows for it add up to, and of nothing else, whether it decodes or not. Whoever has the sum alone
does not learn who has a key, nor which keys belong to one client. Single sketches hide nothing:
that nobody but their client sees one is up to the secure sum that adds them, and rests on what that
rests on. Not hidden: the counts, and the row of a key that one client alone has (without its
name). Nothing here is differentially private.

What a client puts in is not checked beyond its form. A sum that decodes is the sketch of what was
decoded, whoever made it up; one client that sends nonsense makes the sum fail.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from keyhole.errors import InputError, KeySpaceError, ShapeError, SketchError
from keyhole.private.secure_sum.sketch_kernels import add_rows, read_keys, take_rows
from keyhole.private.secure_sum.sketch_shape import SketchShape
from keyhole.types import Array, KeyArray

__all__ = ["Decoded", "SketchShape", "decode", "encode"]


@dataclass(frozen=True)
class Decoded:
    """What a sum of sketches holds.

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
    """The sketch of one client.

    Args:
        shape: the same for all clients of a sum.
        keys: (m,), distinct, below num_keys.
        rows: (m, width) of the ring.

    Returns:
        (length,) of the ring.

    Raises:
        KeySpaceError: keys that are not distinct numbers of 0..num_keys - 1, or too many of them.
        ShapeError: rows of another shape or ring.

    >>> shape = SketchShape(1000, 2, 3, bytes(16), 32)
    >>> one = encode(shape, np.array([7, 900]), np.array([[1, 2], [3, 4]], np.uint32))
    >>> other = encode(shape, np.array([900]), np.array([[10, 20]], np.uint32))
    >>> decoded = decode(shape, one + other, most_clients=2)
    >>> decoded.keys, decoded.counts, decoded.rows
    (array([  7, 900]), array([1, 2]), array([[ 1,  2], [13, 24]], dtype=uint32))
    """
    keys = _checked(shape, keys)
    if rows.shape != (len(keys), shape.width) or rows.dtype != shape.dtype:
        raise ShapeError(
            "rows that do not fit the sketch",
            got=f"{rows.dtype} {rows.shape}",
            allowed=f"uint{shape.bits} {(len(keys), shape.width)}",
            fix="encode the rows with the ring and the width of the shape",
        )
    sketch = np.zeros(shape.length, shape.dtype)
    heads, values = shape.parts(sketch)
    cells, own = shape.place(keys)
    add_rows(heads, cells, own)
    add_rows(values, cells, rows)
    return sketch


def decode(shape: SketchShape, total: Array, most_clients: int) -> Decoded:
    """Peels a sum of sketches.

    What it returns encodes to exactly this sum: every cell is empty at the end.

    Args:
        shape: of the sketches.
        total: (length,) of the ring; it stays as it is.
        most_clients: how many sketches were added, or more.

    Raises:
        InputError: more clients than the shape has room for.
        ShapeError: a total of another length or ring.
        SketchError: it does not decode: too many distinct keys, keys that share all their cells
            (a new seed helps), or a sketch that no client makes: a key that is not below num_keys,
            a count above the number of clients, a key that comes twice, rows without a key.
    """
    if not 1 <= most_clients <= shape.most_clients:
        raise InputError(
            "another number of clients than the sketch was made for",
            got=most_clients,
            allowed=f"1..{shape.most_clients}",
            fix="make the shape with most_clients of the cohort",
        )
    if total.shape != (shape.length,) or total.dtype != shape.dtype:
        raise ShapeError(
            "a sum that does not fit the sketch",
            got=f"{total.dtype} {total.shape}",
            allowed=f"uint{shape.bits} {(shape.length,)}",
            fix="add up sketches of one shape",
        )
    peeling = _Peeling(shape, total, most_clients)
    peeling.run()
    peeling.check()
    return peeling.result()


@dataclass(frozen=True)
class _Found:
    """Keys that were alone in a cell: (n,), (n,), (n, width)."""

    keys: KeyArray
    counts: NDArray[np.int64]
    rows: Array


class _Peeling:
    """A sum of sketches that is taken apart, all single keys of a pass at a time.

    Hashes are computed for all keys of a pass at once. A pass looks only at cells that the last one
    touched, so that all passes together cost no more than the keys have cells.
    """

    def __init__(self, shape: SketchShape, total: Array, most_clients: int) -> None:
        self._shape = shape
        self._most_clients = most_clients
        self._heads, self._values = (part.copy() for part in shape.parts(total))
        self._found: list[_Found] = []

    def run(self) -> None:
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
            self._found.append(_Found(keys, counts.astype(np.int64), rows))
            touched = np.unique(cells)

    def check(self) -> None:
        """Raises SketchError unless all is taken out, and each key once."""
        keys = np.concatenate([found.keys for found in self._found])
        if len(np.unique(keys)) < len(keys):
            raise self._failure("a key that comes twice in a sum of sketches")
        left = np.flatnonzero(self._heads.any(axis=1))
        if len(left) and len(self._singles(left, is_lenient=True)[0]):
            raise self._failure("a key or a count that cannot be in a sum of sketches")
        if len(left):
            raise self._failure("a sum of sketches that does not peel")
        if self._values.max():
            raise self._failure("rows without a key in a sum of sketches")

    def result(self) -> Decoded:
        """All that was found, in the order of keys."""
        keys = np.concatenate([found.keys for found in self._found])
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
        most_keys = 1 << 62 if is_lenient else shape.num_keys
        most_clients = 2**shape.bits if is_lenient else self._most_clients
        keys = read_keys(
            self._heads, touched, shape.key_words, shape.word_bits, most_keys, most_clients
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
            wrong,
            got=f"{left} of {self._shape.cells} cells left",
            allowed="none",
            fix="apply nothing; take a new seed and more distinct keys for the next round",
        )


def _checked(shape: SketchShape, keys: KeyArray) -> KeyArray:
    """Keys that can be encoded."""
    keys = np.asarray(keys)
    if keys.ndim != 1 or keys.dtype.kind not in "iu":
        raise KeySpaceError(
            "keys of another form",
            got=f"{keys.dtype} {keys.shape}",
            allowed="whole numbers (m,)",
            fix="pass one array of keys",
        )
    keys = keys.astype(np.int64)
    is_outside = (keys < 0) | (keys >= shape.num_keys)
    if is_outside.any() or len(keys) > shape.most_distinct or len(np.unique(keys)) < len(keys):
        raise KeySpaceError(
            "keys that a sketch cannot hold",
            got=f"{len(keys)} keys, {len(np.unique(keys))} distinct, {is_outside.sum()} outside",
            allowed=f"distinct keys below {shape.num_keys}, {shape.most_distinct} at most",
            fix="add up the rows of equal keys, and size the sketch for all keys of the cohort",
        )
    return keys
