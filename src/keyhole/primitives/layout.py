"""Cuts: which axis of which parameter belongs to which key space, declared once.

Parts: the parameters that one key selects together, and the slice they make.

Parameters that share their cuts form a part: the filters of a convolution, their biases and the
dense weights they feed are one part, because one key selects all three. A part cut by two key
spaces is keyed by their product, and what no cut touches is the part with the empty product: one
key for everyone, which is a broadcast (section 3.3).

Layout: a model and its cuts, from which select, deselect and sizes follow.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from math import prod
from typing import Any, Protocol, TypeAlias

import numpy as np

from keyhole import tree
from keyhole.arrays import Array, KeyArray, Tree
from keyhole.errors import CutError, KeySpaceError, ShapeError
from keyhole.parts import near_miss
from keyhole.primitives.keyspace import Keys, KeySpace, Product


@dataclass(frozen=True)
class Cut:
    """Key k of `space` owns index k of the given axis of each named parameter.

    Args:
        space: the key space; its size must be the length of every axis it cuts.
        axes: parameter path -> axis.

    A neuron with its incoming weights, bias and outgoing weights:

    >>> Cut(KeySpace("neuron", 200), {"in/kernel": 1, "in/bias": 0, "out/kernel": 0}).space.name
    'neuron'
    """

    space: KeySpace
    axes: Mapping[str, int]


def check_names(spaces: Sequence[KeySpace]) -> None:
    """Raises CutError where two cuts share a name."""
    names = [space.name for space in spaces]
    if len(set(names)) < len(names):
        raise CutError(
            f"two cuts use one key space: got {', '.join(names)}; expected one cut per key space; "
            "put all axes that a key owns into one cut"
        )


def claim_axes(leaves: Mapping[str, Any], cuts: Sequence[Cut]) -> dict[str, dict[int, KeySpace]]:
    """Returns which key space owns which axis of which parameter; refuses impossible cuts."""
    claims: dict[str, dict[int, KeySpace]] = {}
    for cut in cuts:
        for path, given in cut.axes.items():
            axis = _axis(leaves, path, given, cut.space)
            owned = claims.setdefault(path, {})
            if axis in owned:
                raise CutError(
                    f"axis {axis} of {path!r} is claimed twice: got key spaces "
                    f"{owned[axis].name!r} and {cut.space.name!r}; expected one key space per "
                    "axis; cut another axis, or join the key spaces into a Product"
                )
            owned[axis] = cut.space
    return claims


def _axis(leaves: Mapping[str, Any], path: str, axis: int, space: KeySpace) -> int:
    """The axis of a parameter, counted from the front, once it is known to fit the key space."""
    if path not in leaves:
        raise CutError(
            f"key space {space.name!r} cuts a parameter that does not exist: got {path!r}; "
            f"expected {', '.join(map(repr, leaves))}; {near_miss(path, leaves)}"
        )
    shape = tuple(leaves[path].shape)
    if not -len(shape) <= axis < len(shape):
        allowed = f"0..{len(shape) - 1}" if shape else "none: it is a scalar"
        raise CutError(
            f"key space {space.name!r} cuts an axis that {path!r} does not have: got {axis}; "
            f"expected {allowed}; count axes from 0"
        )
    if shape[axis] != space.num_keys:
        raise CutError(
            f"axis {axis} of {path!r} is not as long as key space {space.name!r}: got "
            f"{shape[axis]}; expected {space.num_keys}; store it so that a key is one index of one "
            "axis, or resize the key space"
        )
    return axis % len(shape)


@dataclass(frozen=True)
class Field:
    """One parameter within a part: where it is, and the axes that the part's key spaces cut."""

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    axes: tuple[int, ...]

    @cached_property
    def slice_shape(self) -> tuple[int, ...]:
        """The shape of one slice: the parameter's without the cut axes."""
        return tuple(n for axis, n in enumerate(self.shape) if axis not in self.axes)

    @cached_property
    def _leads(self) -> bool:
        """Whether the cut axes come first, in order: then slices lie as they are."""
        return self.axes == tuple(range(len(self.axes)))

    def client_shape(self, counts: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape on a client that selected `counts[i]` keys of the i-th key space."""
        shape = list(self.shape)
        for axis, count in zip(self.axes, counts, strict=True):
            shape[axis] = count
        return tuple(shape)

    def index(self, keys: Sequence[Any]) -> tuple[Any, ...]:
        """Returns the index of one slice, for NumPy and JAX arrays alike."""
        chosen = dict(zip(self.axes, keys, strict=True))
        return tuple(chosen.get(axis, slice(None)) for axis in range(len(self.shape)))

    def stack(self, slices: Sequence[Array] | Array, counts: Sequence[int]) -> Array:
        """Returns the client's parameter from its slices, which come in the order of
        `Product.grid`."""
        stacked = np.asarray(slices, self.dtype).reshape((*counts, *self.slice_shape))
        if self._leads:
            return stacked
        return np.moveaxis(stacked, range(len(counts)), self.axes)

    def unstack(self, value: Array) -> Array:
        """Returns the slices of a client's parameter, shape (number of slices, *slice_shape)."""
        moved = value if self._leads else np.moveaxis(value, self.axes, range(len(self.axes)))
        return moved.reshape(prod(moved.shape[: len(self.axes)]), *self.slice_shape)


@dataclass(frozen=True)
class Part:
    """The parameters that the same key spaces cut: what one key selects."""

    product: Product
    fields: tuple[Field, ...]

    @property
    def space(self) -> KeySpace:
        """The key space of this part; one key where nothing is cut."""
        return self.product.space

    @cached_property
    def record(self) -> np.dtype[Any]:
        """The bytes of one slice: little-endian fields in path order, without padding."""
        spec = [(f.path, f.dtype.newbyteorder("<"), f.slice_shape) for f in self.fields]
        return np.dtype(spec)

    @cached_property
    def slice_size(self) -> int:
        """How many numbers a slice holds."""
        return sum(prod(field.slice_shape) for field in self.fields)

    def select_fn(self, server_value: Tree, key: int) -> dict[str, Any]:
        """psi: the slice of every field at `key`."""
        keys = [k for (k,) in self.product.split(self.space.keys([key]))]
        return {f.path: tree.get(server_value, f.path)[f.index(keys)] for f in self.fields}

    def keys_of(self, keys: Mapping[str, Keys]) -> Keys:
        """Returns the keys of this part for a client that selected `keys`: every combination."""
        if not self.product.factors:
            return self._only
        return self.product.grid(*(keys[factor.name] for factor in self.product.factors))

    @cached_property
    def _only(self) -> Keys:
        """The key of a part that is not cut."""
        return self.product.grid()

    def to_rows(self, leaves: Mapping[str, Array], out: Array | None = None) -> Array:
        """Returns the slices of a model or sub-model as rows, (number of slices, slice_size).

        The fields of a slice stand side by side, in the order of `record`.

        Args:
            out: where to write them; without it, rows of one field may be a view of its leaf.
        """
        blocks = [field.unstack(np.asarray(leaves[field.path])) for field in self.fields]
        flat = [
            b.reshape(len(b), prod(f.slice_shape)) for b, f in zip(blocks, self.fields, strict=True)
        ]
        if out is None and len(flat) == 1:
            return flat[0]
        return np.concatenate(flat, axis=1, out=out)

    def from_rows(self, rows: Array, counts: Sequence[int]) -> dict[str, Array]:
        """Returns the parameters of a client with `counts` keys: the inverse of `to_rows`."""
        leaves, start = {}, 0
        for field in self.fields:
            stop = start + prod(field.slice_shape)
            leaves[field.path] = field.stack(rows[:, start:stop], counts)
            start = stop
        return leaves

    @cached_property
    def blocks(self) -> tuple[tuple[str, int, int, int], ...] | None:
        """Where each field of a row belongs: its path, its first column, and how many numbers a
        client's parameter has before and behind the axis of the keys. The parameter is C-contiguous
        (before, number of slices, behind). None where a field is cut along two axes, or rows lie as
        the only parameter does."""
        alone = self.fields[0] if len(self.fields) == 1 else None
        if len(self.product.factors) > 1 or (alone is not None and alone.axes in ((), (0,))):
            return None
        found, start = [], 0
        for field in self.fields:
            (axis,) = field.axes or (0,)
            behind = field.shape[axis + 1 :] if field.axes else field.shape
            found.append((field.path, start, prod(field.shape[:axis]), prod(behind)))
            start += prod(field.slice_shape)
        return tuple(found)

    def pack(self, piece: Mapping[str, Array]) -> bytes:
        """Returns the bytes of one slice, laid out as `record`."""
        row = np.zeros((), self.record)
        for field in self.fields:
            row[field.path] = piece[field.path]
        return row.tobytes()

    def unpack(self, data: bytes) -> dict[str, Array]:
        """Returns the slice whose bytes are `data`."""
        if len(data) != self.record.itemsize:
            raise ShapeError(
                f"bytes are not one slice of {self.space.name!r}: got {len(data)} bytes; expected "
                f"{self.record.itemsize}; check that both sides use the same cuts"
            )
        row = np.frombuffer(data, self.record)[0]
        return {field.path: np.asarray(row[field.path], field.dtype) for field in self.fields}


_MAX_SIZES = 1024  # sizes of clients that a layout remembers

KeysBySpace: TypeAlias = Mapping[str, Keys]
"""One client's keys by the name of their key space: the form that rounds pass on."""

ClientKeys: TypeAlias = Keys | Sequence[Keys] | KeysBySpace
"""One client's keys as a caller may give them: one `Keys` for each key space; one alone need not be
wrapped."""


class RowSource(Protocol):
    """What holds a model as rows, or some of them."""

    @property
    def layout(self) -> Layout:
        """The model and its cuts."""
        ...

    def rows(self, part: int, keys: KeyArray, /) -> Array:
        """Returns a row for each key of a part, by its place in `layout.parts`; fields side by
        side."""
        ...


@dataclass(frozen=True)
class Layout:
    """How a model is cut into parts, checked against its shapes.

    Made by `Layout.of`. `select` and `deselect` here are the plain definitions, slice by slice;
    `keyhole.server.state` has the fast ones.

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

    @property
    def server_bytes(self) -> int:
        """How many bytes those numbers take."""
        return self.client_bytes(**{space.name: space.num_keys for space in self.spaces})

    def client_size(self, **keys_per_client: int) -> int:
        """Returns how many numbers a client holds that selects this many keys of each key space."""
        return self._sizes_of(keys_per_client)[0]

    def client_bytes(self, **keys_per_client: int) -> int:
        """Returns how many bytes those numbers take."""
        return self._sizes_of(keys_per_client)[1]

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
        held = (keys,) if isinstance(keys, Keys) else keys
        given: tuple[Keys, ...] = tuple(held.values() if isinstance(held, Mapping) else held)
        found = {k.space.name: k for k in given}
        is_each_there = all(s.name in found and found[s.name].space == s for s in self.spaces)
        if not is_each_there or len(given) != len(self.spaces):
            spaces = sorted((k.space for k in given), key=lambda space: space.name)
            got, allowed = (
                ", ".join(f"{s.name!r} of {s.num_keys}" for s in each) or "none"
                for each in (spaces, self.spaces)
            )
            raise KeySpaceError(
                f"keys do not match the cuts: got {got}; expected {allowed}; pass one Keys for "
                "each key space that cuts the model"
            )
        return found

    def check(self, value: Tree, keys: Mapping[str, Keys] | None = None) -> None:
        """Raises ShapeError unless `value` is shaped as the server's model, or as `keys` select
        it."""
        self.check_leaves(tree.flatten(value), keys)

    def check_leaves(
        self, leaves: Mapping[str, Any], keys: Mapping[str, Keys] | None = None
    ) -> None:
        """Does the same as `check` for the leaves of a tree, by path."""
        expected = {}
        for part in self.parts:
            spaces = part.product.factors
            counts = [s.num_keys if keys is None else len(keys[s.name]) for s in spaces]
            expected.update({f.path: f.client_shape(counts) for f in part.fields})
        found = {path: tuple(np.shape(leaf)) for path, leaf in leaves.items()}
        wrong = sorted(p for p in expected.keys() | found if expected.get(p) != found.get(p))
        if wrong:
            raise ShapeError(
                f"parameter {wrong[0]!r} does not fit the cuts: got "
                f"{found.get(wrong[0], 'no such parameter')}; expected "
                f"{expected.get(wrong[0], 'no such parameter')}; pass the tree that the layout was "
                "made for, or the sub-model it selected"
            )

    @cached_property
    def _known_sizes(self) -> dict[tuple[tuple[str, int], ...], tuple[int, int]]:
        """Numbers and bytes of clients by their numbers of keys: most of a cohort have the same."""
        return {}

    def _sizes_of(self, keys_per_client: Mapping[str, int]) -> tuple[int, int]:
        """How many numbers a client holds, and how many bytes they take."""
        counts = tuple(keys_per_client.items())
        found = self._known_sizes.get(counts)
        if found is None:
            slices = list(self._slices(keys_per_client))
            numbers = sum(n * part.slice_size for n, part in slices)
            found = numbers, sum(n * part.record.itemsize for n, part in slices)
            if len(self._known_sizes) < _MAX_SIZES:
                self._known_sizes[counts] = found
        return found

    def _slices(self, keys_per_client: Mapping[str, int]) -> Iterable[tuple[int, Part]]:
        """How many slices of each part a client receives."""
        names = {space.name for space in self.spaces}
        if keys_per_client.keys() != names:
            raise KeySpaceError(
                "a client's size needs one number of keys for each key space: got "
                f"{', '.join(sorted(keys_per_client)) or 'none'}; expected "
                f"{', '.join(sorted(names)) or 'none'}; name each of them"
            )
        for part in self.parts:
            yield prod(keys_per_client[factor.name] for factor in part.product.factors), part


def select_rows(source: RowSource, keys: ClientKeys) -> Tree:
    """Returns the sub-model of one client, made of rows."""
    layout = source.layout
    chosen = layout.keys_by_space(keys)
    leaves: dict[str, Array] = {}
    for place, part in enumerate(layout.parts):
        counts = [len(chosen[factor.name]) for factor in part.product.factors]
        leaves |= part.from_rows(source.rows(place, part.keys_of(chosen).array), counts)
    return tree.unflatten(layout.structure, leaves)


def layout_digest(layout: Layout) -> bytes:
    """Returns 32 bytes that differ between layouts whose rows differ in meaning."""
    lines = []
    for part in layout.parts:
        factors = [(factor.name, factor.num_keys) for factor in part.product.factors]
        fields = [(f.path, f.shape, f.dtype.str, f.axes) for f in part.fields]
        lines.append(repr((factors, fields)))
    return sha256("\n".join(lines).encode()).digest()


def max_keys_of(layout: Layout, keys_per_client: Mapping[str, int]) -> list[int]:
    """Returns the max number of keys that a client asks of each part; all of them without a cut.

    Args:
        keys_per_client: key space -> m, which is public.
    """
    counts = (prod(keys_per_client[f.name] for f in part.product.factors) for part in layout.parts)
    return [min(n, part.space.num_keys) for n, part in zip(counts, layout.parts, strict=True)]
