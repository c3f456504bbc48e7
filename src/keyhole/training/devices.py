"""A cohort on the CPU devices of one process: clients in sequence on each, devices in parallel."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import jax

from keyhole.errors import InputError
from keyhole.training.clients import Clients
from keyhole.training.jobs import Job
from keyhole.types import Tree

__all__ = ["keep_compiled", "on_devices", "use_cpu_devices"]


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


def keep_compiled(directory: Path) -> None:
    """Keeps what JAX compiles in a directory, so that the next process need not compile it."""
    jax.config.update("jax_compilation_cache_dir", str(directory))


def on_devices(
    clients: Clients, jobs: Sequence[Job], devices: Iterable[jax.Device] | None = None
) -> list[Tree]:
    """Runs jobs on the CPU devices of this process: an executor for rounds.

    A client's update depends on its job and data alone, so the result is the same for any number of
    devices, to the byte.

    Args:
        clients: the population; its `train` is called from as many threads as there are devices.
        jobs: of one round.
        devices: where to train; all CPU devices of this process if not given.

    Returns:
        Updates in the order of the jobs.

    Raises:
        Exception: whatever the first client that failed has raised.
    """
    free: SimpleQueue[jax.Device] = SimpleQueue()
    for device in devices or jax.local_devices(backend="cpu"):
        free.put(device)

    def work(job: Job) -> Tree:
        device = free.get()
        try:
            with jax.default_device(device):
                return job.run(clients)
        finally:
            free.put(device)

    with ThreadPoolExecutor(free.qsize()) as pool:
        return list(pool.map(work, jobs))
