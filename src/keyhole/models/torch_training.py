"""Trains clients of a PyTorch module: what is done for each of them, and nothing more.

Modules are made and checked once for each number of keys, and then used again: a client's slices
are copied into their memory. As many are kept as clients train at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from threading import Condition
from types import ModuleType
from typing import Any, ClassVar, Protocol

import numpy as np

from keyhole.arrays import Array, Tree
from keyhole.errors import InputError
from keyhole.models.client_update import (
    Batch,
    ClientUpdate,
    Trainer,
    count_examples,
    draw_batches,
    draw_examples,
)
from keyhole.primitives.layout import KeysBySpace, Layout
from keyhole.primitives.report import Report

_SHAPES = 32  # numbers of keys whose modules are kept


def torch_lib() -> ModuleType:
    """Returns PyTorch, which computes each operation with one thread.

    Raises:
        InputError: it is not installed.
    """
    try:
        import torch
    except ImportError as error:
        raise InputError(
            "PyTorch is not installed: got no torch; expected the extra 'torch'; pip install "
            "'keyhole[torch]', or write the model in JAX"
        ) from error
    if torch.get_num_threads() != 1:  # a thread begins with what was last set in another
        torch.set_num_threads(1)
    found: ModuleType = torch
    return found


class _Generator:
    """PyTorch's own generator, one for the process: for one client alone, or for many that do not
    draw from it."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._sharing, self._is_held = 0, False
        self._before: Any = None  # the state that those who share it met

    @contextmanager
    def watched(self) -> Iterator[Callable[[], bool]]:
        """Shares the generator; tells whether somebody drew from it. The last one to leave puts it
        back to where it was."""
        torch = torch_lib()
        with self._changed:
            self._changed.wait_for(lambda: not self._is_held)
            if not self._sharing:
                self._before = torch.get_rng_state()
            self._sharing += 1

        def is_drawn() -> bool:
            return not torch.equal(self._before, torch.get_rng_state())

        try:
            yield is_drawn
        finally:
            with self._changed:
                self._sharing -= 1
                if not self._sharing and is_drawn():
                    torch.set_rng_state(self._before)
                self._changed.notify_all()

    @contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        """Starts the generator from `seed`, for this thread alone; leaves it where it was."""
        torch = torch_lib()
        with self._changed:
            self._changed.wait_for(lambda: not self._is_held and not self._sharing)
            self._is_held = True
        before = torch.get_rng_state()
        try:
            torch.default_generator.manual_seed(seed)
            yield
        finally:
            torch.set_rng_state(before)
            with self._changed:
                self._is_held = False
                self._changed.notify_all()


GENERATOR = _Generator()
"""Who may draw from PyTorch's generator. It is PyTorch's that is global."""


@dataclass(frozen=True, eq=False)
class Net:
    """A module for some number of keys, used by one client at a time.

    Args:
        travelling: name -> tensor that is loaded and whose change is the update.
        trained: the parameters among them that are trained.
        kept: tensors that do not travel and may change, with how they were made.
        frozen: name -> tensor that is not trained, and travels once.
    """

    module: Any
    travelling: Mapping[str, Any]
    trained: list[tuple[str, Any]]
    kept: list[tuple[Any, Any]]
    frozen: Mapping[str, Any]

    @staticmethod
    def of(module: Any, travelling: Mapping[str, Any], frozen: Mapping[str, Any]) -> Net:
        """Returns the module with what is known of its tensors; `frozen` ones travel once."""
        others = [b for name, b in module.named_buffers() if name not in travelling]
        for name, tensor in travelling.items():
            if tensor.device.type != "cpu":
                raise InputError(
                    f"the module is not in the memory of the CPU: got {name!r} on "
                    f"{tensor.device}; expected cpu; let make_net leave it there"
                )
        trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        kept = [(b, b.detach().clone()) for b in others]
        return Net(module, travelling, trained, kept, frozen)

    def load(self, slices: Tree) -> None:
        """Copies slices into the module; what does not travel is as it was made."""
        for name, tensor in self.travelling.items():
            _write(tensor.detach(), slices[name])
        for tensor, made in self.kept:
            tensor.detach().copy_(made)

    def update(self, slices: Tree) -> dict[str, Array]:
        """Returns start minus end."""
        return {
            name: np.subtract(slices[name], _numbers(tensor.detach()), dtype=np.float32)
            for name, tensor in self.travelling.items()
        }


def _write(tensor: Any, array: Array) -> None:
    if tensor.dtype == torch_lib().float32:
        np.copyto(tensor.numpy(), array)
    else:
        tensor.copy_(torch_lib().tensor(array))


def _numbers(tensor: Any) -> Array:
    """A tensor as NumPy, which knows no bfloat16."""
    return np.asarray(tensor.float().numpy())


