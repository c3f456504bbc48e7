"""Maps over nested dicts, lists and tuples of arrays, without importing jax.

Leaves come in the order of `jax.tree`: dicts by sorted key, sequences by position, None holds
nothing. A leaf is named by its path, the keys on the way joined by "/": `{"conv": {"bias": b}}`
holds "conv/bias". A bare array is the leaf ".".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from keyhole.arrays import Tree
from keyhole.errors import ShapeError

ROOT = "."

_LEAVES = np.ndarray, str
_NODES = dict, list, tuple, type(None), Mapping  # the slowest to tell last


def flatten(tree: Tree) -> dict[str, Any]:
    """Returns the leaves by path, in order.

    >>> flatten({"b": 1, "a": [2, 3]})
    {'a/0': 2, 'a/1': 3, 'b': 1}
    """
    leaves: dict[str, Any] = {}
    _collect(tree, "", leaves)
    return leaves


def get(tree: Tree, path: str) -> Any:
    """Returns the leaf at `path`.

    >>> get({"a": [2, 3]}, "a/1")
    3
    """
    leaves = flatten(tree)
    if path not in leaves:
        raise ShapeError(
            f"the tree has no such leaf: got {path!r}; expected "
            f"{', '.join(map(repr, leaves)) or 'nothing: the tree is empty'}; name one of its paths"
        )
    return leaves[path]


def unflatten(like: Tree, leaves: Mapping[str, Any]) -> Tree:
    """Returns a tree built like `like` whose leaf at each path is `leaves[path]`.

    >>> unflatten({"b": 0, "a": [0, 0]}, {"a/0": 2, "a/1": 3, "b": 1})
    {'b': 1, 'a': [2, 3]}
    """
    return _rebuild(like, lambda path, _: leaves[path], "")


def map_leaves(fn: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree:
    """Returns the tree of `fn(leaf, *leaves of rest)`; all trees must have the same paths.

    >>> map_leaves(lambda a, b: a + b, {"w": 1, "b": 2}, {"w": 10, "b": 20})
    {'w': 11, 'b': 22}
    """
    if not rest:
        return _map(fn, tree)
    first, others = flatten(tree), [flatten(other) for other in rest]
    for other in others:
        if other.keys() != first.keys():
            raise ShapeError(
                f"trees differ in structure: got {', '.join(map(repr, other)) or 'no leaves'}; "
                f"expected {', '.join(map(repr, first)) or 'no leaves'}; pass trees with the same "
                "paths"
            )
    return _rebuild(tree, lambda path, leaf: fn(leaf, *(o[path] for o in others)), "")


def _map(fn: Callable[[Any], Any], tree: Tree) -> Tree:
    """Copies the nodes of `tree` and asks `fn` for the leaves; most trees are dicts of arrays."""
    if type(tree) is dict:
        return {name: _map(fn, node) for name, node in tree.items()}
    if type(tree) is np.ndarray:
        return fn(tree)
    return _rebuild(tree, lambda _, leaf: fn(leaf), "")


def _collect(tree: Tree, path: str, leaves: dict[str, Any]) -> None:
    """Adds the leaves of a node; most nodes are arrays in a dict, known at a glance."""
    if type(tree) is not dict and (isinstance(tree, _LEAVES) or not isinstance(tree, _NODES)):
        _add_leaf(leaves, path or ROOT, tree)
    elif tree is not None:
        names = sorted(tree) if isinstance(tree, Mapping) else range(len(tree))
        for name in names:
            node, below = tree[name], f"{path}/{name}" if path else str(name)
            if type(node) is np.ndarray and below not in leaves:
                leaves[below] = node
            else:
                _collect(node, below, leaves)


def _add_leaf(leaves: dict[str, Any], path: str, leaf: Any) -> None:
    if path in leaves:
        raise ShapeError(
            f'two leaves have one path: got {path!r}; expected paths that differ; keep "/" out '
            "of dict keys"
        )
    leaves[path] = leaf


def _rebuild(tree: Tree, leaf_at: Callable[[str, Any], Any], path: str) -> Tree:
    """Copies the nodes of `tree` and asks `leaf_at(path, leaf)` for the leaves."""

    def child(name: object, node: Tree) -> Tree:
        below = f"{path}/{name}" if path else str(name)
        is_leaf = type(node) is np.ndarray or type(node) is str
        return leaf_at(below, node) if is_leaf else _rebuild(node, leaf_at, below)

    if isinstance(tree, _LEAVES):
        return leaf_at(path or ROOT, tree)
    if tree is None:
        return None
    if isinstance(tree, (dict, Mapping)):
        return {key: child(key, node) for key, node in tree.items()}
    if isinstance(tree, (list, tuple)):
        nodes = [child(i, node) for i, node in enumerate(tree)]
        return type(tree)(*nodes) if hasattr(tree, "_fields") else type(tree)(nodes)
    return leaf_at(path or ROOT, tree)
