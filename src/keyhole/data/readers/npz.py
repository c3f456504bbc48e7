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


def load_arrays(
    path: Path, kinds: Mapping[str, str], ranks: Mapping[str, tuple[int, ...]] | None = None
) -> dict[str, Array]:
    """Returns arrays of a .npz file.

    Args:
        path: the file.
        kinds: name -> the dtype kinds it may have, such as "ui" for whole numbers.
        ranks: name -> the ranks it may have, where that is not 1.

    Raises:
        InputError: the file is cut short, or an array is missing or of another kind or rank.
    """
    missing = sorted(kinds.keys() - names_in(path))
    if missing:
        raise bad_file(path, got=f"no array {', '.join(missing)}", allowed=f"{', '.join(kinds)}")
    with reading(path, "a whole .npz file"), np.load(path, allow_pickle=False) as archive:
        arrays = {name: archive[name] for name in kinds}
    for name, array in arrays.items():
        _check(path, name, array, kinds[name], (ranks or {}).get(name, (1,)))
    return arrays


def _check(path: Path, name: str, array: object, kinds: str, ranks: tuple[int, ...]) -> None:
    """Demands an array of one of these kinds and ranks."""
    if not isinstance(array, np.ndarray):  # a member of the archive that is no .npy file
        raise bad_file(path, got=f"{name} of {type(array).__name__}", allowed="an array")
    if array.dtype.kind not in kinds:
        expected = " or ".join(_SAID[kind] for kind in kinds)
        raise bad_file(path, got=f"{name} of {array.dtype}", allowed=expected)
    if array.ndim not in ranks:
        expected = f"an array of rank {' or '.join(map(str, ranks))}"
        raise bad_file(path, got=f"{name} of shape {array.shape}", allowed=expected)


_SAID = {"u": "unsigned integers", "i": "integers", "U": "text", "b": "booleans"}
