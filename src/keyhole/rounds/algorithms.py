"""Names algorithms: a client update and a server optimizer that belong together.

Reddi et al., Adaptive Federated Optimization (2021), for the adaptive ones; Li et al., Federated
Optimization in Heterogeneous Networks (2020), for FedProx.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from keyhole.errors import InputError
from keyhole.models.client_update import ClientUpdate
from keyhole.parts import near_miss
from keyhole.server.optimizers import SGD, Adagrad, Adam, Optimizer, WithAdded, Yogi


@dataclass(frozen=True)
class Algorithm:
    """How clients train and how the server steps."""

    client: ClientUpdate
    server: Optimizer


ALGORITHMS: dict[str, Callable[[float, float], Optimizer]] = {
    "FedAvg": lambda lr, _: SGD(lr),
    "FedProx": lambda lr, _: SGD(lr),
    "FedAdagrad": lambda lr, eps: Adagrad(lr, eps=eps),
    "FedAdam": lambda lr, eps: Adam(lr, b1=0.9, b2=0.99, eps=eps),
    "FedYogi": lambda lr, eps: Yogi(lr, b1=0.9, b2=0.99, eps=eps),
}
"""Name -> the server's optimizer for a learning rate and eps; betas are those of Reddi et al.
Clients run SGD; those of FedProx are pulled back to where they started."""


def algorithm_named(
    name: str,
    client_lr: float,
    server_lr: float = 1.0,
    *,
    eps: float = 1e-3,
    proximal: float = 0.01,
    **client: Any,
) -> Algorithm:
    """Returns the algorithm of that name.

    Args:
        name: a key of `ALGORITHMS`, in any case.
        server_lr: with 1, FedAvg averages models.
        eps: of adaptive optimizers; others do without.
        proximal: of FedProx; others do without.
        client: what else `ClientUpdate` takes.

    >>> algorithm_named("FedAvg", client_lr=0.1).server
    SGD(lr=1.0)
    """
    by_case = {known.lower(): known for known in ALGORITHMS}
    known = by_case.get(name.lower())
    if known is None:
        raise InputError(
            f"no such algorithm: got {name}; expected {', '.join(ALGORITHMS)}; choose one of them"
        )
    pull = proximal if known == "FedProx" else 0.0
    update = ClientUpdate(client_lr, proximal=pull, **client)
    return Algorithm(update, ALGORITHMS[known](server_lr, eps))


def with_added(optimizer: Optimizer, model: Any) -> Optimizer:
    """Returns the optimizer, which leaves out what a model declares as `added`."""
    paths = [field.path for part in model.layout.parts for field in part.fields]
    found = WithAdded(optimizer, tuple(getattr(model, "added", ())))
    for each in found.added:
        if not any(WithAdded(optimizer, (each,)).is_added(path) for path in paths):
            raise InputError(
                f"the model has no parameter {each!r} to add updates to: got it in `added`; "
                f"expected some of {', '.join(paths)}; {near_miss(each, paths)}"
            )
    return found if found.added else optimizer
