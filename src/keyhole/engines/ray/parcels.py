"""Parcels: jobs as the object store takes them, without a copy of what clients have in common.

Slices that all clients of a round receive (what is not cut, or a whole model) are stored once.
Everything else of a block of clients is one object; workers on the same machine read both in place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from keyhole import tree
from keyhole.training.clients import Job
from keyhole.types import Array, Tree

__all__ = ["common_leaves", "dense_leaves", "pack", "unpack"]

_PEEK = 64  # bytes that tell most arrays apart before all of them are compared
_SMALL = 4096  # bytes that are compared sooner than NumPy is called


@dataclass(frozen=True)
class _Common:
    """Stands in for a leaf that everybody received."""

    path: str


def common_leaves(jobs: Sequence[Job]) -> dict[str, Array]:
    """Returns path -> leaf of what the first two jobs have in common, byte for byte: most likely
    what everybody received, as `pack` finds out."""
    if len(jobs) < 2:
        return {}
    first, second = (tree.flatten(jobs[place].submodel) for place in (0, 1))
    return {
        path: _dense(leaf)
        for path, leaf in first.items()
        if path in second and _is_same(leaf, second[path])
    }


def pack(jobs: Sequence[Job], common: Mapping[str, Array]) -> list[Job]:
    """Returns the jobs without the leaves that are as in `common`, byte for byte, and the others
    without gaps. Comparing reads memory; storing would write it, too."""
    known = {path: _Common(path) for path in common}

    def strip(submodel: Tree) -> Tree:
        leaves = tree.flatten(submodel)
        own = {
            path: known[path] if path in known and _is_same(common[path], leaf) else _dense(leaf)
            for path, leaf in leaves.items()
        }
        return tree.unflatten(submodel, own)

    return [replace(job, submodel=strip(job.submodel)) for job in jobs]


def unpack(jobs: Sequence[Job], common: Mapping[str, Array]) -> list[Job]:
    """Returns the jobs as they were, with leaves that cannot be written to."""
    if not common:
        return list(jobs)

    def fill(leaf: Any) -> Any:
        return common[leaf.path] if isinstance(leaf, _Common) else leaf

    return [replace(job, submodel=tree.map_leaves(fill, job.submodel)) for job in jobs]


def dense_leaves(update: Tree) -> Tree:
    """Returns a tree whose leaves are arrays without gaps."""
    return tree.map_leaves(_dense, update)


def _dense(leaf: Any) -> Array:
    """A leaf without gaps, which the store takes as it is; axes keep their order in memory, so that
    products of it are computed, and rounded, as they would be of the leaf."""
    array = np.asarray(leaf)
    is_dense = array.flags.c_contiguous or array.flags.f_contiguous
    return array if is_dense else array.copy(order="K")


def _is_same(one: Any, other: Any) -> bool:
    """Whether two leaves have the same bytes; NaN equals itself, and zero not its negative."""
    if one is other:
        return True
    a, b = np.asarray(one), np.asarray(other)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.nbytes <= _SMALL:
        return a.tobytes() == b.tobytes()
    x, y = (np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in (a, b))
    return x[:_PEEK].tobytes() == y[:_PEEK].tobytes() and np.array_equal(x, y)
