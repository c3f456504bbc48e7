"""What a client computes: the settings of its local training, and what every client update is."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isfinite
from typing import Any, Protocol

import numpy as np

from keyhole.errors import InputError
from keyhole.types import Tree

__all__ = ["ClientUpdate", "ClientUpdateFn"]


class ClientUpdateFn(Protocol):
    """Any `(slices, data, rng) -> update` on NumPy arrays, in whatever framework.

    The update is start minus end, shaped as the slices. All randomness comes from `rng`, which is a
    function of (seed, round, client).
    """

    def __call__(self, slices: Tree, data: Any, rng: np.random.Generator, /) -> Tree:
        """Trains on `data` from `slices` on."""
        ...


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
        max_examples: a client with more trains on this many, drawn anew each time.

    Raises:
        InputError: a value is outside its range.

    >>> ClientUpdate(client_lr=0.1).batch_size
    20
    >>> ClientUpdate(client_lr=0)
    Traceback (most recent call last):
    keyhole.errors.InputError: client_lr is out of range: got 0, allowed is a finite number ...
    """

    client_lr: float
    epochs: int = 1
    batch_size: int = 20
    momentum: float = 0.0
    proximal: float = 0.0
    clip_norm: float = inf
    max_examples: int | None = None

    def __post_init__(self) -> None:
        lr, most = self.client_lr, self.max_examples
        _check("client_lr", lr, isfinite(lr) and lr > 0, "a finite number above 0")
        _check("epochs", self.epochs, _is_count(self.epochs), "a whole number from 1")
        _check("batch_size", self.batch_size, _is_count(self.batch_size), "a whole number from 1")
        _check("momentum", self.momentum, 0 <= self.momentum < 1, "from 0 to below 1")
        _check("proximal", self.proximal, 0 <= self.proximal < inf, "a finite number from 0")
        _check("clip_norm", self.clip_norm, self.clip_norm > 0, "above 0, or infinity for none")
        _check("max_examples", most, most is None or _is_count(most), "a whole number from 1, None")

    @property
    def is_plain(self) -> bool:
        """Whether this is SGD without momentum, proximal term or clipping."""
        return self.momentum == 0 and self.proximal == 0 and self.clip_norm == inf


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _check(name: str, value: object, is_allowed: bool, allowed: str) -> None:
    if not is_allowed:
        raise InputError(
            f"{name} is out of range", got=value, allowed=allowed, fix="choose another"
        )
