"""Starts Flower's processes on one machine, quiet, with a log each, and ends them whatever happens.

Quiet means: no usage statistics, no question whether there is a newer version, no installation of
packages. Nothing that is started here speaks to anybody but this machine.

Flower's executors start processes in sessions of their own: a ServerApp outlives its SuperLink for
as long as it tries to reach it. Held before their parents end, processes can be ended after them,
without a doubt about whom a number means by then. Where the system cannot hold processes (other
than Linux), none are found.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from keyhole.errors import InputError, ServiceError


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


QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",  # usage statistics, on by default in flwr 1.41
    "FLWR_DISABLE_UPDATE_CHECK": "1",  # asks once a day for a newer version otherwise
}
"""Environment variables that keep Flower from speaking to anybody; for users' own processes too."""

_FRAME = " \t│╭╮╰╯─"  # what Flower draws around errors
_PATIENCE = 10.0  # seconds for a child to end before it is killed
# A child that asks the system to kill it when its parent dies, where the system can (Linux: 1 is
# PR_SET_PDEATHSIG of prctl(2)), and then becomes the command. Asked after the fork, in a process of
# one thread.
_LEASH = (
    sys.executable,
    "-SEc",
    "import ctypes, os, sys\n"
    "if sys.platform == 'linux': ctypes.CDLL(None).prctl(1, 9)\n"
    "os.execv(sys.argv[1], sys.argv[1:])",
)


def environment(home: Path) -> dict[str, str]:
    """The environment of Flower's processes.

    Args:
        home: directory that Flower keeps its files in, in place of the one in the user's home.
    """
    here = str(Path(sys.executable).parent)  # Flower starts its parts by name
    path = os.pathsep.join([here, os.environ.get("PATH", os.defpath)])
    return {**os.environ, **QUIET, "FLWR_HOME": str(home), "PATH": path}


def flower_command(name: str) -> str:
    """The path of a command of Flower.

    Raises:
        InputError: Flower is not installed beside this Python.
    """
    path = Path(sys.executable).parent / name
    if not path.exists():
        raise InputError(
            f"Flower is not installed: got no {name}; expected the extra 'flower'; "
            "pip install 'keyhole[flower]'"
        )
    return str(path)


def free_port() -> int:
    """A port of this machine that is free at the moment."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@dataclass
class Children:
    """Processes that end with the block, and with this process even if it is killed.

    Args:
        logs: directory; what a child prints goes to NAME.log in it.
        env: environment of all of them.
    """

    logs: Path
    env: Mapping[str, str]
    _running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict, repr=False)

    def __enter__(self) -> Self:
        self.logs.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Ends all, the last one first, and what they have started."""
        started = hold_descendants(child.pid for child in self._running.values())
        for name in reversed(self._running):
            self._signal(name, signal.SIGTERM)
        until = time.monotonic() + _PATIENCE
        for name, child in self._running.items():
            with suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, until - time.monotonic()))
            self._signal(name, signal.SIGKILL)  # its group, too
            child.wait()
        end(started)

    def start(self, name: str, command: Sequence[str]) -> None:
        """Starts a child in a group of its own: Ctrl-C of a terminal reaches this process alone.

        One that has the same name and is gone is replaced.
        """
        if name in self._running:
            self._signal(name, signal.SIGKILL)  # what it had started may live
            self._running[name].wait()
        with self.log_of(name).open("ab") as log:
            self._running[name] = subprocess.Popen(
                [*_LEASH, *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.env,
                start_new_session=True,
            )

    def log_of(self, name: str) -> Path:
        """The file that a child prints to."""
        return self.logs / f"{name}.log"

    def is_alive(self, name: str) -> bool:
        """Whether a child runs."""
        return self._running[name].poll() is None

    def pid_of(self, name: str) -> int:
        """The number of a child's process."""
        return self._running[name].pid

    def wait_for(self, name: str, is_ready: Callable[[], bool], seconds: float = 60.0) -> None:
        """Waits until a child can be used.

        Raises:
            ServiceError: it has ended, or is not ready in time.
        """
        until = time.monotonic() + seconds
        while not is_ready():
            if not self.is_alive(name) or time.monotonic() > until:
                raise ServiceError(
                    f"{name} did not start: got {last_line(self.log_of(name))}; "
                    f"expected ready within {seconds:g} seconds; see "
                    f"{self.log_of(name)}"
                )
            time.sleep(0.1)

    def _signal(self, name: str, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._running[name].pid, number)


def last_line(path: Path) -> str:
    """The last line of a log that says something."""
    lines = (line.strip(_FRAME) for line in path.read_text(errors="replace").splitlines())
    said = [line for line in lines if line]
    return said[-1] if said else "nothing"


LOOPBACK = "127.0.0.1"


def listens(address: str) -> bool:
    """Whether somebody takes connections at `host:port`."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=1.0).close()
    except OSError:
        return False
    return True


CONNECTION = """\
[superlink]
default = "local"

[superlink.local]
address = "{address}"
insecure = true
"""
"""What `config.toml` of Flower says of the SuperLink of a run on one machine."""


def superlink_command(address: str) -> list[str]:
    """What starts a SuperLink at `host:port`, without TLS."""
    host, _, port = address.rpartition(":")
    command = [flower_command("flower-superlink"), "--insecure", "--host", host, "--port", port]
    return [*command, "--disable-runtime-dependency-installation"]


def supernode_command(address: str) -> list[str]:
    """What starts a SuperNode on this machine, for the SuperLink at `host:port`."""
    command = [flower_command("flower-supernode"), "--insecure", "--superlink", address]
    return [*command, "--host", LOOPBACK, "--port", str(free_port())]
