"""What runs in a worker of the cluster: it builds the population once, then does tasks.

A method returns a pair: what went wrong, or None, and the result. Ray keeps the two apart, so that
the driver reads the first and the second stays on the node.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from keyhole.engines.ray.session import find_ray
from keyhole.server.allocator import keep_freed_memory
from keyhole.training.clients import Clients
from keyhole.training.workers import portable

__all__ = ["RayWorker"]


class RayWorker:
    """A worker; Ray makes an actor of it, whose methods run one at a time."""

    def __init__(self) -> None:
        keep_freed_memory()
        os.environ.setdefault("NPROC", "1")  # XLA: workers share the cores, not single operations
        # Read when JAX is imported: a client trains on the thread that waits for it.
        os.environ.setdefault("JAX_CPU_ENABLE_ASYNC_DISPATCH", "0")
        self._clients: Clients | None = None

    def prepare(self, factory: Callable[[], Clients]) -> tuple[Exception | None, tuple[str, int]]:
        """Builds the population; returns the node and the process number."""
        found = find_ray().get_runtime_context().get_node_id(), os.getpid()
        try:
            self._clients = factory()
        except Exception as error:  # noqa: BLE001
            return portable(error), found  # the driver raises it
        return None, found

    def do(self, work: Callable[..., Any], *arguments: Any) -> tuple[Exception | None, Any]:
        """Runs `work(clients, *arguments)`; arguments that lie in the object store are there."""
        try:
            return None, work(self._clients, *arguments)
        except Exception as error:  # noqa: BLE001
            return portable(error), None
