"""Layout: a model and its cuts, from which select, deselect and sizes follow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol, TypeAlias

import numpy as np

from keyhole import tree
from keyhole.errors import KeySpaceError, ShapeError
from keyhole.primitives.cuts import Cut, check_names, claim_axes
from keyhole.primitives.keymaps import Product
from keyhole.primitives.keyspace import Keys, KeySpace
from keyhole.primitives.parts import Field, Part
from keyhole.types import Array, KeyArray, Tree

__all__ = ["ClientKeys", "Layout", "RowSource", "select_rows"]

ClientKeys: TypeAlias = Keys | Sequence[Keys]
"""One client's keys: one `Keys` for each key space; one alone need not be wrapped."""


class RowSource(Protocol):
    """What holds a model as rows, or some of them."""

    @property
    def layout(self) -> Layout:
        """The model and its cuts."""
        ...

    def rows(self, part: int, keys: KeyArray, /) -> Array:
        """A row for each key of a part, by its place in `layout.parts`; fields side by side."""
        ...


@dataclass(frozen=True)
class Layout:
    """How a model is cut into parts, checked against its shapes.

    Made by `Layout.of`. `select` and `deselect` here are the plain definitions, slice by slice;
    `keyhole.server.submodels` has the fast ones.

    >>> neuron = KeySpace("neuron", 200)
    >>> model = {"in": np.zeros((784, 200)), "bias": np.zeros(200), "out": np.zeros((200, 10))}
    >>> layout = Layout.of(model, Cut(neuron, {"in": 1, "bias": 0, "out": 0}))
    >>> layout.client_size(neuron=50), layout.server_size
    (39750, 159000)
    >>> layout.select(model, neuron.keys([7, 3]))["in"].shape
    (784, 2)
    """

    structure: Tree
    spaces: tuple[KeySpace, ...]
    parts: tuple[Part, ...]

    @staticmethod
    def of(like: Tree, *cuts: Cut) -> Layout:
        """Checks cuts against a model and groups its parameters into parts.

        Args:
            like: the server's model, or anything with its tree structure, shapes and dtypes.
            cuts: any number of cuts; none means that everything is broadcast.

        Raises:
            CutError: a parameter or axis does not exist or is claimed twice, two cuts share a name,
                or an axis is not as long as its key space.
        """
        leaves = tree.flatten(like)
        spaces = tuple(cut.space for cut in cuts)
        check_names(spaces)
        claims = claim_axes(leaves, cuts)
        grouped: dict[tuple[str, ...], list[Field]] = {}
        for path, leaf in leaves.items():
            owners = {space.name: axis for axis, space in claims.get(path, {}).items()}
            names = tuple(space.name for space in spaces if space.name in owners)
            axes = tuple(owners[name] for name in names)
            field = Field(path, tuple(leaf.shape), np.dtype(leaf.dtype), axes)
            grouped.setdefault(names, []).append(field)
        by_name = {space.name: space for space in spaces}
        parts = tuple(
            Part(Product(tuple(by_name[name] for name in names)), tuple(grouped[names]))
            for names in sorted(grouped, key=lambda names: (len(names), names))
        )
        structure = tree.unflatten(like, {path: path for path in leaves})
        return Layout(structure, spaces, parts)

    @property
    def server_size(self) -> int:
        """How many numbers the server's model holds."""
        return self.client_size(**{space.name: space.num_keys for space in self.spaces})

    def client_size(self, **keys_per_client: int) -> int:
        """How many numbers a client holds that selects this many keys of each key space."""
        return sum(n * p.slice_size for n, p in self._slices(keys_per_client))

    def client_bytes(self, **keys_per_client: int) -> int:
        """How many bytes those numbers take."""
        return sum(n * p.record.itemsize for n, p in self._slices(keys_per_client))

    def select(self, server_value: Tree, keys: ClientKeys) -> Tree:
        """Returns the sub-model of one client: the server's tree with shorter axes.

        Args:
            server_value: x, the server's model.
            keys: the client's keys, one `Keys` for each key space (one alone need not be wrapped).

        Raises:
            ShapeError: the model does not have the shapes of this layout.
            KeySpaceError: keys are missing, or of another key space.
        """
        chosen = self.keys_by_space(keys)
        self.check(server_value)
        leaves: dict[str, Array] = {}
        for part in self.parts:
            slices = [part.select_fn(server_value, key) for key in part.keys_of(chosen)]
            counts = [len(chosen[factor.name]) for factor in part.product.factors]
            for field in part.fields:
                leaves[field.path] = field.stack([s[field.path] for s in slices], counts)
        return tree.unflatten(self.structure, leaves)

    def deselect(self, update: Tree, keys: ClientKeys) -> Tree:
        """phi: adds each slice of `update` into zeros at the key it came from; repeats add up.

        Args:
            update: u, shaped as the sub-model that `select` returned.
            keys: the keys it was selected with.

        Raises:
            ShapeError: the update does not have the shapes of that sub-model.
            KeySpaceError: keys are missing, or of another key space.
        """
        chosen = self.keys_by_space(keys)
        self.check(update, chosen)
        given, leaves = tree.flatten(update), {}
        for part in self.parts:
            keys_of_slices = zip(*part.product.split(part.keys_of(chosen)), strict=True)
            index = list(keys_of_slices) if part.product.factors else [()]
            for field in part.fields:
                pieces = field.unstack(np.asarray(given[field.path]))
                total = np.zeros(field.shape, np.result_type(field.dtype, pieces.dtype))
                for at, piece in zip(index, pieces, strict=True):
                    total[field.index(at)] += piece
                leaves[field.path] = total
        return tree.unflatten(self.structure, leaves)

    def keys_by_space(self, keys: ClientKeys) -> dict[str, Keys]:
        """Returns a client's keys by the name of their key space; all must be there."""
        given = (keys,) if isinstance(keys, Keys) else tuple(keys)
        found = {k.space.name: k for k in given}
        is_each_there = all(s.name in found and found[s.name].space == s for s in self.spaces)
        if not is_each_there or len(given) != len(self.spaces):
            spaces = sorted((k.space for k in given), key=lambda space: space.name)
            raise KeySpaceError(
                "keys do not match the cuts",
                got=", ".join(f"{s.name!r} of {s.num_keys}" for s in spaces) or "none",
                allowed=", ".join(f"{s.name!r} of {s.num_keys}" for s in self.spaces) or "none",
                fix="pass one Keys for each key space that cuts the model",
            )
        return found

    def check(self, value: Tree, keys: Mapping[str, Keys] | None = None) -> None:
        """Raises ShapeError unless `value` is shaped as the server's model, or as `keys` select
        it."""
        leaves = tree.flatten(value)
        expected = {}
        for part in self.parts:
            spaces = part.product.factors
            counts = [s.num_keys if keys is None else len(keys[s.name]) for s in spaces]
            expected.update({f.path: f.client_shape(counts) for f in part.fields})
        found = {path: tuple(np.shape(leaf)) for path, leaf in leaves.items()}
        wrong = sorted(p for p in expected.keys() | found if expected.get(p) != found.get(p))
        if wrong:
            raise ShapeError(
                f"parameter {wrong[0]!r} does not fit the cuts",
                got=found.get(wrong[0], "no such parameter"),
                allowed=expected.get(wrong[0], "no such parameter"),
                fix="pass the tree that the layout was made for, or the sub-model it selected",
            )

    def _slices(self, keys_per_client: Mapping[str, int]) -> Iterable[tuple[int, Part]]:
        """How many slices of each part a client receives."""
        names = {space.name for space in self.spaces}
        if keys_per_client.keys() != names:
            raise KeySpaceError(
                "a client's size needs one number of keys for each key space",
                got=", ".join(sorted(keys_per_client)) or "none",
                allowed=", ".join(sorted(names)) or "none",
                fix="name each of them",
            )
        for part in self.parts:
            yield prod(keys_per_client[factor.name] for factor in part.product.factors), part


def select_rows(source: RowSource, keys: ClientKeys) -> Tree:
    """Returns the sub-model of one client, made of rows.

    Raises:
        KeySpaceError: keys are missing, or of another key space.
    """
    layout = source.layout
    chosen = layout.keys_by_space(keys)
    leaves: dict[str, Array] = {}
    for place, part in enumerate(layout.parts):
        counts = [len(chosen[factor.name]) for factor in part.product.factors]
        leaves |= part.from_rows(source.rows(place, part.keys_of(chosen).array), counts)
    return tree.unflatten(layout.structure, leaves)
