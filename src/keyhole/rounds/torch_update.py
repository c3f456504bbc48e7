"""Trains a `torch.nn.Module` as a client update; needs the extra `torch`.

Slices arrive as NumPy arrays and the update leaves as such: PyTorch sees neither keys nor rounds.
A leaf at the path "items/weight" is the tensor "items.weight" of the module's state dict.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from types import ModuleType
from typing import Any

import numpy as np

from keyhole import tree
from keyhole.arrays import Tree
from keyhole.errors import InputError, ShapeError

_SEEDED = Lock()  # the generator that dropout draws from is one for the whole process


@dataclass(frozen=True)
class TorchUpdate:
    """A client update that trains a module: `(slices, data, rng) -> update`.

    Args:
        make: `slices -> module` with tensors of their names and shapes: a sub-model, with as many
            rows as the client has keys.
        train: `(module, data, torch.Generator) -> None`: trains in place. The generator is seeded
            from the client's place in the run, and so is PyTorch's own on the CPU, which layers
            such as dropout draw from: clients of one process train one after another.

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
        tensors = {_name(path): torch.from_numpy(np.array(leaf)) for path, leaf in start.items()}
        seed, own_seed = (int(seed) for seed in rng.integers(2**63, size=2))
        with _seeded(torch, own_seed):
            module = self.make(slices)
            _check(tensors, module.state_dict())
            module.load_state_dict(tensors)
            self.train(module, data, torch.Generator().manual_seed(seed))
        end = module.state_dict()
        _check(tensors, end)
        update = {
            path: np.asarray(leaf - _array(end[_name(path)], tensors[_name(path)].dtype))
            for path, leaf in start.items()
        }
        return tree.unflatten(slices, update)


@contextmanager
def _seeded(torch: Any, seed: int) -> Iterator[None]:
    """PyTorch's own generator starts from `seed`, and is afterwards where it was."""
    with _SEEDED, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def _array(tensor: Any, dtype: Any) -> Any:
    """A tensor as NumPy, which knows no bfloat16, in the dtype of the slices."""
    return tensor.detach().to("cpu", dtype).numpy()


def _name(path: str) -> str:
    return path.replace("/", ".")


def _check(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Every tensor of the module is a leaf of the slices, of the same shape, and the reverse."""
    wanted = {name: tuple(np.shape(tensor)) for name, tensor in wanted.items()}
    found = {name: tuple(np.shape(value)) for name, value in found.items()}
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            raise ShapeError(
                f"the module does not fit the slices: got {name} of shape "
                f"{found.get(name, 'none')}; expected shape {wanted.get(name, 'none')}; make the "
                "module from the slices it is given"
            )


def _torch() -> ModuleType:
    try:
        import torch
    except ImportError as error:
        raise InputError(
            "PyTorch is not installed: got no torch; expected the extra 'torch'; pip install "
            "'keyhole[torch]', or write the client update with NumPy"
        ) from error
    found: ModuleType = torch
    return found
