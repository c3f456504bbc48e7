"""Packs jobs for the object store, without a copy of what clients have in common.

Where sub-models are a function of keys, workers select them. A small model is stored once for all
parcels of a call; of a large one, each parcel holds the rows that its clients chose, once. Where
they are not, as after a private delivery, a parcel holds sub-models, and what all clients of the
round received is stored once. Workers on the same machine read everything in place.

Keys of many clients travel as a few arrays, which is faster than many small ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from keyhole import tree
from keyhole.arrays import Array, KeyArray, Tree
from keyhole.delivery.sources import Excerpt
from keyhole.primitives.keyspace import Keys, KeySpace
from keyhole.primitives.layout import KeysBySpace, RowSource, select_rows
from keyhole.rounds.clients import ClientJob, Jobs
from keyhole.server.inputs import UNBOUND, InputBound


@dataclass(frozen=True)
class KeyBundle:
    """Keys of clients, end to end.

    Args:
        shapes: for each client the key spaces that it named, as a place in `kinds`; clients of one
            task mostly have one kind.
        kinds: the key spaces of a client, in order.
        keys: of all clients and spaces, one after the other.
        ends: where those of each client and space end.

    >>> word = KeySpace("word", 10)
    >>> bundle = KeyBundle.of([{"word": word.keys([3, 1])}, {"word": word.keys([])}])
    >>> [list(keys["word"]) for keys in bundle.unpack()]
    [[3, 1], []]
    """

    shapes: KeyArray
    kinds: tuple[tuple[KeySpace, ...], ...]
    keys: KeyArray
    ends: KeyArray

    @staticmethod
    def of(keys: Sequence[KeysBySpace]) -> KeyBundle:
        """Bundles the keys of clients."""
        kinds: dict[tuple[KeySpace, ...], int] = {}
        shapes, arrays = [], [np.empty(0, np.int64)]
        for own in keys:
            kind = tuple(z.space for z in own.values())
            shapes.append(kinds.setdefault(kind, len(kinds)))
            arrays += [z.array for z in own.values()]
        ends = np.cumsum([len(array) for array in arrays])
        return KeyBundle(np.array(shapes, np.int64), tuple(kinds), np.concatenate(arrays), ends)

    def unpack(self) -> list[KeysBySpace]:
        """Returns the keys of each client, as they were."""
        spans = iter([self.keys[start:stop] for start, stop in pairwise(self.ends.tolist())])
        found: list[KeysBySpace] = []
        for shape in self.shapes.tolist():
            spaces = self.kinds[shape]
            found.append({space.name: Keys(space, next(spans)) for space in spaces})
        return found


_WHOLE = 16 << 20  # bytes of a model that goes to every node as it is
_PEEK = 64  # bytes that tell most arrays apart before all of them are compared
_SMALL = 4096  # bytes that are compared sooner than NumPy is called


class Packing(NamedTuple):
    """How the jobs of one call travel: what all parcels have in common, and what packs the jobs at
    some places, whose slices are read then."""

    common: Any
    pack: Callable[[range], Parcel]


def packing_of(jobs: Sequence[ClientJob]) -> Packing:
    """Returns the packing that suits jobs: of rows, or of sub-models without leaves that are
    common."""
    if isinstance(jobs, Jobs) and jobs.source is not None:
        return _packing_of_rows(jobs, jobs.source)
    common = _common_leaves(jobs)
    return Packing(common, lambda at: _CopyParcel(_strip([jobs[place] for place in at], common)))


def _packing_of_rows(jobs: Jobs, source: RowSource) -> Packing:
    """Sends rows: all of them once, or those of its clients with each parcel."""
    spaces, clients = source.layout.spaces, list(jobs.keys)
    common = Excerpt.of_everyone(source)
    every = {space.name: space.num_keys for space in spaces}
    is_whole = source.layout.client_bytes(**every) <= _WHOLE
    if is_whole:
        common |= Excerpt.of_keys(source, [[space.all_keys() for space in spaces]])

    def pack(places: range) -> Parcel:
        own = [clients[at] for at in places]
        keys = [jobs.keys[client] for client in own]
        rows = None if is_whole else Excerpt.of_keys(source, keys)
        states = {c: state for c in own if (state := jobs.states(c)) is not None}
        return _RowParcel(jobs.seed_path, own, KeyBundle.of(keys), rows, jobs.bound, states)

    return Packing(common, pack)


@dataclass(frozen=True)
class _RowParcel:
    """Keys of clients, and rows that they name beyond those that all parcels have."""

    seed_path: tuple[int, int, int]
    clients: list[int]
    keys: KeyBundle
    own: Excerpt | None
    bound: InputBound = UNBOUND
    states: Mapping[int, bytes] = field(default_factory=dict)

    def jobs(self, common: Excerpt) -> Jobs:
        rows = common if self.own is None else common | self.own
        keys = dict(zip(self.clients, self.keys.unpack(), strict=True))
        return Jobs(
            self.seed_path,
            keys,
            lambda client: select_rows(rows, keys[client]),
            bound=self.bound,
            states=self.states.get,
        )


@dataclass(frozen=True)
class _CopyParcel:
    """Jobs in which `_Common` stands for what is not there."""

    stripped: list[ClientJob]

    def jobs(self, common: Mapping[str, Array]) -> list[ClientJob]:
        def fill(leaf: Any) -> Any:
            return common[leaf.path] if isinstance(leaf, _Common) else leaf

        if not common:
            return self.stripped
        return [replace(job, submodel=tree.map_leaves(fill, job.submodel)) for job in self.stripped]


Parcel: TypeAlias = _RowParcel | _CopyParcel
"""Some jobs on their way; `jobs(common)` returns them as they were."""


@dataclass(frozen=True)
class _Common:
    """Stands in for a leaf that everybody received."""

    path: str


def _common_leaves(jobs: Sequence[ClientJob]) -> dict[str, Array]:
    """Returns path -> leaf of what the first two jobs have in common, byte for byte: most likely
    what everybody received, as `_strip` finds out."""
    if len(jobs) < 2:
        return {}
    first, second = (tree.flatten(jobs[place].submodel) for place in (0, 1))
    return {
        path: dense(leaf)
        for path, leaf in first.items()
        if path in second and _is_same(leaf, second[path])
    }


def _strip(jobs: Sequence[ClientJob], common: Mapping[str, Array]) -> list[ClientJob]:
    """Returns the jobs without the leaves that are as in `common`, byte for byte, and the others
    without gaps. Comparing reads memory; storing would write it, too."""
    known = {path: _Common(path) for path in common}

    def strip(submodel: Tree) -> Tree:
        leaves = tree.flatten(submodel)
        own = {
            path: known[path] if path in known and _is_same(common[path], leaf) else dense(leaf)
            for path, leaf in leaves.items()
        }
        return tree.unflatten(submodel, own)

    return [replace(job, submodel=strip(job.submodel)) for job in jobs]


def dense(leaf: Any) -> Array:
    """Returns a leaf without gaps, which the store takes as it is; axes keep their order in memory,
    so that products of it are computed, and rounded, as they would be of the leaf."""
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
