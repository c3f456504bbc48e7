"""Describes a round: what its tables hold, where they lie, and what binds them.

A manifest is all that a device needs to know of a model: from it follow the layout, the records and
the URLs of a round. It is JSON, read strictly: an unknown name, a wrong type or a size that does
not add up is refused.

An answer of a service begins with the nodes that lead from its records to the root of their table
(`keyhole.crypto.merkle`), which the manifest names. A device that compares holds what the trainer
published and nothing else, unless somebody finds a collision of BLAKE3. A table that is computed on
demand has no root: the service vouches for its own answer with one node, the root over the records
asked for. That finds damage on the way; the service itself can give every device what it likes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from hashlib import sha256
from math import prod
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from keyhole.arrays import KeyArray, Tree
from keyhole.crypto.merkle import HashArray, TreeShape, proof_places, root_of
from keyhole.crypto.merkle import Tree as HashTree
from keyhole.delivery.records import PLAIN, Coding, CodingKind, RecordField, Records
from keyhole.errors import DamageError, InputError, KeyholeError, ViolationError
from keyhole.primitives.keyspace import KeySpace
from keyhole.primitives.layout import Cut, Layout

VERSION = 2
MAX_BYTES = 64 << 20
"""Bytes of an encoded manifest: more than 300,000 segments."""

_FROZEN = "frozen "  # before the name of a frozen table
_MAX_ROUNDS = 10**18  # what the identifier of a round has digits for
_MAX_TABLES = 4096  # of one manifest; a model of the paper has four
_MAX_DEPTH = 64  # of the structure: trees are walked by recursion
_MAX_TABLE_BYTES = 1 << 62  # so that every place in a table is a whole number of 64 bits
_MIN_RECORD = 64  # bytes: those that each record has in the file of the tree
# Bytes from a network are viewed as these numbers: never as objects.
_DTYPES = frozenset(
    ["|b1", "|i1", "|u1", *(f"<{kind}{size}" for kind in "iuf" for size in (2, 4, 8))]
)
# What reading and rebuilding a manifest that makes no sense can raise.
_REFUSED = (
    *(msgspec.DecodeError, KeyholeError, RecursionError),
    *(ValueError, TypeError, KeyError, OverflowError),
)


class SpaceInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A key space that cuts the model."""

    name: str
    num_keys: int


class FieldInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One array of a slice."""

    path: str
    dtype: str  # little-endian, as NumPy writes it: "<f4"
    shape: tuple[int, ...]  # of the whole parameter; of the slice where `axes` is null
    # which axis each factor of the table cuts; null for a table of a select function
    axes: tuple[int, ...] | None = None


class SegmentInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file of consecutive records."""

    first: int  # the key of its first record
    count: int


class TableInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One table: a part of the model, or the slices of a select function."""

    name: str  # of its key space; "everyone" for what is not cut
    num_keys: int  # K
    # names of the key spaces whose product keys it; null for a select function
    factors: tuple[str, ...] | None
    fields: tuple[FieldInfo, ...]  # the arrays of a slice, in path order
    coding: CodingKind
    coding_seed: int  # of the stochastic rounding
    record_bytes: int
    # of the Merkle tree over all records (`keyhole.crypto.merkle`), 64 hex digits: what every
    # record is bound by. Empty where slices are computed on demand: they are bound to nothing
    root: str = ""
    # in order of keys; empty where slices are computed on demand
    segments: tuple[SegmentInfo, ...] = ()
    # true for leaves that are not trained: a device keeps what it has under this root, and no
    # update holds them. Not written where it is false
    frozen: bool | msgspec.UnsetType = msgspec.UNSET

    @property
    def is_frozen(self) -> bool:
        """Whether it holds leaves that are not trained."""
        return self.frozen is True

    @property
    def records(self) -> Records:
        """What a record holds."""
        fields = []
        for f in self.fields:
            shape = tuple(n for axis, n in enumerate(f.shape) if axis not in (f.axes or ()))
            fields.append(RecordField(f.path, shape, np.dtype(f.dtype).newbyteorder("=")))
        coding = Coding(self.coding, self.coding_seed)
        return Records(self.name, self.num_keys, tuple(fields), coding)


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A published round."""

    version: int  # of this format
    number: int  # t, which round of the run; grows
    step: int  # how many steps the server had made
    spaces: tuple[SpaceInfo, ...]
    structure: Any  # the tree of the model with paths for leaves, see `docs/wire.md`
    tables: tuple[TableInfo, ...]  # in the order of the parts of the layout
    # what devices are told about the run: keys_per_client, seed and the like
    settings: dict[str, Any] = {}

    @property
    def trained(self) -> tuple[TableInfo, ...]:
        """The tables of what is trained: all but the last ones, if some are frozen."""
        return tuple(table for table in self.tables if not table.is_frozen)

    @property
    def layout(self) -> Layout | None:
        """The trained model and its cuts; None where the tables are of select functions."""
        if any(table.factors is None for table in self.tables):
            return None
        leaves, cuts = self._cut(self.trained)
        return Layout.of(_decode_structure(self.structure, leaves), *cuts)

    @property
    def frozen_layout(self) -> Layout | None:
        """The frozen leaves and their cuts; None where there are none."""
        frozen = tuple(table for table in self.tables if table.is_frozen)
        leaves, cuts = self._cut(frozen)
        return Layout.of(leaves, *cuts) if frozen else None

    def _cut(self, tables: Sequence[TableInfo]) -> tuple[dict[str, Any], list[Cut]]:
        axes: dict[str, dict[str, int]] = {space.name: {} for space in self.spaces}
        leaves = {}
        for table in tables:
            for field in table.fields:
                leaves[field.path] = np.broadcast_to(
                    np.zeros((), np.dtype(field.dtype).newbyteorder("=")), field.shape
                )
                for name, axis in zip(table.factors or (), field.axes or (), strict=True):
                    axes[name][field.path] = axis
        return leaves, [Cut(KeySpace(s.name, s.num_keys), axes[s.name]) for s in self.spaces]


def table_info(records: Records, layout: Layout | None = None, place: int = 0) -> TableInfo:
    """Describes a table that has no segments yet."""
    if layout is None:
        factors = None
        fields = tuple(
            FieldInfo(f.path, f.dtype.newbyteorder("<").str, f.shape) for f in records.fields
        )
    else:
        part = layout.parts[place]
        factors = tuple(factor.name for factor in part.product.factors)
        fields = tuple(
            FieldInfo(f.path, f.dtype.newbyteorder("<").str, f.shape, f.axes) for f in part.fields
        )
    return TableInfo(
        name=records.name,
        num_keys=records.num_keys,
        factors=factors,
        fields=fields,
        coding=records.coding.kind,
        coding_seed=records.coding.seed,
        record_bytes=records.record_bytes,
    )


def frozen_info(records: Records, layout: Layout | None, place: int) -> TableInfo:
    """Describes a table of frozen leaves that has no segments yet, by a name of its own."""
    info = table_info(records, layout, place)
    return msgspec.structs.replace(info, name=f"{_FROZEN}{info.name}", frozen=True)


def unwritten(table: TableInfo) -> TableInfo:
    """Returns the table without what follows from the content of its records."""
    return msgspec.structs.replace(table, root="", segments=())


def describe_round(
    layout: Layout | None,
    tables: Sequence[TableInfo],
    number: int,
    step: int,
    settings: Mapping[str, Any],
) -> Manifest:
    """Returns the manifest of a round; `layout` is None where its tables are of select
    functions."""
    spaces = () if layout is None else layout.spaces
    return Manifest(
        version=VERSION,
        number=number,
        step=step,
        spaces=tuple(SpaceInfo(s.name, s.num_keys) for s in spaces),
        structure=None if layout is None else _encode_structure(layout.structure),
        tables=tuple(tables),
        settings=dict(settings),
    )


def encode_manifest(manifest: Manifest) -> bytes:
    """Returns the manifest as JSON; the same manifest gives the same bytes."""
    try:
        encoded = msgspec.json.encode(manifest, order="sorted")
        told = msgspec.json.decode(encoded)["settings"]
    except TypeError as error:
        raise _bad_settings(str(error)) from error
    if told != _as_json(manifest.settings):
        raise _bad_settings("NaN, infinity, bytes, a set or the like")
    return msgspec.json.format(encoded, indent=1) + b"\n"


