"""Writes a trained model to one file that other programs read, with what says where it comes from.

The parameters are there under their names, "layer/kernel", with the bytes that the run has. Beside
them stand the run's record, the number of rounds, and the SHA-256 of names, shapes and bytes, so
that a file says which run made it and whether it is whole. A .onnx file also has what the model
predicts of examples, as a graph.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from keyhole import tree
from keyhole.arrays import Array
from keyhole.errors import InputError
from keyhole.experiments.task import TaskParts
from keyhole.extras import check_installed
from keyhole.files import replacing, write_all
from keyhole.models.client_update import Batch
from keyhole.parts import near_miss
from keyhole.rounds.spec import RunSpec
from keyhole.server.state import ServerState

ABOUT = "keyhole"
"""The name of what stands beside the parameters: JSON of spec, rounds and sha256."""

Graph: TypeAlias = Callable[[], Any]
"""Returns the model as an onnx.ModelProto."""

_ONNX_BYTES = 2_000_000_000  # of parameters: a message of protobuf has 2 GiB at most
_EXAMPLES = 8  # on which a graph is compared with the model


def export_model(state: ServerState, path: Path, spec: RunSpec, task: TaskParts) -> str:
    """Writes a model to a .npz, .safetensors or .onnx file; returns the digest of its parameters.

    Args:
        state: that has it.
        path: its ending says the format.
        spec: the run that it is of.
        task: of the run; .onnx asks it for examples and for what the model predicts.

    Raises:
        InputError: no such format, what writes it is not installed, or the model has no such form.
    """
    if path.suffix not in FORMATS:
        raise InputError(
            f"a model is not written in this format: got {path.name}; expected a name that ends in "
            f"{' or '.join(FORMATS)}; {near_miss(path.suffix, FORMATS)}"
        )
    model = state.model()
    arrays = {name: np.ascontiguousarray(leaf) for name, leaf in tree.flatten(model).items()}
    digest = digest_of(arrays)
    about = json.dumps({"spec": spec.describe(), "rounds": state.steps, "sha256": digest})
    content = FORMATS[path.suffix](arrays, about, lambda: _graph_of(state, task))
    with replacing(path) as descriptor:
        write_all(descriptor, [content])
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


def _npz(arrays: Mapping[str, Array], about: str, _: Graph) -> bytes:
    named: dict[str, Any] = {**arrays, ABOUT: np.array(about)}
    file = BytesIO()
    np.savez(file, **named)
    return file.getvalue()


def _safetensors(arrays: Mapping[str, Array], about: str, _: Graph) -> bytes:
    try:
        save = importlib.import_module("safetensors.numpy").save
    except ImportError as error:
        raise InputError(
            "safetensors is not installed: got no safetensors; expected the extra 'export'; pip "
            "install 'keyhole[export]', or write .npz"
        ) from error
    made: bytes = save(dict(arrays), metadata={ABOUT: about})
    return made


def _onnx(arrays: Mapping[str, Array], about: str, graph: Graph) -> bytes:
    check_installed("onnx", "a model in ONNX")
    if (size := sum(array.nbytes for array in arrays.values())) > _ONNX_BYTES:
        raise InputError(
            f"the model is too large for one ONNX file: got {size / 1e9:.1f} GB; expected at most "
            f"{_ONNX_BYTES / 1e9:.1f} GB; write .npz or .safetensors"
        )
    made = graph()
    importlib.import_module("onnx").helper.set_model_props(made, {ABOUT: about})
    written: bytes = made.SerializeToString()
    return written


def _graph_of(state: ServerState, task: TaskParts) -> Any:
    """The model as ONNX."""
    make = getattr(task.model, "onnx", None)
    if make is None:
        raise InputError(
            f"this model has no ONNX form: got a {type(task.model).__name__} without a method "
            "onnx; expected kh.jax.Model, kh.torch.Model, or onnx(params, batch) of your own; "
            "write .npz or .safetensors"
        )
    return make(state.model(), _some_examples(task, state))


def _some_examples(task: TaskParts, state: ServerState) -> Batch:
    """A few examples, with keys of the whole model."""
    every = {space.name: space.all_keys() for space in task.model.layout.spaces}
    if task.clients:
        found = task.localize(task.data(0), every)
    elif task.predictions:
        _, found = next(iter(task.predictions.values()))(state)
    else:
        raise InputError(
            "nobody here knows what examples look like: got data that are at devices; expected "
            "some; train with --held-out FILE, or write .npz or .safetensors"
        )
    at = np.arange(_EXAMPLES) % min(map(len, found.values()))
    return {name: column[at] for name, column in found.items()}


FORMATS: Mapping[str, Callable[[Mapping[str, Array], str, Graph], bytes]] = {
    ".npz": _npz,
    ".safetensors": _safetensors,
    ".onnx": _onnx,
}
"""Ending of a file's name -> what makes its bytes."""
