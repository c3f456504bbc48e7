"""Server processes: started on a core of their own, waited for, their CPU time read, ended."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

CORE = 0
PATIENCE = 60.0
_TICK = 1 / os.sysconf("SC_CLK_TCK")


@contextmanager
def serving(
    command: Sequence[str], port: int, environment: Mapping[str, str] | None = None
) -> Iterator[int]:
    """Runs a server until the block ends; gives its process."""
    process = subprocess.Popen(
        list(command),
        preexec_fn=_settle_in,  # noqa: PLW1509 - no threads are running here
        stdout=subprocess.DEVNULL,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1", **(environment or {})},
    )
    try:
        _wait_for(port, process)
        yield process.pid
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def script(module: str, *arguments: object) -> list[str]:
    """The command that runs a module of this package."""
    path = Path(__file__).with_name(f"{module}.py")
    return [sys.executable, str(path), *(str(argument) for argument in arguments)]


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def cpu_seconds(pid: int) -> float:
    """CPU time, user and system, of a process and all below it."""
    children: dict[int, list[int]] = {}
    times: dict[int, float] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        children.setdefault(int(fields[1]), []).append(int(entry.name))
        times[int(entry.name)] = (int(fields[11]) + int(fields[12])) * _TICK
    total, found = 0.0, [pid]
    while found:
        one = found.pop()
        total += times.get(one, 0.0)
        found += children.get(one, [])
    return total


def _settle_in() -> None:
    os.sched_setaffinity(0, {CORE})
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"no server: {process.args!r}") from None
            time.sleep(0.02)
