"""Model: what is trained, as a frozen record of functions with its cuts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from keyhole import tree
from keyhole.arrays import Array, Tree
from keyhole.models.client_update import Batch
from keyhole.primitives.layout import Cut, Layout

HIDDEN_LOGIT = -1e30  # its exponential is 0 in float32, so what is padded has no share in a softmax


@dataclass(frozen=True, eq=False)
class Model:
    """A model and how it is cut.

    `loss` and `predict` read every size from the shapes of the parameters, so they serve the
    server's model and a sub-model of any number of keys alike.

    Args:
        init: `seed -> parameters`, a tree of float32 arrays.
        loss: `(parameters, batch, mask) -> scalar`, the mean over the examples where the bool mask
            (batch size,) holds; traced by JAX.
        predict: `(parameters, batch) -> outputs`, one row per example.
        cuts: which axes of which parameters belong to which key space.
        hide_padding: `(parameters, {key space: bool mask (slots,)}) -> parameters`. A padded slot
            holds zeros, which weigh nothing in a hidden layer; where they would count, as in a
            softmax over words, this function takes them out.
        plain_sgd: `(parameters, examples, batches, client_lr) -> (update, loss)` in NumPy, start
            minus end: a faster way to the same end as gradient steps on `loss`, if there is one.
            `batches` is int64 (steps, batch size), -1 for no example; the loss is their mean.
        added: paths of parameters from which the server subtracts the mean update as it is, without
            its optimizer: what an algorithm keeps at the server beside the model.

    >>> from keyhole import Cut, KeySpace
    >>> word = KeySpace("word", 50)
    >>> model = Model(
    ...     init=lambda seed: {"w": np.zeros((50, 3), np.float32)},
    ...     loss=lambda w, batch, mask: (w["w"][batch["word"]].sum(axis=1) * mask).mean(),
    ...     predict=lambda w, batch: w["w"][batch["word"]],
    ...     cuts=(Cut(word, {"w": 0}),),
    ... )
    >>> model.layout.client_size(word=4), model.layout.server_size
    (12, 150)
    """

    init: Callable[[int], Tree]
    loss: Callable[[Tree, Batch, Any], Any]
    predict: Callable[[Tree, Batch], Any]
    cuts: tuple[Cut, ...]
    hide_padding: Callable[[Tree, Mapping[str, Any]], Tree] | None = None
    plain_sgd: Callable[[Tree, Batch, Array, float], tuple[Tree, float]] | None = None
    added: tuple[str, ...] = ()

    @cached_property
    def layout(self) -> Layout:
        """The cuts checked against the shapes: select, deselect and sizes follow from it."""
        return Layout.of(self.init(0), *self.cuts)

    def lacking(self, examples: Batch) -> str | None:
        """Returns a column that the loss reads and examples lack; None where it lacks none, or has
        another fault, of which training will tell."""
        import jax

        lacked: list[str] = []

        class Columns(dict[str, Any]):
            def __missing__(self, name: str) -> Any:
                lacked.append(name)
                raise KeyError(name)

        def shape_of(leaf: Any) -> Any:
            return jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype)

        count = min(map(len, examples.values()), default=0)
        given = Columns({name: jax.numpy.asarray(each) for name, each in examples.items()})
        params, mask = tree.map_leaves(shape_of, self.init(0)), shape_of(np.ones(count, bool))
        with suppress(Exception):
            jax.eval_shape(lambda params, mask: self.loss(params, given, mask), params, mask)
        return lacked[0] if lacked else None

    def onnx(self, params: Tree, batch: Batch) -> Any:
        """Returns `predict` as an onnx.ModelProto; its inputs are columns as the batch has them."""
        from keyhole.models.onnx_graph import onnx_graph  # loads JAX

        return onnx_graph(self.predict, params, batch)


def glorot(rng: np.random.Generator, *shape: int, fan_in: int, fan_out: int) -> Array:
    """Draws weights uniformly from +-sqrt(6 / (fan_in + fan_out)), float32.

    Glorot and Bengio, Understanding the difficulty of training deep feedforward neural networks,
    2010, Eq. 16.
    """
    bound = np.float32(np.sqrt(6.0 / (fan_in + fan_out)))
    unit = rng.random(shape, np.float32)
    return (2.0 * unit - 1.0) * bound


def dense_layer(rng: np.random.Generator, fan_in: int, fan_out: int, *stack: int) -> Tree:
    """Draws the kernel and zeroes the bias of a dense layer, or of a stack of them."""
    kernel = glorot(rng, *stack, fan_in, fan_out, fan_in=fan_in, fan_out=fan_out)
    return {"kernel": kernel, "bias": np.zeros((*stack, fan_out), np.float32)}
