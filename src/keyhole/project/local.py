"""Runs all parties of a project on this machine, each in a process, until they are stopped.

They end with the process that started them, even if that is killed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from textwrap import shorten

from keyhole.errors import InputError, ServiceError
from keyhole.files import make_directory
from keyhole.project.kits import device_names
from keyhole.project.parties import TRAINER, Command, commands_of, device_command
from keyhole.project.spec import Project, host_of, port_of

_STARTS_WITHIN = 120.0  # seconds, on a machine that does much else
_ENDS_WITHIN = 30.0
_SERVES = (" at http://", " at https://")
_RUN = (
    "from keyhole.cli.main import main; from keyhole.signals import end_with_parent; "
    "end_with_parent(); main()"
)
_LISTENS = "0A"  # state of a socket in /proc/net/tcp

Tell = Callable[[str, str], None]
"""`(name of a process, line that it wrote)`."""


def check_local(project: Project) -> None:
    """Raises InputError unless all services can be started here."""
    if not project.deploy.is_local:
        raise InputError(
            "not all parties are on this machine: got addresses of others in [deploy]; expected "
            "http://127.0.0.1 for a try-out; give it a copy of the project with such addresses"
        )
    for name, url in project.deploy.urls.items():
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port_of(url)))
            except OSError as error:
                taken, end = _taker_of(port_of(url))
                raise InputError(
                    f"the port of {name} cannot be taken: got {host_of(url)}:{port_of(url)}, "
                    f"{error.strerror}{taken}; expected a free one; {end}, or write another port "
                    "into [deploy]"
                ) from error


def _taker_of(port: int) -> tuple[str, str]:
    """Names the process that listens at a port, and how to end it, where the system tells."""
    listening, found = set[str](), dict[int, str]()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                _, local, _, state, *_, inode = line.split()[:10]
                if state == _LISTENS and int(local.rpartition(":")[2], 16) == port:
                    listening.add(f"socket:[{inode}]")
    for process in Path("/proc").glob("[0-9]*") if listening else ():
        with suppress(OSError):  # it has ended, or is somebody else's
            if listening.intersection(str(link.readlink()) for link in (process / "fd").iterdir()):
                told = (process / "cmdline").read_text().rstrip("\0").split("\0")
                words = [word for word in told[1:] if word not in ("-c", _RUN)]
                found[int(process.name)] = shorten(" ".join([Path(told[0]).name, *words]), 100)
    if not found:
        return "", "stop what listens there"
    first = min(found)  # its workers have the socket, too
    return f", by process {first} ({found[first]})", f"end it with `kill {first}`"


class _Process:
    """One party's process; every line that it writes is passed on."""

    def __init__(self, command: Command, folder: Path, tell: Tell) -> None:
        self.name, self._tell = command.name, tell
        self.is_up = threading.Event()
        make_directory(folder / command.folder)
        self._child = subprocess.Popen(
            [sys.executable, "-c", _RUN, *command.args],
            cwd=folder,
            stdin=subprocess.PIPE,  # nothing is written to it: its end is that of this process
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,  # Ctrl-C is for the one that ends them in order
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            if any(sign in line for sign in _SERVES):
                self.is_up.set()
            self._tell(self.name, line.rstrip("\n"))

    @property
    def code(self) -> int | None:
        """Its exit code, once it has ended."""
        return self._child.poll()

    def stop(self) -> None:
        """Asks it to end."""
        if self.code is None:
            self._child.terminate()

    def wait(self) -> None:
        """Returns once it has ended, which it is made to."""
        try:
            self._child.wait(_ENDS_WITHIN)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._reader.join(_ENDS_WITHIN)
        assert self._child.stdin is not None
        self._child.stdin.close()


@contextmanager
def running_parties(
    project: Project, kits: Path, stop: threading.Event, tell: Tell
) -> Iterator[Callable[[], dict[str, int]]]:
    """Starts the services of a project, then its devices, and ends them all with the context.

    Yields:
        What names the processes that have ended since, and should not have, with their exit codes.

    Raises:
        ServiceError: a service ended before it listened.
    """
    processes: list[_Process] = []
    parties = [name for name in project.deploy.urls if name != TRAINER]
    try:
        listening = []
        for party in parties:
            for command in commands_of(project, party):
                processes.append(_Process(command, kits / party, tell))
                if command.listens:
                    listening.append(processes[-1])
        for process in listening:
            _await(process, stop)
        names = [] if stop.is_set() else device_names(project.deploy.devices)
        processes += [_Process(device_command(project, name), kits / name, tell) for name in names]
        yield lambda: {each.name: each.code for each in processes if each.code is not None}
    finally:
        for process in reversed(processes):  # devices first: they would ask services that are gone
            process.stop()
        for process in processes:
            process.wait()


def _await(process: _Process, stop: threading.Event) -> None:
    """Returns once a service listens, or all are to stop."""
    waited = 0.0
    while not (process.is_up.wait(0.1) or stop.is_set()):
        waited += 0.1
        if process.code is not None or waited > _STARTS_WITHIN:
            raise ServiceError(
                f"{process.name} did not start: got exit code {process.code}; expected it to "
                "listen; read its lines above"
            )
