"""A model in PyTorch by `module:NAME`: engines, sweeps, reports and devices take it."""

import subprocess
import sys
from contextlib import ExitStack

import numpy as np
import pytest

import keyhole as kh
from keyhole.parts import resolve
from tests.helpers import ROOT

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch==2.13.0")
OWN = "tests.front.torch_own"
RUN = f"train {OWN}:TASK --data {OWN}:DATA --keys top --m 6 --rounds 2 --cohort 3 --out"
MAIN = "import sys; from keyhole.cli.main import main; main(sys.argv[1:])"


def start(words, **more):
    command = [sys.executable, "-c", MAIN, *map(str, words)]
    return subprocess.Popen(command, cwd=ROOT, text=True, stderr=subprocess.PIPE, **more)


def keyhole(line, *more, stdout=subprocess.DEVNULL):
    process = start([*line.split(), *more], stdout=stdout)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 0, said


def model_of(folder):
    (run,) = folder.iterdir()
    return kh.open_run(run).model()


def same_bytes(a, b):
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """The model of a run on the cores of one process."""
    folder = tmp_path_factory.mktemp("runs") / "here"
    keyhole(RUN, folder)
    return model_of(folder)


def test_a_task_stands_for_the_kind_of_its_name():
    task = resolve(f"{OWN}:TASK")
    assert (task.name, task.metric) == ("task", "accuracy")


@pytest.mark.slow
def test_ray_makes_the_same_bytes(here, tmp_path):
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'keyhole[ray]'")
    keyhole(RUN, tmp_path / "ray", "--engine", "ray", "--workers", "1")
    assert same_bytes(here, model_of(tmp_path / "ray"))


@pytest.mark.slow
def test_a_sweep_in_processes_is_drawn(here, tmp_path):
    grid = f'task = "{OWN}:TASK"\ndata = "{OWN}:DATA"\nrounds = 2\ntrials = 2\ncohort.size = 3\n'
    (tmp_path / "grid.toml").write_text(grid + '[keys.item]\nchoice = "top"\ncount = [3, 6]\n')
    out = tmp_path / "sweep"
    keyhole("sweep", tmp_path / "grid.toml", "--out", out, "--processes", "2", "--keep-state")
    (six,) = out.glob("*count=6*")
    assert same_bytes(here, kh.open_run(six).model())
    keyhole("report", out)
    assert "accuracy" in (out / "report" / "grid.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("task", ["TASK", "FROZEN"])
def test_devices_make_the_same_bytes(task, tmp_path):
    run = RUN.replace("TASK", task).replace("--rounds 2", "--rounds 3")
    keyhole(run, tmp_path / "here", "--delivery", "pregenerated")
    (tmp_path / "rounds").mkdir()
    keyhole("token new-key", tmp_path / "key")
    with ExitStack() as stack:
        flags = ["--port", 0, "--token-key", tmp_path / "key", "--again", 0.2]
        service = start(["serve", tmp_path / "rounds", *flags])
        stack.callback(service.communicate)
        stack.callback(service.terminate)
        url = service.stderr.readline().split()[-1]
        for client in range(3):
            token = tmp_path / f"{client}.token"
            with token.open("w") as file:
                token.chmod(0o600)
                issue = f"token issue --device device-{client} --key"
                keyhole(issue, tmp_path / "key", stdout=file)
            named = ["--task", f"{OWN}:{task}", "--data", f"{OWN}:DATA", "--seed", 0]
            flags = ["--token-file", token, "--client", client, *named, "--rounds", 3]
            flags += ["--cache", tmp_path / f"cache-{client}"]
            device = start(["device", url, *flags], stdout=subprocess.DEVNULL)
            stack.callback(device.communicate)
            stack.callback(device.terminate)
        keyhole(run, tmp_path / "run", "--devices", tmp_path / "rounds", "--round-seconds", "120")
    assert same_bytes(model_of(tmp_path / "here"), model_of(tmp_path / "run"))
    here, there = (kh.open_run(next((tmp_path / name).iterdir())) for name in ("here", "run"))
    pairs = zip(here.records(), there.records(), strict=True)
    assert all(sorted(a.bytes_down) == sorted(b.bytes_down) for a, b in pairs)
    assert list(tmp_path.glob("cache-*/frozen/*.slices")) != [] or task == "TASK"
