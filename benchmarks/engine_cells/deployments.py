"""Our round on a deployment of Flower, beside a round in which nodes reply at once.

A SuperLink, SuperNodes and a slice service, each a process. First an app runs that replies at once,
then ours, on the same processes; Flower starts a process for every message of either. A round of
ours is everything from its publication to the step of the server: nodes fetch slices from the
service, train in NumPy and send updates to it. Wall time counts: most of it is waiting for polls.
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

from harness import Goal, progress
from keyhole.engines.flower.local import CONNECTION, superlink_command, supernode_command
from keyhole.engines.flower.processes import Children, environment, flower_command, free_port
from keyhole.engines.flower.project import write_project
from keyhole.engines.flower.services import listens
from keyhole.serving.service.access import new_key

MOST_ADDED = 0.1  # of Flower's own latency
PATIENCE = 900.0  # seconds for all rounds of an app
WARM_UP = 1  # rounds; in ours, nodes are asked whom they stand for
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
        name = f"{MOST_ADDED:.0%} over what we add to Flower's latency, {self.nodes} nodes"
        return [Goal(name, MOST_ADDED / max(self.added, 1e-3), 1.0)]

    def __str__(self) -> str:
        return (
            f"deployment  {self.nodes} nodes: empty round {_range(self.empty)}, ours"
            f" {_range(self.ours)}: {self.added:+.0%}"
        )


def _range(seconds: list[float]) -> str:
    middle = statistics.median(seconds)
    return f"{middle:.2f} s ({min(seconds):.2f} to {max(seconds):.2f})"


def measure_deployment(nodes: int, rounds: int) -> Cell:
    """Starts everything, runs both apps one after the other, and ends everything."""
    with tempfile.TemporaryDirectory(prefix="engines-") as made:
        root = Path(made)
        for name in ("home", "rounds"):
            (root / name).mkdir()
        here = str(Path(__file__).parents[1])
        paths = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
        env = environment(root / "home") | {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"}
        with Children(root / "logs", env) as children:
            service = _start(children, root, nodes)
            told = {"least-nodes": nodes, "rounds": WARM_UP + rounds, **service}
            taken = {name: _run(children, root, name, told) for name in ("empty", "our")}
    return Cell(nodes, taken["empty"][WARM_UP:], taken["our"][WARM_UP:])


def _start(children: Children, root: Path, nodes: int) -> dict[str, str]:
    """Slice service, SuperLink and SuperNodes; returns what rounds are told of them."""
    keys, port, link = root / "keys", free_port(), f"127.0.0.1:{free_port()}"
    keys.touch(0o600)
    keys.write_text(new_key() + "\n")
    command = [sys.executable, "-c", _SERVE, "serve", str(root / "rounds")]
    children.start("service", [*command, "--token-key", str(keys), "--port", str(port)])
    children.start("superlink", superlink_command(link))
    children.wait_for("service", lambda: listens(f"127.0.0.1:{port}"))
    children.wait_for("superlink", lambda: listens(link))
    for number in range(nodes):
        children.start(f"node-{number}", supernode_command(link))
    (root / "home" / "config.toml").write_text(CONNECTION.format(address=link))
    return {
        "run": str(root / "run"),
        "rounds-directory": str(root / "rounds"),
        "service": f"http://127.0.0.1:{port}",
        "token-key": str(keys),
    }


def _run(children: Children, root: Path, name: str, told: Mapping[str, object]) -> list[float]:
    """Runs an app to its end; returns the seconds of its rounds."""
    progress(f"  app {name}")
    app, results = root / f"app-{name}", root / f"{name}.json"
    write_project(app, {**told, "results": str(results), "over-selection": 1.0})
    for part in ("server", "client"):
        text = f"from engine_cells.deployed import {name}_{part}\n\napp = {name}_{part}.app\n"
        (app / "keyhole_app" / f"{part}.py").write_text(text)
    children.start(name, [flower_command("flwr"), "run", str(app), "local", "--stream"])
    children.wait_for(name, results.exists, PATIENCE)
    seconds: list[float] = json.loads(results.read_text())
    return seconds
