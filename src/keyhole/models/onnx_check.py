"""Says what ONNX graphs here have in common, and whether one says what its model says."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from keyhole.arrays import Array
from keyhole.errors import InputError
from keyhole.models.client_update import Batch

OPSET = 18
OUTPUT = "output"
"""The name of what a graph comes to."""


def check_graph(graph: Any, batch: Batch, outputs: Array) -> None:
    """Raises InputError unless a graph is well-formed and says of examples what a model says."""
    importlib.import_module("onnx").checker.check_model(graph)
    evaluator = importlib.import_module("onnx.reference").ReferenceEvaluator(graph)
    (found,) = evaluator.run(None, {each.name: batch[each.name] for each in graph.graph.input})
    is_shaped = np.shape(found) == np.shape(outputs)
    if not (is_shaped and np.allclose(found, outputs, rtol=1e-4, atol=1e-5, equal_nan=True)):
        off = f"{np.nanmax(np.abs(found - outputs)):.2g} off" if is_shaped else "other shapes"
        raise InputError(
            f"the ONNX graph does not say what the model says: got outputs {off} on "
            f"{len(outputs)} examples; expected the same; write .npz or .safetensors"
        )
