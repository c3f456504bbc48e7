"""A deployment of Flower in processes, as operators start them, with the toy problem as its app."""

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from benchmarks.engine_cells.local_deployment import (
    CONNECTION,
    Children,
    environment,
    flower_command,
    free_port,
    listens,
    superlink_command,
    supernode_command,
)
from keyhole.engines.flower.config import write_project
from keyhole.rounds.record import read_records
from keyhole.service.access import Keyring, new_key
from tests.helpers import ROOT

_SERVE = [sys.executable, "-c", "from keyhole.cli.main import main; main()", "serve"]
TOY = "tests.engines.flower.toy_app"
_MODULES = {"server": "server_app", "client": "client_app"}


class Deployment:
    """A slice service, a SuperLink and SuperNodes; the app is that of `toy_app`."""

    def __init__(self, directory, children, config, app):
        self.directory, self.children, self.config = directory, children, config
        self.run, self.rounds = directory / "run", directory / "rounds"
        self.keys, self.app = directory / "keys", directory / "app"
        self.service_port, self.link = free_port(), f"127.0.0.1:{free_port()}"
        self.app_module = app

    def write(self):
        told = {
            "run": str(self.run),
            "rounds-directory": str(self.rounds),
            "service": f"http://127.0.0.1:{self.service_port}",
            "token-key": str(self.keys),
            "node-seconds": 120.0,
            "named-cohorts": True,
        }
        write_project(self.app, {**told, **self.config})
        for name, attribute in _MODULES.items():
            text = f"from {self.app_module} import {attribute}\n\napp = {attribute}\n"
            (self.app / "keyhole_app" / f"{name}.py").write_text(text)
        (self.directory / "home").mkdir(exist_ok=True)
        told = CONNECTION.format(address=self.link)
        (self.directory / "home" / "config.toml").write_text(told)

    def write_task(self, task, *options):
        """The app of a task, as `keyhole flower app` writes it, in place of the toy's."""
        shutil.rmtree(self.app)
        command = [*_SERVE[:-1], "flower", "app", self.app, "--task", task, *options]
        command += ["--service", f"http://127.0.0.1:{self.service_port}", "--run", self.run]
        command += ["--rounds-directory", self.rounds, "--token-key", self.keys]
        for name, value in self.config.items():
            command += [f"--{name}", str(value).replace(" ", ",")]
        subprocess.run(list(map(str, command)), env=self.children.env, check=True)

    def serve(self, *options, name="service", port=None):
        port = self.service_port if port is None else port
        command = [*_SERVE, str(self.rounds), "--token-key", str(self.keys), "--port", str(port)]
        self.children.start(name, [*command, *map(str, options)])
        self.children.wait_for(name, lambda: listens(f"127.0.0.1:{port}"))

    def aggregators(self):
        """Two aggregators, with tokens of the trainer; returns what the run config says of them."""
        ports = free_port(), free_port()
        for name in ("peer", "trainer-0", "trainer-1"):
            _key_file(self.directory / name)
        for party in (0, 1):
            trainer = Keyring.load(self.directory / f"trainer-{party}")
            to = {"audience": "aggregator"}
            token = trainer.issue("device", "trainer", now=time.time(), seconds=3600, **to)
            (self.directory / f"token-{party}").write_text(token)
            made = [*_SERVE[:-1], "token", "aggregator-key", self.keys, party]
            made = [*made, self.directory / f"sums-{party}.key"]
            subprocess.run(list(map(str, made)), env=self.children.env, check=True)
            command = [
                *(*_SERVE[:-1], "aggregator", self.directory / f"aggregator-{party}"),
                *("--party", party, "--peer", f"http://127.0.0.1:{ports[1 - party]}"),
                *("--peer-key", self.directory / "peer"),
                *("--token-key", self.directory / f"sums-{party}.key"),
                *("--trainer-key", self.directory / f"trainer-{party}", "--port", ports[party]),
            ]
            self.children.start(f"aggregator-{party}", list(map(str, command)))
        for party, port in enumerate(ports):
            address = f"127.0.0.1:{port}"
            self.children.wait_for(f"aggregator-{party}", partial(listens, address))
        signing = self.directory / "sign.key"
        made = [*_SERVE[:-1], "token", "signing-key", signing, self.directory / "sign.pub"]
        subprocess.run(list(map(str, made)), env=self.children.env, check=True)
        folders = [self.directory / f"aggregator-{party}" for party in (0, 1)]
        keys = [(folder / "seal.pub").read_text().strip() for folder in folders]
        pairs = zip(ports, keys, strict=True)
        return {
            "aggregators": " ".join(f"http://127.0.0.1:{port}#{key}" for port, key in pairs),
            "aggregator-tokens": " ".join(str(self.directory / f"token-{p}") for p in (0, 1)),
            "signing-key": str(signing),
        }

    def superlink(self):
        state = ["--database", str(self.directory / "superlink.db")]  # nodes stay known
        self.children.start("superlink", [*superlink_command(self.link), *state])
        self.children.wait_for("superlink", lambda: listens(self.link))

    def supernode(self, name, **node_config):
        if (pinned := self.directory / "sign.pub").exists():
            node_config = {"trainer-key": f'"{pinned}"', **node_config}
        told = " ".join(f"{k}={v}" for k, v in node_config.items())
        self.children.start(
            name, [*supernode_command(self.link), *(["--node-config", told] if told else [])]
        )

    def start_run(self, name="run"):
        command = [flower_command("flwr"), "run", str(self.app), "local", "--stream"]
        self.children.start(name, command)

    def records(self):
        path = self.run / "records.jsonl"
        return read_records(path) if path.exists() else []

    def wait(self, what, seconds=150.0):
        """Waits until `what()` is true; a test that waits longer shows the logs."""
        until = time.monotonic() + seconds
        while not what():
            if time.monotonic() > until:
                raise AssertionError(self.logs())
            time.sleep(0.1)

    def wait_for_model(self, seconds=150.0):
        self.wait((self.run / "model").exists, seconds)
        return (self.run / "model").read_text()

    def logs(self):
        return "\n".join(
            f"== {path.name}\n{path.read_text(errors='replace')[-3000:]}"
            for path in sorted(self.children.logs.iterdir())
        )

    def kill(self, name):
        """SIGKILL to a child and to all that it has started, some in sessions of their own; returns
        once all have ended, and with them their locks."""
        child = self.children.pid_of(name)
        started = list(_descendants(child))
        os.killpg(child, signal.SIGKILL)
        for pid in started:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.wait(lambda: not any(map(_lives, started)))

    def kill_task(self, node, command):
        """SIGKILL to the process `command` that a node or the SuperLink has started."""
        found = [pid for pid in _descendants(self.children.pid_of(node)) if _runs(pid, command)]
        assert found, f"no {command} under {node}"
        for pid in found:
            os.kill(pid, signal.SIGKILL)


def plain_service(made):
    made.serve()
    return {}


def _key_file(path):
    path.write_text(new_key() + "\n")
    path.chmod(0o600)


@contextmanager
def deployment(directory, nodes, app=TOY, before=plain_service, **config):
    """A running deployment: `nodes` is how many SuperNodes, or their node configs; `before` starts
    the services, and returns what the run config says of them."""
    env = environment(directory / "home") | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]),
        "JAX_PLATFORMS": "cpu",
    }
    configs = [{}] * nodes if isinstance(nodes, int) else nodes
    with Children(directory / "logs", env) as children:
        made = Deployment(directory, children, {"min-nodes": len(configs), **config}, app)
        _key_file(made.keys)
        made.rounds.mkdir()
        made.config |= before(made)
        made.write()
        made.superlink()
        for number, told in enumerate(configs):
            made.supernode(f"node-{number}", **told)
        yield made


def _descendants(pid):
    children = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False
    ).stdout.split()
    for child in map(int, children):
        yield child
        yield from _descendants(child)


def _runs(pid, command):
    try:
        return command.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _lives(pid):
    """Whether a process runs; one that has ended and was not waited for holds nothing."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
