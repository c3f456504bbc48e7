"""The steps of docs/deploy.md, run as they stand there: fewer rounds, other addresses, folders."""

import json
import os
import re
import shutil
import socket
import tempfile
from importlib import import_module

import pytest

from benchmarks.engine_cells.local_deployment import QUIET
from keyhole.rounds.record import read_records
from tests.engines.deploy_steps import HERE, PAGE, commands, machine
from tests.helpers import ROOT
from tests.service.fronts import certificate

FEWER = {"--rounds 20": "--rounds 2", "--cohort 10": "--cohort 3"}


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def test_every_step_of_the_table_has_its_commands():
    steps = re.findall(r"^\| (\d) \|", PAGE, re.MULTILINE)
    assert steps == [str(n) for n in range(1, 8)]
    assert all(commands(step) for step in steps)


def records_of(folder, out):
    """What a run recorded, without the times it took."""
    (path,) = (folder / out).rglob("records.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in line.items() if "seconds" not in k} for line in lines]


def state_of(folder, out):
    """The bytes of the model that a run ended with."""
    files = sorted((folder / out).rglob("state/**/*"))
    return {path.name: path.read_bytes() for path in files if path.is_file()}


@pytest.mark.slow
def test_one_process_all_cores_and_ray_on_one_machine_train_the_same(tmp_path):
    with machine(tmp_path, FEWER) as laptop:
        for step in (1, 2, 3):
            laptop.run(next(line for line in commands(step) if line.startswith("keyhole")))
    first = records_of(tmp_path, "one-process")
    assert len(first) == 2
    for out in ("all-cores", "on-ray"):
        assert records_of(tmp_path, out) == first
        assert state_of(tmp_path, out) == state_of(tmp_path, "one-process")


@pytest.mark.slow
def test_ray_has_the_options_that_the_page_gives():
    start = import_module("ray.scripts.scripts").start
    for line in [line for line in commands(4) if line.startswith("ray start")]:
        for option in [part for part in line.split() if part.startswith("--")]:
            assert option in {name for each in start.params for name in each.opts}, line


@pytest.mark.slow
def test_two_machines_of_a_ray_cluster_train_the_same(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        monkeypatch.delenv(name)  # of a Ray that this process may have
    monkeypatch.setenv("HOME", str(tmp_path))  # where Ray keeps a token
    port = next(iter(p for p in iter(free_port, None) if p > 20000))  # below are Ray's workers
    places = {**FEWER, "10.0.0.30:6379": f"{own_address()}:{port}", "--port 6379": f"--port {port}"}
    with machine(tmp_path, places) as place:
        make, export, head, node, line = commands(4)
        place.run(make)
        for pair in place.put_in(export).split()[1:]:
            monkeypatch.setenv(*pair.split("=", 1))
    with machine(tmp_path, places) as place:
        folder = tempfile.mkdtemp(prefix="keyhole-ray-", dir="/tmp")  # names of sockets are short
        small = "--block --num-cpus 1 --object-store-memory 100000000"
        place.start(f"{head} {small} --include-dashboard false --temp-dir {folder}", "head")
        place.wait(lambda: "will now block" in place.log("head"))
        place.start(f"{node} {small}", "node")
        place.wait(lambda: "will now block" in place.log("node"))
        place.run(line)
        place.run(commands(1)[0])
    shutil.rmtree(folder, ignore_errors=True)
    assert records_of(tmp_path, "on-cluster") == records_of(tmp_path, "one-process")
    assert state_of(tmp_path, "on-cluster") == state_of(tmp_path, "one-process")


def own_address():
    """The address that Ray takes for this machine's."""
    return import_module("ray.util").get_node_ip_address()


def serve_all(place, lines):
    """Starts what goes on; runs the rest, up to the trainer."""
    for number, line in enumerate(lines):
        if line.startswith(("keyhole serve", "keyhole aggregator")):
            name = f"{number}-service"
            place.start(line, name)
            place.wait(lambda name=name: " at http" in place.log(name))
        elif line.startswith("keyhole train"):
            return place.start(line, "train"), lines[number + 1 :]
        else:
            place.run(line)
    raise AssertionError("the page has no trainer")


def take_part(place, lines, count):
    """Starts devices with the commands of the first."""
    for number in range(count):
        device = f"phone-{number}"
        *issues, run = (
            line.replace("phone-0", device).replace("--client 0", f"--client {number}")
            for line in lines
        )
        for issue in issues:
            place.run(issue)
        place.start(f"{run} --rounds 1", device)


def train_one_round(place, lines, count):
    """Everything of a step is started, until its trainer is done."""
    trainer, devices = serve_all(place, lines)
    take_part(place, devices, count)
    place.wait(lambda: trainer.poll() is not None)
    assert trainer.returncode == 0, place.log("train")


def check_one_round(folder):
    (record,) = records_of(folder, "runs")
    assert record["closed"] in ("goal", "everyone")


def ports_of(lines):
    """Every port of a step, and one that is free."""
    found = sorted(set(re.findall(r"\b8\d\d0\b", "\n".join(lines))))
    return {port: free_port() for port in found}


@pytest.mark.slow
def test_devices_train_with_a_service_of_their_own(tmp_path):
    lines = commands(5)
    places = {"--rounds 20": "--rounds 1", "--cohort 10": "--cohort 2", "--spread 60": "--spread 1"}
    ports = ports_of(lines)
    places |= {"https://slices.example": f"http://127.0.0.1:{ports['8100']}", **ports}
    with machine(tmp_path, places) as place:
        train_one_round(place, lines, 2)
    check_one_round(tmp_path)


@pytest.mark.slow
def test_two_slice_servers_and_two_aggregators_train_together(tmp_path):
    lines = commands(7)
    places = {"--rounds 2": "--rounds 1", "keyhole-copy": "keyhole", **ports_of(lines)}
    with machine(tmp_path, places) as place:
        (tmp_path / "srv/keyhole").mkdir()
        for name in ("sums-0", "sums-1"):
            (tmp_path / "srv" / name).mkdir()
        train_one_round(place, lines, 3)
    check_one_round(tmp_path)


@pytest.mark.slow
def test_flower_on_one_machine_trains(tmp_path):
    line = next(line for line in commands(6) if line.startswith("python examples/"))
    places = {"--rounds 3": "--rounds 1 --cohort 2", "examples/": f"{ROOT}/examples/"}
    with machine(tmp_path, places) as laptop:
        laptop.run(line, seconds=280)
    assert len(read_records(tmp_path / "flower-runs" / "run" / "records.jsonl")) == 1


@pytest.mark.slow
def test_nodes_with_registered_keys_come_to_a_superlink_with_tls(tmp_path, monkeypatch):
    (port, own), home = (free_port(), free_port()), tmp_path / "home"
    home.mkdir()
    for name, value in {**QUIET, "FLWR_HOME": str(home)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", f"{HERE}{os.pathsep}{os.environ['PATH']}")
    places = {
        "slices.example:9091": f"localhost:{port}",
        "0.0.0.0 --port 9091": f"127.0.0.1 --port {port}",
    }
    by_name = {" ".join(line.split()[:3]): line for line in commands(6)}
    with machine(tmp_path, places) as place:
        certificate(tmp_path / "etc")
        shutil.copy(tmp_path / "etc/tls.crt", tmp_path / "etc/ca.crt")
        (connection,) = re.findall(r"^```toml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
        (home / "config.toml").write_text(place.put_in(connection))
        place.start(by_name["flower-superlink --host 0.0.0.0"], "link")
        place.wait(
            lambda: (
                "Uvicorn running" in place.log("link") or "startup complete" in place.log("link")
            )
        )
        place.run(by_name["ssh-keygen -q -t"])
        place.run(by_name["flwr supernode register"])
        node = by_name["flower-supernode --superlink slices.example:9091"]
        place.start(f"{node} --port {own}", "node")
        place.wait(lambda: "SuperNode ID" in place.log("node"))
        assert "online" in place.run(by_name["flwr supernode list"])
        printed = place.run(by_name["keyhole flower app"])
        assert printed == "flwr run news-app\n"
        assert (tmp_path / "news-app/pyproject.toml").exists()