class Nets:
    """Modules by number of keys, made when none is free.

    Args:
        make: `{key space: number of keys} -> module`.
    """

    def __init__(self, make: Callable[[Mapping[str, int]], Net]) -> None:
        self._make = make
        self._free: dict[tuple[int, ...], list[Net]] = {}

    def take(self, sizes: Mapping[str, int]) -> Net:
        """Returns a module that nobody else uses until it is given back."""
        try:
            return self._free[tuple(sizes.values())].pop()
        except (KeyError, IndexError):
            return self._make(sizes)

    def give(self, sizes: Mapping[str, int], net: Net) -> None:
        """Takes a module back; those of the size that came first make room."""
        self._free.setdefault(tuple(sizes.values()), []).append(net)
        while len(self._free) > _SHAPES:
            self._free.pop(next(iter(self._free)), None)


def as_tensors(examples: Batch) -> dict[str, Any]:
    """Returns columns as tensors: whole numbers int64, others float32; rows of unequal length
    side by side with -1 after the last; text stays as it is."""
    torch = torch_lib()
    found: dict[str, Any] = {}
    for name, column in examples.items():
        array = _padded(column) if hasattr(column, "offsets") else np.asarray(column)
        if array.dtype.kind in "iu":
            array = array.astype(np.int64, copy=False)
        elif array.dtype.kind == "f":
            array = array.astype(np.float32, copy=False)
        elif array.dtype.kind != "b":
            found[name] = array
            continue
        found[name] = torch.from_numpy(array if array.flags.writeable else array.copy())
    return found


def _padded(rows: Any) -> Array:
    lengths = np.asarray(rows.lengths)
    values = [rows[at] for at in range(len(rows))]
    padded = np.full((len(rows), max(1, int(lengths.max(initial=0)))), -1, np.int64)
    for row, value in zip(padded, values, strict=True):
        row[: len(value)] = value
    return padded


class TrainableNet(Protocol):
    """What is trained: see `TorchModel`."""

    @property
    def layout(self) -> Layout:
        """Its cuts."""
        ...

    @property
    def loss(self) -> Callable[[Any, Any], Any]:
        """`(outputs, batch) -> scalar`."""
        ...

    @property
    def optimizer(self) -> Callable[[list[tuple[str, Any]], float], Any] | None:
        """`(named parameters, lr) -> torch.optim.Optimizer`; None for SGD."""
        ...

    @property
    def schedule(self) -> Callable[[int, int], float] | None:
        """`(step, steps) -> factor` of the learning rate."""
        ...

    @property
    def clip_norm(self) -> float:
        """The max norm of gradients."""
        ...

    @property
    def stochastic(self) -> bool:
        """Whether it is known to draw from PyTorch's generator."""
        ...

    def make(self, sizes: Mapping[str, int], /) -> Net:
        """Returns a module for some number of keys."""
        ...

    def sizes_of(self, params: Tree, keys: KeysBySpace | None, /) -> dict[str, int]:
        """Returns how many keys of each key space parameters are of."""
        ...

    def put_frozen(
        self,
        net: Net,
        sizes: Mapping[str, int],
        keys: KeysBySpace | None,
        frozen: Tree | None,
        /,
    ) -> None:
        """Puts the frozen leaves of keys into a module."""
        ...

    def tell_keys(self, module: Any, sizes: Mapping[str, int], keys: KeysBySpace | None, /) -> None:
        """Tells a module that asks for it which keys its rows stand for."""
        ...

    def outputs(self, module: Any, batch: Mapping[str, Any], /) -> Any:
        """Returns what the module makes of a batch."""
        ...


class KnowsKeys(Protocol):
    """What a client knows when it trains, as far as it matters here."""

    @property
    def keys(self) -> KeysBySpace:
        """Those that its slices hold."""
        ...

    @property
    def frozen(self) -> Tree | None:
        """Frozen leaves as they arrived; None where the model has them."""
        ...


@dataclass(frozen=True, eq=False)
class _OfKeys:
    keys: KeysBySpace
    frozen: Tree | None = None


