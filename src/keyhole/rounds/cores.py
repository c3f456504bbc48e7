"""Trains a cohort on the cores of one process: threads in parallel, clients in sequence in each."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import jax

from keyhole.arrays import Tree
from keyhole.errors import InputError
from keyhole.rounds.clients import Clients, Job
from keyhole.rounds.threads import is_one_thread, set_one_thread


def use_one_thread() -> None:
    """Lets JAX compute each operation with one thread, the one that asks for it.

    So updates have the same bytes on any machine and engine; and splitting the operations of a
    small model over cores can double their CPU time. JAX decides when it first computes, so this
    comes before anything else that uses it.

    Raises:
        InputError: JAX has started otherwise.
    """
    try:
        for count in (2, 1):  # a JAX that has started refuses a change, and only that
            jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:  # JAX has started
        if not is_one_thread():
            raise InputError(
                "too late to let JAX compute with one thread, it has started",
                got="a JAX that has computed",
                allowed="one that has not",
                fix="call use_one_thread first of all, before any JAX array is made",
            ) from None
    else:
        set_one_thread()
        jax.config.update("jax_cpu_enable_async_dispatch", False)


def keep_compiled(directory: Path) -> None:
    """Keeps what JAX compiles in a directory, so that the next process need not compile it."""
    jax.config.update("jax_compilation_cache_dir", str(directory))


@dataclass(frozen=True)
class Cores:
    """Runs jobs in threads of this process: an executor for rounds. Call `use_one_thread` first.

    A client's update depends on its job and data alone, so the result is the same for any number of
    threads, to the byte.

    Args:
        count: threads, each of which trains one client at a time; more than there are cores bring
            nothing.

    Raises:
        InputError: `count` is below 1.
    """

    count: int

    def __post_init__(self) -> None:
        if self.count < 1:
            raise InputError(
                "number of cores is out of range", got=self.count, allowed="1 or more", fix="pass 1"
            )

    def __call__(self, clients: Clients, jobs: Sequence[Job]) -> list[Tree]:
        """Returns updates in the order of the jobs; raises what the first client that failed has
        raised."""
        with ThreadPoolExecutor(self.count) as pool:
            return list(pool.map(lambda job: job.run(clients), jobs))
