"""What runs in a worker of the cluster: it builds the population once, then does tasks.

A method returns a pair: what went wrong, or None, and the result. Ray keeps the two apart, so that
the driver reads the first and the second stays on the node.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from keyhole.engines.ray.session import find_ray
from keyhole.server.allocator import keep_freed_memory
from keyhole.training.clients import Clients
from keyhole.training.threads import set_one_thread
from keyhole.training.workers import portable

__all__ = ["LostError", "RayWorker", "fetch"]


class LostError(Exception):
    """What a task was to go on from is lost with whoever had it."""


def fetch(reference: Any) -> Any:
    """Waits for another worker's result.

    Raises:
        LostError: it will not come.
    """
    ray = find_ray()
    try:
        found = ray.get(reference)
    except ray.exceptions.RayError as error:
        raise LostError from error
    if found is None:  # that worker has failed, too
        raise LostError
    return found


class RayWorker:
    """A worker; Ray makes an actor of it, whose methods run one at a time."""

    def __init__(self) -> None:
        keep_freed_memory()
        set_one_thread()
        self._clients: Clients | None = None
        self._cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()

    def prepare(self, factory: Callable[[], Clients]) -> tuple[Exception | None, tuple[str, int]]:
        """Builds the population; returns the node and the process number."""
        found = find_ray().get_runtime_context().get_node_id(), os.getpid()
        try:
            self._clients = factory()
        except Exception as error:  # noqa: BLE001
            return portable(error), found  # the driver raises it
        return None, found

    def settle(self, place: int, workers: int) -> None:
        """Stays on one core if all cores of the node have a worker: a client's work goes back and
        forth between Python's thread and XLA's, which is 10 to 20 % cheaper on one core.

        Args:
            place: of this worker among those of its node.
            workers: how many those are.
        """
        if hasattr(os, "sched_setaffinity"):
            cores = sorted(self._cores)
            own = {cores[place]} if workers == len(cores) else self._cores
            for thread in Path("/proc/self/task").iterdir():
                with suppress(ProcessLookupError):  # it has ended meanwhile
                    os.sched_setaffinity(int(thread.name), own)

    def do(self, work: Callable[..., Any], *arguments: Any) -> tuple[Exception | None, Any]:
        """Runs `work(clients, *arguments)`; arguments that lie in the object store are there."""
        try:
            return None, work(self._clients, *arguments)
        except Exception as error:  # noqa: BLE001
            return portable(error), None