@dataclass(frozen=True, eq=False)
class TorchTrainer:
    """The client update of a PyTorch model: `(slices, data, rng) -> report` on NumPy arrays.

    All randomness comes from `rng`: the order of examples, and the seed of PyTorch's generator
    where training draws from it.

    Raises:
        InputError: the settings have momentum, and the model an optimizer of its own.
    """

    reads_only: ClassVar[bool] = True  # slices; see `keyhole.rounds.clients`

    model: TrainableNet
    settings: ClientUpdate
    _nets: Nets = field(init=False, compare=False, repr=False)
    _is_drawing: list[bool] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_nets", Nets(self.model.make))
        object.__setattr__(self, "_is_drawing", [self.model.stochastic])
        if self.model.optimizer is not None and self.settings.momentum:
            raise InputError(
                "momentum is set beside an optimizer of your own: got momentum "
                f"{self.settings.momentum}; expected 0; set it in the optimizer"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return TorchTrainer, (self.model, self.settings)

    def for_keys(self, keys: KeysBySpace) -> Trainer:
        """Returns what trains a client that selected `keys`."""
        return partial(self, context=_OfKeys(keys))

    def __call__(
        self,
        slices: Tree,
        data: Batch,
        rng: np.random.Generator,
        /,
        context: KnowsKeys | None = None,
    ) -> Report:
        """Trains one client; reports start minus end, shaped as `slices`, and as metric "loss" the
        mean loss of the examples, each as its step met it.

        Args:
            context: knows the client's keys, which a module with `set_keys` is told.
        """
        data = draw_examples(self.settings, data, rng)
        count = count_examples(data)
        order = draw_batches(self.settings, count, rng).reshape(self.settings.epochs, -1)
        seed = int(rng.integers(2**63))
        columns = as_tensors(data)
        keys, frozen = (None, None) if context is None else (context.keys, context.frozen)
        sizes = self.model.sizes_of(slices, keys)
        net = self._nets.take(sizes)
        try:
            self.model.tell_keys(net.module, sizes, keys)
            self.model.put_frozen(net, sizes, keys, frozen)
            loss = self._train(net, slices, columns, order[:, :count], seed)
            return Report(net.update(slices), metrics={"loss": loss})
        finally:
            self._nets.give(sizes, net)

    def _train(
        self, net: Net, slices: Tree, columns: dict[str, Any], order: Array, seed: int
    ) -> float:
        """Trains beside others unless it turns out that somebody draws; then alone, from a seed."""
        if not self._is_drawing[0]:
            with GENERATOR.watched() as is_drawn:
                loss = self._descend(net, slices, columns, order)
                if not is_drawn():
                    return loss
            self._is_drawing[0] = True
        with GENERATOR.seeded(seed):
            return self._descend(net, slices, columns, order)

    def _descend(self, net: Net, slices: Tree, columns: dict[str, Any], order: Array) -> float:
        """Makes all steps; returns the mean loss on the way."""
        net.load(slices)
        net.module.train()
        model, size, (epochs, count) = self.model, self.settings.batch_size, order.shape
        steps = epochs * -(-count // size)
        step = _stepper(model, self.settings, net, steps)
        at, total = 0, 0.0
        for epoch in order:
            shuffled = {name: column[epoch] for name, column in columns.items()}
            for start in range(0, count, size):
                batch = {name: c[start : start + size] for name, c in shuffled.items()}
                loss = model.loss(model.outputs(net.module, batch), batch)
                _check_loss(loss)
                loss.backward()
                step(at)
                at += 1
                total += loss.item() * min(size, count - start)
        return total / order.size


def _check_loss(loss: Any) -> None:
    if getattr(loss, "ndim", None) != 0:
        shape = getattr(loss, "shape", None)
        got = type(loss).__name__ if shape is None else f"shape {tuple(shape)}"
        raise InputError(
            f"the loss is no scalar tensor: got {got}; expected the mean over the batch; return "
            "loss.mean()"
        )


def _stepper(
    model: TrainableNet, settings: ClientUpdate, net: Net, steps: int
) -> Callable[[int], None]:
    """Returns what makes step t from the gradients that are there, and clears them."""
    torch = torch_lib()
    parameters = [p for _, p in net.trained]
    clip_norm = min(model.clip_norm, settings.clip_norm)
    start = [p.detach().clone() for p in parameters] if settings.proximal else []
    move = (
        _sgd(parameters, settings)
        if model.optimizer is None
        else _own(model.optimizer(net.trained, settings.client_lr))
    )

    def step(t: int) -> None:
        with torch.no_grad():
            if clip_norm != np.inf:
                _clip(parameters, clip_norm)
            if settings.proximal:
                _pull(parameters, start, settings.proximal)
            move(1.0 if model.schedule is None else model.schedule(t, steps))
        for p in parameters:
            p.grad = None

    for p in parameters:
        p.grad = None
    return step


def _sgd(parameters: list[Any], settings: ClientUpdate) -> Callable[[float], None]:
    momentum, velocity = settings.momentum, [None] * len(parameters)

    def move(factor: float) -> None:
        rate = -settings.client_lr * factor
        for place, p in enumerate(parameters):
            if p.grad is None:
                continue
            if momentum:
                v: Any = velocity[place]
                grad = p.grad.to_dense() if p.grad.is_sparse else p.grad
                velocity[place] = grad.clone() if v is None else v.mul_(momentum).add_(grad)
                p.add_(velocity[place], alpha=rate)
            else:
                p.add_(p.grad, alpha=rate)

    return move


def _own(optimizer: Any) -> Callable[[float], None]:
    rates = [group["lr"] for group in optimizer.param_groups]

    def move(factor: float) -> None:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * factor
        optimizer.step()

    return move


def _clip(parameters: list[Any], clip_norm: float) -> None:
    """Scales gradients down to `clip_norm`; a NaN stays one."""
    for p in parameters:
        if p.grad is not None and p.grad.is_sparse:
            p.grad = p.grad.coalesce()  # rows that were met twice count once, with their sum
    grads = [p.grad for p in parameters if p.grad is not None]
    squares = [(g.values() if g.is_sparse else g).square().sum() for g in grads]
    norm = float(sum(squares)) ** 0.5
    if norm > clip_norm:
        for grad in grads:
            grad.mul_(clip_norm / norm)


def _pull(parameters: list[Any], start: list[Any], strength: float) -> None:
    """Adds the gradient of strength / 2 times the squared distance from the start."""
    for p, first in zip(parameters, start, strict=True):
        if p.grad is not None:
            p.grad = strength * (p - first) + p.grad
