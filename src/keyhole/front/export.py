"""Writes a trained model to one file that other programs read, with what says where it comes from.

The parameters are there under their names, "layer/kernel", with the bytes that the run has. Beside
them stand the run's record, the number of rounds, and the SHA-256 of names, shapes and bytes, so
that a file says which run made it and whether it is whole.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from keyhole import tree
from keyhole.arrays import Array, Tree
from keyhole.errors import InputError
from keyhole.files import replacing
from keyhole.parts import near_miss
from keyhole.rounds.spec import RunSpec

ABOUT = "keyhole"
"""The name of what stands beside the parameters: JSON of spec, rounds and sha256."""


def export_model(model: Tree, path: Path, spec: RunSpec, rounds: int) -> str:
    """Writes parameters to a .npz or .safetensors file; returns their digest.

    Args:
        model: the parameters.
        path: its ending says the format.
        spec: the run that they are of.
        rounds: that were made.

    Raises:
        InputError: no such format, or what writes it is not installed.
    """
    if path.suffix not in FORMATS:
        raise InputError(
            f"a model is not written in this format: got {path.name}; expected a name that ends in "
            f"{' or '.join(FORMATS)}; {near_miss(path.suffix, FORMATS)}; a program that needs "
            "another format, such as ONNX, makes it from these arrays and its own model"
        )
    arrays = {name: np.ascontiguousarray(leaf) for name, leaf in tree.flatten(model).items()}
    digest = digest_of(arrays)
    about = {"spec": spec.describe(), "rounds": rounds, "sha256": digest}
    with replacing(path) as descriptor, open(descriptor, "wb", closefd=False) as file:
        FORMATS[path.suffix](file, arrays, json.dumps(about))
    return digest


def digest_of(arrays: Mapping[str, Array]) -> str:
    """Returns the SHA-256 of names, types, shapes and bytes, in the order of names.

    >>> digest_of({"w": np.zeros(2)}) == digest_of({"w": np.zeros((2, 1))})
    False
    """
    found = sha256()
    for name, array in sorted(arrays.items()):
        little = array.astype(array.dtype.newbyteorder("<"), copy=False)
        found.update(f"{name} {array.dtype.name} {array.shape}\n".encode())
        found.update(np.ascontiguousarray(little).data)
    return found.hexdigest()


def _write_npz(file: Any, arrays: Mapping[str, Array], about: str) -> None:
    named: dict[str, Any] = {**arrays, ABOUT: np.array(about)}
    np.savez(file, **named)


def _write_safetensors(file: Any, arrays: Mapping[str, Array], about: str) -> None:
    try:
        save = importlib.import_module("safetensors.numpy").save
    except ImportError as error:
        raise InputError(
            "safetensors is not installed: got no safetensors; expected the extra 'export'; pip "
            "install 'keyhole[export]', or write .npz"
        ) from error
    file.write(save(dict(arrays), metadata={ABOUT: about}))


FORMATS: Mapping[str, Callable[[Any, Mapping[str, Array], str], None]] = {
    ".npz": _write_npz,
    ".safetensors": _write_safetensors,
}
"""Ending of a file's name -> what writes it."""
