"""NumPy archives: arrays by name, checked before they are used."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from keyhole.data.source import bad_file, reading
from keyhole.types import Array

__all__ = ["load_arrays", "names_in"]


def names_in(path: Path) -> set[str]:
    """Returns the names of the arrays in a .npz file without reading them."""
    with reading(path, "a whole .npz file"), zipfile.ZipFile(path) as archive:
        return {name.removesuffix(".npy") for name in archive.namelist()}


def load_arrays(path: Path, kinds: Mapping[str, str]) -> dict[str, Array]:
    """Returns arrays of a .npz file.

    Args:
        path: the file.
        kinds: name -> the dtype kinds it may have, such as "ui" for whole numbers.

    Raises:
        InputError: the file is cut short, or an array is missing or of another kind.
    """
    missing = sorted(kinds.keys() - names_in(path))
    if missing:
        raise bad_file(path, got=f"no array {', '.join(missing)}", allowed=f"{', '.join(kinds)}")
    with reading(path, "a whole .npz file"), np.load(path, allow_pickle=False) as archive:
        arrays = {name: archive[name] for name in kinds}
    for name, array in arrays.items():
        if array.dtype.kind not in kinds[name]:
            expected = " or ".join(_SAID[kind] for kind in kinds[name])
            raise bad_file(path, got=f"{name} of {array.dtype}", allowed=expected)
    return arrays


_SAID = {"u": "unsigned integers", "i": "integers", "U": "text", "b": "booleans"}
