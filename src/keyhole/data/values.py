"""Reads the values of one column of your own: numbers, dates, texts, or lists of them.

A column that was read is an array of numbers, or of texts (dtype object), or `Ragged` rows of
either. Lists of one length are a matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from keyhole.arrays import Array
from keyhole.data.federated import Column, Ragged
from keyhole.errors import InputError

_NUMBERS = (int, float, np.number, np.bool_)


def count_rows(values: Any) -> int:
    """Returns how many entries a column has; 0 for what has no length."""
    is_scalar = isinstance(values, np.ndarray) and not values.ndim
    return len(values) if hasattr(values, "__len__") and not is_scalar else 0


def flat_values(column: Column) -> Array:
    """Returns all values of a column, one after the other."""
    return column.flat if isinstance(column, Ragged) else column.reshape(-1)


def row_of_value(column: Column) -> Array:
    """Returns the row of each of `flat_values`, int64."""
    if isinstance(column, Ragged):
        return column.row_numbers
    return np.repeat(np.arange(len(column)), column.size // max(1, len(column)))


def read_column(name: str, values: Any, place: Callable[[int], str]) -> Column:
    """Returns a column: numbers and texts as they are, dates as microseconds since 1970.

    Args:
        place: says where a row is, for errors.

    >>> read_column("age", [3, 4.5], str).tolist()
    [3.0, 4.5]
    >>> read_column("words", [[1, 2], [3]], str).lengths.tolist()
    [2, 1]
    """
    if isinstance(values, Ragged):
        flat = read_column(name, values.flat, lambda at: place(int(values.row_numbers[at])))
        return Ragged(flat_values(flat), values.offsets - values.offsets[0])
    array = values if isinstance(values, np.ndarray) else _as_array(values)
    if array.dtype.kind in "biuf" and array.ndim:
        return array
    if array.dtype.kind == "M" and array.ndim:
        return _read_dates(name, array, place)
    if array.dtype.kind == "U" and array.ndim:
        return array.astype(object)
    if array.dtype.kind == "O" and array.ndim:
        return _read_objects(name, array.tolist(), place)
    raise InputError(
        f"column {name!r} cannot be read: got {array.dtype} of rank {array.ndim}; expected "
        "numbers, dates, texts, or lists of numbers or texts, one for each example; convert it"
    )


def join_columns(name: str, parts: Sequence[Column]) -> Column:
    """Returns the rows of several columns that were read, one after the other."""
    if len({flat_values(part).dtype.kind == "O" for part in parts if flat_values(part).size}) > 1:
        raise InputError(
            f"column {name!r} is of two kinds: got texts and numbers; expected one kind; make all "
            "of it texts"
        )
    arrays = [part for part in parts if not isinstance(part, Ragged)]
    if len(arrays) == len(parts) and len({array.shape[1:] for array in arrays}) == 1:
        return np.concatenate(arrays)
    rows = [_to_ragged(name, part) for part in parts]
    filled = [part.flat for part in rows if len(part.flat)] or [np.empty(0, np.int64)]
    lengths = np.concatenate([part.lengths for part in rows])
    return _square(np.concatenate(filled), lengths)


def _to_ragged(name: str, part: Column) -> Ragged:
    if isinstance(part, Ragged):
        return part
    if part.ndim != 2:
        raise InputError(
            f"column {name!r} is of two shapes: got rows of shape {part.shape[1:]} and others; "
            "expected one shape, or lists; bring them to one shape"
        )
    return Ragged(part.reshape(-1), np.arange(len(part) + 1) * part.shape[1])


def _as_array(values: Any) -> Array:
    """Values one by one: NumPy would make texts of numbers that stand among texts."""
    listed = [*values] if hasattr(values, "__iter__") and not isinstance(values, str) else values
    if not isinstance(listed, list):
        return np.asarray(listed)
    if all(type(each) in (int, float, bool) for each in listed):
        return np.asarray(listed)
    array = np.empty(len(listed), object)
    for at, each in enumerate(listed):
        array[at] = each
    return array


def _read_dates(name: str, array: Array, place: Callable[[int], str]) -> Array:
    """Microseconds since 1970, int64."""
    if np.isnat(array).any():
        raise _missing(name, int(np.argmax(np.isnat(array.reshape(len(array), -1)).any(1))), place)
    return array.astype("datetime64[us]").astype(np.int64)


def _missing(name: str, row: int, place: Callable[[int], str]) -> InputError:
    return InputError(
        f"column {name!r} has no value in {place(row)}: got nothing; expected one; fill it in, or "
        "leave the row out"
    )


def _read_objects(name: str, values: list[Any], place: Callable[[int], str]) -> Column:
    """A column of Python objects, all of one kind."""
    first = next((each for each in values if not _is_missing(each)), None)
    kinds: tuple[tuple[type, ...], ...] = ((str,), _NUMBERS, (list, tuple, np.ndarray))
    kind = next((each for each in kinds if isinstance(first, each)), None)
    gone = -1
    for row, each in enumerate(values):
        if _is_missing(each):
            gone = row if gone < 0 else gone
        elif kind is None or not isinstance(each, kind):
            raise InputError(
                f"column {name!r} is of two kinds, or of none that is known: got a "
                f"{type(each).__name__} in {place(row)}; expected numbers alone, texts alone or "
                "lists alone; convert it"
            )
    if kind is _NUMBERS:
        numbers = np.array([np.nan if _is_missing(each) else each for each in values])
        return read_column(name, numbers, place)
    if gone >= 0:
        raise _missing(name, gone, place)
    if kind == (str,):
        return np.array(values, object)
    return _read_rows(name, values, place)


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, (float, np.floating)) and value != value)


def _read_rows(name: str, rows: list[Any], place: Callable[[int], str]) -> Column:
    """Rows of numbers or of texts."""
    parts: list[Array] = []
    for row, each in enumerate(rows):
        part = each if isinstance(each, np.ndarray) and each.dtype.kind != "O" else _as_array(each)
        is_texts = part.dtype.kind == "O" and all(isinstance(one, str) for one in part.tolist())
        if is_texts or part.dtype.kind == "U":
            part = part.astype(object)
        elif part.dtype.kind not in "biuf":
            part = _nested(name, row, each, place)
        parts.append(part)
    filled = [part for part in parts if part.size]
    if len({part.dtype.kind == "O" for part in filled}) > 1:
        raise InputError(
            f"column {name!r} is of two kinds: got lists of texts and lists of numbers; expected "
            "one kind; make all of it texts"
        )
    if len({part.shape for part in parts}) == 1 and filled:
        return np.stack(filled)
    for row, part in enumerate(parts):
        if part.ndim != 1:
            raise InputError(
                f"column {name!r} is of two shapes: got {part.shape} in {place(row)}; expected "
                "arrays of one shape, or lists; bring them to one shape"
            )
    values = np.concatenate(filled or [np.empty(0, np.int64)])
    return _square(values, np.array([len(part) for part in parts], np.int64))


def _nested(name: str, row: int, each: Any, place: Callable[[int], str]) -> Array:
    """The array of nested lists of numbers."""
    try:
        found = np.asarray([np.asarray(one, np.float64) for one in each])
    except (TypeError, ValueError):
        found = np.empty(0, object)
    if found.dtype.kind != "f":
        raise InputError(
            f"column {name!r} cannot be read in {place(row)}: got a list of several kinds; "
            "expected numbers alone or texts alone; convert it"
        )
    return found


def _square(values: Array, lengths: Array) -> Column:
    """A matrix where all rows are of one length, else ragged rows."""
    if len(lengths) and lengths[0] and (lengths == lengths[0]).all():
        return values.reshape(len(lengths), -1)
    return Ragged(values, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))


def to_float32(column: Column) -> Column:
    """Returns a column whose float64 are float32; others as they are."""
    if flat_values(column).dtype != np.float64:
        return column
    if isinstance(column, Ragged):
        return Ragged(column.values.astype(np.float32), column.offsets)
    return column.astype(np.float32)
