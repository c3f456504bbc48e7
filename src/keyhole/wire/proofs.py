"""Binds records that are fetched by key to the root of their table, as the manifest has it.

An answer begins with the nodes that lead from its records to the root (`keyhole.crypto.merkle`), so
a device that compares holds what the trainer published and nothing else, unless somebody finds a
collision of BLAKE3. A table that is computed on demand has no root. The service then vouches for
its own answer, with one node: the root over the records asked for. That finds damage on the way;
the service itself can give every device what it likes.

Hidden: nothing. Not hidden: keys; they are in the query.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from keyhole.arrays import KeyArray
from keyhole.crypto.merkle import HashArray, Tree, TreeShape, proof_places, root_of
from keyhole.errors import DamageError
from keyhole.wire.manifest import TableInfo


def max_proof_nodes(info: TableInfo, count: int) -> int:
    """Nodes before the records of this many keys, at most."""
    return TreeShape(info.num_keys).max_proof(count) if info.root else 1


def count_nodes(info: TableInfo, keys: KeyArray) -> int:
    """Nodes before the records of keys."""
    if not info.root:
        return int(len(keys) > 0)
    return len(place_nodes(TreeShape(info.num_keys), keys))


def place_nodes(shape: TreeShape, keys: KeyArray) -> NDArray[np.int64]:
    """Where in a tree those nodes lie that lead from the records of keys, in any order, to its
    root."""
    return proof_places(shape, np.sort(keys)) if len(keys) else np.empty(0, np.int64)


def vouch(keys: KeyArray, leaves: HashArray) -> HashArray:
    """The one node that stands for an answer of a table without a root."""
    if not len(keys):
        return leaves[:0]
    root = Tree.of(leaves[np.unique(keys, return_index=True)[1]]).root
    return np.frombuffer(root, np.uint8).reshape(1, -1)


def check_records(info: TableInfo, keys: KeyArray, leaves: HashArray, proof: HashArray) -> None:
    """Raises DamageError unless records are those of the table.

    Args:
        keys: (m,) in any order; may repeat.
        leaves: (m, 32), of the records that arrived.
        proof: what came before them.
    """
    if not len(keys):
        return
    distinct, first, places = np.unique(keys, return_index=True, return_inverse=True)
    are_equal = np.array_equal(leaves[first][places], leaves)  # records of one key
    if info.root:
        shape, expected = TreeShape(info.num_keys), bytes.fromhex(info.root)
        is_right = root_of(shape, distinct, leaves[first], proof) == expected
    else:
        is_right = np.array_equal(vouch(keys, leaves), proof)
    if not (are_equal and is_right):
        raise DamageError(
            f"slices of table {info.name!r} are not those of the round: got records that do not "
            "lead to the root in the manifest; expected the records that the round was published "
            "with; fetch them again; if it happens every time, the service or what stands before "
            "it is damaged or lies"
        )
