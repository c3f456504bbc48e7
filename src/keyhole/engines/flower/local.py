"""Descendants: what children have started in turn, some of it in sessions of its own.

Flower's executors do so: a ServerApp outlives its SuperLink for as long as it tries to reach it.
Held before their parents end, processes can be ended after them, without a doubt about whom a
number means by then. Where the system cannot hold processes (other than Linux), none are found.

Processes of Flower on one machine: started quiet, with a log each, and ended whatever happens.

Quiet means: no usage statistics, no question whether there is a newer version, no installation of
packages. Nothing that is started here speaks to anybody but this machine.

The services of a run on one machine: one slice service, or the four of a secure round.

On one machine the four show that everything works together, and hide nothing: whoever runs them all
can put together what each of them knows.

A whole deployment on one machine: its services, SuperLink, SuperNodes and the run.

For a first look, and for tests. The processes are the ones that a deployment has, each with a log;
a service that dies is started again, a SuperNode that dies is missed.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from keyhole.engines.flower.project import write_project
from keyhole.errors import InputError, ServiceError, WorkerError
from keyhole.files import make_directory
from keyhole.service.access import Keyring, new_key


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
            "Flower is not installed",
            got=f"no {name}",
            allowed="the extra 'flower'",
            fix="pip install 'keyhole[flower]'",
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
                    f"{name} did not start",
                    got=last_line(self.log_of(name)),
                    allowed=f"ready within {seconds:g} seconds",
                    fix=f"see {self.log_of(name)}",
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
_KEYHOLE = (sys.executable, "-c", "from keyhole.cli.main import main; main()")
_TRAINER_SECONDS = 30 * 86_400.0  # a run that takes longer is stopped and goes on


@dataclass
class Services:
    """Processes that devices of a run fetch from and send to; whichever dies is started again.

    Args:
        directory: of the run's files.
        is_secure: whether slices come by private retrieval from two servers, and updates go in
            shares to two aggregators.
    """

    directory: Path
    is_secure: bool = False
    _commands: dict[str, tuple[str, list[str]]] = field(default_factory=dict, repr=False)

    def start(self, children: Children) -> dict[str, str]:
        """Starts them; returns what the run config says of them."""
        rounds = str((self.directory / "rounds").resolve())
        keys = ["--token-key", str(self._key_file("keys"))]
        ours = ["--pir", "0"] if self.is_secure else []
        told = {"service": self._add("service", ["serve", rounds, *keys, *ours])}
        told |= {"rounds-directory": rounds, "token-key": keys[1]}
        if self.is_secure:
            second = self._add("second", ["serve", rounds, "--pir", "1"])
            told |= {"delivery": "pir", "second": second, **self._aggregators(keys)}
        for name in self._commands:
            self._run(children, name)
        for name, (address, _) in self._commands.items():
            children.wait_for(name, partial(listens, address))
        return told

    def look(self, children: Children, tell: Callable[[str], None]) -> None:
        """Starts those again that have died, where they were."""
        for name, (address, _) in self._commands.items():
            if not children.is_alive(name):
                tell(f"{name} is gone and is started again")
                self._run(children, name)
                children.wait_for(name, partial(listens, address))

    def _add(self, name: str, command: list[str], port: int = 0) -> str:
        """Notes a service; returns its URL."""
        port = port or free_port()
        where = ["--host", LOOPBACK, "--port", str(port)]
        self._commands[name] = f"{LOOPBACK}:{port}", [*_KEYHOLE, *command, *where]
        return f"http://{LOOPBACK}:{port}"

    def _run(self, children: Children, name: str) -> None:
        children.start(name, self._commands[name][1])

    def _aggregators(self, keys: list[str]) -> dict[str, str]:
        """Both aggregators, and tokens of the trainer there."""
        ports = free_port(), free_port()
        peer, trainer = self._key_file("peer-key"), self._key_file("trainer-key")
        token = Keyring.load(trainer).issue(
            "device", "trainer", now=time.time(), seconds=_TRAINER_SECONDS
        )
        file = _private_file(self.directory / "trainer-token", token)
        urls = []
        for party, port in enumerate(ports):
            name = f"aggregator-{party}"
            command = ["aggregator", str(self.directory / name), "--party", str(party), *keys]
            command += ["--peer", f"http://{LOOPBACK}:{ports[1 - party]}", "--peer-key", str(peer)]
            urls.append(self._add(name, [*command, "--trainer-key", str(trainer)], port))
        return {"aggregators": " ".join(urls), "aggregator-tokens": f"{file} {file}"}

    def _key_file(self, name: str) -> Path:
        """The file of a signing key, made where it is missing."""
        path = self.directory / name
        return path.resolve() if path.exists() else _private_file(path, new_key() + "\n")


def _private_file(path: Path, text: str) -> Path:
    """A file that its owner alone can read."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    return path.resolve()


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

