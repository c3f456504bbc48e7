"""Stores the whole server state in one file, and checks it before it is used.

    file     head, description (JSON), arrays one after the other, each from a multiple of 64 bytes
    head     magic, version, digest of the layout, size and CRC-32 of the description, CRC-32,
             as `keyhole.server.log` packs it
    description   step, optimizer, kinds of tables; name, dtype, shape and CRC-32 of each array

A lazy table stores the rows that exist, in the order in which they were made, so that a loaded
state goes on with the same bytes. A snapshot gets its name when all of it is on the disk.

Arrays come and go a piece at a time, some consecutive rows. Rows that lie elsewhere pass through
this process in pieces: twice when they are stored, since the checksums come first, and once when
they are loaded.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeAlias, runtime_checkable

import numpy as np

from keyhole.arrays import Array
from keyhole.errors import InputError, StorageError
from keyhole.files import checksum, replacing, storage_errors, write_all
from keyhole.primitives.layout import Layout
from keyhole.server.log import pack_header, read_header, refusal
from keyhole.server.optimizers import Optimizer, describe_optimizer, optimizer_named, optimizer_of
from keyhole.server.state import ServerState
from keyhole.server.tables import DenseTable, LazyTable, RowInitial, Table

PIECE = 64 << 20
"""Bytes of a piece: large enough for disks and networks, small enough to forget about."""


@dataclass(frozen=True)
class StoredArray:
    """An array as a snapshot takes it: `pieces()` gives some consecutive rows after the other,
    from the first to the last, and may be called more than once."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    pieces: Callable[[], Iterator[Array]]

    @staticmethod
    def of(array: Array) -> StoredArray:
        """Returns an array that is in this process; its pieces are views of it."""
        rows = rows_of_piece(array.dtype, array.shape, PIECE)

        def pieces() -> Iterator[Array]:
            return (array[at : at + rows] for at in range(0, len(array), rows))

        return StoredArray(array.dtype, array.shape, pieces)


Fill: TypeAlias = Callable[[str, int, Array], None]
"""`fill(name, first row, piece)`: arrays in the order in which a table dumps them, each from its
first row to its last."""


