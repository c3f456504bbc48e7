"""Names algorithms: a client update and a server optimizer that belong together.

Reddi et al., Adaptive Federated Optimization (2021), for the adaptive ones; Li et al., Federated
Optimization in Heterogeneous Networks (2020), for FedProx.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from keyhole.errors import InputError
from keyhole.rounds.clients import ClientUpdate
from keyhole.server.optimizers import SGD, Adagrad, Adam, Optimizer, Yogi


@dataclass(frozen=True)
class Algorithm:
    """How clients train and how the server steps."""

    client: ClientUpdate
    server: Optimizer


def fed_avg(client_lr: float, server_lr: float = 1.0, **client: Any) -> Algorithm:
    """SGD at the clients, SGD at the server; with server_lr 1 the server averages models."""
    return Algorithm(ClientUpdate(client_lr, **client), SGD(server_lr))


def fed_prox(
    client_lr: float, server_lr: float = 1.0, proximal: float = 0.01, **client: Any
) -> Algorithm:
    """FedAvg whose clients are pulled back to where they started."""
    return Algorithm(ClientUpdate(client_lr, proximal=proximal, **client), SGD(server_lr))


def fed_adagrad(client_lr: float, server_lr: float, eps: float = 1e-3, **client: Any) -> Algorithm:
    """SGD at the clients, Adagrad at the server."""
    return Algorithm(ClientUpdate(client_lr, **client), Adagrad(server_lr, eps=eps))


def fed_adam(client_lr: float, server_lr: float, eps: float = 1e-3, **client: Any) -> Algorithm:
    """SGD at the clients, Adam at the server, with the betas of Reddi et al."""
    return Algorithm(ClientUpdate(client_lr, **client), Adam(server_lr, b1=0.9, b2=0.99, eps=eps))


def fed_yogi(client_lr: float, server_lr: float, eps: float = 1e-3, **client: Any) -> Algorithm:
    """SGD at the clients, Yogi at the server, with the betas of Reddi et al."""
    return Algorithm(ClientUpdate(client_lr, **client), Yogi(server_lr, b1=0.9, b2=0.99, eps=eps))


ALGORITHMS: dict[str, Callable[..., Algorithm]] = {
    "FedAvg": fed_avg,
    "FedProx": fed_prox,
    "FedAdagrad": fed_adagrad,
    "FedAdam": fed_adam,
    "FedYogi": fed_yogi,
}


def algorithm_named(name: str, **settings: Any) -> Algorithm:
    """Returns the algorithm of that name.

    Args:
        name: a key of `ALGORITHMS`, in any case.
        settings: client_lr, server_lr, and what else the algorithm takes.

    >>> algorithm_named("FedAvg", client_lr=0.1).server
    SGD(lr=1.0)
    """
    by_case = {known.lower(): make for known, make in ALGORITHMS.items()}
    if name.lower() not in by_case:
        raise InputError(
            f"no such algorithm: got {name}; expected {', '.join(ALGORITHMS)}; choose one of them"
        )
    return by_case[name.lower()](**settings)
