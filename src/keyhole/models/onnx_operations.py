"""Turns operations of a JAX trace into nodes of an ONNX graph: `onnx_graph.py` walks the trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np


class Graph(Protocol):
    """A graph that operations add nodes to."""

    def op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """Adds a node; returns the name of what it comes to."""
        ...

    def constant(self, value: Any) -> str:
        """Returns the name of a tensor that holds a value."""
        ...

    def cast(self, name: str, dtype: Any) -> str:
        """Returns a tensor in another type."""
        ...

    def size(self, values: tuple[int, ...]) -> str:
        """Returns an int64 tensor (1,) of a size that is `values` in the traces."""
        ...

    def shape(self, *shapes: tuple[int, ...]) -> str:
        """Returns an int64 tensor of a shape that is `shapes` in the traces."""
        ...


class NoFormError(Exception):
    """An operation or a size that has no form in ONNX."""


def _out(eqns: Sequence[Any]) -> list[Any]:
    """What an operation comes to, as each trace describes it."""
    return [eqn.outvars[0].aval for eqn in eqns]


def _in(eqns: Sequence[Any], place: int = 0) -> list[Any]:
    return [eqn.invars[place].aval for eqn in eqns]


def _reshape(graph: Graph, eqns: Sequence[Any], x: str) -> str:
    return graph.op("Reshape", x, graph.shape(*(out.shape for out in _out(eqns))))


def _broadcast(graph: Graph, eqns: Sequence[Any], x: str) -> str:
    outs, ins = [out.shape for out in _out(eqns)], [value.shape for value in _in(eqns)]
    places = eqns[0].params["broadcast_dimensions"]
    ones = [[1] * len(out) for out in outs]
    for each, shape in zip(ones, ins, strict=True):
        for place, size in zip(places, shape, strict=True):
            each[place] = size
    if len(places) < len(outs[0]):
        x = graph.op("Reshape", x, graph.shape(*map(tuple, ones)))
    if [tuple(each) for each in ones] == outs:
        return x
    return graph.op("Expand", x, graph.shape(*outs))


def _convert(graph: Graph, eqns: Sequence[Any], x: str) -> str:
    return graph.cast(x, _out(eqns)[0].dtype)


def _transpose(graph: Graph, eqns: Sequence[Any], x: str) -> str:
    return graph.op("Transpose", x, perm=list(eqns[0].params["permutation"]))


def _concatenate(graph: Graph, eqns: Sequence[Any], *parts: str) -> str:
    return graph.op("Concat", *parts, axis=eqns[0].params["dimension"])


def _slice(graph: Graph, eqns: Sequence[Any], x: str) -> str:
    starts, ends = (
        graph.shape(*(eqn.params[name] for eqn in eqns))
        for name in ("start_indices", "limit_indices")
    )
    rank = len(eqns[0].params["start_indices"])
    steps = eqns[0].params["strides"] or (1,) * rank
    axes = graph.constant(np.arange(rank))
    return graph.op("Slice", x, starts, ends, axes, graph.constant(np.array(steps, np.int64)))


def _iota(graph: Graph, eqns: Sequence[Any]) -> str:
    axis, outs = eqns[0].params["dimension"], [out.shape for out in _out(eqns)]
    scalar = graph.constant(np.zeros(0, np.int64))
    end = graph.op("Reshape", graph.size(tuple(out[axis] for out in outs)), scalar)
    line = graph.op("Range", graph.constant(np.int64(0)), end, graph.constant(np.int64(1)))
    ones = [1] * len(outs[0])
    ones[axis] = -1
    placed = graph.op("Reshape", line, graph.constant(np.array(ones, np.int64)))
    return graph.cast(graph.op("Expand", placed, graph.shape(*outs)), _out(eqns)[0].dtype)


def _reduce(kind: str) -> Callable[..., str]:
    def reduce(graph: Graph, eqns: Sequence[Any], x: str) -> str:
        axes, is_bool = np.array(eqns[0].params["axes"], np.int64), _in(eqns)[0].dtype == bool
        if is_bool:
            x = graph.cast(x, np.int32)
        found = graph.op(kind, x, graph.constant(axes), keepdims=0)
        return graph.cast(found, _out(eqns)[0].dtype) if is_bool else found

    return reduce


def _arg(kind: str) -> Callable[..., str]:
    def arg(graph: Graph, eqns: Sequence[Any], x: str) -> str:
        (axis,) = eqns[0].params["axes"]
        return graph.cast(graph.op(kind, x, axis=int(axis), keepdims=0), _out(eqns)[0].dtype)

    return arg


def _dot(graph: Graph, eqns: Sequence[Any], a: str, b: str) -> str:
    (of_a, of_b), (batch_a, batch_b) = eqns[0].params["dimension_numbers"]
    rank_a, rank_b = len(_in(eqns, 0)[0].shape), len(_in(eqns, 1)[0].shape)
    if not batch_a and rank_b == 2 and tuple(of_b) == (0,) and tuple(of_a) == (rank_a - 1,):
        return graph.op("MatMul", a, b)
    letters: Iterator[str] = iter("abcdefghijklmnopqrstuvwxyz")
    left, right = ["" for _ in range(rank_a)], ["" for _ in range(rank_b)]
    for one, other in [*zip(batch_a, batch_b, strict=True), *zip(of_a, of_b, strict=True)]:
        left[one] = right[other] = next(letters)
    shared = {*left, *right}
    left, right = ([at or next(letters) for at in side] for side in (left, right))
    out = [left[i] for i in batch_a] + [at for at in (*left, *right) if at not in shared]
    return graph.op("Einsum", a, b, equation=f"{''.join(left)},{''.join(right)}->{''.join(out)}")


def _convolve(graph: Graph, eqns: Sequence[Any], images: str, kernel: str) -> str:
    told = eqns[0].params
    if set(told["lhs_dilation"]) != {1} or told["batch_group_count"] != 1:
        raise NoFormError("a transposed convolution")
    into, of_kernel, out = told["dimension_numbers"]  # where batch, features and space stand
    befores, afters = zip(*told["padding"], strict=True)
    found = graph.op(
        "Conv",
        graph.op("Transpose", images, perm=list(into)),
        graph.op("Transpose", kernel, perm=list(of_kernel)),
        strides=list(told["window_strides"]),
        dilations=list(told["rhs_dilation"]),
        pads=[*befores, *afters],
        group=told["feature_group_count"],
    )
    return graph.op("Transpose", found, perm=np.argsort(out).tolist())


def _gather(graph: Graph, eqns: Sequence[Any], x: str, at: str) -> str:
    """Rows along one axis, as x[at] takes them."""
    told, size, shape = eqns[0].params, eqns[0].params["slice_sizes"], _in(eqns)[0].shape
    numbers, place = told["dimension_numbers"], _in(eqns, 1)[0]
    axes, rank = tuple(numbers.start_index_map), len(place.shape) - 1
    is_rows = numbers.collapsed_slice_dims == axes == (0,) and not numbers.operand_batching_dims
    whole = tuple(numbers.offset_dims) == tuple(range(rank, rank + len(shape) - 1))
    if not (is_rows and whole and size == (1, *shape[1:])):
        raise NoFormError("a gather that takes no whole rows")
    index = graph.op("Squeeze", at, graph.constant(np.array([-1])))
    last, zero = (graph.constant(np.array(v, place.dtype)) for v in (shape[0] - 1, 0))
    near = graph.op("Max", graph.op("Min", index, last), zero)
    found = graph.op("Gather", x, near, axis=0)
    if "FILL" not in told["mode"].name:
        return found
    value = np.nan if told["fill_value"] is None else told["fill_value"]
    filled = graph.constant(np.array(value, _in(eqns)[0].dtype))
    is_there = graph.op("Equal", index, near)
    for _ in shape[1:]:
        is_there = graph.op("Unsqueeze", is_there, graph.constant(np.array([-1])))
    return graph.op("Where", is_there, found, filled)


def _scatter(reduction: str) -> Callable[..., str]:
    def scatter(graph: Graph, eqns: Sequence[Any], x: str, at: str, values: str) -> str:
        """Single numbers, each put where its index says; those outside go beyond the end, which is
        cut off."""
        numbers, rank = eqns[0].params["dimension_numbers"], len(_in(eqns)[0].shape)
        points = tuple(range(rank))
        if (
            not points
            == tuple(numbers.inserted_window_dims)
            == tuple(numbers.scatter_dims_to_operand_dims)
        ):
            raise NoFormError("a scatter of more than single numbers")
        end = graph.shape(*(value.shape for value in _in(eqns)))
        index = graph.cast(at, np.int64)
        is_in = graph.op(
            "And",
            graph.op("GreaterOrEqual", index, graph.constant(np.int64(0))),
            graph.op("Less", index, end),
        )
        index = graph.op("Where", is_in, index, end)
        pads = graph.constant(np.array([0] * rank + [1] * rank))
        wide = graph.op("Pad", x, pads)
        put = graph.op("ScatterND", wide, index, values, reduction=reduction)
        zeros, axes = graph.constant(np.zeros(rank, np.int64)), graph.constant(np.arange(rank))
        return graph.op("Slice", put, zeros, end, axes)

    return scatter


def _pad(graph: Graph, eqns: Sequence[Any], x: str, value: str) -> str:
    befores, afters, between = zip(*eqns[0].params["padding_config"], strict=True)
    if any(between):
        raise NoFormError("padding between elements")
    return graph.op("Pad", x, graph.constant(np.array([*befores, *afters])), value)


def _select(graph: Graph, eqns: Sequence[Any], which: str, *cases: str) -> str:
    if len(cases) != 2 or _in(eqns)[0].dtype != bool:
        raise NoFormError("a choice among more than two")
    no, yes = cases
    if _out(eqns)[0].dtype != bool:
        return graph.op("Where", which, yes, no)
    if_not = graph.op("And", graph.op("Not", which), no)  # runtimes choose among numbers alone
    return graph.op("Or", graph.op("And", which, yes), if_not)


def _power(graph: Graph, eqns: Sequence[Any], x: str) -> str:
    return graph.op("Pow", x, graph.constant(np.array(eqns[0].params["y"], _in(eqns)[0].dtype)))


def _with(kind: str, value: float) -> Callable[..., str]:
    def of(graph: Graph, eqns: Sequence[Any], x: str) -> str:
        return graph.op(kind, x, graph.constant(np.array(value, _in(eqns)[0].dtype)))

    return of


ONE_TO_ONE = {
    "abs": "Abs",
    "add": "Add",
    "add_any": "Add",
    "and": "And",
    "ceil": "Ceil",
    "copy": "Identity",
    "cos": "Cos",
    "div": "Div",
    "eq": "Equal",
    "erf": "Erf",
    "exp": "Exp",
    "floor": "Floor",
    "ge": "GreaterOrEqual",
    "gt": "Greater",
    "le": "LessOrEqual",
    "log": "Log",
    "logistic": "Sigmoid",
    "lt": "Less",
    "max": "Max",
    "min": "Min",
    "mul": "Mul",
    "neg": "Neg",
    "not": "Not",
    "or": "Or",
    "pow": "Pow",
    "sign": "Sign",
    "sin": "Sin",
    "sqrt": "Sqrt",
    "stop_gradient": "Identity",
    "sub": "Sub",
    "tanh": "Tanh",
}
"""Operation of JAX -> the node of ONNX that does the same."""

OPERATIONS: Mapping[str, Callable[..., str]] = {
    "argmax": _arg("ArgMax"),
    "argmin": _arg("ArgMin"),
    "broadcast_in_dim": _broadcast,
    "clamp": lambda graph, _, low, x, high: graph.op("Max", graph.op("Min", x, high), low),
    "concatenate": _concatenate,
    "conv_general_dilated": _convolve,
    "convert_element_type": _convert,
    "dot_general": _dot,
    "expand_dims": _reshape,
    "gather": _gather,
    "integer_pow": _power,
    "iota": _iota,
    "is_finite": lambda graph, _, x: graph.op(
        "Not", graph.op("Or", graph.op("IsNaN", x), graph.op("IsInf", x))
    ),
    "log1p": lambda graph, eqns, x: graph.op("Log", _with("Add", 1)(graph, eqns, x)),
    "expm1": lambda graph, eqns, x: _with("Sub", 1)(graph, eqns, graph.op("Exp", x)),
    "ne": lambda graph, _, a, b: graph.op("Not", graph.op("Equal", a, b)),
    "pad": _pad,
    "reduce_and": _reduce("ReduceMin"),
    "reduce_max": _reduce("ReduceMax"),
    "reduce_min": _reduce("ReduceMin"),
    "reduce_or": _reduce("ReduceMax"),
    "reduce_prod": _reduce("ReduceProd"),
    "reduce_sum": _reduce("ReduceSum"),
    "reshape": _reshape,
    "rsqrt": lambda graph, _, x: graph.op("Reciprocal", graph.op("Sqrt", x)),
    "scatter": _scatter("none"),
    "scatter-add": _scatter("add"),
    "select_n": _select,
    "slice": _slice,
    "square": lambda graph, _, x: graph.op("Mul", x, x),
    "squeeze": _reshape,
    "transpose": _transpose,
}
"""Operation of JAX -> `(graph, the operation in each trace, *inputs) -> output`."""
