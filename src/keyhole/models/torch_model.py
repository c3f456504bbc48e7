"""Trains any `torch.nn.Module` that can be made for a number of keys; needs the extra `torch`.

Outside, parameters are a flat dict of float32 arrays under the names of the module's state dict.
What of a module travels:

- trainable parameters, and float buffers such as the running statistics of BatchNorm: down, and
  their change up, averaged as all parameters are. A tensor with several names travels once, under
  the first of them.
- frozen parameters (`requires_grad` False, or named by `frozen`): down once for each digest, cut or
  not, and never up; they are as `make_net` makes or loads them after `torch.manual_seed(0)`. Those
  that are `local` never travel: who makes the module has them.
- integer buffers (`num_batches_tracked`), and those that are not in the state dict: never. Each
  client starts with those that `make_net` made.

A module with a method `set_keys(keys)` is told which keys its rows stand for, by key space.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from math import inf
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np

from keyhole.arrays import Array, Tree
from keyhole.errors import InputError
from keyhole.models.client_update import Batch, ClientUpdate, Trainer
from keyhole.models.torch_tensors import Tensors, check_shapes, travelling
from keyhole.models.torch_training import GENERATOR, Net, Nets, TorchTrainer, as_tensors, torch_lib
from keyhole.primitives.coding import count_slots
from keyhole.primitives.layout import Cut, KeysBySpace, Layout
from keyhole.server.frozen import FrozenLeaves

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
        frozen: names of parameters that are not trained, `*` for any text, beside those that
            require no gradient.
        local: names of frozen parameters that every client has from `make_net`, such as a base that
            it loads; where they are cut, they travel all the same.
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
    frozen: Sequence[str] = ()
    local: Sequence[str] = ()
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
        """The cuts checked against the tensors of the whole module that are trained."""
        return self._tensors.layout

    @property
    def frozen_leaves(self) -> FrozenLeaves | None:
        """What is not trained and reaches a client once; None where there is nothing."""
        return self._tensors.frozen

    def init(self, seed: int, /) -> Tree:
        """Returns the parameters of the whole module, made after `torch.manual_seed(seed)`."""
        net = self._make_module(self._whole, seed)
        found = travelling(net, self._not_trained)
        return {name: np.array(tensor.detach().float().numpy()) for name, tensor in found.items()}

    def predict(self, params: Tree, batch: Batch, /) -> Array:
        """Returns the outputs of the module in evaluation mode."""
        torch = torch_lib()
        sizes = self.sizes_of(params, self._if_whole(params))
        net = self._for_prediction.take(sizes)
        try:
            self.tell_keys(net.module, sizes)
            self.put_frozen(net, sizes)
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
        keys = keys or self._if_whole(params)
        sizes = self.sizes_of(params, keys)
        net = self.make(sizes)
        self.tell_keys(net.module, sizes, keys)
        self.put_frozen(net, sizes, keys)
        net.load(params)
        return net.module.train(False)

    def onnx(self, params: Tree, batch: Batch) -> Any:
        """Returns the module in evaluation mode as an onnx.ModelProto; its inputs are columns as
        the batch has them."""
        from keyhole.models.torch_export import torch_graph

        return torch_graph(self, params, batch)

    def sizes_of(self, params: Tree, keys: KeysBySpace | None = None) -> dict[str, int]:
        """Returns how many keys of each key space parameters are of.

        Raises:
            InputError: a key space cuts frozen tensors alone, and no keys tell.
        """
        found = count_slots(self.layout, params)
        if keys is None and found.keys() != self._whole.keys():
            raise _keys_unknown(found)
        return {name: found[name] if keys is None else len(keys[name]) for name in self._whole}

    def put_frozen(
        self,
        net: Net,
        sizes: Mapping[str, int],
        keys: KeysBySpace | None = None,
        frozen: Tree | None = None,
    ) -> None:
        """Puts the frozen tensors of keys into a module, which shares their memory.

        Args:
            frozen: as they arrived on a device; those of the whole module without it.

        Raises:
            InputError: it is not the whole module, frozen tensors are cut, and its keys are not
                known.
        """
        if frozen is None and net.frozen:
            frozen = self._tensors.frozen_of(lambda: self._keys_of(sizes, keys))
        for name, tensor in net.frozen.items():
            found = frozen[name] if frozen is not None else tensor
            held = _shared(torch_lib(), found) if isinstance(found, np.ndarray) else found
            tensor.data = held.to(tensor.dtype)

    def tell_keys(
        self, module: Any, sizes: Mapping[str, int], keys: KeysBySpace | None = None
    ) -> None:
        """Tells a module that asks for it, by a method `set_keys`, which keys its rows stand for.

        Raises:
            InputError: it is not the whole module, and its keys are not known.
        """
        if not hasattr(module, "set_keys"):
            return
        known = self._keys_of(sizes, keys)
        module.set_keys({name: z.array for name, z in known.items()})

    def _keys_of(self, sizes: Mapping[str, int], keys: KeysBySpace | None) -> KeysBySpace:
        """The keys of a module, which are all keys where it is the whole one."""
        if keys is not None:
            return keys
        if sizes != self._whole:
            raise _keys_unknown(sizes)
        return self._every_key

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
        module, tensors = self._make_module(sizes, 0), self._tensors
        found = travelling(module, self._not_trained)
        named = dict(module.named_parameters())
        held = {name: p for name, p in named.items() if name in tensors.held}
        check_shapes(self.layout, sizes, found)
        if tensors.frozen is not None:
            check_shapes(tensors.frozen.layout, sizes, held)
        for name in tensors.local:
            named[name].data = tensors.local[name]  # one memory for all modules
        for name in self._not_trained:
            named[name].requires_grad_(False)
        return Net.of(module, found, held)

    @property
    def _not_trained(self) -> dict[str, Any]:
        return {**self._tensors.held, **self._tensors.local}

    @cached_property
    def _every_key(self) -> KeysBySpace:
        return {space.name: space.all_keys() for space in self.layout.spaces}

    def _if_whole(self, params: Tree) -> KeysBySpace | None:
        """All keys, where parameters tell of no fewer."""
        found = count_slots(self.layout, params)
        return self._every_key if found.items() <= self._whole.items() else None

    @property
    def _whole(self) -> dict[str, int]:
        return {cut.space.name: cut.space.num_keys for cut in self.cuts}

    @cached_property
    def _tensors(self) -> Tensors:
        return Tensors.of(self._make_module(self._whole, 0), self.cuts, self.frozen, self.local)

    def _make_module(self, sizes: Mapping[str, int], seed: int) -> Any:
        with GENERATOR.seeded(seed):
            module = self.make_net(**sizes)
        if not isinstance(module, torch_lib().nn.Module):
            raise InputError(
                f"make_net has made no module: got {type(module).__name__}; expected a "
                "torch.nn.Module; return one"
            )
        return module


def _keys_unknown(sizes: Mapping[str, int]) -> InputError:
    told = ", ".join(f"{count} of {name!r}" for name, count in sizes.items()) or "parameters"
    return InputError(
        f"the module must be told its keys: got none beside {told}; expected the keys that its "
        "slices were selected with; train with trainer.for_keys(keys), or pass keys="
    )


def _shared(torch: ModuleType, array: Any) -> Any:
    """A tensor over an array's memory; of one that may not be written, over a copy."""
    held = np.asarray(array)
    return torch.from_numpy(held if held.flags.writeable else held.copy())
