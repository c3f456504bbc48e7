"""Turns signals into an event that long work looks at between two steps."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _StopEvent(threading.Event):
    """An event that a signal handler may set while the same thread is setting or awaiting it.

    The lock of a plain event waits for ever for the thread that holds it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._cond = threading.Condition(threading.RLock())


@contextmanager
def stop_on_signals(*, every: bool = False) -> Iterator[threading.Event]:
    """Turns the first SIGINT or SIGTERM into an event; a second one ends the process as usual.

    Signals reach the main thread alone: in another one the event is there and nothing sets it.

    Args:
        every: turns every further signal into the event, too: for a process that must end others
            before itself.
    """
    stop = _StopEvent()
    previous: dict[int, Any] = {}

    def ask(number: int, _: object) -> None:
        if not every:
            signal.signal(number, previous[number])
        stop.set()

    is_main = threading.current_thread() is threading.main_thread()
    for asked in (signal.SIGINT, signal.SIGTERM) if is_main else ():
        previous[asked] = signal.signal(asked, ask)
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
