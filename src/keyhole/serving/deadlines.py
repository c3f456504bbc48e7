"""Deadlines: many waits that share one timer.

A timer for each request costs more than the rest of reading it. Hardly any request is late, so one
timer looks at all that wait, now and then; being some milliseconds late itself does no harm.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any

__all__ = ["Deadlines"]


class Deadlines:
    """Ends the waits of tasks whose time is up.

    Args:
        seconds: that a wait may take; it can be extended.

    `with deadlines:` around a wait raises TimeoutError when its time is up. One task, one wait.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._look_every = min(0.25, seconds / 8)
        self._due: dict[asyncio.Task[Any], float] = {}
        self._late: set[asyncio.Task[Any]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None  # whose timer runs

    def __enter__(self) -> None:
        """Begins the wait of this task."""
        loop = asyncio.get_running_loop()
        self._due[_this_task()] = loop.time() + self._seconds
        if self._loop is not loop:
            self._loop = loop
            loop.call_later(self._look_every, self._look, loop)

    def extend(self, seconds: float) -> None:
        """Gives this task's wait so much more time."""
        self._due[_this_task()] += seconds

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Ends it."""
        task = _this_task()
        del self._due[task]
        if self._late and task in self._late:
            self._late.remove(task)
            task.uncancel()
            if kind is asyncio.CancelledError:
                raise TimeoutError from error

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        for task, due in self._due.items():
            if due <= now and task not in self._late:
                self._late.add(task)
                task.cancel()
        # The timer runs on while there are waits, and is started again by the next one.
        if self._due:
            loop.call_later(self._look_every, self._look, loop)
        elif self._loop is loop:
            self._loop = None


def _this_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("a wait outside a task")
    return task
