"""Trains a whole client of a JAX model in one compiled call.

Compilation is what clients of unequal size would drown in, so their shapes are rounded up to powers
of two: examples (as a number of batches) and the slots of each key space. Padding costs memory, not
work: the loop runs over the batches that exist, and what stands in padded places reaches no result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, ClassVar

import numpy as np

from keyhole import tree
from keyhole.arrays import Array, Tree, empty_on_line, on_line
from keyhole.computing import Steps, complete
from keyhole.errors import ShapeError
from keyhole.models.client_update import (
    Batch,
    ClientUpdate,
    Trainer,
    TrainsItself,
    count_examples,
    draw_batches,
    draw_examples,
)
from keyhole.models.model import Model
from keyhole.primitives.coding import count_slots, resize_submodel, slot_masks
from keyhole.primitives.report import Report

MIN_BATCHES = 8  # clients with fewer share one shape; the empty batches cost a copy of zeros

COMPILER_OPTIONS = {
    # Threads within an operation cost more than they bring at these sizes: clients run in parallel.
    "xla_cpu_multi_thread_eigen": False,
    # Parameters change in place; otherwise most of them are copied in every step, 2 to 5 % of it.
    "xla_cpu_copy_insertion_use_region_analysis": True,
}


def trainer_of(
    model: Model | TrainsItself, settings: ClientUpdate, slots: Mapping[str, Sequence[int]]
) -> Trainer:
    """Returns what trains one client of a model: its own way, or `LocalSgd` for one of JAX."""
    if isinstance(model, TrainsItself):
        return model.trainer(settings, slots)
    return LocalSgd(model, settings, slots)


@dataclass(frozen=True, eq=False)
class LocalSgd:
    """The client update of a JAX model: `(slices, data, rng) -> report` on NumPy arrays.

    Args:
        slots: key space -> sizes that a client's number of keys is rounded up to. Beyond the
            largest, and where none are given, it goes up to a power of two or to the whole key
            space, whichever is nearer. Padded slots are computed with, so a run in which
            every client has m keys passes `{name: [m]}`.

    >>> from keyhole.models.dense import two_layer
    >>> model = two_layer(pixels=4, neurons=6, hidden=3, classes=2)
    >>> train = LocalSgd(model, ClientUpdate(client_lr=0.1, batch_size=2))
    >>> data = {"pixels": np.ones((3, 4), np.float32), "label": np.array([0, 1, 1], np.int32)}
    >>> report = train(model.init(0), data, np.random.default_rng(0))
    >>> report.update["dense1"]["kernel"].shape, train.compilations
    ((4, 6), 1)
    >>> report
    Report(weight None, loss, no state)
    """

    reads_only: ClassVar[bool] = True  # slices; see `keyhole.rounds.clients`

    model: Model
    settings: ClientUpdate
    slots: Mapping[str, Sequence[int]] = field(default_factory=dict)
    _shapes: list[Any] = field(default_factory=list, init=False, repr=False)

    def __call__(self, slices: Tree, data: Batch, rng: np.random.Generator) -> Report:
        """Trains one client; reports start minus end, shaped as `slices`, in NumPy arrays, and as
        metric "loss" the mean loss of the examples, each as its step met it.

        The examples in `data` share a first axis; `rng` orders them.
        """
        return complete(self.train_in_steps(slices, data, rng))

    def train_in_steps(self, slices: Tree, data: Batch, rng: np.random.Generator) -> Steps[Report]:
        """Does the same in steps: yields what one call of compiled code computes."""
        data = draw_examples(self.settings, data, rng)
        batches = draw_batches(self.settings, count_examples(data), rng)
        if self.model.plain_sgd is not None and self.settings.is_plain:
            given = slices, data, batches, self.settings.client_lr
            update, loss = yield partial(self.model.plain_sgd, *given)
        else:
            update, loss = yield from self._train_compiled(slices, data, batches)
        return Report(update, metrics={"loss": float(np.asarray(loss))})

    @property
    def compilations(self) -> int:
        """How many shapes have been compiled so far; each device compiles each of them once."""
        return len(self._shapes)

    def _train_compiled(self, slices: Tree, data: Batch, batches: Array) -> Steps[tuple[Tree, Any]]:
        layout = self.model.layout
        counts = count_slots(layout, slices)
        sizes = {name: self._round_slots(name, m) for name, m in counts.items()}
        epochs = self.settings.epochs
        max_steps = epochs * max(MIN_BATCHES, _power_of_two(len(batches) // epochs))
        is_whole = sizes == counts
        start = slices if is_whole else resize_submodel(layout, slices, sizes)
        places = np.maximum(batches, 0)
        update, loss = yield partial(
            self._train,
            tree.map_leaves(on_line, start),  # XLA's own copy of slices takes several times as long
            slot_masks(counts, sizes),
            {name: _arrange(np.asarray(array), places, max_steps) for name, array in data.items()},
            _masks(batches, max_steps),
            np.int32(len(batches)),
        )
        arrays = tree.map_leaves(np.asarray, update)
        return arrays if is_whole else resize_submodel(layout, arrays, counts), loss

    def _round_slots(self, name: str, count: int) -> int:
        (num_keys,) = (s.num_keys for s in self.model.layout.spaces if s.name == name)
        given = self.slots.get(name, ())
        largest = _power_of_two(count)
        return min((n for n in (*given, num_keys) if count <= n <= largest), default=largest)

    @cached_property
    def _train(self) -> Any:
        """The compiled client: one call trains all epochs on one core."""
        import jax  # models that train themselves need none

        def train(
            start: Tree, slots: Mapping[str, Any], batches: Batch, masks: Any, steps: Any
        ) -> tuple[Tree, Any]:
            # Once for each trace.
            self._shapes.append(jax.tree.map(jax.numpy.shape, (start, batches)))
            return _descend(self.model, self.settings, start, slots, batches, masks, steps)

        return jax.jit(train, compiler_options=COMPILER_OPTIONS)


def _descend(
    model: Model,
    settings: ClientUpdate,
    start: Tree,
    slots: Mapping[str, Any],
    batches: Batch,
    masks: Any,
    steps: Any,
) -> tuple[Tree, Any]:
    """Start minus end after `steps` steps, and the mean loss of the examples on the way; batches
    and masks are (max steps, batch size, ...)."""
    import jax
    import jax.numpy as jnp

    def loss(params: Tree, i: Any) -> Any:
        shown = model.hide_padding(params, slots) if model.hide_padding else params
        batch = {name: array[i] for name, array in batches.items()}
        return _scalar(model.loss(shown, batch, masks[i]))

    def step(i: Any, state: tuple[Tree, Tree, Any]) -> tuple[Tree, Tree, Any]:
        params, velocity, total = state
        found, grads = jax.value_and_grad(loss)(params, i)
        total = total + found * jnp.sum(masks[i], dtype=total.dtype)
        grads = _clip(settings, grads)
        if mu := settings.proximal:  # the gradient of mu / 2 times the squared distance
            grads = jax.tree.map(lambda g, w, y: g + mu * (w - y), grads, params, start)
        if settings.momentum:
            grads = jax.tree.map(lambda v, g: settings.momentum * v + g, velocity, grads)
        params = jax.tree.map(lambda w, g: w - settings.client_lr * g, params, grads)
        return params, grads if settings.momentum else velocity, total

    velocity = jax.tree.map(jnp.zeros_like, start) if settings.momentum else None
    end, _, total = jax.lax.fori_loop(0, steps, step, (start, velocity, jnp.float32(0)))
    return jax.tree.map(jnp.subtract, start, end), total / jnp.sum(masks, dtype=total.dtype)


def _scalar(loss: Any) -> Any:
    """The loss; raises ShapeError where it is not one number."""
    if np.shape(loss) != ():
        raise ShapeError(
            f"the loss of a batch is no number: got an array of shape {np.shape(loss)}; expected "
            "the mean over the examples where mask holds; return (losses * mask).sum() / mask.sum()"
        )
    return loss


def _clip(settings: ClientUpdate, grads: Tree) -> Tree:
    """Scales gradients down to `clip_norm`; a NaN stays one."""
    import jax
    import jax.numpy as jnp

    if settings.clip_norm == np.inf:
        return grads
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
    scale = jnp.where(norm > settings.clip_norm, settings.clip_norm / norm, 1.0)
    return jax.tree.map(lambda g: g * scale, grads)


def _arrange(array: Array, places: Array, max_steps: int) -> Array:
    """The examples of each step side by side, (most steps, batch size, ...).

    NumPy gathers rows at the speed of memory, XLA within the loop several times slower. A place
    without example holds the first one, under a mask: it cannot bring in a NaN of its own. Steps
    beyond the last are never read, nor written.
    """
    arranged = empty_on_line((max_steps, *places.shape[1:], *array.shape[1:]), array.dtype)
    np.take(array, places, axis=0, out=arranged[: len(places)], mode="clip")
    if arranged.itemsize > 4:  # JAX casts all of it, and would warn of what is there by chance
        arranged[len(places) :] = 0
    return arranged


def _masks(batches: Array, max_steps: int) -> Array:
    """Which places of each step hold an example, (most steps, batch size)."""
    masks = np.zeros((max_steps, batches.shape[1]), bool)
    np.greater_equal(batches, 0, out=masks[: len(batches)])
    return masks


def _power_of_two(count: int) -> int:
    return 1 << max(count - 1, 0).bit_length()
