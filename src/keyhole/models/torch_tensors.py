"""Finds the tensors of a module: which travel, which are trained, and which are frozen.

A tensor with several names counts once, under the first of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from keyhole.errors import CutError, ShapeError
from keyhole.models.torch_training import torch_lib
from keyhole.parts import near_miss
from keyhole.primitives.keyspace import Keys
from keyhole.primitives.layout import Cut, KeysBySpace, Layout
from keyhole.server.frozen import FrozenLeaves


@dataclass(frozen=True)
class Tensors:
    """What is known of the tensors of a whole module.

    Args:
        layout: of what is trained.
        frozen: what travels once and is not trained; None where there is nothing.
        held: the tensors of `frozen`, by name.
        local: what is not trained and never travels, by name.
    """

    layout: Layout
    frozen: FrozenLeaves | None
    held: Mapping[str, Any]
    local: Mapping[str, Any]

    @staticmethod
    def of(
        module: Any, cuts: Sequence[Cut], frozen: Sequence[str], local: Sequence[str]
    ) -> Tensors:
        """Finds them in the whole module.

        Args:
            frozen, local: names, `*` for any text; see `TorchModel`.
        """
        first = _first_names(module)
        cuts = [Cut(cut.space, _by_first_name(cut, first)) for cut in cuts]
        _check_tied(module, cuts, first)
        names = _frozen_names(module, frozen)
        cut_names = {name for cut in cuts for name in cut.axes}
        kept = {n: p.detach() for n, p in module.named_parameters() if n in names}
        stays = {n: t for n, t in kept.items() if _matches(n, local) and n not in cut_names}
        sent = {n: t for n, t in kept.items() if n not in stays}
        trained = travelling(module, kept)
        if not any(name in trained for name, _ in module.named_parameters()):
            raise CutError(
                f"nothing of the module is trained: got {len(kept)} frozen parameters and no "
                "other; expected some that require gradients; leave some of them out of `frozen`"
            )
        layout = Layout.of(_like(trained), *_of(cuts, lambda name: name not in kept))
        if not sent:
            return Tensors(layout, None, {}, stays)
        of_frozen = Layout.of(_like(sent), *_of(cuts, lambda name: name in sent))
        values = {n: np.asarray(t.float().numpy()) for n, t in sent.items()}
        return Tensors(layout, FrozenLeaves(of_frozen, values), sent, stays)

    def frozen_of(self, keys: Callable[[], KeysBySpace]) -> dict[str, Any]:
        """Returns what travels once, cut to some keys, which are asked for where it is cut; whole
        tensors are not copied."""
        if self.frozen is None:
            return {}
        found = dict(self.held)
        for part in self.frozen.layout.parts:
            for field in part.fields:
                for factor, axis in zip(part.product.factors, field.axes, strict=True):
                    found[field.path] = _cut(found[field.path], axis, keys()[factor.name])
        return found


def _cut(tensor: Any, axis: int, keys: Keys) -> Any:
    if len(keys) == keys.space.num_keys and keys == keys.space.all_keys():
        return tensor
    return tensor.index_select(axis, torch_lib().tensor(keys.array))


def _frozen_names(module: Any, patterns: Sequence[str]) -> set[str]:
    """Parameters that are not trained: those that require no gradient, and those named."""
    named = dict(module.named_parameters())
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in named):
            raise CutError(
                f"frozen names no parameter of the module: got {pattern!r}; expected a name of its "
                f"{len(named)} parameters, * for any text; {near_miss(pattern, named)}"
            )
    return {n for n, p in named.items() if not p.requires_grad or _matches(n, patterns)}


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _like(tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {n: np.broadcast_to(np.float32(0), tuple(t.shape)) for n, t in tensors.items()}


def _of(cuts: Sequence[Cut], is_in: Callable[[str], bool]) -> list[Cut]:
    return [Cut(c.space, {n: axis for n, axis in c.axes.items() if is_in(n)}) for c in cuts]


def travelling(module: Any, frozen: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the tensors that travel in every round, each once, by the first of its names."""
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


def check_shapes(layout: Layout, sizes: Mapping[str, int], tensors: Mapping[str, Any]) -> None:
    """Raises ShapeError where tensors are not those of a layout with shorter axes."""
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
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
