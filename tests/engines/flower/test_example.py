"""The example project: its README's commands run as they stand there, and both clients agree."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from benchmarks.engine_cells.local_deployment import QUIET, Children
from keyhole.engines.flower.config import write_project
from keyhole.keys.choice import ClientContext
from keyhole.rounds.loop import start_run
from keyhole.rounds.record import read_records
from tests.helpers import LONG, ROOT

EXAMPLE = ROOT / "examples" / "flower"
BLOCK = re.compile(r"```bash( terminal)?\n(.*?)```", re.DOTALL)
needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE))
    import flower_example.model as model

    yield model
    for name in [name for name in sys.modules if name.startswith("flower_example")]:
        del sys.modules[name]


def test_the_readme_names_every_switch_that_keeps_flower_quiet():
    text = (EXAMPLE / "README.md").read_text()
    assert all(f"{name}={value}" in text for name, value in QUIET.items())


def test_the_model_of_the_example_learns(example):
    from flower_example.server import CLIENTS, LAYOUT, RATINGS, SGD, Cohorts, RunParts, ServerState

    state = ServerState.dense(LAYOUT, example.make_model(), SGD(1.0))
    plan = RunParts(Cohorts(CLIENTS, CLIENTS), keys_per_client={"item": RATINGS})
    before = example.loss(example.make_model())
    run = start_run(state, example.make_clients(), plan)
    list(run.rounds(3))
    assert example.loss(run.state.model()) < before / 2


@needs_torch
def test_the_module_makes_the_update_that_numpy_makes(example):
    from flower_example.module import train_torch

    data = example.ratings_of(1)
    keys = example.choose(data, ClientContext({"item": 40}, np.random.default_rng(0)))
    model = example.make_model()
    slices = {**model, "items.weight": model["items.weight"][keys.array]}
    local = example.localize(data, {"item": keys})
    ours = example.train_numpy(slices, local, None)
    theirs = train_torch(slices, local, np.random.default_rng(0)).update
    assert ours.keys() == theirs.keys()
    for name, leaf in theirs.items():
        np.testing.assert_allclose(ours[name], leaf, atol=1e-5)
        assert leaf.dtype == np.float32


def make_example(project):
    shutil.copytree(EXAMPLE, project, ignore=shutil.ignore_patterns("__pycache__"))


def make_app(project):
    write_project(project, {"task": "so_tag"})


@pytest.mark.parametrize(
    ("make", "name"), [(make_example, "flower_example"), (make_app, "keyhole_app")]
)
def test_devices_receive_the_package_and_nothing_of_the_run(tmp_path, make, name):
    project = tmp_path / "project"
    make(project)
    (home,) = re.findall(r"FLWR_HOME=\$PWD/(\S+)", (EXAMPLE / "README.md").read_text())
    kept = ["run/records.jsonl", "rounds/current.json", "rounds/rounds/0-a/cohort.json", "keys"]
    for path in (*kept, home + "/app" * 12 + "/manifest.json"):  # deeper than Flower takes
        (project / path).parent.mkdir(parents=True, exist_ok=True)
        (project / path).write_text("{}")
    flwr = [str(Path(sys.executable).parent / "flwr"), "build", "--app", str(project)]
    env = {**os.environ, **QUIET, "FLWR_HOME": str(project / home)}
    subprocess.run(flwr, check=True, cwd=tmp_path, env=env, timeout=LONG)
    (built,) = tmp_path.glob("*.fab")
    with zipfile.ZipFile(built) as bundle:
        names = {path for path in bundle.namelist() if not path.startswith(".info/")}
    package = {f"{name}/{path.name}" for path in project.glob(f"{name}/*.py")}
    assert names == package | {"pyproject.toml"}
    assert len(package) > 2


@pytest.mark.slow
def test_the_commands_of_the_readme_train(tmp_path):
    project = tmp_path / "project"
    shutil.copytree(EXAMPLE, project)
    blocks = BLOCK.findall((project / "README.md").read_text())
    begin, once, *terminals, last = blocks
    assert [begin[0], once[0], last[0]] == [""] * 3
    assert all(kind for kind, _ in terminals)
    bin_ = str(Path(sys.executable).parent)
    env = {**os.environ, "PATH": os.pathsep.join([bin_, os.environ["PATH"]])}
    prelude = f"set -e; cd {project}\n{begin[1]}"
    with Children(tmp_path / "logs", env) as children:
        subprocess.run(["bash", "-c", prelude + once[1]], check=True, env=env, timeout=LONG)
        for number, (_, commands) in enumerate(terminals):
            shell = ["/bin/bash", "-c", f"{prelude}exec {commands}"]
            children.start(f"terminal-{number}", shell)
        children.wait_for("terminal-1", lambda: "running on" in _log(children, 1).lower())
        done = subprocess.run(
            ["bash", "-c", prelude + last[1]],
            capture_output=True,
            text=True,
            env=env,
            timeout=300,
            check=False,
        )
        told = done.stdout + done.stderr + "".join(_log(children, n) for n in range(4))
    assert done.returncode == 0, told
    losses = [float(x) for x in re.findall(r"loss (\d+\.\d+)", done.stdout)]
    assert len(losses) == 3, told
    assert losses == sorted(losses, reverse=True)
    records = read_records(project / "run" / "records.jsonl")
    assert [(r.closed, len(r.staleness)) for r in records] == [("goal", 2)] * 3, told


def _log(children, number):
    return children.log_of(f"terminal-{number}").read_text(errors="replace")
