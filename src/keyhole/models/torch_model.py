"""Trains any `torch.nn.Module` that can be made for a number of keys; needs the extra `torch`.

Outside, parameters are a flat dict of float32 arrays under the names of the module's state dict.
What of a module travels:

- trainable parameters, and float buffers such as the running statistics of BatchNorm: down, and
  their change up, averaged as all parameters are. A tensor with several names travels once, under
  the first of them.
- frozen parameters (`requires_grad` False) that are not cut: never. Who makes the module has
  them: they are as `make_net` makes or loads them after `torch.manual_seed(0)`. Where they are cut
  they travel down with their slices, and their update is zero.
- integer buffers (`num_batches_tracked`), and those that are not in the state dict: never. Each
  client starts with those that `make_net` made.

A module with a method `set_keys(keys)` is told which keys its rows stand for, by key space.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from math import inf
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np

from keyhole.arrays import Array, Tree
from keyhole.errors import CutError, InputError, ShapeError
from keyhole.models.client_update import Batch, ClientUpdate, Trainer
from keyhole.models.torch_training import GENERATOR, Net, Nets, TorchTrainer, as_tensors, torch_lib
from keyhole.parts import near_miss
from keyhole.primitives.coding import count_slots
from keyhole.primitives.layout import Cut, KeysBySpace, Layout

MakeOptimizer: TypeAlias = Callable[[list[tuple[str, Any]], float], Any]
"""`(named trainable parameters, client_lr) -> torch.optim.Optimizer`, once for each client."""


@dataclass(frozen=True, eq=False)
class TorchModel:
    """A PyTorch module and how it is cut: `kh.torch.Model`.

    Args:
        make_net: makes the module; called with the number of keys of each key space by its name:
            `make_net(item=200_000)` is the server's module, `make_net(item=100)` a client's.
        loss: `(outputs, batch) -> scalar`, the mean over the batch, a dict of tensors by column.
        cuts: which axes of which tensors belong to which key space, by names of the state dict.
        forward: `(module, batch) -> outputs`; `module(batch)` unless told.
        optimizer: `(named parameters, lr) -> torch.optim.Optimizer`, made for each client, with
            groups and moments as you like; plain SGD with the momentum of the run unless told.
        schedule: `(step, steps) -> factor` of the learning rate, steps counted from 0.
        clip_norm: gradients are scaled down to this Euclidean norm over all parameters before each
            step, where they are longer; infinity never scales.
        stochastic: whether training draws from PyTorch's own generator, as dropout does. It is
            noticed otherwise, at the price of training the first clients twice. Clients that draw
            train one after the other in a process, since there is one generator.

    Raises:
        InputError: PyTorch is not installed, `make_net` does not take the key spaces, or
            `clip_norm` is not above 0.
        CutError: a cut names no tensor that travels, or cuts a tied tensor in two ways.

    A run sets `torch.set_num_threads(1)`: clients run in parallel, not their operations, and the
    bytes of a result do not depend on the machine's cores.
    """

    make_net: Callable[..., Any]
    loss: Callable[[Any, Any], Any]
    cuts: Sequence[Cut] = ()
    forward: Callable[[Any, Any], Any] | None = None
    optimizer: MakeOptimizer | None = None
    schedule: Callable[[int, int], float] | None = None
    stochastic: bool = False
    clip_norm: float = inf
    _for_prediction: Nets = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        torch_lib()
        if not self.clip_norm > 0:
            raise InputError(
                f"clip_norm is out of range: got {self.clip_norm}; expected above 0, or infinity "
                "for none; choose another"
            )
        object.__setattr__(self, "_for_prediction", Nets(self.make))
        try:
            inspect.signature(self.make_net).bind(**self._whole)
        except TypeError as error:
            raise InputError(
                f"make_net does not take the key spaces: got {error}; expected make_net("
                f"{', '.join(f'{name}={n}' for name, n in self._whole.items())}) to work; give it "
                "one keyword for each key space of the cuts"
            ) from None

    def __reduce__(self) -> tuple[Any, ...]:
        return TorchModel, tuple(getattr(self, each.name) for each in fields(self) if each.init)

    @property
    def layout(self) -> Layout:
        """The cuts checked against the tensors of the whole module."""
        return self._tensors.layout

    def init(self, seed: int, /) -> Tree:
        """Returns the parameters of the whole module, made after `torch.manual_seed(seed)`."""
        net = self._make_module(self._whole, seed)
        found = _travelling(net, self._tensors.frozen)
        return {name: np.array(tensor.detach().float().numpy()) for name, tensor in found.items()}

    def predict(self, params: Tree, batch: Batch, /) -> Array:
        """Returns the outputs of the module in evaluation mode."""
        torch = torch_lib()
        sizes = count_slots(self.layout, params)
        net = self._for_prediction.take(sizes)
        try:
            self.tell_keys(net.module, sizes)
            net.module.train(False)
            for name, tensor in net.travelling.items():
                tensor.data = _shared(torch, params[name]).to(tensor.dtype)
            with torch.no_grad():
                outputs = self.outputs(net.module, as_tensors(batch))
        finally:
            self._for_prediction.give(sizes, net)
        if not isinstance(outputs, torch.Tensor):
            raise InputError(
                f"outputs are no tensor: got {type(outputs).__name__}; expected one row for each "
                "example; let forward return the tensor that metrics are computed from"
            )
        return np.asarray(outputs.float() if outputs.is_floating_point() else outputs)

    def module(self, params: Tree, keys: KeysBySpace | None = None) -> Any:
        """Returns a new module with these parameters, and all that does not travel.

        Args:
            keys: that the parameters were selected with; a module with `set_keys` needs them.
        """
        sizes = count_slots(self.layout, params)
        net = self.make(sizes)
        self.tell_keys(net.module, sizes, keys)
        net.load(params)
        return net.module.train(False)

    def tell_keys(
        self, module: Any, sizes: Mapping[str, int], keys: KeysBySpace | None = None
    ) -> None:
        """Tells a module that asks for it, by a method `set_keys`, which keys its rows stand for.

        Raises:
            InputError: it is not the whole module, and its keys are not known.
        """
        if not hasattr(module, "set_keys"):
            return
        if keys is None:
            if sizes != self._whole:
                raise InputError(
                    "the module must be told its keys: got none beside "
                    f"{', '.join(f'{count} of {name!r}' for name, count in sizes.items())}; "
                    "expected the keys that its slices were selected with; train with "
                    "trainer.for_keys(keys), or pass keys="
                )
            keys = {space.name: space.all_keys() for space in self.layout.spaces}
        module.set_keys({name: z.array for name, z in keys.items()})

    def trainer(
        self, settings: ClientUpdate, slots: Mapping[str, Sequence[int]] | None = None, /
    ) -> Trainer:
        """Returns what trains one client; modules have exactly the client's number of keys."""
        del slots
        return TorchTrainer(self, settings)

    def outputs(self, module: Any, batch: Mapping[str, Any]) -> Any:
        """Returns what the module makes of a batch of tensors."""
        return module(batch) if self.forward is None else self.forward(module, batch)

    def make(self, sizes: Mapping[str, int]) -> Net:
        """Returns a module for some number of keys, checked, to be loaded and trained.

        Raises:
            ShapeError: its tensors are not those of the whole module with shorter axes.
        """
        module = self._make_module(sizes, 0)
        frozen = self._tensors.frozen
        found = _travelling(module, frozen)
        _check_shapes(self.layout, sizes, {name: tuple(t.shape) for name, t in found.items()})
        for name, parameter in module.named_parameters():
            if name in frozen:
                parameter.data = frozen[name]  # one memory for all modules
        return Net.of(module, found, frozen)

    @property
    def _whole(self) -> dict[str, int]:
        return {cut.space.name: cut.space.num_keys for cut in self.cuts}

    @cached_property
    def _tensors(self) -> _Tensors:
        return _Tensors.of(self._make_module(self._whole, 0), self.cuts)

    def _make_module(self, sizes: Mapping[str, int], seed: int) -> Any:
        with GENERATOR.seeded(seed):
            module = self.make_net(**sizes)
        if not isinstance(module, torch_lib().nn.Module):
            raise InputError(
                f"make_net has made no module: got {type(module).__name__}; expected a "
                "torch.nn.Module; return one"
            )
        return module