_POLL = 0.25  # seconds between two looks at the children
_ERROR = re.compile(r"keyhole\.errors\.\w+: (.+)")


@dataclass
class LocalRun:
    """A run on this machine alone.

    Args:
        directory: for rounds, keys, logs and Flower's own files.
        run: directory of the run.
        nodes: how many SuperNodes.
        config: further run config: the task, and what differs for its rounds.
        is_secure: whether two slice servers and two aggregators stand in for the slice service.
        tell: called with a sentence when something happens that one should know.
    """

    directory: Path
    run: Path
    nodes: int
    config: Mapping[str, Any]
    is_secure: bool = False
    tell: Callable[[str], None] = lambda _: None
    _missed: set[str] = field(default_factory=set, repr=False)

    def __call__(self, is_done: Callable[[], bool]) -> None:
        """Starts everything, waits until the run is done, and ends everything.

        Args:
            is_done: asked every so often; it may show progress.

        Raises:
            WorkerError: the run ended before it was done; the same again goes on with it.
            ServiceError: a part of the deployment did not start, or is gone.
        """
        home = (self.directory / "home").resolve()
        for path in (self.directory, home, self.directory / "rounds"):
            make_directory(path)
        services = Services(self.directory, self.is_secure)
        with Children(self.directory / "logs", environment(home)) as children:
            self._start(children, services)
            while not is_done():
                self._look(children)
                services.look(children, self.tell)
                time.sleep(_POLL)

    def _start(self, children: Children, services: Services) -> None:
        address = f"{LOOPBACK}:{free_port()}"
        children.start("superlink", superlink_command(address))
        told = services.start(children)
        children.wait_for("superlink", lambda: listens(address))
        for number in range(self.nodes):
            children.start(f"supernode-{number}", supernode_command(address))
        rounds = {"run": str(self.run.resolve()), "min-nodes": self.nodes, **told}
        write_project(self.directory / "app", {**self.config, **rounds}, replace=True)
        (self.directory / "home" / "config.toml").write_text(CONNECTION.format(address=address))
        app = str(self.directory / "app")
        children.start("run", [flower_command("flwr"), "run", app, "local", "--stream"])

    def _look(self, children: Children) -> None:
        """Notices who has died."""
        if not children.is_alive("run"):
            raise self._ended(children)
        if not children.is_alive("superlink"):
            raise ServiceError(
                "the SuperLink is gone",
                got=last_line(children.log_of("superlink")),
                allowed="a SuperLink until the run is done",
                fix="the same command goes on with the run",
            )
        for name in (f"supernode-{number}" for number in range(self.nodes)):
            if name not in self._missed and not children.is_alive(name):
                self._missed.add(name)
                self.tell(f"{name} is gone; the run goes on without it")

    def _ended(self, children: Children) -> WorkerError:
        log = children.log_of("run")
        told = _ERROR.findall(log.read_text(errors="replace"))
        return WorkerError(
            "the run ended before it was done",
            got=told[-1] if told else last_line(log),
            allowed="all rounds",
            fix=f"see {children.logs}; the same command goes on with the run",
        )


def superlink_command(address: str) -> list[str]:
    """What starts a SuperLink at `host:port`, without TLS."""
    host, _, port = address.rpartition(":")
    command = [flower_command("flower-superlink"), "--insecure", "--host", host, "--port", port]
    return [*command, "--disable-runtime-dependency-installation"]


def supernode_command(address: str) -> list[str]:
    """What starts a SuperNode on this machine, for the SuperLink at `host:port`."""
    command = [flower_command("flower-supernode"), "--insecure", "--superlink", address]
    return [*command, "--host", LOOPBACK, "--port", str(free_port())]
