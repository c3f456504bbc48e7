"""Our round on a deployment of Flower, beside a round in which nodes reply at once.

A SuperLink, SuperNodes and a slice service, each a process. An app that replies at once and ours
run in turns, on the same processes; Flower starts a process for every message of either. Replies of
the first are looked for every 0.1 s, where Flower's own strategies wait for 3. A round of ours is
everything from its publication to the step of the server: nodes fetch slices from the service,
train in NumPy and send updates to it. Wall time counts: most of it is waiting for polls.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from engine_cells.local_deployment import (
    CONNECTION,
    Children,
    environment,
    flower_command,
    free_port,
    listens,
    superlink_command,
    supernode_command,
)
from harness import Goal, progress
from keyhole.engines.flower.config import write_project
from keyhole.service.access import new_key

MAX_ADDED = 0.1  # of Flower's own latency
PATIENCE = 900.0  # seconds for all rounds of an app
TURNS = 2  # of each app
WARM_UP = 1  # rounds of a turn; in ours, nodes are asked whom they stand for
_SERVE = "from keyhole.cli.main import main; main()"


@dataclass(frozen=True)
class Cell:
    """Rounds of both apps.

    Args:
        nodes: of the deployment.
        empty: seconds of each round in which nodes reply at once.
        ours: of each of ours.
    """

    nodes: int
    empty: list[float]
    ours: list[float]

    @property
    def added(self) -> float:
        """What ours add to the latency of messages, as a part of it."""
        return statistics.median(self.ours) / statistics.median(self.empty) - 1

    def goals(self) -> list[Goal]:
        name = f"{MAX_ADDED:.0%} over what we add to Flower's latency, {self.nodes} nodes"
        return [Goal(name, MAX_ADDED / max(self.added, 1e-3), 1.0)]

    def __str__(self) -> str:
        return (
            f"deployment  {self.nodes} nodes: empty round {_range(self.empty)}, ours"
            f" {_range(self.ours)}: {self.added:+.0%}"
        )


def _range(seconds: list[float]) -> str:
    middle = statistics.median(seconds)
    return f"{middle:.2f} s ({min(seconds):.2f} to {max(seconds):.2f})"


def measure_deployment(nodes: int, rounds: int) -> Cell:
    """Starts everything, runs both apps in turns, and ends everything."""
    with tempfile.TemporaryDirectory(prefix="engines-") as made:
        root = Path(made)
        (root / "home").mkdir()
        here = str(Path(__file__).parents[1])
        paths = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
        env = environment(root / "home") | {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"}
        with Children(root / "logs", env) as children:
            _start(children, root, nodes)
            taken: dict[str, list[float]] = {"empty": [], "our": []}
            for turn in range(TURNS):
                told = {"min-nodes": nodes, "rounds": WARM_UP + rounds}
                told |= _serve(children, root / str(turn))
                for name, seconds in taken.items():
                    seconds.extend(_run(children, root / str(turn), name, told)[WARM_UP:])
    return Cell(nodes, taken["empty"], taken["our"])


def _start(children: Children, root: Path, nodes: int) -> None:
    """SuperLink and SuperNodes."""
    link = f"127.0.0.1:{free_port()}"
    children.start("superlink", superlink_command(link))
    children.wait_for("superlink", lambda: listens(link))
    for number in range(nodes):
        children.start(f"node-{number}", supernode_command(link))
    (root / "home" / "config.toml").write_text(CONNECTION.format(address=link))


def _serve(children: Children, turn: Path) -> dict[str, str]:
    """A slice service for the run of one turn; returns what its rounds are told."""
    name, keys, port = f"service-{turn.name}", turn / "keys", free_port()
    (turn / "rounds").mkdir(parents=True)
    keys.touch(0o600)
    keys.write_text(new_key() + "\n")
    command = [sys.executable, "-c", _SERVE, "serve", str(turn / "rounds")]
    children.start(name, [*command, "--token-key", str(keys), "--port", str(port)])
    children.wait_for(name, lambda: listens(f"127.0.0.1:{port}"))
    return {
        "run": str(turn / "run"),
        "rounds-directory": str(turn / "rounds"),
        "service": f"http://127.0.0.1:{port}",
        "token-key": str(keys),
    }


def _run(children: Children, turn: Path, name: str, told: Mapping[str, object]) -> list[float]:
    """Runs an app to its end; returns the seconds of its rounds."""
    process = f"{name}-{turn.name}"
    progress(f"  app {process}")
    app, results = turn / f"app-{name}", turn / f"{name}.json"
    write_project(app, {**told, "results": str(results), "over-selection": 1.0})
    for part in ("server", "client"):
        text = f"from engine_cells.deployed import {name}_{part}\n\napp = {name}_{part}.app\n"
        (app / "keyhole_app" / f"{part}.py").write_text(text)
    children.start(process, [flower_command("flwr"), "run", str(app), "local", "--stream"])
    children.wait_for(process, results.exists, PATIENCE)
    seconds: list[float] = json.loads(results.read_text())
    return seconds
