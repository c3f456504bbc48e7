"""Settings of a client's local training, and the order in which it meets its examples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np

from keyhole.arrays import Array, Tree
from keyhole.errors import InputError, NoExamplesError, ShapeError
from keyhole.primitives.layout import Layout

Batch: TypeAlias = Mapping[str, Any]
"""Named arrays whose first axis counts examples."""


@dataclass(frozen=True)
class ClientUpdate:
    r"""How a client trains: E epochs of mini-batch SGD from the slices y that it received.

    $v \leftarrow \beta v + clip(\nabla \ell(w)) + \mu (w - y), \quad w \leftarrow w - \gamma v$,
    starting at $w = y, v = 0$; the update is $y - w$ (ClientUpdate of Algorithm 2; the $\mu$ term
    is FedProx).

    Args:
        client_lr: gamma, above 0.
        epochs: passes over the client's examples, each in an order of its own.
        batch_size: examples per step; the last step of an epoch takes what is left.
        momentum: beta, from 0 to below 1; 0 is plain SGD.
        proximal: mu, 0 or more; 0 is FedAvg.
        clip_norm: the gradient is scaled down to this Euclidean norm over all parameters where it
            is longer; infinity never scales.
        max_examples: a client with more trains on this many, drawn again each time.

    Raises:
        InputError: a value is outside its range.

    >>> ClientUpdate(client_lr=0.1).batch_size
    20
    >>> ClientUpdate(client_lr=0)
    Traceback (most recent call last):
    keyhole.errors.InputError: client_lr is out of range: got 0; expected a finite number ...
    """

    client_lr: float
    epochs: int = 1
    batch_size: int = 20
    momentum: float = 0.0
    proximal: float = 0.0
    clip_norm: float = inf
    max_examples: int | None = None

    def __post_init__(self) -> None:
        lr, limit = self.client_lr, self.max_examples
        _check("client_lr", lr, isfinite(lr) and lr > 0, "a finite number above 0")
        _check("epochs", self.epochs, _is_count(self.epochs), "a whole number from 1")
        _check("batch_size", self.batch_size, _is_count(self.batch_size), "a whole number from 1")
        _check("momentum", self.momentum, 0 <= self.momentum < 1, "from 0 to below 1")
        _check("proximal", self.proximal, 0 <= self.proximal < inf, "a finite number from 0")
        _check("clip_norm", self.clip_norm, self.clip_norm > 0, "above 0, or infinity for none")
        _check(
            "max_examples", limit, limit is None or _is_count(limit), "a whole number from 1, None"
        )

    @property
    def is_plain(self) -> bool:
        """Whether this is SGD without momentum, proximal term or clipping."""
        return self.momentum == 0 and self.proximal == 0 and self.clip_norm == inf


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _check(name: str, value: object, is_allowed: bool, allowed: str) -> None:
    if not is_allowed:
        raise InputError(f"{name} is out of range: got {value}; expected {allowed}; choose another")


def draw_batches(settings: ClientUpdate, num_examples: int, rng: np.random.Generator) -> Array:
    """Returns the examples of each step, int64 (steps, batch size), -1 where a batch is not full.

    Every epoch visits each example once, in an order of its own.

    >>> settings = ClientUpdate(client_lr=0.1, epochs=2, batch_size=2)
    >>> batches = draw_batches(settings, 3, np.random.default_rng(0))
    >>> batches.shape, sorted(batches[:2].ravel().tolist())
    ((4, 2), [-1, 0, 1, 2])
    """
    steps = -(-num_examples // settings.batch_size)
    epochs = np.full((settings.epochs, steps * settings.batch_size), -1, np.int64)
    for epoch in epochs:
        epoch[:num_examples] = rng.permutation(num_examples)
    return epochs.reshape(-1, settings.batch_size)


def draw_examples(settings: ClientUpdate, data: Batch, rng: np.random.Generator) -> Batch:
    """Returns all examples of a client, or `max_examples` of them, drawn without replacement."""
    count, limit = count_examples(data), settings.max_examples
    if limit is None or count <= limit:
        return data
    chosen = rng.choice(count, limit, replace=False)
    return {name: np.asarray(array)[chosen] for name, array in data.items()}


def count_examples(data: Batch) -> int:
    """Returns how many examples a client holds; refuses none, and arrays that disagree."""
    counts = {len(array) for array in data.values()}
    if len(counts) > 1:
        lengths = ", ".join(f"{name}: {len(array)}" for name, array in sorted(data.items()))
        raise ShapeError(
            f"arrays of a client differ in their number of examples: got {lengths}; expected one "
            "number; the first axis of every array counts examples"
        )
    if counts <= {0}:
        raise NoExamplesError(
            "a client has no examples: got 0; expected 1 or more; leave such clients out of the "
            "cohort"
        )
    return counts.pop()


Trainer: TypeAlias = Callable[..., Any]
"""`(slices, examples, rng) -> update`, start minus end, or a `Report` of it; it may take a
`TrainContext` after them."""


@runtime_checkable
class TrainsItself(Protocol):
    """A model that brings its own local training, as one of PyTorch does.

    Parameters are a tree of NumPy arrays outside of it, whatever it uses inside.
    """

    @property
    def layout(self) -> Layout:
        """Its cuts, checked against the shapes of its parameters."""
        ...

    def init(self, seed: int, /) -> Tree:
        """Returns the parameters that training starts with."""
        ...

    def predict(self, params: Tree, batch: Batch, /) -> Any:
        """Returns the outputs, one row for each example."""
        ...

    def trainer(self, settings: ClientUpdate, slots: Mapping[str, Sequence[int]], /) -> Trainer:
        """Returns what trains one client under these settings.

        Args:
            slots: key space -> sizes that a client's number of keys may be rounded up to.
        """
        ...
