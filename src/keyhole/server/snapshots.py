"""Snapshots: the whole server state in one file, checked before it is used.

    file     head, description (JSON), arrays one after the other, each from a multiple of 64 bytes
    head     magic, version, digest of the layout, size and CRC-32 of the description, CRC-32
    description   step, optimizer, kinds of tables; name, dtype, shape and CRC-32 of each array

A lazy table stores the rows that exist, in the order in which they were made, so that a loaded
state goes on with the same bytes. A snapshot gets its name when all of it is on the disk.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol, runtime_checkable

import numpy as np

from keyhole.errors import InputError, StorageError
from keyhole.primitives.layout import Layout
from keyhole.server.files import (
    checksum,
    layout_digest,
    replacing,
    storage_errors,
    write_all,
)
from keyhole.server.initial import RowInitial
from keyhole.server.optimizers import Optimizer, describe_optimizer, optimizer_named
from keyhole.server.state import ServerState
from keyhole.server.tables import DenseTable, LazyTable, Table
from keyhole.types import Array

__all__ = ["Gathered", "Snapshot", "dump_table", "load_snapshot", "load_table", "save_snapshot"]

_VERSION = 1
_MAGIC = b"khsnap\n\0"
_HEAD = struct.Struct("<8sI32sQI4xI")  # 64 bytes; the last number is the CRC of those before
_ALIGN = 64


@dataclass(frozen=True)
class Snapshot:
    """A state and the bytes that the caller put with it."""

    state: ServerState
    metadata: bytes = b""


@runtime_checkable
class Gathered(Protocol):
    """A table whose rows lie elsewhere, and which can bring them here."""

    def gather(self) -> DenseTable | LazyTable:
        """All of it in this process."""
        ...


def save_snapshot(path: Path, snapshot: Snapshot) -> None:
    """Writes a snapshot; it appears under its name whole or not at all.

    Raises:
        StorageError: the disk is full or failed; files that were there before are untouched.
    """
    state = snapshot.state
    arrays = {"metadata": np.frombuffer(snapshot.metadata, np.uint8)}
    tables = []
    for place, table in enumerate(state.tables):
        described, own = dump_table(table)
        tables.append(described)
        arrays |= {f"{place}/{name}": array for name, array in own.items()}
    description = {
        "step": state.steps,
        "optimizer": describe_optimizer(state.optimizer),
        "tables": tables,
        "arrays": [_describe_array(name, array) for name, array in arrays.items()],
    }
    text = json.dumps(description).encode()
    fields = (_MAGIC, _VERSION, layout_digest(state.layout), len(text), checksum(text))
    head = _HEAD.pack(*fields, checksum(_HEAD.pack(*fields, 0)[:-4]))
    with replacing(path) as descriptor:
        write_all(descriptor, [head, text, bytes(-len(text) % _ALIGN)])
        for array in arrays.values():
            write_all(descriptor, [_bytes(array), bytes(-array.nbytes % _ALIGN)])


def load_snapshot(path: Path, layout: Layout, threads: int = 1) -> Snapshot:
    """Reads a snapshot and checks all of it.

    Args:
        path: of the file.
        layout: that it must have been written for.
        threads: of the loaded state.

    Raises:
        StorageError: not a snapshot, of another layout or version, torn, or damaged.
    """
    with storage_errors(path, "read"), path.open("rb") as file:
        description = _read_description(file, path, layout)
        arrays = {d["name"]: _read_array(file, path, d) for d in description["arrays"]}
        if file.read(1):
            raise _refusal(path, "is longer than it says", "more bytes", "its arrays")
    try:
        state = _rebuild(description, arrays, layout, threads)
    except (KeyError, TypeError, ValueError, InputError) as error:
        raise _refusal(path, "describes what cannot be", repr(error), "a known state") from error
    return Snapshot(state, arrays["metadata"].tobytes())


def _rebuild(
    description: dict[str, Any], arrays: dict[str, Array], layout: Layout, threads: int
) -> ServerState:
    optimizer = optimizer_named(**description["optimizer"])
    tables = []
    for place, (part, d) in enumerate(zip(layout.parts, description["tables"], strict=True)):
        prefix = f"{place}/"
        own = {n.removeprefix(prefix): a for n, a in arrays.items() if n.startswith(prefix)}
        tables.append(load_table(part.space.num_keys, d, own, optimizer))
    return ServerState(layout, tuple(tables), optimizer, description["step"], threads)


def dump_table(table: Table) -> tuple[dict[str, Any], dict[str, Array]]:
    """What a table stores: its kind, and every row or those that exist and their keys."""
    if isinstance(table, Gathered):
        table = table.gather()
    if isinstance(table, LazyTable):
        described = {"seed": table.initial.seed, "columns": table.initial.columns}
        rows = {name: array[: len(table)] for name, array in table.slab.named().items()}
        return {"kind": "lazy", **described}, {"keys": table.index.keys, **rows}
    assert isinstance(table, DenseTable)
    return {"kind": "dense"}, dict(table.slab.named())


def load_table(
    num_keys: int, described: Mapping[str, Any], arrays: Mapping[str, Array], optimizer: Optimizer
) -> DenseTable | LazyTable:
    """A table with what `dump_table` returned in place of its own; it takes `values` over."""
    if described["kind"] == "dense":
        dense = DenseTable(arrays["values"], optimizer)
        _fill(dense.slab.named(), arrays)
        return dense
    columns = tuple((int(n), int(kind), float(scale)) for n, kind, scale in described["columns"])
    lazy = LazyTable(num_keys, RowInitial(described["seed"], columns), optimizer)
    lazy.reserve(arrays["keys"])
    _fill(lazy.slab.named(), arrays)
    return lazy


def _fill(own: Mapping[str, Array], stored: Mapping[str, Array]) -> None:
    for name, array in own.items():
        array[: len(stored[name])] = stored[name]


def _describe_array(name: str, array: Array) -> dict[str, Any]:
    little = array.dtype.newbyteorder("<").str
    crc = checksum(_bytes(array))
    return {"name": name, "dtype": little, "shape": array.shape, "crc": crc}


def _bytes(array: Array) -> memoryview:
    """The bytes of an array, little-endian; no copy on the machines we know."""
    little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return little.data.cast("B") if little.size else memoryview(b"")


def _read_description(file: BinaryIO, path: Path, layout: Layout) -> dict[str, Any]:
    head = file.read(_HEAD.size)
    if len(head) < _HEAD.size or head[: len(_MAGIC)] != _MAGIC:
        raise _refusal(path, "is not a snapshot", f"{len(head)} first bytes", "its head")
    _, version, digest, size, text_crc, crc = _HEAD.unpack(head)
    if crc != checksum(head[:-4]):
        raise _refusal(path, "has a damaged head", f"CRC {crc:08x}", "the head's own")
    if version != _VERSION:
        raise _refusal(path, "is of another version", version, _VERSION)
    if digest != layout_digest(layout):
        got, allowed = digest.hex()[:12], layout_digest(layout).hex()[:12]
        raise _refusal(path, "was written for another layout", got, allowed)
    if size > os.fstat(file.fileno()).st_size:
        raise _refusal(path, "is cut short", "part of its description", f"{size} bytes of it")
    text = file.read(size)
    _skip_padding(file, path, size)
    if checksum(text) != text_crc:
        raise _refusal(path, "has a damaged description", "another CRC", f"{text_crc:08x}")
    return dict(json.loads(text))


def _read_array(file: BinaryIO, path: Path, d: dict[str, Any]) -> Array:
    """The next array, once its size is known to fit the file and its checksum to hold."""
    dtype, shape = np.dtype(d["dtype"]), tuple(d["shape"])
    size = int(np.prod(shape, dtype=object)) * dtype.itemsize
    left = os.fstat(file.fileno()).st_size - file.tell()
    if size > left:
        raise _refusal(path, "is cut short", f"{left} bytes left", f"{size} for {d['name']}")
    array = np.empty(shape, dtype)
    if size:
        file.readinto(array.data.cast("B"))  # type: ignore[attr-defined]
    _skip_padding(file, path, size)
    if checksum(_bytes(array)) != d["crc"]:
        raise _refusal(path, f"is damaged in {d['name']}", "another CRC", f"{d['crc']:08x}")
    return array


def _skip_padding(file: BinaryIO, path: Path, size: int) -> None:
    padding = file.read(-size % _ALIGN)
    if len(padding) < -size % _ALIGN or any(padding):
        raise _refusal(path, "is damaged between arrays", "other bytes", "zeros")


def _refusal(path: Path, wrong: str, got: object, allowed: object) -> StorageError:
    fix = "use the snapshot before it"
    return StorageError(f"{path.name} {wrong}", got=got, allowed=allowed, fix=fix)
