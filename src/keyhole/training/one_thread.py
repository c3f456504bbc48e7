"""One thread for each operation of XLA: then bytes do not depend on the machine.

XLA sums in another order where it splits a product over threads. What runs in parallel here is
clients, and each of their operations is computed by one thread, in every process that trains.
"""

from __future__ import annotations

import os

__all__ = ["is_one_thread", "set_one_thread"]

_THREADS = "NPROC"  # read by XLA when it starts


def set_one_thread() -> None:
    """Takes effect where JAX has not computed anything yet."""
    os.environ[_THREADS] = "1"


def is_one_thread() -> bool:
    """Whether it was set, by whomever."""
    return os.environ.get(_THREADS) == "1"
