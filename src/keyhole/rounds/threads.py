"""Threads: a core for each client that trains, and one thread for each operation of XLA.

XLA sums in another order where it splits a product over threads. What runs in parallel here is
clients, and each of their operations is computed by one thread, in every process that trains: then
bytes do not depend on the machine.
"""

from __future__ import annotations

import os

_THREADS = "NPROC"  # read by XLA when it starts


def count_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def set_one_thread() -> None:
    """Takes effect where JAX has not computed anything yet."""
    os.environ[_THREADS] = "1"


def is_one_thread() -> bool:
    """Whether it was set, by whomever."""
    return os.environ.get(_THREADS) == "1"