def decode_manifest(data: bytes) -> Manifest:
    """Returns the manifest that `data` holds."""
    try:
        if len(data) > MAX_BYTES:
            raise ValueError(f"more than {MAX_BYTES} bytes")
        manifest = msgspec.json.decode(data, type=Manifest)
        _check(manifest)
    except _REFUSED as error:
        got = error.wrong if isinstance(error, KeyholeError) else str(error)
        raise InputError(
            f"not the manifest of a round: got {got}; expected JSON of version "
            f"{VERSION}, see docs/wire.md; fetch it again; it may come from another "
            "version of keyhole"
        ) from error
    return manifest


def decode_round(data: bytes, number: int) -> Manifest:
    """Returns the manifest of the round of a number; raises ViolationError where it says another,
    which it was published and signed with."""
    manifest = decode_manifest(data)
    if manifest.number != number:
        raise ViolationError(
            f"a round under another number: got round {manifest.number} as round {number}; "
            "expected the number that it was published with; nothing was fetched; the service lies"
        )
    return manifest


def name_round(encoded: bytes, number: int) -> str:
    """Returns the identifier of a round: its number and what its manifest holds, never used twice.

    >>> name_round(b"{}", 12)
    '12-44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a'
    """
    return f"{number}-{sha256(encoded).hexdigest()}"


def keys_of_round(manifest: Manifest, table: TableInfo) -> int | None:
    """Returns how many slices of a table a client takes at most, as the round says: public, and no
    more than there are. A table that several key spaces cut is asked for every combination of a
    client's keys. None where the settings of the round, which can hold anything, do not say."""
    per_client = manifest.settings.get("keys_per_client")
    told = per_client if isinstance(per_client, dict) else {}
    counts = [told.get(name) for name in (table.factors or ("",))]
    known = [count for count in counts if type(count) is int and count > 0]
    return min(prod(known), table.num_keys) if len(known) == len(counts) else None


def _check(manifest: Manifest) -> None:
    if manifest.version != VERSION:
        raise ValueError("another version")
    if not 0 <= manifest.number < _MAX_ROUNDS or manifest.step < 0:
        raise ValueError("a round or a step outside the range")
    if len(manifest.tables) > _MAX_TABLES:
        raise ValueError("too many tables")
    for table in manifest.tables:
        _check_size(table)
        _check_segments(table)
    layout = manifest.layout
    if describe_round(layout, (), 0, 0, {}) != msgspec.structs.replace(
        manifest, number=0, step=0, tables=(), settings={}
    ):
        raise ValueError("key spaces or a structure that are not those of the tables")
    trained, frozen = manifest.trained, manifest.frozen_layout
    if layout is not None and len(layout.parts) != len(trained):
        raise ValueError("tables are not the parts of the layout")
    for place, table in enumerate(trained):
        _check_fields(table, layout, place)
    _check_frozen(manifest.tables[len(trained) :], frozen)


def _check_size(table: TableInfo) -> None:
    if not {field.dtype for field in table.fields} <= _DTYPES:
        raise ValueError("an array that does not hold plain numbers, little-endian")
    if any(min(field.shape, default=0) < 0 for field in table.fields):
        raise ValueError("an array of a size below 0")
    longest = max(table.records.record_bytes, _MIN_RECORD)
    if not 1 <= table.num_keys <= _MAX_TABLE_BYTES // longest:
        raise ValueError("a table without keys, or beyond all sizes")


def _check_segments(table: TableInfo) -> None:
    keys = 0
    for segment in table.segments:
        if segment.first != keys or segment.count < 1:
            raise ValueError("segments do not follow each other")
        keys += segment.count
    if table.segments and keys != table.num_keys:
        raise ValueError("segments do not hold every key")
    if not _ROOT.fullmatch(table.root) if table.segments else table.root:
        raise ValueError("segments without a root, or a root without segments")


def _check_fields(table: TableInfo, layout: Layout | None, place: int) -> None:
    """Whether the table is described as the part of the layout, or its own records, would be."""
    coding = Coding(table.coding, table.coding_seed)
    records = table.records if layout is None else Records.of_part(layout.parts[place], coding)
    if table_info(records, layout, place) != unwritten(table):
        raise ValueError("a table does not say what its records hold")
    if len({field.path for field in table.fields}) != len(table.fields):
        raise ValueError("two arrays of one path")


