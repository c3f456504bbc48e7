"""Binds the rows of a table to one hash: a Merkle tree, proofs for many keys, paths for rows.

Leaf k is the hash of row k; a node is the hash of its two children; a node without a sibling moves
up as it is. Leaves and nodes are hashed under different keys, and the number of leaves is known
from elsewhere, so that no text can pass for one of another place or height.

    prove      the fewest nodes with which many rows lead to the root: what a server sends
    root_of    rows and such nodes -> root: what a device compares
    paths      siblings from each leaf up to a public layer: what a row carries that is fetched by
               private retrieval, where a proof would have to know the keys
    climb      rows and their paths -> nodes of that layer

Hashes are keyed BLAKE3, 32 bytes each; the keys are public and keep hashes of different kinds
apart. The `blake3` package is the definition and hashes texts one after the other, which is enough
for the few thousand of a device. A server has millions: the compiled loop of `merkle_loops.py`
hashes eight texts at once and gives the same bytes. It takes seconds to compile, so that numba in
the process is no reason to: 4 MB are, or a service that has asked for it (`compiled.py`).

What holds: two rows under one root and key are equal, unless somebody finds a collision of BLAKE3.
Nothing is hidden: a proof tells the keys it is for, and is sent to the device that named them.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import expm1, log1p

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from keyhole.arrays import KeyArray
from keyhole.compiled import loop
from keyhole.errors import DamageError, ShapeError

HASH_BYTES = 32
KEY_BYTES = 32

HashArray = NDArray[np.uint8]
"""Hashes, shape (m, 32)."""

_COMPILE_FROM = 4 << 20  # bytes; below, one text at a time is done before compiled code is loaded
_LEAF, _NODE = (word.ljust(32, b"\0") for word in (b"keyhole leaf", b"keyhole node"))


def hash_rows(rows: NDArray[np.uint8], key: bytes) -> HashArray:
    """Returns the keyed BLAKE3 of each row: (m, 32).

    Args:
        rows: (m, n) uint8.
        key: 32 public bytes.

    >>> hash_rows(np.zeros((2, 5), np.uint8), bytes(32))[1, :4].tobytes().hex()
    '4e9e4fc9'
    """
    if rows.ndim != 2 or rows.dtype != np.uint8 or len(key) != KEY_BYTES:
        raise ShapeError(
            f"cannot hash these texts: got {rows.dtype} of shape {rows.shape}, a key of "
            f"{len(key)} bytes; expected uint8 of shape (m, n), {KEY_BYTES} bytes; pass one text a "
            "row"
        )
    out = np.empty((len(rows), HASH_BYTES // 4), np.uint32)
    hash_lanes(np.ascontiguousarray(rows), np.frombuffer(key, np.uint32), out)
    return out.view(np.uint8)


@loop("keyhole.crypto.merkle_loops", from_bytes=_COMPILE_FROM)
def hash_lanes(rows: NDArray[np.uint8], key: NDArray[np.uint32], out: NDArray[np.uint32]) -> None:
    """Writes the hash of each of rows (m, n), in memory one after the other, to `out`, (m, 8); the
    key is 8 words."""
    named = key.tobytes()
    digests = b"".join([blake3(row, key=named).digest() for row in rows])
    out[:] = np.frombuffer(digests, np.uint32).reshape(out.shape)


def hash_leaves(rows: NDArray[np.uint8]) -> HashArray:
    """Returns the leaf of each row, (m, 32)."""
    return hash_rows(rows, _LEAF)


def hash_pairs(left: HashArray, right: HashArray) -> HashArray:
    """Returns the node above each pair."""
    return hash_rows(np.concatenate([left, right], axis=1), _NODE)


@dataclass(frozen=True)
class TreeShape:
    """Which nodes a tree over a number of leaves has: levels one behind the other, leaves first.

    >>> TreeShape(5).sizes
    (5, 3, 2, 1)
    """

    num_leaves: int

    def __post_init__(self) -> None:
        if self.num_leaves < 1:
            raise ShapeError(
                f"a tree needs leaves: got {self.num_leaves}; expected 1 or more; leave an empty "
                "table out"
            )

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Nodes of each level, from the leaves to the root."""
        sizes = [self.num_leaves]
        while sizes[-1] > 1:
            sizes.append(-(-sizes[-1] // 2))
        return tuple(sizes)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The place of each level's first node, and of the end."""
        return (0, *np.cumsum(self.sizes).tolist())

    @property
    def num_nodes(self) -> int:
        """The number of nodes of all levels."""
        return self.starts[-1]

    @cached_property
    def _room(self) -> tuple[list[int], list[int]]:
        """Half of each level's nodes, from the top down; and their sums up to each of them."""
        room = [size // 2 for size in reversed(self.sizes[:-1])]
        return room, [0, *accumulate(room)]

    @cached_property
    def levels(self) -> NDArray[np.int64]:
        """`sizes` as loops take it."""
        return np.array(self.sizes)

    def max_proof(self, keys: int) -> int:
        """Returns the max number of nodes of a proof for this many keys: one for each key on the
        levels that have room for it, half of the level above."""
        room, sums = self._room
        narrow = bisect_left(room, keys)  # levels with less room than keys
        return sums[narrow] + keys * (len(room) - narrow)

    def mean_proof(self, keys: int) -> float:
        """Returns the mean number of nodes of a proof for this many distinct keys, drawn uniformly.

        A node is sent if no key lies below it, and some below its sibling. To within some percent:
        the last nodes of levels count as full ones.

        >>> round(TreeShape(100_000).mean_proof(1_000), -2)
        5800.0
        """
        widths = [1 << height for height in range(len(self.sizes))]
        is_hit = [self._is_hit(width, keys) for width in widths]
        return sum(
            size * (above - below)
            for size, below, above in zip(self.sizes, is_hit, is_hit[1:], strict=False)
        )

    def _is_hit(self, width: int, keys: int) -> float:
        """The probability that one of `keys` leaves lies among `width`: 1 - C(n-w, m) / C(n, m),
        each of the fewer factors as their middle one."""
        n, few, many = self.num_leaves, min(width, keys), max(width, keys)
        if width + keys > n:
            return 1.0
        return -expm1(few * log1p(-many / (n - (few - 1) / 2)))

    def height_of(self, max_nodes: int) -> int:
        """Returns the lowest level of at most this many nodes."""
        return next(level for level, size in enumerate(self.sizes) if size <= max_nodes)


@dataclass(frozen=True, repr=False)
class Tree:
    """A tree with all its nodes.

    Args:
        nodes: (num_nodes, 32): its levels one behind the other, leaves first; may be a mapped file.
    """

    shape: TreeShape
    nodes: HashArray

    def __post_init__(self) -> None:
        if self.nodes.shape != (self.shape.num_nodes, HASH_BYTES) or self.nodes.dtype != np.uint8:
            raise ShapeError(
                f"nodes that are no tree: got {self.nodes.dtype} of shape {self.nodes.shape}; "
                f"expected uint8 of shape ({self.shape.num_nodes}, {HASH_BYTES}); build the tree "
                "from its leaves"
            )

    def __repr__(self) -> str:
        return f"Tree({self.shape.num_leaves} leaves)"

    @staticmethod
    def of(leaves: HashArray) -> Tree:
        """Returns the tree over leaves.

        >>> Tree.of(hash_leaves(np.zeros((5, 8), np.uint8)))
        Tree(5 leaves)
        """
        shape = TreeShape(len(leaves))
        tree = Tree(shape, np.empty((shape.num_nodes, HASH_BYTES), np.uint8))
        tree.level(0)[:] = leaves
        tree.join()
        return tree

    @property
    def root(self) -> bytes:
        """32 bytes that stand for all rows."""
        return bytes(self.nodes[-1])

    def level(self, height: int) -> HashArray:
        """Returns the nodes of one level."""
        return self.nodes[self.shape.starts[height] : self.shape.starts[height + 1]]

    def join(self) -> None:
        """Makes all nodes above the leaves."""
        for height in range(len(self.shape.sizes) - 1):
            below, above = self.level(height), self.level(height + 1)
            pairs = len(below) // 2
            above[:pairs] = hash_rows(below[: 2 * pairs].reshape(pairs, -1), _NODE)
            above[pairs:] = below[2 * pairs :]  # it has no sibling

    def update(self, keys: KeyArray, leaves: HashArray) -> None:
        """Changes leaves and what lies above them: work for their number, not that of all leaves.

        Args:
            keys: (m,) ascending, all different.
            leaves: (m, 32).
        """
        self.nodes[keys] = leaves
        self.join_above(keys)

    def join_above(self, keys: KeyArray) -> None:
        """Makes the nodes above leaves that have changed; `keys` ascending, all different."""
        for height in range(len(self.shape.sizes) - 1):
            keys = _distinct(keys >> 1)
            self._join(height, keys)

    def _join(self, height: int, parents: KeyArray) -> None:
        """Makes nodes of the level above `height` from their children."""
        below, above = self.level(height), self.level(height + 1)
        if len(parents) and 2 * parents[-1] + 1 == len(below):  # it has no sibling
            above[parents[-1]] = below[-1]
            parents = parents[:-1]
        above[parents] = hash_pairs(below[2 * parents], below[2 * parents + 1])


def prove(tree: Tree, keys: KeyArray) -> HashArray:
    """Returns the nodes that lead from the rows of `keys` to the root, (p, 32), level by level.

    Args:
        keys: (m,) ascending; may repeat.
    """
    return tree.nodes[proof_places(tree.shape, keys)]


def proof_places(shape: TreeShape, keys: KeyArray) -> NDArray[np.int64]:
    """Returns where the nodes of a proof lie among all nodes, (p,); `keys` as for `prove`."""
    keys = np.ascontiguousarray(keys)
    out = np.empty(shape.max_proof(len(keys)) + 1, np.int64)
    room = np.empty(len(keys) + 1, np.int64)
    return out[: find_siblings(keys, shape.levels, room, out)]


@loop("keyhole.crypto.merkle_loops", from_bytes=_COMPILE_FROM)
def find_siblings(
    keys: KeyArray, sizes: NDArray[np.int64], room: NDArray[np.int64], out: NDArray[np.int64]
) -> int:
    """Writes the places of a proof's nodes to `out`; returns how many there are.

    Args:
        keys: ascending; may repeat.
        sizes: nodes of each level, from the leaves to the root.
        room: longer than `keys` by one; for the compiled form.
        out: longer by one than the longest proof.
    """
    keys, start, count = _distinct(keys), 0, 0
    for size in sizes[:-1].tolist():
        siblings = keys ^ 1
        is_known = np.zeros(len(keys), bool)
        is_known[1:] = siblings[1:] == keys[:-1]
        is_known[:-1] |= siblings[:-1] == keys[1:]
        lacking = siblings[~is_known & (siblings < size)]
        out[count : count + len(lacking)] = start + lacking
        count += len(lacking)
        start += size
        keys = _distinct(keys >> 1)
    return count


def proof_length(shape: TreeShape, keys: KeyArray) -> int:
    """Returns how many nodes `prove` sends for keys."""
    return len(proof_places(shape, keys))


def root_of(shape: TreeShape, keys: KeyArray, leaves: HashArray, proof: HashArray) -> bytes:
    """Returns the root that rows and a proof lead to.

    Args:
        keys: (m,) ascending, all different; one or more.
        leaves: (m, 32), of the rows that arrived.

    Raises:
        DamageError: the proof is not as long as one for these keys.
    """
    nodes, taken = leaves, 0
    for size in shape.sizes[:-1]:
        is_left = keys % 2 == 0
        has_both = np.zeros(len(keys), bool)  # a left node whose sibling is the next one
        has_both[:-1] = is_left[:-1] & (keys[1:] == keys[:-1] + 1)
        follows = np.concatenate([[False], has_both[:-1]])
        is_last = is_left & (keys == size - 1)  # moves up as it is
        lacks = ~(has_both | follows | is_last)
        count = int(np.count_nonzero(lacks))
        if taken + count > len(proof):
            raise _wrong_length(len(proof))
        siblings = np.empty_like(nodes)
        siblings[lacks] = proof[taken : taken + count]
        siblings[:-1][has_both[:-1]] = nodes[1:][has_both[:-1]]
        taken += count
        kept = ~follows
        joined = hash_pairs(
            np.where(is_left[kept, None], nodes[kept], siblings[kept]),
            np.where(is_left[kept, None], siblings[kept], nodes[kept]),
        )
        nodes = np.where(is_last[kept, None], nodes[kept], joined)
        keys = keys[kept] >> 1
    if taken != len(proof):
        raise _wrong_length(len(proof))
    return bytes(nodes[0])


def paths(tree: Tree, height: int, keys: KeyArray | None = None) -> HashArray:
    """Returns the siblings of leaves and of what lies above them, up to a level.

    Args:
        keys: (m,) in any order; every leaf if None.

    Returns:
        (m, height * 32); zeros where a node has no sibling.
    """
    places = np.arange(tree.shape.num_leaves) if keys is None else keys
    out = np.zeros((len(places), height, HASH_BYTES), np.uint8)
    for level in range(height):
        siblings = (places >> level) ^ 1
        there = siblings < tree.shape.sizes[level]
        out[there, level] = tree.level(level)[siblings[there]]
    return out.reshape(len(places), height * HASH_BYTES)


def climb(shape: TreeShape, keys: KeyArray, leaves: HashArray, path: HashArray) -> HashArray:
    """Returns the node that each row and its path lead to, (m, 32): node `keys >> height`.

    Args:
        keys: (m,) in any order.
        path: (m, height * 32), as `paths` has it.
    """
    height = path.shape[1] // HASH_BYTES
    siblings = path.reshape(len(keys), height, HASH_BYTES)
    nodes = leaves
    for level in range(height):
        is_left = (keys >> level) % 2 == 0
        joined = hash_pairs(
            np.where(is_left[:, None], nodes, siblings[:, level]),
            np.where(is_left[:, None], siblings[:, level], nodes),
        )
        is_last = is_left & (keys >> level == shape.sizes[level] - 1)
        nodes = np.where(is_last[:, None], nodes, joined)
    return nodes


def root_of_level(shape: TreeShape, height: int, nodes: HashArray) -> bytes:
    """Returns the root above all nodes of one level.

    Raises:
        DamageError: they are not as many as the level has.
    """
    if nodes.shape != (shape.sizes[height], HASH_BYTES):
        raise _wrong_length(len(nodes))
    return Tree.of(nodes).root


def _distinct(ascending: KeyArray) -> KeyArray:
    """The different ones of ascending numbers."""
    keep = np.ones(len(ascending), bool)
    keep[1:] = ascending[1:] != ascending[:-1]
    return ascending[keep]


def _wrong_length(got: int) -> DamageError:
    return DamageError(
        f"the proof does not fit the rows: got {got} nodes; expected those of the keys asked for; "
        "ask again"
    )