@dataclass(frozen=True)
class _Tensors:
    """What is known of the whole module: its layout, and what is frozen and never travels."""

    layout: Layout
    frozen: Mapping[str, Any]

    @staticmethod
    def of(module: Any, cuts: Sequence[Cut]) -> _Tensors:
        first = _first_names(module)
        cuts = [Cut(cut.space, _by_first_name(cut, first)) for cut in cuts]
        _check_tied(module, cuts, first)
        cut_names = {name for cut in cuts for name in cut.axes}
        frozen = {
            name: parameter.detach()
            for name, parameter in module.named_parameters()
            if not parameter.requires_grad and name not in cut_names
        }
        like = {
            name: np.broadcast_to(np.float32(0), tuple(tensor.shape))
            for name, tensor in _travelling(module, frozen).items()
        }
        return _Tensors(Layout.of(like, *cuts), frozen)


def _travelling(module: Any, frozen: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors that travel, each once, by the first of its names."""
    kept = module.state_dict().keys()
    parameters = {n: p for n, p in module.named_parameters() if n not in frozen}
    buffers = {n: b for n, b in module.named_buffers() if n in kept and b.is_floating_point()}
    return parameters | buffers


def _first_names(module: Any) -> dict[str, str]:
    """Name of a tensor -> the first name that the same tensor has."""
    named = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in named}


def _by_first_name(cut: Cut, first: Mapping[str, str]) -> dict[str, int]:
    axes: dict[str, int] = {}
    for name, axis in cut.axes.items():
        if name not in first:
            raise CutError(
                f"key space {cut.space.name!r} cuts a tensor that the module does not have: got "
                f"{name!r}; expected {', '.join(sorted(first))}; {near_miss(name, first)}"
            )
        if axes.setdefault(first[name], axis) != axis:
            raise _tied(first[name], name, f"axes {axes[first[name]]} and {axis}")
    return axes


def _check_tied(module: Any, cuts: Iterable[Cut], first: Mapping[str, str]) -> None:
    """Raises CutError where one axis of a tied tensor belongs to two key spaces."""
    others = {name: other for other, name in first.items() if other != name}
    owners: dict[tuple[str, int], str] = {}
    ranks = {name: tensor.dim() for name, tensor in _named(module).items()}
    for cut in cuts:
        for name, axis in cut.axes.items():
            at = name, axis % max(ranks[name], 1)
            if owners.setdefault(at, cut.space.name) != cut.space.name and name in others:
                raise _tied(name, others[name], f"key spaces {owners[at]!r} and {cut.space.name!r}")


def _named(module: Any) -> dict[str, Any]:
    return dict([*module.named_parameters(), *module.named_buffers()])


def _tied(name: str, other: str, got: str) -> CutError:
    return CutError(
        f"{name!r} and {other!r} are one tensor and are cut differently: got {got}; expected one "
        "axis of one key space; cut both alike, or untie them"
    )


def _check_shapes(
    layout: Layout, sizes: Mapping[str, int], found: Mapping[str, tuple[int, ...]]
) -> None:
    expected = {
        f.path: f.client_shape([sizes[factor.name] for factor in part.product.factors])
        for part in layout.parts
        for f in part.fields
    }
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            asked = ", ".join(f"{space}={count}" for space, count in sizes.items())
            raise ShapeError(
                f"the module does not follow the number of keys: got {name!r} of shape "
                f"{found.get(name, 'none')} from make_net({asked}); expected "
                f"{expected.get(name, 'no such tensor')}; read sizes from the arguments of make_net"
            )


def _shared(torch: ModuleType, array: Any) -> Any:
    """A tensor over an array's memory; of one that may not be written, over a copy."""
    held = np.asarray(array)
    return torch.from_numpy(held if held.flags.writeable else held.copy())
