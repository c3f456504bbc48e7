"""Arrays that grow on disk: .npy files written row by row, their length known at the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy_format

from keyhole.types import Array

__all__ = ["ArrayFile", "RaggedFile"]

_BUFFER = 1 << 20  # bytes; clients are small, so most appends do not reach the disk


class ArrayFile:
    """Appends rows to a .npy file; memory does not grow with the rows.

    Args:
        path: the file to be made.
        dtype: of the array.
        row_shape: the shape of one row, () for an array of rank 1.
    """

    def __init__(self, path: Path, dtype: Any, row_shape: tuple[int, ...] = ()) -> None:
        self.rows = 0
        self._dtype = np.dtype(dtype)
        self._row_shape = row_shape
        self._file = path.open("xb", buffering=_BUFFER)
        self._write_header()

    def append(self, rows: Array) -> None:
        """Adds rows at the end."""
        block = np.ascontiguousarray(rows, self._dtype)
        assert block.shape[1:] == self._row_shape, "rows of one shape"
        self._file.write(block.tobytes())
        self.rows += len(block)

    def close(self) -> None:
        """Writes the true length into the header, which has room for any."""
        if self._file.closed:
            return
        self._file.seek(0)
        self._write_header()
        self._file.close()

    def _write_header(self) -> None:
        descr = npy_format.dtype_to_descr(self._dtype)
        shape = (self.rows, *self._row_shape)
        header = {"descr": descr, "fortran_order": False, "shape": shape}
        npy_format.write_array_header_1_0(self._file, header)


class RaggedFile:
    """Appends rows of unequal length to a pair of .npy files: `stem.values`, `stem.offsets`.

    Args:
        directory: where the files are made.
        stem: how their names begin.
        dtype: of the values.
    """

    def __init__(self, directory: Path, stem: str, dtype: Any) -> None:
        self._values = ArrayFile(directory / f"{stem}.values.npy", dtype)
        self._offsets = ArrayFile(directory / f"{stem}.offsets.npy", np.int64)
        self._offsets.append(np.zeros(1, np.int64))

    def append(self, values: Array, lengths: Array | list[int]) -> None:
        """Adds rows: their values one after the other, and the length of each."""
        ends = self._values.rows + np.cumsum(np.asarray(lengths, np.int64))
        assert len(values) == (ends[-1] - self._values.rows if len(ends) else 0)
        self._values.append(values)
        self._offsets.append(ends)

    def close(self) -> None:
        """Finishes both files."""
        self._values.close()
        self._offsets.close()
