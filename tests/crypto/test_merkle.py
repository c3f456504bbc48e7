"""A Merkle tree: proofs, paths and updates agree with the definition, and nothing else passes."""

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyhole.crypto import merkle
from keyhole.crypto.merkle import (
    Tree,
    TreeShape,
    climb,
    hash_leaves,
    hash_pairs,
    hash_rows,
    paths,
    prove,
    root_of,
    root_of_level,
)
from keyhole.errors import DamageError, ShapeError


def table(num_keys, width=12, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (num_keys, width), dtype=np.uint8)


def plain_root(rows):
    """The definition, by hand: pair up, the odd one out moves up."""
    level = [hash_leaves(row[None])[0] for row in rows]
    while len(level) > 1:
        pairs = [
            hash_pairs(a[None], b[None])[0] for a, b in zip(level[::2], level[1::2], strict=False)
        ]
        level = pairs + level[len(level) - len(level) % 2 :]
    return level[0].tobytes()


sizes = st.integers(1, 40)


@given(sizes)
def test_the_root_is_that_of_the_definition(num_keys):
    rows = table(num_keys)
    assert Tree.of(hash_leaves(rows)).root == plain_root(rows)


@given(sizes, st.data())
def test_any_keys_lead_to_the_root(num_keys, data):
    rows = table(num_keys)
    tree = Tree.of(hash_leaves(rows))
    keys = np.array(sorted(data.draw(st.sets(st.integers(0, num_keys - 1), min_size=1))))
    assert root_of(tree.shape, keys, hash_leaves(rows[keys]), prove(tree, keys)) == tree.root


@given(sizes, st.data())
def test_another_row_key_or_node_does_not_lead_to_the_root(num_keys, data):
    rows = table(num_keys)
    tree = Tree.of(hash_leaves(rows))
    keys = np.array(sorted(data.draw(st.sets(st.integers(0, num_keys - 1), min_size=1))))
    proof, leaves = prove(tree, keys), hash_leaves(rows[keys])
    changed = leaves.copy()
    changed[data.draw(st.integers(0, len(keys) - 1)), 0] ^= 1
    assert root_of(tree.shape, keys, changed, proof) != tree.root
    if len(proof):
        bent = proof.copy()
        bent[data.draw(st.integers(0, len(proof) - 1)), 31] ^= 0x80
        assert root_of(tree.shape, keys, leaves, bent) != tree.root
        with pytest.raises(DamageError, match="proof does not fit"):
            root_of(tree.shape, keys, leaves, proof[:-1])
    with pytest.raises(DamageError, match="proof does not fit"):
        root_of(tree.shape, keys, leaves, np.concatenate([proof, proof, leaves[:1]]))


@given(sizes, st.data())
def test_changed_rows_change_what_lies_above_them_and_nothing_else(num_keys, data):
    old, new = table(num_keys), table(num_keys, seed=1)
    keys = np.array(sorted(data.draw(st.sets(st.integers(0, num_keys - 1)))), np.int64)
    tree = Tree.of(hash_leaves(old))
    tree.update(keys, hash_leaves(new[keys]))
    old[keys] = new[keys]
    np.testing.assert_array_equal(tree.nodes, Tree.of(hash_leaves(old)).nodes)


@given(sizes, st.integers(1, 8))
def test_paths_lead_to_the_public_layer_and_it_to_the_root(num_keys, max_nodes):
    rows = table(num_keys)
    tree = Tree.of(hash_leaves(rows))
    height = tree.shape.height_of(max_nodes)
    keys = np.random.default_rng(2).permutation(num_keys)
    nodes = climb(tree.shape, keys, hash_leaves(rows[keys]), paths(tree, height)[keys])
    layer = tree.level(height)
    assert len(layer) <= max_nodes
    np.testing.assert_array_equal(nodes, layer[keys >> height])
    assert root_of_level(tree.shape, height, layer) == tree.root


def test_a_row_does_not_climb_as_another_key():
    rows = table(32)
    tree = Tree.of(hash_leaves(rows))
    nodes = climb(tree.shape, np.array([4]), hash_leaves(rows[[5]]), paths(tree, 3)[[5]])
    assert nodes.tobytes() != tree.level(3)[0].tobytes()


def test_a_leaf_is_no_node():
    pair = table(1, width=64)
    assert hash_leaves(pair).tobytes() != hash_pairs(pair[:, :32], pair[:, 32:]).tobytes()


def test_a_tree_of_nothing_and_a_cut_layer_are_refused():
    with pytest.raises(ShapeError, match="a tree needs leaves"):
        TreeShape(0)
    with pytest.raises(DamageError, match="proof does not fit"):
        root_of_level(TreeShape(8), 1, np.zeros((3, 32), np.uint8))


@pytest.mark.slow
def test_processors_without_avx512_hash_the_same(tmp_path):
    """Eight lanes in place of sixteen, compiled in a process of their own."""
    program = (
        "import llvmlite.binding as b; real = b.get_host_cpu_features()\n"
        "old = type(real)({k: v and '512' not in k for k, v in real.items()})\n"
        "b.get_host_cpu_features = lambda: old\n"
        "import numpy as np; from keyhole.crypto import merkle, merkle_loops as loops\n"
        "assert loops._LANES == 8\n"
        "for n in (0, 5, 64, 1025, 2000):\n"
        "    rows = np.random.default_rng(n).integers(0, 256, (37, n), np.uint8)\n"
        "    out = np.empty((37, 8), np.uint32)\n"
        "    loops.hash_lanes(rows, np.zeros(8, np.uint32), out)\n"
        "    plain = np.empty((37, 8), np.uint32)\n"
        "    merkle.hash_lanes.plain(rows, np.zeros(8, np.uint32), plain)\n"
        "    assert (out == plain).all()\n"
    )
    own = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", program], check=True, env=own)


def test_texts_that_are_no_rows_are_refused():
    with pytest.raises(ShapeError, match="cannot hash these texts"):
        hash_rows(np.zeros(4, np.uint8), bytes(32))


@given(sizes, st.data())
def test_the_compiled_loop_finds_the_nodes_that_numpy_finds(num_keys, data):
    tree = Tree.of(hash_leaves(table(num_keys)))
    keys = np.array(sorted(data.draw(st.lists(st.integers(0, num_keys - 1), min_size=1))))
    length, found = merkle.proof_length(tree.shape, keys), []
    for form in (merkle.find_siblings.plain, merkle.find_siblings.compiled):
        out = np.empty(tree.shape.max_proof(len(keys)) + 1, np.int64)
        count = form(keys, np.array(tree.shape.sizes), np.empty(len(keys) + 1, np.int64), out)
        found.append(out[:count].tolist())
    assert found[0] == found[1]
    assert len(found[0]) == length <= tree.shape.max_proof(len(set(keys.tolist())))


@pytest.mark.parametrize(
    ("num_leaves", "count"), [(20, 3), (20, 17), (77, 76), (100, 50), (5, 5), (1, 1), (4_000, 90)]
)
def test_proofs_have_their_mean_length(num_leaves, count):
    shape, rng = TreeShape(num_leaves), np.random.default_rng(num_leaves)
    drawn = [np.sort(rng.choice(num_leaves, count, replace=False)) for _ in range(500)]
    mean = np.mean([merkle.proof_length(shape, keys) for keys in drawn])
    assert shape.mean_proof(count) == pytest.approx(mean, rel=0.03)
