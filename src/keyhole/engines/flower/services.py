"""The services of a run on one machine: one slice service, or the four of a secure round.

On one machine the four show that everything works together, and hide nothing: whoever runs them all
can put together what each of them knows.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from keyhole.engines.flower.processes import Children, free_port
from keyhole.serving.service.access import Keyring, new_key

__all__ = ["LOOPBACK", "Services", "listens"]

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
