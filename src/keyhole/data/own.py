"""Makes a `Dataset` of your own examples: columns in memory, with the client of each row.

Columns of `inputs` name keys: whole numbers from 0, or texts, which are numbered by how many
clients use them. What cannot be used is one error that names the column and the row or client.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, TypeAlias

import numpy as np

from keyhole.arrays import Array
from keyhole.data.federated import Column, Dataset, FederatedData, Ragged
from keyhole.data.values import (
    count_rows,
    flat_values,
    join_columns,
    read_column,
    row_of_value,
    to_float32,
)
from keyhole.errors import InputError
from keyhole.parts import near_miss

Place: TypeAlias = Callable[[int], str]
"""Says where a row is, such as "row 3 of client 'ann'"."""

OWN = "own"
"""The kind of data that are your own."""


def from_arrays(
    columns: Mapping[str, Any],
    *,
    client: Any,
    inputs: Mapping[str, str] | None = None,
    target: str | None = None,
    names: Mapping[str, Sequence[str]] | None = None,
    name: str = OWN,
) -> Dataset:
    """Returns the examples of clients from one array or list for each column.

    Args:
        columns: name -> one entry for each example: numbers, arrays, lists, or texts where the
            column is in `inputs` or the target. Lists of one length are a matrix, others `Ragged`.
            Floats are kept as float32, dates as microseconds since 1970.
        client: the column that says whose example it is, or its values.
        inputs: column -> the key space whose keys it names. Texts are numbered, those that most
            clients use first; `names` of the dataset has them under the key space.
        target: the column that is predicted; texts are numbered alike.
        names: what numbers stand for, by key space or column, where you know it.
        name: of the dataset.

    Returns:
        a dataset with the split "train"; call `.hold_out(0.1)` on it to get "test".

    Raises:
        InputError: a column is missing, of another length or not of one kind; a row has no client
            or no value; a key is negative or not whole.

    >>> data = from_arrays(
    ...     {"user": ["ann", "ben", "ann"], "film": ["Up", "Up", "Heat"], "stars": [5, 3, 4]},
    ...     client="user", inputs={"film": "film"}, target="stars")
    >>> data.splits["train"].client(0)["film"].tolist(), data.names["film"]
    ([0, 1], ['Up', 'Heat'])
    """
    table = dict(columns)
    if isinstance(client, str):
        _check_named("client names", client, table)
        ids, label = table.pop(client), f"column {client!r}"
    else:
        ids, label = client, "client"
    _check_declared(table, inputs or {}, target)
    lengths = {each: count_rows(values) for each, values in table.items()}
    people, owner = _read_clients(label, ids)
    lengths[client if isinstance(client, str) else label] = len(owner)
    if len(set(lengths.values())) > 1:
        raise InputError(
            f"columns are of different length: got {lengths}; expected one entry for each example; "
            "bring them to one length"
        )
    rows = _Rows(people, owner, lambda row: f"row {row} of client {people[owner[row]]!r}")
    read = {each: read_column(each, values, rows.place) for each, values in table.items()}
    return _make(read, rows, dict(inputs or {}), target, dict(names or {}), name)


def from_dict(
    clients: Mapping[Any, Mapping[str, Any]],
    *,
    inputs: Mapping[str, str] | None = None,
    target: str | None = None,
    names: Mapping[str, Sequence[str]] | None = None,
    name: str = OWN,
) -> Dataset:
    """Returns the examples of clients from the columns of each.

    Args:
        clients: client -> {column: one entry for each example}; all have the same columns.

    The other arguments, and what is refused, are those of `from_arrays`.

    >>> data = from_dict({"ann": {"film": [7, 8]}, "ben": {"film": [7]}}, inputs={"film": "film"})
    >>> data.splits["train"].client_ids, data.splits["train"].counts.tolist()
    (['ann', 'ben'], [2, 1])
    """
    people = _read_clients("clients", list(clients))[0]
    if len(people) != len(clients):
        raise InputError(
            f"two clients have one name: got {len(clients)} clients of {len(people)} names; "
            "expected names that differ as texts; rename one"
        )
    parts: dict[str, list[Column]] = {}
    counts = []
    for person, columns in zip(people, clients.values(), strict=True):
        _check_declared(columns, inputs or {}, target)
        counts.append(_count_of(person, columns, parts))
        for each, values in columns.items():
            parts.setdefault(each, []).append(read_column(each, values, _place_in(person)))
    starts = np.concatenate([[0], np.cumsum(counts)])
    owner = np.repeat(np.arange(len(people)), counts)
    rows = _Rows(
        people,
        owner,
        lambda row: f"row {row - starts[owner[row]]} of client {people[owner[row]]!r}",
    )
    read = {each: join_columns(each, found) for each, found in parts.items()}
    return _make(read, rows, dict(inputs or {}), target, dict(names or {}), name)


@dataclass(frozen=True, eq=False)
class _Rows:
    """Whose each row is, and how a row is told."""

    people: list[str]
    owner: Array  # int64 (rows,)
    place: Place


def _place_in(person: str) -> Place:
    return lambda row: f"row {row} of client {person!r}"


def _count_of(person: str, columns: Mapping[str, Any], known: Mapping[str, Any]) -> int:
    """How many examples a client has; InputError unless all columns agree, as other clients' do."""
    lengths = {each: count_rows(values) for each, values in columns.items()}
    if known and lengths.keys() != known.keys():
        raise InputError(
            f"client {person!r} has other columns than the first: got {', '.join(lengths)}; "
            f"expected {', '.join(known)}; give every client the same"
        )
    if len(set(lengths.values())) != 1:
        raise InputError(
            f"columns of client {person!r} are of different length: got {lengths}; expected one "
            "entry for each example; bring them to one length"
        )
    if not (count := next(iter(lengths.values()))):
        raise InputError(
            f"client {person!r} has no examples: got 0 rows; expected 1 or more; leave it out"
        )
    return count


