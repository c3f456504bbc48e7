"""A `torch.nn.Module` as a client update; needs the extra `torch`.

Slices arrive as NumPy arrays and the update leaves as such: PyTorch sees neither keys nor rounds.
A leaf at the path "items/weight" is the tensor "items.weight" of the module's state dict.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from keyhole import tree
from keyhole.errors import InputError, ShapeError
from keyhole.types import Tree

__all__ = ["TorchUpdate"]


@dataclass(frozen=True)
class TorchUpdate:
    """A client update that trains a module: `(slices, data, rng) -> update`.

    Args:
        make: `slices -> module` with tensors of their names and shapes: a sub-model, with as many
            rows as the client has keys.
        train: `(module, data, torch.Generator) -> None`: trains in place. All randomness comes from
            the generator, which is seeded from the client's place in the run.

    Raises:
        InputError: PyTorch is not installed.
    """

    make: Callable[[Tree], Any]
    train: Callable[[Any, Any, Any], None]

    def __post_init__(self) -> None:
        _torch()

    def __call__(self, slices: Tree, data: Any, rng: np.random.Generator, /) -> Tree:
        """Trains on `data` from `slices` on; returns start minus end.

        Raises:
            ShapeError: the module has tensors of other names or shapes than the slices.
        """
        torch = _torch()
        start = tree.flatten(slices)
        module = self.make(slices)
        _check(start, module.state_dict())
        tensors = {_name(path): torch.from_numpy(np.array(leaf)) for path, leaf in start.items()}
        module.load_state_dict(tensors)
        generator = torch.Generator().manual_seed(int(rng.integers(2**63)))
        self.train(module, data, generator)
        end = module.state_dict()
        update = {
            path: leaf - end[_name(path)].detach().cpu().numpy().astype(leaf.dtype, copy=False)
            for path, leaf in start.items()
        }
        return tree.unflatten(slices, update)


def _name(path: str) -> str:
    return path.replace("/", ".")


def _check(start: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Every tensor of the module is a leaf of the slices, of the same shape, and the reverse."""
    wanted = {_name(path): tuple(np.shape(leaf)) for path, leaf in start.items()}
    found = {name: tuple(tensor.shape) for name, tensor in state.items()}
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            raise ShapeError(
                "the module does not fit the slices",
                got=f"{name} of shape {found.get(name, 'none')}",
                allowed=f"shape {wanted.get(name, 'none')}",
                fix="make the module from the slices it is given",
            )


def _torch() -> ModuleType:
    try:
        import torch
    except ImportError as error:
        raise InputError(
            "PyTorch is not installed",
            got="no torch",
            allowed="the extra 'torch'",
            fix="pip install 'keyhole[torch]', or write the client update with NumPy",
        ) from error
    found: ModuleType = torch
    return found
