"""Binds rows that are fetched in private to the root of their table: each carries its own path.

A proof for many keys (`keyhole.crypto.merkle.prove`) depends on the keys, so nobody may be asked
for one. A row that is fetched in private brings its own: the siblings on its way up to the top, a
public layer of the tree of at most 4,096 nodes. Everybody fetches the top, the same bytes, once a
round, and compares it with the root. How many levels a path has follows from the number of keys
alone:

    K       4,096   10^4   10^5   10^6
    path        0     64    160    256   bytes, in every row
    top       128     78     98    122   KB, once a round

A row is right if it and its path lead to the node of the top above its key. Then it is the row of
that key under the root, unless somebody finds a collision of BLAKE3, no matter who answered and
what they guessed. What is wrong is for the client alone to know: see `Retrieved`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from keyhole.arrays import KeyArray
from keyhole.crypto.merkle import (
    HASH_BYTES,
    HashArray,
    Tree,
    TreeShape,
    climb,
    hash_leaves,
    paths,
    root_of_level,
)
from keyhole.errors import DamageError, StaleError

TOP_NODES = 4096
"""Max nodes of a top."""

_AT_ONCE = 1 << 15  # keys whose paths are made together: what they take stays in a cache


def path_bytes(num_keys: int) -> int:
    """Returns the number of bytes of the path in every row of a table."""
    return HASH_BYTES * _height(TreeShape(num_keys))


def top_bytes(num_keys: int) -> int:
    """Returns the number of bytes of the top of a table."""
    shape = TreeShape(num_keys)
    return HASH_BYTES * shape.sizes[_height(shape)]


def tree_of(records: NDArray[np.uint8]) -> Tree:
    """Returns the tree of a table: leaf k is the hash of record k."""
    return Tree.of(hash_leaves(records))


def top_of(tree: Tree) -> bytes:
    """Returns the top of a tree, as everybody fetches it."""
    return tree.level(_height(tree.shape)).tobytes()


def with_paths(tree: Tree, keys: KeyArray, records: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Returns the rows of keys: their records, (m, record_bytes), each with its path behind it."""
    return np.concatenate([records, paths(tree, _height(tree.shape), keys)], axis=1)


def fill_rows(tree: Tree, records: NDArray[np.uint8], out: NDArray[np.uint8]) -> None:
    """Writes all rows of a table, (num_keys, record_bytes + path_bytes), into `out`."""
    cut = records.shape[1]
    out[:, :cut] = records
    for start in range(0, len(records), _AT_ONCE):
        keys = np.arange(start, min(start + _AT_ONCE, len(records)))
        out[start : start + _AT_ONCE, cut:] = paths(tree, _height(tree.shape), keys)


@dataclass(frozen=True, repr=False)
class Top:
    """A top that belongs to a root: what rows are compared with. From `Top.of`."""

    shape: TreeShape
    nodes: HashArray

    def __repr__(self) -> str:
        return f"Top({len(self.nodes)} nodes above {self.shape.num_leaves} rows)"

    @staticmethod
    def of(num_keys: int, root: bytes, data: bytes) -> Top:
        """Returns the top that `data` holds.

        Raises:
            StaleError: it is not the top under this root. That depends on no key: a top is fetched
                before anything is asked for, and everybody fetches the same.
        """
        shape = TreeShape(num_keys)
        nodes = np.frombuffer(data[: len(data) // HASH_BYTES * HASH_BYTES], np.uint8)
        try:
            is_right = root_of_level(shape, _height(shape), nodes.reshape(-1, HASH_BYTES)) == root
        except DamageError:
            is_right = False
        if not is_right or len(data) != nodes.size:
            raise StaleError(
                f"the top of a table is not that of its root: got {len(data)} bytes; expected "
                f"{top_bytes(num_keys)} bytes that lead to the root of the round; fetch it "
                "again; a server lies or is damaged"
            )
        return Top(shape, nodes.reshape(-1, HASH_BYTES))

    def are_right(self, keys: KeyArray, rows: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Returns which rows are those of their keys, (m,); as much work for wrong ones.

        Args:
            keys: (m,) below the number of rows.
            rows: (m, n) uint8: a record and its path each.
        """
        cut = rows.shape[1] - HASH_BYTES * _height(self.shape)
        found = climb(self.shape, keys, hash_leaves(rows[:, :cut]), rows[:, cut:])
        above = self.nodes[keys >> _height(self.shape)]
        is_right: NDArray[np.bool_] = (found == above).all(axis=1)
        return is_right


def _height(shape: TreeShape) -> int:
    """The level that is the top."""
    return shape.height_of(TOP_NODES)
