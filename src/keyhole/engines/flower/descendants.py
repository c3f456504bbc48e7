"""Descendants: what children have started in turn, some of it in sessions of its own.

Flower's executors do so: a ServerApp outlives its SuperLink for as long as it tries to reach it.
Held before their parents end, processes can be ended after them, without a doubt about whom a
number means by then. Where the system cannot hold processes (other than Linux), none are found.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

__all__ = ["end", "hold_descendants"]


def hold_descendants(parents: Iterable[int]) -> list[int]:
    """Handles of all processes that descend from these, without themselves; `end` closes them."""
    if sys.platform != "linux":
        return []
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*"):
        children.setdefault(_parent_of(path), []).append(int(path.name))
    found, ahead = [], list(parents)
    while ahead:
        young = children.get(ahead.pop(), [])
        found += young
        ahead += young
    handles = []
    for pid in found:
        with suppress(OSError):  # it has ended
            handles.append(os.pidfd_open(pid))
    return handles


def end(handles: Iterable[int]) -> None:
    """Kills those that live."""
    for handle in handles:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        os.close(handle)


def _parent_of(process: Path) -> int:
    """The second field behind the name, which stands in parentheses (proc_pid_stat(5))."""
    try:
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return 0
