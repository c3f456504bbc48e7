"""Reads tables of your own into a `Dataset`: pandas, Hugging Face, and files.

None of these libraries is imported before it is needed; CSV, JSON lines and .npz need none.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from keyhole.arrays import Array
from keyhole.data.federated import Column, Dataset, Ragged
from keyhole.data.own import OWN, from_arrays
from keyhole.data.readers.source import Progress, bad_file, reading
from keyhole.data.values import join_columns, read_column
from keyhole.errors import InputError

_CHUNK = 100_000  # rows of a CSV file that are texts at a time


def from_pandas(
    frame: Any,
    *,
    client: str,
    inputs: Mapping[str, str] | None = None,
    target: str | None = None,
    name: str = OWN,
) -> Dataset:
    """Returns the examples of clients from a pandas frame, one in each row.

    Args:
        frame: a `pandas.DataFrame`; its index is left out.
        client: the column that says whose row it is.

    The other arguments, and what is refused, are those of `from_arrays`.
    """
    if not hasattr(frame, "columns") or not hasattr(frame, "iloc"):
        raise InputError(
            f"data are no frame: got a {type(frame).__name__}; expected a pandas.DataFrame; use "
            "from_arrays or from_dict for others"
        )
    labels = [str(label) for label in frame.columns]
    if twice := sorted({label for label in labels if labels.count(label) > 1}):
        raise InputError(
            f"the frame has a column twice: got {', '.join(twice)}; expected each name once; "
            "rename one"
        )
    columns = {label: _series(frame.iloc[:, at]) for at, label in enumerate(labels)}
    return from_arrays(columns, client=client, inputs=inputs, target=target, name=name)


def _series(series: Any) -> Array:
    """The values of a column of pandas; what is missing is NaN, NaT or None."""
    if getattr(series.dtype, "tz", None) is not None:
        series = series.dt.tz_convert("UTC").dt.tz_localize(None)
    values = series.to_numpy()
    if values.dtype.kind == "O" and bool(series.isna().any()):
        values = series.astype(object).where(series.notna(), None).to_numpy()
    return np.asarray(values)


def from_huggingface(
    dataset: Any,
    *,
    client: str,
    inputs: Mapping[str, str] | None = None,
    target: str | None = None,
    name: str = OWN,
) -> Dataset:
    """Returns the examples of clients from a `datasets.Dataset`, one in each row.

    Args:
        dataset: one split of Hugging Face's library, with a column of clients. Names of its class
            labels become `names` of the result.
        client: the column that says whose row it is.

    The other arguments, and what is refused, are those of `from_arrays`.
    """
    columns = getattr(dataset, "column_names", None)
    if not isinstance(columns, list) or not hasattr(dataset, "num_rows"):
        raise InputError(
            f"data are no datasets.Dataset: got a {type(dataset).__name__}; expected one split "
            'that is on disk or in memory; choose one, such as dataset["train"]'
        )
    table = dataset.with_format("arrow")[:]
    known = {column: getattr(dataset.features[column], "names", None) for column in columns}
    names = {(inputs or {}).get(each, each): labels for each, labels in known.items() if labels}
    return from_arrays(
        _of_arrow(table), client=client, inputs=inputs, target=target, names=names, name=name
    )


def from_files(
    paths: str | Path | Sequence[str | Path],
    *,
    client: str,
    inputs: Mapping[str, str] | None = None,
    target: str | None = None,
    name: str | None = None,
    progress: Progress | None = None,
) -> Dataset:
    """Returns the examples of clients from files that hold one table together.

    Args:
        paths: one file or several: .csv with a header, .jsonl with an object on each line, .npz
            with an array for each column (lists of unequal length as NAME.values and
            NAME.offsets), .parquet.
        client: the column that says whose row it is.
        name: of the dataset; None for that of the first file.
        progress: called with the bytes that are read and how many there are.

    The other arguments, and what is refused, are those of `from_arrays`.
    """
    files = [Path(paths)] if isinstance(paths, (str, Path)) else [Path(path) for path in paths]
    columns = read_tables(files, progress or (lambda done, total: None))
    called = name or files[0].name.partition(".")[0]
    return from_arrays(columns, client=client, inputs=inputs, target=target, name=called)


def read_tables(files: Sequence[Path], progress: Progress) -> dict[str, Any]:
    """Returns the columns of a table that lies in one file or several."""
    for path in files:
        if path.suffix not in READERS or not path.is_file():
            raise bad_file(
                path,
                f"a name that ends in {path.suffix!r}" if path.is_file() else "no such file",
                f"a file that ends in {', '.join(READERS)}",
                fix="convert it, or name another",
            )
    if not files:
        raise InputError("no file to read: got an empty list; expected one or more; name one")
    sizes = [path.stat().st_size for path in files]
    tables = []
    for number, path in enumerate(files):
        before = sum(sizes[:number])

        def tell(done: int, before: int = before) -> None:
            progress(before + done, sum(sizes))

        with reading(path, f"a whole {path.suffix} file"):
            tables.append(READERS[path.suffix](path, tell))
        tell(sizes[number])
    first = tables[0]
    if len(tables) == 1:
        return first
    for path, table in zip(files, tables, strict=True):
        if table.keys() != first.keys():
            raise bad_file(path, f"columns {', '.join(table)}", ", ".join(first))
    return {column: _join(column, files, tables) for column in first}


def _join(column: str, files: Sequence[Path], tables: Sequence[Mapping[str, Any]]) -> Column:
    def place(path: Path) -> Callable[[int], str]:
        return lambda row: f"row {row} of {path.name}"

    parts = [
        read_column(column, table[column], place(path))
        for path, table in zip(files, tables, strict=True)
    ]
    return join_columns(column, parts)


def _read_csv(path: Path, tell: Callable[[int], None]) -> dict[str, Any]:
    """Columns of a CSV file: whole numbers, numbers, or texts where one entry is neither."""
    as_text: set[str] = set()
    while True:
        chunks: dict[str, list[Array]] = {}
        for names, columns in _csv_chunks(path, tell):
            for name, cells in zip(names, columns, strict=True):
                found = _cells(cells, name in as_text)
                chunks.setdefault(name, []).append(found)
        mixed = {name for name, parts in chunks.items() if len({p.dtype == "O" for p in parts}) > 1}
        if not mixed:
            return {name: np.concatenate(parts) for name, parts in chunks.items()}
        as_text |= mixed  # what was read as a number was a text: 007


def _csv_chunks(
    path: Path, tell: Callable[[int], None]
) -> Iterator[tuple[list[str], list[tuple[str, ...]]]]:
    with path.open("rb") as raw, io.TextIOWrapper(raw, "utf-8-sig", newline="") as text:
        lines = _csv_lines(text)
        _, names = next(lines, (0, []))
        if not names or len(set(names)) < len(names):
            raise ValueError(f"a first line of {', '.join(names) or 'nothing'}, not of names")
        rows: list[list[str]] = []
        for line, row in lines:
            if len(row) != len(names):
                raise ValueError(f"{len(row)} cells in line {line}, not {len(names)}")
            rows.append(row)
            if len(rows) == _CHUNK:
                yield names, list(zip(*rows, strict=True))
                rows = []
                tell(raw.tell())
        yield names, list(zip(*rows, strict=True)) or [()] * len(names)


def _csv_lines(text: Iterable[str]) -> Iterator[tuple[int, list[str]]]:
    """The number and the cells of each line that is not empty."""
    lines = csv.reader(text, strict=True)
    try:
        for row in lines:
            if row:
                yield lines.line_num, row
    except csv.Error as error:
        raise ValueError(f"line {lines.line_num}: {error}") from error


def _cells(cells: Sequence[str], is_text: bool) -> Array:
    """Cells of a CSV file; an empty one is missing."""
    if not is_text:
        try:
            return np.array([int(cell) for cell in cells], np.int64)
        except (ValueError, OverflowError):
            pass
        try:
            return np.array([float(cell) if cell else np.nan for cell in cells], np.float64)
        except ValueError:
            pass
    return np.array([cell or None for cell in cells], object)


def _read_jsonl(path: Path, tell: Callable[[int], None]) -> dict[str, Any]:
    """Columns of JSON lines; what an object does not have is missing."""
    columns: dict[str, list[Any]] = {}
    count = 0
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"line {number}: {error}") from error
            if not isinstance(record, dict):
                raise ValueError(f"a {type(record).__name__} in line {number}, not an object")
            for name in record.keys() - columns.keys():
                columns[name] = [None] * count
            for name, values in columns.items():
                values.append(record.get(name))
            count += 1
            if count % _CHUNK == 0:
                tell(lines.tell())
    return dict(sorted(columns.items()))


def _read_npz(path: Path, tell: Callable[[int], None]) -> dict[str, Any]:
    """Arrays of a .npz file; NAME.values with NAME.offsets are rows of unequal length."""
    with np.load(path, allow_pickle=False) as archive:
        arrays = {name: archive[name] for name in archive.files}
    ends = {name.removesuffix(".offsets") for name in arrays if name.endswith(".offsets")}
    found: dict[str, Any] = {}
    for name in sorted(each for each in ends if f"{each}.values" in arrays):
        values, offsets = arrays.pop(f"{name}.values"), arrays.pop(f"{name}.offsets")
        is_whole = offsets.ndim == values.ndim == 1 and len(offsets) and offsets.dtype.kind in "iu"
        if not is_whole or offsets[0] or offsets[-1] != len(values) or (np.diff(offsets) < 0).any():
            raise ValueError(f"{name}.offsets that do not cut {name}.values into rows")
        found[name] = Ragged(values, offsets.astype(np.int64))
    return {**arrays, **found}


def _read_parquet(path: Path, tell: Callable[[int], None]) -> dict[str, Any]:
    try:
        from pyarrow import parquet
    except ImportError:
        pass
    else:
        return _of_arrow(parquet.ParquetFile(path).read())
    try:
        import pandas as pd

        frame = pd.read_parquet(path)
    except ImportError as error:
        raise InputError(
            f"cannot read {path}: got no pyarrow; expected it for Parquet; run: pip install "
            "'keyhole[data]'"
        ) from error
    return {str(label): _series(frame[label]) for label in frame.columns}


def _of_arrow(table: Any) -> dict[str, Any]:
    """Columns of a pyarrow Table."""
    return {name: _arrow_column(table.column(name)) for name in table.column_names}


def _arrow_column(chunked: Any) -> Any:
    """Numbers and plain lists of them without a Python object for each."""
    kind = str(chunked.type)
    if kind.startswith("dictionary"):
        return _arrow_column(chunked.cast(chunked.type.value_type))
    if kind.startswith("timestamp"):
        return chunked.to_numpy().astype("datetime64[us]")
    if kind.startswith(("int", "uint", "float", "double", "bool")):
        if kind == "bool" and chunked.null_count:
            return chunked.to_pylist()
        return chunked.to_numpy()
    if kind.startswith("list") and not chunked.null_count:
        array = chunked.combine_chunks()
        array = array.chunk(0) if hasattr(array, "num_chunks") and array.num_chunks else array
        inner = str(array.type.value_type)
        if inner.startswith(("int", "uint", "float", "double")) and not array.flatten().null_count:
            offsets = array.offsets.to_numpy()
            rows = Ragged(array.flatten().to_numpy(), (offsets - offsets[0]).astype(np.int64))
            return join_columns("", [rows])  # a matrix where all are of one length
    return chunked.to_pylist()


READERS: Mapping[str, Callable[[Path, Callable[[int], None]], dict[str, Any]]] = {
    ".csv": _read_csv,
    ".jsonl": _read_jsonl,
    ".npz": _read_npz,
    ".parquet": _read_parquet,
}
