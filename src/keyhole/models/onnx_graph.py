"""Writes what a JAX model predicts as an ONNX graph; needs the extra `onnx`.

`predict` is traced by JAX, and each operation of the trace becomes nodes of ONNX. Parameters are
initializers under their names. The trace is made for several numbers of examples at once, and for
several lengths of a column of lists: a size that differs between the traces is computed from the
sizes of the inputs, so the graph takes any number of examples. What has no form here is refused by
name.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import combinations, product
from math import prod
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

from keyhole import tree
from keyhole.arrays import Array, Tree
from keyhole.errors import InputError
from keyhole.models.client_update import Batch
from keyhole.models.onnx_check import OPSET, OUTPUT, check_graph
from keyhole.models.onnx_operations import ONE_TO_ONE, OPERATIONS, NoFormError

_EXAMPLES, _LENGTHS = (5, 7), (11, 13)  # sizes of the traces
_INLINED = ("jaxpr", "call_jaxpr", "fun_jaxpr")  # parameters that hold operations

Predict: TypeAlias = Callable[[Tree, Batch], Any]
"""`(parameters, batch) -> outputs`, one row per example."""

Sizes: TypeAlias = tuple[int, ...]
"""A size, in each trace."""


def onnx_graph(predict: Predict, params: Tree, batch: Batch) -> Any:
    """Returns what a model predicts as an onnx.ModelProto, whose inputs are the columns it reads.

    Args:
        predict: of the model.
        params: of the whole model.
        batch: some examples: their types and lengths are those of the inputs, and on them the graph
            is compared with the model.

    Raises:
        InputError: an operation of `predict` has no form here, or comes to something else.
    """
    graph = _graph_of(predict, params, batch)
    check_graph(graph, batch, np.asarray(jax.jit(predict)(params, batch)))
    return graph


def _graph_of(predict: Predict, params: Tree, batch: Batch) -> Any:
    """With lists of any length, where the model takes them; else of one."""
    examples = [("examples", None, 0, _EXAMPLES)]
    lists = [n for n, a in batch.items() if np.ndim(a) == 2 and np.issubdtype(a.dtype, np.integer)]
    lengths = [(f"length of {name}", name, 1, _LENGTHS) for name in lists]
    if lengths:
        with suppress(Exception):
            return _Graph(predict, params, batch, [*examples, *lengths[:1]]).proto()
    try:
        return _Graph(predict, params, batch, examples).proto()
    except NoFormError as error:
        raise InputError(
            f"this model has no ONNX form: got {error} in its predict; expected operations that "
            "docs/runs.md names, as those of all tasks here but movies; write .npz or .safetensors"
        ) from error


class _Graph:
    """A graph under construction: the traces of one model, walked side by side."""

    def __init__(
        self,
        predict: Predict,
        params: Tree,
        batch: Batch,
        free: Sequence[tuple[str, str | None, int, Sizes]],
    ) -> None:
        self._onnx: Any = importlib.import_module("onnx")
        self.helper, self.numpy = self._onnx.helper, importlib.import_module("onnx.numpy_helper")
        self.nodes: list[Any] = []
        self.constants: dict[tuple[str, Sizes, bytes], str] = {}
        self.initializers: list[Any] = []
        self.symbols: dict[str, str] = {}  # of a free size -> the tensor that holds it
        self.free = free
        self.corners = list(product(*(sizes for *_, sizes in free)))
        self._count, self._params, self._batch = 0, params, batch
        leaves = {name: np.asarray(leaf) for name, leaf in tree.flatten(params).items()}
        traces = [self._trace(predict, leaves, corner) for corner in self.corners]
        self._walk(traces, leaves)

    def _trace(self, predict: Predict, leaves: Mapping[str, Array], corner: Sizes) -> ClosedJaxpr:
        columns = {
            name: jax.ShapeDtypeStruct(self._shape_at(name, corner), np.asarray(a).dtype)
            for name, a in self._batch.items()
        }
        given = {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in leaves.items()}

        def flat(leaves: Mapping[str, Any], columns: Mapping[str, Any]) -> Any:
            return predict(tree.unflatten(self._params, leaves), dict(columns))

        try:
            return jax.make_jaxpr(flat)(given, columns)
        except Exception as error:
            raise NoFormError(f"{type(error).__name__} {error}"[:200]) from error

    def _shape_at(self, name: str, corner: Sizes) -> Sizes:
        shape = list(np.shape(self._batch[name]))
        for (_, column, axis, _), size in zip(self.free, corner, strict=True):
            if column in (None, name):
                shape[axis] = size
        return tuple(shape)

    def _walk(self, traces: list[ClosedJaxpr], leaves: Mapping[str, Array]) -> None:
        """Turns the traces into nodes; inputs that nothing reads are left out."""
        first = traces[0].jaxpr
        if len(first.outvars) != 1:
            raise NoFormError(f"{len(first.outvars)} outputs")
        names = [*sorted(leaves), *sorted(self._batch)]  # as JAX orders a dict
        read = {v for eqn in first.eqns for v in eqn.invars if not isinstance(v, Literal)}
        given: dict[Any, str] = {}
        self.inputs: list[str] = []
        for place, (name, variable) in enumerate(zip(names, first.invars, strict=True)):
            if place < len(leaves):
                given[variable] = f"params/{name}" if name in self._batch else name
                self.initializers.append(self.numpy.from_array(leaves[name], given[variable]))
            elif variable in read:
                given[variable] = name
                self.inputs.append(name)
        for label, column, axis, _ in self.free:
            source = column if column in self.inputs else next(iter(self.inputs), None)
            if source is None:
                raise NoFormError("no input")
            self.symbols[label] = self.op("Shape", source, start=axis, end=axis + 1)
        (found,) = self._inline(traces, [given[v] for v in first.invars if v in given], given)
        self.nodes.append(self.helper.make_node("Identity", [found], [OUTPUT]))
        self.output = [trace.out_avals[0] for trace in traces]

    def _inline(
        self, traces: Sequence[Any], args: Sequence[str], env: dict[Any, str] | None = None
    ) -> list[str]:
        """Adds the operations of traces; returns the names of what they come to."""
        plain = [getattr(trace, "jaxpr", trace) for trace in traces]
        first = plain[0]
        env = dict(zip(first.invars, args, strict=True)) if env is None else env
        consts = [getattr(trace, "consts", ()) for trace in traces]
        for variable, *values in zip(first.constvars, *consts, strict=True):
            env[variable] = self.constant(_same(values))
        for eqns in zip(*(trace.eqns for trace in plain), strict=True):
            kinds = {eqn.primitive.name for eqn in eqns}
            if len(kinds) > 1:
                raise NoFormError("operations that depend on the number of examples")
            told = [self._name(atoms, env) for atoms in zip(*(e.invars for e in eqns), strict=True)]
            env |= zip(eqns[0].outvars, self._operation(eqns, told), strict=True)
        return [self._name(atoms, env) for atoms in zip(*(p.outvars for p in plain), strict=True)]

    def _name(self, atoms: Sequence[Any], env: Mapping[Any, str]) -> str:
        """The tensor of a variable, or of a number that may differ between traces."""
        if not isinstance(atoms[0], Literal):
            return env[atoms[0]]
        values = [np.asarray(atom.val, atom.aval.dtype) for atom in atoms]
        if all(value == values[0] or value != value for value in values):
            return self.constant(values[0])
        if not np.issubdtype(values[0].dtype, np.integer):
            raise NoFormError("a number that depends on the number of examples")
        size = self.size(tuple(int(value) for value in values))
        return self.cast(
            self.op("Reshape", size, self.constant(np.zeros(0, np.int64))), values[0].dtype
        )

    def _operation(self, eqns: Sequence[Any], args: list[str]) -> list[str]:
        eqn, name = eqns[0], eqns[0].primitive.name
        inner = next((n for n in _INLINED if n in eqn.params), None)
        if inner is not None and name not in OPERATIONS:
            return self._inline([each.params[inner] for each in eqns], args)
        if name in ONE_TO_ONE:
            return [self.op(ONE_TO_ONE[name], *args)]
        if name not in OPERATIONS:
            raise NoFormError(f"operation {name}")
        return [OPERATIONS[name](self, eqns, *args)]

    def op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """Adds a node; returns the name of what it comes to."""
        self._count += 1
        name = f"{kind}_{self._count}"
        self.nodes.append(self.helper.make_node(kind, list(inputs), [name], name, **attributes))
        return name

    def constant(self, value: Any) -> str:
        """Returns the name of a tensor that holds a value."""
        array = np.asarray(value)
        key = str(array.dtype), array.shape, array.tobytes()
        if key not in self.constants:
            self.constants[key] = f"constant_{len(self.constants)}"
            self.initializers.append(self.numpy.from_array(array, self.constants[key]))
        return self.constants[key]

    def cast(self, name: str, dtype: Any) -> str:
        """Returns a tensor in another type."""
        return self.op("Cast", name, to=self.helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))

    def size(self, values: Sizes) -> str:
        """Returns an int64 tensor (1,) of a size that is `values` in the traces: a polynomial in
        the free sizes, each to the power of 0 or 1."""
        if len(set(values)) == 1:
            return self.constant(np.array(values[:1], np.int64))
        labels = [label for label, *_ in self.free]
        powers = [s for k in range(len(labels) + 1) for s in combinations(range(len(labels)), k)]
        known = np.array([[prod(corner[i] for i in p) for p in powers] for corner in self.corners])
        weights = np.rint(np.linalg.solve(known, np.array(values))).astype(np.int64)
        if (known @ weights != np.array(values)).any():
            raise NoFormError("a size that is no multiple of the number of examples")
        found = ""
        for weight, power in zip(weights.tolist(), powers, strict=True):
            if weight:
                term = (
                    self.constant(np.array([weight], np.int64)) if weight != 1 or not power else ""
                )
                for i in power:
                    symbol = self.symbols[labels[i]]
                    term = self.op("Mul", term, symbol) if term else symbol
                found = self.op("Add", found, term) if found else term
        return found

    def shape(self, *shapes: Sizes) -> str:
        """Returns an int64 tensor of a shape that is `shapes` in the traces."""
        if len(set(shapes)) == 1:
            return self.constant(np.array(shapes[0], np.int64))
        return self.op("Concat", *map(self.size, zip(*shapes, strict=True)), axis=0)

    def proto(self) -> Any:
        """Returns the model."""
        helper = self.helper

        def described(name: str, dtype: Any, shapes: Sequence[Sizes]) -> Any:
            dims = [self._dimension(sizes) for sizes in zip(*shapes, strict=True)]
            kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
            return helper.make_tensor_value_info(name, kind, dims)

        inputs = [
            described(name, np.asarray(self._batch[name]).dtype, shapes)
            for name in self.inputs
            for shapes in [[self._shape_at(name, corner) for corner in self.corners]]
        ]
        shapes = [aval.shape for aval in self.output]
        output = described(OUTPUT, self.output[0].dtype, shapes)
        graph = helper.make_graph(self.nodes, "predict", inputs, [output], self.initializers)
        opset = helper.make_opsetid("", OPSET)
        return helper.make_model(
            graph, opset_imports=[opset], ir_version=8, producer_name="keyhole"
        )

    def _dimension(self, sizes: Sizes) -> int | str | None:
        """A size where it is one, the name of a free one, None for what follows from these."""
        if len(set(sizes)) == 1:
            return sizes[0]
        corners = zip(*self.corners, strict=True)
        names = zip(self.free, corners, strict=True)
        return next((free[0] for free, known in names if known == tuple(sizes)), None)


def _same(values: Sequence[Any]) -> Array:
    first = np.asarray(values[0])
    if any(
        np.shape(v) != first.shape or np.asarray(v).tobytes() != first.tobytes() for v in values
    ):
        raise NoFormError("constants that depend on the number of examples")
    return first
