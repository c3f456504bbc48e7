"""Cuts a module that is already made: vocabulary rows, LoRA ranks, experts or neurons by layer.

A `LayerCut` names one tensor of every layer, such as `model.layers.{layer}.mlp.up_proj.weight`, and
the axis of its units. The server holds these tensors stacked, with a row for each (layer, unit):
key `layer * units + unit`. A client that selects some keys holds as many rows, and each of its
layers has the units that it selected there, none included. What no cut names is frozen and never
travels: all modules of a process share its memory.

Modules are used as they are, from whatever library: tensors are found by their names.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from hashlib import sha256
from math import inf
from typing import Any, Protocol

import numpy as np

from keyhole.arrays import Array, Tree
from keyhole.errors import CutError
from keyhole.models.torch_model import MakeOptimizer, TorchModel
from keyhole.models.torch_training import torch_lib
from keyhole.parts import near_miss
from keyhole.primitives.keyspace import KeySpace
from keyhole.primitives.layout import Cut

_LAYER = "{layer}"
STACKED = "stacked"
"""The submodule of a client's module that holds the tensors which are cut."""


class Fit(Protocol):
    """Sets what a module holds as numbers beside its tensors, such as `num_experts`."""

    def __call__(self, module: Any, units: Sequence[Array], /) -> None:
        """Makes `module` fit the units of each layer, in the order of its tensors."""
        ...


@dataclass(frozen=True)
class LayerCut:
    """Key `layer * units + unit` owns index `unit` of the named tensors of that layer.

    Args:
        name: of the key space.
        axes: name of a tensor, with `{layer}` in place of the layer's number -> the axis of its
            units. Without `{layer}` there is one layer, and keys are units.
        fit: sets numbers of the module that must follow, given the units of each layer.

    Attention heads would be `LayerCut("head", {"layers.{layer}.heads.weight": 0})`.
    """

    name: str
    axes: Mapping[str, int]
    fit: Fit | None = None


def from_module(
    module: Any,
    loss: Callable[[Any, Any], Any],
    cuts: Sequence[LayerCut],
    *,
    trained: Sequence[str] = (),
    forward: Callable[[Any, Any], Any] | None = None,
    optimizer: MakeOptimizer | None = None,
    schedule: Callable[[int, int], float] | None = None,
    stochastic: bool = False,
    clip_norm: float = inf,
) -> TorchModel:
    """Returns a model that trains what the cuts name of `module`, and nothing else of it.

    Args:
        module: the whole module with the values to start from. It is not changed, and must not
            change while the model is used: what is frozen is not copied.
        loss: `(outputs, batch) -> scalar`, the mean over the batch.
        cuts: such as `vocabulary_cut(module)`, `lora_cut(module)`, `expert_cut(module)`.
        trained: names of further tensors, `*` for any text, that all clients receive and train.
        forward, optimizer, schedule, stochastic, clip_norm: as for `kh.torch.Model`.

    Raises:
        CutError: a cut names no tensor, one that another cut has, or layers that differ.
    """
    torch_lib()
    made = CutModule(module, tuple(cuts), tuple(trained), digest_of_tensors(module.state_dict()))
    _check_trained(made)
    return TorchModel(
        made,
        loss,
        [stacks.cut for stacks in made.stacks],
        forward=forward,
        optimizer=optimizer,
        schedule=schedule,
        stochastic=stochastic,
        clip_norm=clip_norm,
        local=("*",),
    )


@dataclass(frozen=True, eq=False)
class CutModule:
    """Makes modules with some of the units of a whole one: the `make_net` of `from_module`.

    Args:
        whole: the module as it was given.
        digest: of its tensors; with the cuts it says which model this is.
    """

    whole: Any = field(compare=False, repr=False)
    cuts: tuple[LayerCut, ...]
    trained: tuple[str, ...]
    digest: str

    def __call__(self, **counts: int) -> Any:
        """Returns a module with this many keys of each key space."""
        torch = torch_lib()
        net = self.copy_structure()
        held = torch.nn.Module()
        for stacks in self.stacks:
            is_whole = counts[stacks.cut.space.name] == stacks.cut.space.num_keys
            for stack in stacks.each:
                shape = counts[stacks.cut.space.name], *stack.row_shape
                dtype = stack.layers[0][0].dtype
                rows = stack.rows() if is_whole else torch.zeros(shape, dtype=dtype)
                _register(held, stack.name, torch.nn.Parameter(rows))
                for _, names in stack.layers:
                    for name in names:
                        owner, attribute = _owner(net, name)
                        del owner._parameters[attribute]
        net.add_module(STACKED, held)
        _Placed.attach(net, self.stacks)
        return net

    def copy_structure(self) -> Any:
        """Returns a copy of the whole module that shares the memory of what is frozen."""
        torch = torch_lib()
        memo: dict[int, Any] = {}
        for name, p in self.whole.named_parameters():
            if any(fnmatchcase(name, pattern) for pattern in self.trained):
                memo[id(p)] = torch.nn.Parameter(p.detach().clone())
            else:
                memo[id(p)] = torch.nn.Parameter(p.data, False) if p.requires_grad else p
        return copy.deepcopy(self.whole, memo)

    @cached_property
    def stacks(self) -> tuple[Stacks, ...]:
        """The tensors of each cut, found in the module."""
        named = dict(self.whole.named_parameters(remove_duplicate=False))
        found = tuple(Stacks.of(cut, named) for cut in self.cuts)
        owners: dict[int, str] = {}
        for stacks, cut in zip(found, self.cuts, strict=True):
            for stack in stacks.each:
                for tensor, names in stack.layers:
                    if owners.setdefault(id(tensor), cut.name) != cut.name:
                        raise CutError(
                            f"two cuts name one tensor: got {names[0]!r} in {owners[id(tensor)]!r} "
                            f"and {cut.name!r}; expected one; leave it out of one of them"
                        )
        return found