@runtime_checkable
class RemoteTable(Protocol):
    """A table whose rows lie elsewhere: they come, and go back, in pieces."""

    def dump(self) -> tuple[dict[str, Any], dict[str, StoredArray]]:
        """Returns what `dump_table` returns, with the bytes of a table in this process."""
        ...

    def refill(self, described: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> Fill:
        """Starts over with what was dumped, of which the pieces are to follow; raises ValueError
        where it does not fit this table."""
        ...


def dump_table(table: Table) -> tuple[dict[str, Any], dict[str, StoredArray]]:
    """Returns what a table stores: its kind, and every row or those that exist and their keys."""
    if isinstance(table, RemoteTable):
        return table.dump()
    assert isinstance(table, DenseTable | LazyTable)
    described: dict[str, Any] = {"kind": "dense"}
    if isinstance(table, LazyTable):
        described = {"kind": "lazy", "seed": table.initial.seed, "columns": table.initial.columns}
    return described, {name: StoredArray.of(a) for name, a in stored_arrays(table).items()}


def stored_arrays(table: DenseTable | LazyTable) -> dict[str, Array]:
    """Arrays of a table in this process, by name, in the order in which they are stored."""
    if isinstance(table, DenseTable):
        return dict(table.slab.named())
    rows = {name: array[: len(table)] for name, array in table.slab.named().items()}
    return {"keys": table.index.keys, **rows}


def _load_table(
    num_keys: int, described: Mapping[str, Any], arrays: Mapping[str, Array], optimizer: Optimizer
) -> DenseTable | LazyTable:
    """A table with what `dump_table` returned in place of its own; it takes `values` over."""
    table: DenseTable | LazyTable
    if described["kind"] == "dense":
        table = DenseTable(arrays["values"], optimizer)
    else:
        table = LazyTable(num_keys, initial_of(described), optimizer)
        table.reserve(arrays["keys"])
    for name, array in table.slab.named().items():
        array[: len(arrays[name])] = arrays[name]
    return table


def initial_of(described: Mapping[str, Any]) -> RowInitial:
    """Returns how the rows of a lazy table start, as `dump_table` has described it."""
    columns = tuple((int(n), int(kind), float(scale)) for n, kind, scale in described["columns"])
    return RowInitial(described["seed"], columns)


def rows_of_piece(dtype: np.dtype[Any], shape: tuple[int, ...], max_bytes: int) -> int:
    """Returns how many rows of an array make a piece."""
    return max(1, max_bytes // max(1, prod(shape[1:]) * dtype.itemsize))


_MAGIC = b"khsnap\n\0"
_ALIGN = 64
_EARLIER = "use the snapshot before it"


@dataclass(frozen=True)
class Snapshot:
    """A state and the bytes that the caller put with it."""

    state: ServerState
    metadata: bytes = b""


def save_snapshot(path: Path, snapshot: Snapshot) -> None:
    """Writes a snapshot; it appears under its name whole or not at all."""
    state = snapshot.state
    arrays = {"metadata": StoredArray.of(np.frombuffer(snapshot.metadata, np.uint8))}
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
    head = pack_header(_MAGIC, state.layout, len(text), checksum(text))
    with replacing(path) as descriptor:
        write_all(descriptor, [head, text, bytes(-len(text) % _ALIGN)])
        for array in arrays.values():
            size = 0
            for piece in array.pieces():
                write_all(descriptor, [_bytes(piece)])
                size += piece.nbytes
            write_all(descriptor, [bytes(-size % _ALIGN)])


def load_snapshot(
    path: Path,
    layout: Layout,
    threads: int = 1,
    into: Sequence[Table] = (),
    optimizer: Optimizer | None = None,
) -> Snapshot:
    """Reads a snapshot and checks all of it.

    Args:
        layout: that it must have been written for.
        into: tables of a state of this layout; those whose rows lie elsewhere take the stored rows
            in place of their own, piece by piece. If it fails, they hold part of them.
        optimizer: that it was written with; None makes it again if the library ships it.
    """
    with storage_errors(path, "read"), path.open("rb") as file:
        description = _read_description(file, path, layout)
        _check_optimizer(description["optimizer"], optimizer)
        try:
            optimizer = optimizer or optimizer_named(**description["optimizer"])
            metadata, tables = _read_tables(file, path, description, layout, into, optimizer)
            state = ServerState(layout, tables, optimizer, description["step"], threads)
        except (KeyError, TypeError, ValueError, InputError) as error:
            wrong = "describes what cannot be"
            raise _refusal(path, wrong, repr(error), "a known state") from error
        if file.read(1):
            raise _refusal(path, "is longer than it says", "more bytes", "its arrays")
    return Snapshot(state, metadata)


def _check_optimizer(stored: Mapping[str, Any], given: Optimizer | None) -> None:
    """Raises InputError unless the optimizer is the one of the snapshot, or can be made from it."""
    described = None if given is None else json.loads(json.dumps(describe_optimizer(given)))
    if described != stored and (given is not None or "identity" in stored):
        raise InputError(
            "the state was written with another optimizer: got "
            f"{_text(described or {'name': 'none'})}; expected {_text(stored)}; pass the optimizer "
            "that the run was started with"
        )


def _text(described: Mapping[str, Any]) -> str:
    settings = ", ".join(f"{k}={v}" for k, v in described.items() if k not in ("name", "identity"))
    return str(described.get("identity", f"{described['name']}({settings})"))


def _read_tables(
    file: BinaryIO,
    path: Path,
    description: dict[str, Any],
    layout: Layout,
    into: Sequence[Table],
    optimizer: Optimizer,
) -> tuple[bytes, tuple[Table, ...]]:
    """The metadata, and the tables one after the other; those of `into` that lie elsewhere take
    their rows a piece at a time."""
    by_place: dict[str, dict[str, Any]] = {}
    for d in description["arrays"]:
        place, _, name = d["name"].rpartition("/")
        by_place.setdefault(place, {})[name] = d
    (metadata,) = _read_pieces(file, path, by_place[""]["metadata"], max_bytes=None)
    tables: list[Table] = []
    for part, described in zip(layout.parts, description["tables"], strict=True):
        own = by_place[str(len(tables))]
        table = into[len(tables)] if into else None
        if isinstance(table, RemoteTable):
            fill = table.refill(described, {name: tuple(d["shape"]) for name, d in own.items()})
            for name, d in own.items():
                fill_in_pieces(fill, name, _read_pieces(file, path, d, PIECE))
            tables.append(table)
        else:
            arrays = {n: a for n, d in own.items() for a in _read_pieces(file, path, d, None)}
            stepped = optimizer_of(optimizer, part)
            tables.append(_load_table(part.space.num_keys, described, arrays, stepped))
    return metadata.tobytes(), tuple(tables)


def fill_in_pieces(fill: Fill, name: str, pieces: Iterator[Array]) -> None:
    """Brings an array back, from its first row to its last."""
    start = 0
    for piece in pieces:
        fill(name, start, piece)
        start += len(piece)


def _describe_array(name: str, array: StoredArray) -> dict[str, Any]:
    little = array.dtype.newbyteorder("<").str
    crc = 0
    for piece in array.pieces():
        crc = checksum(_bytes(piece), start=crc)
    return {"name": name, "dtype": little, "shape": array.shape, "crc": crc}


def _bytes(array: Array) -> memoryview:
    """The bytes of an array, little-endian; no copy on the machines we know."""
    little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return little.data.cast("B") if little.size else memoryview(b"")


def _read_description(file: BinaryIO, path: Path, layout: Layout) -> dict[str, Any]:
    size, text_crc = read_header(file, path, _MAGIC, layout, "a snapshot", _EARLIER)
    if size > os.fstat(file.fileno()).st_size:
        raise _refusal(path, "is cut short", "part of its description", f"{size} bytes of it")
    text = file.read(size)
    _skip_padding(file, path, size)
    if checksum(text) != text_crc:
        raise _refusal(path, "has a damaged description", "another CRC", f"{text_crc:08x}")
    try:
        told = dict(json.loads(text))
        told["optimizer"]
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise _refusal(path, "describes what cannot be", repr(error), "a known state") from error
    return told


def _read_pieces(
    file: BinaryIO, path: Path, d: dict[str, Any], max_bytes: int | None
) -> Iterator[Array]:
    """The next array, whole or in pieces, once its size is known to fit the file; one who takes all
    of it learns whether its checksum holds."""
    dtype, shape = np.dtype(d["dtype"]), tuple(d["shape"])
    size = int(np.prod(shape, dtype=object)) * dtype.itemsize
    left = os.fstat(file.fileno()).st_size - file.tell()
    if size > left:
        raise _refusal(path, "is cut short", f"{left} bytes left", f"{size} for {d['name']}")
    rows = rows_of_piece(dtype, shape, max_bytes) if max_bytes else max(shape[0], 1)
    crc = 0
    for at in range(0, max(shape[0], 1), rows):
        piece = np.empty((min(rows, shape[0] - at), *shape[1:]), dtype)
        if piece.nbytes:
            file.readinto(piece.data.cast("B"))  # type: ignore[attr-defined]
        crc = checksum(_bytes(piece), start=crc)
        yield piece
    _skip_padding(file, path, size)
    if crc != d["crc"]:
        raise _refusal(path, f"is damaged in {d['name']}", "another CRC", f"{d['crc']:08x}")


def _skip_padding(file: BinaryIO, path: Path, size: int) -> None:
    padding = file.read(-size % _ALIGN)
    if len(padding) < -size % _ALIGN or any(padding):
        raise _refusal(path, "is damaged between arrays", "other bytes", "zeros")


def _refusal(path: Path, wrong: str, got: object, allowed: object) -> StorageError:
    return refusal(path, wrong, got, allowed, _EARLIER)
