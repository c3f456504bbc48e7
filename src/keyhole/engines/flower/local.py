"""A whole deployment on one machine: slice service, SuperLink, SuperNodes and the run.

For a first look, and for tests. The processes are the ones that a deployment has, each with a log;
a slice service that dies is started again, a SuperNode that dies is missed.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keyhole.engines.flower.processes import (
    Children,
    environment,
    flower_command,
    free_port,
    last_line,
)
from keyhole.engines.flower.project import write_project
from keyhole.errors import ServiceError, WorkerError
from keyhole.server.files import make_directory
from keyhole.serving.service.access import new_key

__all__ = ["LocalRun"]

_HOST = "127.0.0.1"
_SERVE = "from keyhole.cli.main import main; main()"
_CONNECTION = """\
[superlink]
default = "local"

[superlink.local]
address = "{address}"
insecure = true
"""
_POLL = 0.25  # seconds between two looks at the children
_URL = re.compile(r"serving .* at (http://\S+:\d+)")
_ERROR = re.compile(r"keyhole\.errors\.\w+: (.+)")


@dataclass
class LocalRun:
    """A run on this machine alone.

    Args:
        directory: for rounds, keys, logs and Flower's own files.
        run: directory of the run.
        nodes: how many SuperNodes.
        config: further run config: the task, and what differs for its rounds.
        tell: called with a sentence when something happens that one should know.
    """

    directory: Path
    run: Path
    nodes: int
    config: Mapping[str, Any]
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
        home = self.directory / "home"
        for path in (self.directory, home, self.directory / "rounds"):
            make_directory(path)
        with Children(self.directory / "logs", environment(home)) as children:
            self._start(children)
            while not is_done():
                self._look(children)
                time.sleep(_POLL)

    def _start(self, children: Children) -> None:
        service = self._serve(children, port=0)
        address = f"{_HOST}:{free_port()}"
        children.start("superlink", _superlink(address))
        children.wait_for("superlink", lambda: _listens(address))
        for number in range(self.nodes):
            children.start(f"supernode-{number}", _supernode(address))
        self._write_app(service)
        (self.directory / "home" / "config.toml").write_text(_CONNECTION.format(address=address))
        app = str(self.directory / "app")
        children.start("run", [flower_command("flwr"), "run", app, "local", "--stream"])

    def _write_app(self, service: str) -> None:
        rounds = {
            "run": str(self.run.resolve()),
            "rounds-directory": str((self.directory / "rounds").resolve()),
            "service": service,
            "token-key": str(self._keys().resolve()),
            "least-nodes": self.nodes,
        }
        write_project(self.directory / "app", {**self.config, **rounds}, replace=True)

    def _serve(self, children: Children, port: int) -> str:
        """Starts the slice service; returns its URL."""
        log = children.log_of("service")
        begin = log.stat().st_size if log.exists() else 0
        rounds, keys = str(self.directory / "rounds"), str(self._keys())
        command = [sys.executable, "-c", _SERVE, "serve", rounds, "--token-key", keys]
        children.start("service", [*command, "--host", _HOST, "--port", str(port)])
        children.wait_for("service", lambda: _url(log, begin) is not None)
        return _url(log, begin) or ""

    def _keys(self) -> Path:
        """The file of the signing key, made where it is missing; its owner alone can read it."""
        path = self.directory / "keys"
        if not path.exists():
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(new_key() + "\n")
        return path

    def _look(self, children: Children) -> None:
        """Starts the service again where it has died; notices who else has."""
        if not children.is_alive("run"):
            raise self._ended(children)
        if not children.is_alive("superlink"):
            raise ServiceError(
                "the SuperLink is gone",
                got=last_line(children.log_of("superlink")),
                allowed="a SuperLink until the run is done",
                fix="the same command goes on with the run",
            )
        if not children.is_alive("service"):
            self.tell("the slice service is gone and is started again")
            url = _url(children.log_of("service"), 0) or ""
            self._serve(children, int(url.rpartition(":")[2]))
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


def _superlink(address: str) -> list[str]:
    host, _, port = address.rpartition(":")
    command = [flower_command("flower-superlink"), "--insecure", "--host", host, "--port", port]
    return [*command, "--disable-runtime-dependency-installation"]


def _supernode(address: str) -> list[str]:
    command = [flower_command("flower-supernode"), "--insecure", "--superlink", address]
    return [*command, "--host", _HOST, "--port", str(free_port())]


def _listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=1.0).close()
    except OSError:
        return False
    return True


def _url(log: Path, begin: int) -> str | None:
    """What the service says of where it listens, since `begin`."""
    found = _URL.search(log.read_bytes()[begin:].decode("utf-8", "replace"))
    return None if found is None else found[1]