def _check_named(what: str, column: str, columns: Mapping[str, Any]) -> None:
    if column not in columns:
        raise InputError(
            f"{what} a column that is not there: got {column!r}; expected one of "
            f"{', '.join(columns)}; {near_miss(column, columns)}"
        )


def _check_declared(
    columns: Mapping[str, Any], inputs: Mapping[str, str], target: str | None
) -> None:
    """Raises InputError where a declaration names no column."""
    for column in inputs:
        _check_named("inputs name", column, columns)
    if target is not None:
        _check_named("target names", target, columns)


def _read_clients(label: str, values: Any) -> tuple[list[str], Array]:
    """The clients in the order in which they come, and which of them each row has."""
    ids = values if isinstance(values, np.ndarray) else np.array([*values], object)
    if ids.ndim != 1 or not len(ids):
        raise InputError(
            f"{label} names no clients: got an array of shape {ids.shape}; expected one id for "
            "each example; bring data of at least one client"
        )
    if ids.dtype.kind not in "iu":
        ids = _checked_ids(label, ids)
    found, first, owner = np.unique(ids, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    return [str(found[at]) for at in order], rank[owner]


def _checked_ids(label: str, ids: Array) -> Array:
    """Ids that are texts, or whole numbers."""
    texts = 0
    for row, each in enumerate(ids.tolist()):
        if each is None or each == "" or each != each:
            raise InputError(
                f"{label} has no client id in row {row}: got {each!r}; expected a text or a whole "
                "number; give the row a client, or leave it out"
            )
        texts += isinstance(each, str)
        is_whole = isinstance(each, (int, float)) and not isinstance(each, bool) and each % 1 == 0
        if not (isinstance(each, str) or is_whole) or texts not in (0, row + 1):
            raise InputError(
                f"{label} has an id of another kind in row {row}: got {each!r}; expected texts "
                "alone, or whole numbers alone; make all ids texts"
            )
    return np.array(ids.tolist(), object) if texts else ids.astype(np.int64)


def _make(
    columns: dict[str, Column],
    rows: _Rows,
    inputs: dict[str, str],
    target: str | None,
    names: dict[str, Sequence[str]],
    name: str,
) -> Dataset:
    """The dataset of columns that are read but not numbered, rows sorted by client."""
    texts = {each for each, column in columns.items() if flat_values(column).dtype.kind == "O"}
    spaces = {**inputs} if target is None or target in inputs else {**inputs, target: target}
    for column in sorted(texts - spaces.keys()):
        raise InputError(
            f"column {column!r} holds texts and is no input: got "
            f"{flat_values(columns[column])[0]!r} first; expected numbers, or a column of inputs; "
            "declare it in inputs, or leave it out"
        )
    for space in sorted({spaces[column] for column in texts}):
        named = [column for column, found in spaces.items() if found == space]
        names[space] = _number_texts(space, named, texts, columns, rows)
    for column in inputs:
        columns[column] = _to_keys(column, columns[column], rows.place)
    if target is not None:
        _check_target(target, columns[target], rows.place)
    columns = {each: to_float32(column) for each, column in columns.items()}
    order = np.argsort(rows.owner, kind="stable")
    if not np.array_equal(order, np.arange(len(order))):
        columns = {each: column[order] for each, column in columns.items()}
    counts = np.bincount(rows.owner, minlength=len(rows.people))
    train = FederatedData.of(rows.people, counts, columns)
    facts = {"source": "your own", "licence": "your own"}
    facts["sha256"] = _digest(train, inputs, target, names)
    return Dataset(name, OWN, {"train": train}, names, facts, inputs, target)


def _number_texts(
    space: str, named: list[str], texts: set[str], columns: dict[str, Column], rows: _Rows
) -> list[str]:
    """Puts numbers in the place of texts, by falling number of clients; returns the texts."""
    if numbers := [column for column in named if column not in texts]:
        raise InputError(
            f"columns of key space {space!r} are of two kinds: got numbers in {numbers[0]!r} and "
            f"texts in others; expected one kind; number the texts of all of them"
        )
    flat = [flat_values(columns[column]) for column in named]
    owner = np.concatenate([rows.owner[row_of_value(columns[column])] for column in named])
    found, number = np.unique(np.concatenate(flat), return_inverse=True)
    pairs = np.unique(number * len(rows.people) + owner)  # a client counts once for each text
    users = np.bincount(pairs // len(rows.people), minlength=len(found))
    order = np.lexsort((np.arange(len(found)), -users))
    rank = np.empty(len(found), np.int32)
    rank[order] = np.arange(len(found), dtype=np.int32)
    ends = np.cumsum([len(values) for values in flat])
    for column, part in zip(named, np.split(rank[number], ends[:-1]), strict=True):
        old = columns[column]
        columns[column] = (
            Ragged(part, old.offsets) if isinstance(old, Ragged) else part.reshape(old.shape)
        )
    return [str(found[at]) for at in order]


def _to_keys(name: str, column: Column, place: Place) -> Column:
    """Whole numbers from 0, int32 where they fit."""
    values = flat_values(column)
    is_bad = values < 0
    if values.dtype.kind == "f":  # NaN equals nothing, and infinity is not below
        is_bad = ~((values >= 0) & (values == np.floor(values)) & (values < np.inf))
    if values.dtype.kind == "b" or is_bad.any():
        at = int(np.argmax(is_bad))
        raise InputError(
            f"column {name!r} names no key in {place(int(row_of_value(column)[at]))}: got "
            f"{values[at]}; expected whole numbers from 0 on; mend the value, or leave the row out"
        )
    dtype = np.int32 if values.max(initial=0) < 2**31 else np.int64
    if isinstance(column, Ragged):
        return Ragged(column.values.astype(dtype, copy=False), column.offsets)
    return column.astype(dtype, copy=False)


def _check_target(name: str, column: Column, place: Place) -> None:
    """Raises InputError where a value is missing or infinite."""
    values = flat_values(column)
    is_bad = ~np.isfinite(values)
    if is_bad.any():
        bad = int(np.argmax(is_bad))
        at = int(row_of_value(column)[bad])
        raise InputError(
            f"target {name!r} has no value in {place(at)}: got {values[bad]}; expected a finite "
            "number; mend the value, or leave the row out"
        )


def _digest(
    data: FederatedData,
    inputs: Mapping[str, str],
    target: str | None,
    names: Mapping[str, Sequence[str]],
) -> str:
    """The SHA-256 of all that the data hold and declare."""
    said = [list(data.client_ids), data.counts.tolist(), [*inputs.items()], target]
    digest = sha256(json.dumps([said, {n: list(names[n]) for n in sorted(names)}]).encode())
    for name, column in sorted(data.columns.items()):
        arrays = [column.values, column.offsets] if isinstance(column, Ragged) else [column]
        for array in arrays:
            digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
