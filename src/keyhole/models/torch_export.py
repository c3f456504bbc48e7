"""Writes a PyTorch module as an ONNX graph, by PyTorch's own exporter; needs the extra `onnx`."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from keyhole.arrays import Tree
from keyhole.errors import InputError
from keyhole.models.client_update import Batch
from keyhole.models.onnx_check import OPSET, OUTPUT, check_graph
from keyhole.models.torch_training import as_tensors, torch_lib


def torch_graph(model: Any, params: Tree, batch: Batch) -> Any:
    """Returns the whole module of a `kh.torch.Model` as an onnx.ModelProto, whose inputs are the
    columns that it reads.

    Raises:
        InputError: PyTorch's exporter refuses the module, or its graph comes to something else.
    """
    torch = torch_lib()
    columns = {n: t for n, t in as_tensors(batch).items() if isinstance(t, torch.Tensor)}
    names = list(columns)

    class Predict(torch.nn.Module):  # type: ignore[misc, name-defined]
        """The module with one argument for each column."""

        def __init__(self) -> None:
            super().__init__()
            self.module = model.module(params)

        def forward(self, *given: Any) -> Any:
            return model.outputs(self.module, dict(zip(names, given, strict=True)))

    auto = torch.export.Dim.AUTO
    free = [
        {0: auto} | ({1: auto} if t.dim() == 2 and not t.is_floating_point() else {})
        for t in columns.values()
    ]
    try:
        with _quiet():
            made = torch.onnx.export(
                Predict().train(False),
                tuple(columns.values()),
                dynamo=True,
                dynamic_shapes=(tuple(free),),
                input_names=names,
                output_names=[OUTPUT],
                opset_version=OPSET,
                verbose=False,
            )
    except Exception as error:
        raise InputError(
            f"this module has no ONNX form: got {' '.join(str(error).split())[:300]}; expected a "
            "module that torch.onnx.export takes; write .npz or .safetensors"
        ) from error
    graph = made.model_proto
    read = {name for node in graph.graph.node for name in node.input}
    for unread in [each for each in graph.graph.input if each.name not in read]:
        graph.graph.input.remove(unread)
    check_graph(graph, {n: np.asarray(t) for n, t in columns.items()}, model.predict(params, batch))
    return graph


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps what PyTorch says of its progress off the screen."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = [each.level for each in loggers]
    try:
        for each in loggers:
            each.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for each, level in zip(loggers, levels, strict=True):
            each.setLevel(level)