def _check_frozen(tables: Sequence[TableInfo], layout: Layout | None) -> None:
    """Whether the last tables are those of frozen leaves, and each described as its part."""
    parts = () if layout is None else layout.parts
    if len(parts) != len(tables) or not all(table.is_frozen for table in tables):
        raise ValueError("frozen tables that are not the last, or not the parts of a layout")
    for place, (part, table) in enumerate(zip(parts, tables, strict=True)):
        if frozen_info(Records.of_part(part, PLAIN), layout, place) != unwritten(table):
            raise ValueError("a frozen table does not say what its records hold")


def _encode_structure(node: Tree) -> Any:
    """The tree with kinds spelled out, since JSON knows neither tuples nor whole-number keys."""
    if isinstance(node, Mapping):
        return {"dict": [[key, _encode_structure(child)] for key, child in node.items()]}
    if isinstance(node, list | tuple):
        kind = "list" if isinstance(node, list) else "tuple"
        return {kind: [_encode_structure(child) for child in node]}
    return node


def _decode_structure(node: Any, leaves: Mapping[str, Any], depth: int = 0) -> Tree:
    if node is None or isinstance(node, str):
        return None if node is None else leaves[node]
    if not isinstance(node, dict) or len(node) != 1 or depth > _MAX_DEPTH:
        raise ValueError("a node of the structure is neither a path nor of one kind, or too deep")
    ((kind, children),) = node.items()
    if kind == "dict":
        return {key: _decode_structure(child, leaves, depth + 1) for key, child in children}
    made = [_decode_structure(child, leaves, depth + 1) for child in children]
    return {"list": list, "tuple": tuple}[kind](made)


def _as_json(value: Any) -> Any:
    """Settings as they are if JSON holds them unchanged; a tuple may become a list."""
    if isinstance(value, Mapping):
        return {key: _as_json(each) for key, each in value.items()}
    return [_as_json(each) for each in value] if isinstance(value, list | tuple) else value


def _bad_settings(got: str) -> InputError:
    return InputError(
        f"settings cannot be told to devices: got {got}; expected what JSON can hold; turn arrays "
        "into lists, and the rest into finite numbers, strings and dicts"
    )


_ROOT = re.compile(r"[0-9a-f]{64}")
_ROUND_ID = re.compile(r"(0|[1-9][0-9]{0,17})-[0-9a-f]{64}")


def number_of(round_id: str) -> int | None:
    """Returns the number in a round's identifier; None if it is no identifier, as `name_round`
    makes them.

    >>> [number_of(f"{number}-" + 64 * "0") for number in ("12", "012", "../12")]
    [12, None, None]
    """
    found = _ROUND_ID.fullmatch(round_id)
    return None if found is None else int(found[1])


def digest_of(round_id: str) -> bytes:
    """Returns the SHA-256 of the manifest that a round is named after, 32 bytes: what messages that
    belong to one model say of it.

    >>> digest_of(name_round(b"{}", 12)) == sha256(b"{}").digest()
    True
    """
    if number_of(round_id) is None:
        raise not_a_round(round_id)
    return bytes.fromhex(round_id.partition("-")[2])


def not_a_round(got: str) -> InputError:
    """Returns the error where something is no identifier of a round."""
    return InputError(
        f"not the identifier of a round: got {got!r}; expected a number, '-' and 64 hex digits; "
        "pass what check_in returns, or the round of current"
    )


def count_nodes(info: TableInfo, keys: KeyArray) -> int:
    """Returns the number of nodes before the records of keys."""
    if not info.root:
        return int(len(keys) > 0)
    return len(place_nodes(TreeShape(info.num_keys), keys))


def place_nodes(shape: TreeShape, keys: KeyArray) -> NDArray[np.int64]:
    """Returns where in a tree those nodes lie that lead from the records of keys, in any order, to
    its root."""
    return proof_places(shape, np.sort(keys)) if len(keys) else np.empty(0, np.int64)


def vouch(keys: KeyArray, leaves: HashArray) -> HashArray:
    """Returns the one node that stands for an answer of a table without a root."""
    if not len(keys):
        return leaves[:0]
    root = HashTree.of(leaves[np.unique(keys, return_index=True)[1]]).root
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
