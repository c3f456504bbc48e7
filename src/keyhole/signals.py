"""Turns signals into an event that long work looks at between two steps; ends a process with the
one that started it."""

from __future__ import annotations

import os
import signal
import threading
import time
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


def ignore_interrupts() -> None:
    """Lets this process end in peace: further SIGINTs change nothing, in its main thread."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def end_with_parent(within: float = 30.0) -> None:
    """Ends this process, as SIGTERM does, once the one that started it is gone, even by SIGKILL.

    Standard input is to be a pipe whose other end that process alone holds: it closes with it.

    Args:
        within: seconds after SIGTERM in which this process may end by itself.
    """

    def watch() -> None:
        while os.read(0, 1):  # nothing is ever written
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(within)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="parent", daemon=True).start()