@dataclass(frozen=True, eq=False)
class Stack:
    """One tensor of every layer, as rows of (layer, unit).

    Args:
        name: of the stacked tensor.
        axis: of the units.
        layers: of each layer the tensor, and all names that it has.
    """

    name: str
    axis: int
    layers: tuple[tuple[Any, tuple[str, ...]], ...]

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The shape of what one key owns."""
        shape = list(self.layers[0][0].shape)
        del shape[self.axis]
        return tuple(shape)

    @property
    def path(self) -> str:
        """The stacked tensor's name in a model's parameters."""
        return f"{STACKED}.{self.name}"

    def rows(self) -> Any:
        """Returns the rows of all layers, copied."""
        moved = [tensor.detach().movedim(self.axis, 0) for tensor, _ in self.layers]
        return torch_lib().cat(moved).contiguous()

    def split(self, rows: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
        """Yields names and tensor of each layer: the inverse of `rows`."""
        for (_, names), piece in zip(self.layers, rows.chunk(len(self.layers)), strict=True):
            yield names, piece.movedim(0, self.axis)


@dataclass(frozen=True, eq=False)
class Stacks:
    """The tensors of one cut."""

    cut: Cut
    units: int
    fit: Fit | None
    each: tuple[Stack, ...]

    @staticmethod
    def of(cut: LayerCut, named: Mapping[str, Any]) -> Stacks:
        """Finds the tensors of a cut among those of a module by name."""
        stacks: dict[int, Stack] = {}
        for pattern, axis in cut.axes.items():
            stack = Stack(pattern.replace(f"{_LAYER}.", ""), axis, _layers(cut, pattern, named))
            first = stacks.setdefault(id(stack.layers[0][0]), stack)
            if first.axis != axis:
                raise CutError(
                    f"{first.layers[0][1][0]!r} and {pattern!r} are one tensor and are cut "
                    f"differently: got axes {first.axis} and {axis}; expected one axis; cut both "
                    "alike, or untie them"
                )
        each = tuple(stacks.values())
        layers, units = _agreed(cut, each)
        axes = {stack.path: 0 for stack in each}
        return Stacks(Cut(KeySpace(cut.name, layers * units), axes), units, cut.fit, each)


def _layers(
    cut: LayerCut, pattern: str, named: Mapping[str, Any]
) -> tuple[tuple[Any, tuple[str, ...]], ...]:
    matched = re.compile(re.escape(pattern).replace(re.escape(_LAYER), r"(\d+)"))
    found = {m: name for name in named if (m := matched.fullmatch(name)) is not None}
    if not found:
        raise CutError(
            f"cut {cut.name!r} names a tensor that the module does not have: got {pattern!r}; "
            f"expected a name of its {len(named)} parameters, with {_LAYER} for the layer's "
            f"number; {near_miss(pattern, named)}"
        )
    numbered = sorted(found.items(), key=lambda item: [int(n) for n in item[0].groups()])
    by_tensor: dict[int, list[str]] = {}
    for name, tensor in named.items():
        by_tensor.setdefault(id(tensor), []).append(name)
    return tuple((named[name], tuple(by_tensor[id(named[name])])) for _, name in numbered)


def _agreed(cut: LayerCut, stacks: Sequence[Stack]) -> tuple[int, int]:
    """The number of layers and of units in each, which must be one for all tensors of a cut."""
    found = {
        (len(stack.layers), tensor.shape[stack.axis] if stack.axis < tensor.dim() else 0)
        for stack in stacks
        for tensor, _ in stack.layers
    }
    shapes = {(s.name, tuple(t.shape)) for s in stacks for t, _ in s.layers}
    if len(found) > 1 or len(shapes) > len(stacks) or found == {(1, 0)}:
        told = ", ".join(f"{name} {shape}" for name, shape in sorted(shapes))
        raise CutError(
            f"the tensors of cut {cut.name!r} do not fit together: got {told}; expected the same "
            "shape in every layer, and as many layers and units for each; cut them apart"
        )
    return found.pop()


def _check_trained(made: CutModule) -> None:
    names = [name for name, _ in made.whole.named_parameters()]
    for pattern in made.trained:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise CutError(
                f"trained names no tensor: got {pattern!r}; expected a name of the module's "
                f"parameters, * for any text; {near_miss(pattern, names)}"
            )


@dataclass(eq=False)
class _Placed:
    """Puts stacked rows where the layers of a module read them, before each pass through it."""

    net: Any
    stacks: tuple[Stacks, ...]
    pieces: list[tuple[Any, Any, list[int], list[list[tuple[Any, str]]], int]]

    @staticmethod
    def attach(net: Any, stacks: tuple[Stacks, ...]) -> None:
        """Gives a module `set_keys(keys)`, after which it can be called."""
        placed = _Placed(net, stacks, [])
        net.set_keys = placed.set_keys
        net.register_forward_pre_hook(placed.place)

    def set_keys(self, keys: Mapping[str, Array]) -> None:
        """Says which keys the rows of each key space stand for."""
        torch = torch_lib()
        self.pieces.clear()
        for stacks in self.stacks:
            own = np.asarray(keys[stacks.cut.space.name])
            layer, unit = np.divmod(own, stacks.units)
            layers = stacks.cut.space.num_keys // stacks.units
            order = np.argsort(layer, kind="stable")
            counts = np.bincount(layer, minlength=layers).tolist()
            if stacks.fit is not None:
                stacks.fit(self.net, np.split(unit[order], np.cumsum(counts)[:-1]))
            is_sorted = bool(np.all(order[1:] > order[:-1]))
            at = None if is_sorted else torch.from_numpy(order)
            for stack in stacks.each:
                owners = [[_owner(self.net, name) for name in names] for _, names in stack.layers]
                rows = self.net.get_parameter(stack.path)
                self.pieces.append((rows, at, counts, owners, stack.axis))

    def place(self, *_: Any) -> None:
        """Lets each layer read its units; gradients go to the stacked rows."""
        for rows, at, counts, owners, axis in self.pieces:
            ordered = rows if at is None else rows.index_select(0, at)
            for piece, readers in zip(ordered.split(counts), owners, strict=True):
                for owner, attribute in readers:
                    setattr(owner, attribute, piece.movedim(0, axis))


def _owner(module: Any, name: str) -> tuple[Any, str]:
    path, _, attribute = name.rpartition(".")
    return module.get_submodule(path), attribute


def _register(module: Any, name: str, parameter: Any) -> None:
    *path, last = name.split(".")
    for step in path:
        if step not in module._modules:
            module.add_module(step, torch_lib().nn.Module())
        module = module._modules[step]
    module.register_parameter(last, parameter)


def whole_module(model: TorchModel, params: Tree) -> Any:
    """Returns the module that `from_module` was given, with trained values: a copy that shares the
    memory of what is frozen.

    Args:
        params: of the whole model, such as `run.model()`.
    """
    torch, made = torch_lib(), cut_module_of(model)
    model.layout.check(params)
    net = made.copy_structure()
    for names, value in trained_tensors(model, params):
        held = torch.nn.Parameter(value.to(net.get_parameter(names[0]).dtype))
        for name in names:
            owner, attribute = _owner(net, name)
            owner._parameters[attribute] = held
    return net.train(False)


def trained_tensors(model: TorchModel, params: Tree) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields all that is trained, as tensors by the names that the whole module has for them."""
    torch = torch_lib()
    stacked = {stack.path: stack for stacks in cut_module_of(model).stacks for stack in stacks.each}
    for path, value in params.items():
        tensor = torch.from_numpy(np.array(value))
        if path in stacked:
            yield from stacked[path].split(tensor)
        else:
            yield (path,), tensor


def cut_module_of(model: TorchModel) -> CutModule:
    """Returns what makes the modules of a model that `from_module` made."""
    if not isinstance(model.make_net, CutModule):
        raise CutError(
            f"the model was not made from a module: got make_net {model.make_net!r}; expected one "
            "of kh.torch.from_module; keep its parameters with numpy.savez"
        )
    return model.make_net


def digest_of_tensors(tensors: Mapping[str, Any]) -> str:
    """Returns a digest of names, types, shapes and values; a tensor of `meta` has none."""
    torch, total = torch_lib(), sha256()
    for name, tensor in sorted(tensors.items()):
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        if tensor.is_meta:
            continue
        held = tensor.detach().cpu().contiguous()
        total.update(memoryview(held.reshape(-1).view(torch.uint8).numpy()))
    return total.hexdigest()
