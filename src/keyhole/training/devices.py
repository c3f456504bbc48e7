"""A cohort on the CPU devices of one process: clients in sequence on each, devices in parallel."""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import TypeAlias

import jax
import numpy as np

from keyhole.errors import InputError
from keyhole.models.model import Batch
from keyhole.training.client_update import ClientUpdateFn
from keyhole.types import Tree

__all__ = ["Client", "run_cohort", "use_cpu_devices"]

Client: TypeAlias = tuple[Tree, Batch, np.random.Generator]
"""What a client update is called with: slices, data, rng."""


def use_cpu_devices(count: int) -> None:
    """Splits the CPU into this many JAX devices, one for each core that should train clients.

    JAX fixes the number when it first computes, so this comes before anything else that uses it.
    Each device then works with one thread (through the environment variable NPROC, which XLA reads
    when it starts): splitting single operations over cores as well can double the CPU time of a
    small model.

    Args:
        count: 1 or more; more than the machine has cores brings nothing.

    Raises:
        InputError: JAX has started with another number, or `count` is below 1.
    """
    if count < 1:
        raise InputError(
            "number of CPU devices is out of range", got=count, allowed="1 or more", fix="pass one"
        )
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:  # JAX has started
        started = len(jax.local_devices(backend="cpu"))
        if started != count:
            raise InputError(
                "too late to change the number of CPU devices, JAX has started",
                got=count,
                allowed=started,
                fix="call use_cpu_devices first of all, before any JAX array is made",
            ) from None
    else:
        os.environ.setdefault("NPROC", "1")


def run_cohort(
    client_update: ClientUpdateFn,
    clients: Iterable[Client],
    devices: Iterable[jax.Device] | None = None,
) -> list[Tree]:
    """Returns the update of every client, in the order of the clients.

    A client's update depends on its slices, data and rng alone, so the result is the same for any
    number of devices, to the byte.

    Args:
        client_update: `(slices, data, rng) -> update`; called from as many threads as devices.
        clients: slices, data and rng of each.
        devices: where to train; all CPU devices of this process if not given.

    Raises:
        Exception: whatever the first client that failed has raised.
    """
    free: SimpleQueue[jax.Device] = SimpleQueue()
    for device in devices or jax.local_devices(backend="cpu"):
        free.put(device)

    def train(client: Client) -> Tree:
        device = free.get()
        try:
            with jax.default_device(device):
                return client_update(*client)
        finally:
            free.put(device)

    with ThreadPoolExecutor(free.qsize()) as pool:
        return list(pool.map(train, clients))
