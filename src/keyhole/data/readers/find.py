"""Which reader knows a file."""

from __future__ import annotations

from pathlib import Path

from keyhole.data.readers import femnist, leaf, movielens, stackexchange, tff_hdf5, tff_sqlite
from keyhole.data.source import Source, bad_file

__all__ = ["FORMATS", "find_source"]

FORMATS = {
    "FEMNIST .npz": femnist.find,
    "MovieLens .npz": movielens.find,
    "Stack Exchange .jsonl.xz": stackexchange.find,
    "TensorFlow Federated _train.h5": tff_hdf5.find,
    "TensorFlow Federated .sqlite": tff_sqlite.find,
    "LEAF .json": leaf.find,
}
"""Each returns the source at a path, or None if it does not know what is there."""


def find_source(path: Path) -> Source:
    """Returns the source at a path, found but not read.

    Raises:
        InputError: no reader knows it, or one does and something is missing.
    """
    for find in FORMATS.values():
        if (source := find(path)) is not None:
            return source
    fix = "see docs/data.md for the names of the files"
    if path.suffix == ".lzma":
        fix = f"unpack it first: unlzma {path.name}"
    raise bad_file(path, got=_describe(path), allowed=", ".join(FORMATS), fix=fix)


def _describe(path: Path) -> str:
    if path.is_dir():
        inside = sorted(file.name for file in path.iterdir())[:3]
        return f"a directory of {', '.join(inside) or 'nothing'}"
    return f"a file of no known format, {path.stat().st_size} bytes"
