"""A whole deployment on one machine: its services, SuperLink, SuperNodes and the run.

For a first look, and for tests. The processes are the ones that a deployment has, each with a log;
a service that dies is started again, a SuperNode that dies is missed.
"""

from __future__ import annotations

import re
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
from keyhole.engines.flower.services import LOOPBACK, Services, listens
from keyhole.errors import ServiceError, WorkerError
from keyhole.server.files import make_directory

__all__ = ["CONNECTION", "LocalRun", "superlink_command", "supernode_command"]

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
        rounds = {"run": str(self.run.resolve()), "least-nodes": self.nodes, **told}
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
